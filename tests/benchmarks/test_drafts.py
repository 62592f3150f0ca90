"""The pair with drafts and without, through whole clusters in small: that it says which answers differ."""

import json
from pathlib import Path

import pytest

from benchmarks import drafts


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drafts.main(["--rounds", "0"])
    assert "at least 1 round" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_are_the_same_in_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the comparison: a gain counts for nothing where the answer is another one."""
    monkeypatch.setattr(drafts, "KINDS", ("quoting",))
    monkeypatch.setattr(drafts, "MODES", ("off", "ngram"))
    figures = tmp_path / "figures.json"
    flags = ["--rounds", "1", "--output-tokens", "32", "--draft-layers", "3"]
    assert drafts.main([*flags, "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["rows"]
    assert len(rows) == 12 and all(row["same"] and row["seconds"] > 0 for row in rows)
    counted = {mode: sum(row["drafted"] for row in rows if row["mode"] == mode) for mode in ("off", "ngram")}
    assert counted["off"] == 0 < counted["ngram"]
    # Whether a draft model is asked within so few tokens is a matter of what steps last.
    assert sum(row["mode"] == "model-3" for row in rows) == 4
    assert all(row["drawn"] <= row["drafted"] and row["tokens_per_step"] >= 1 for row in rows)
    capsys.readouterr()


def test_another_answer_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = drafts.DraftRow(kind="text", mode="off", number=0, seconds=1.0, tokens_per_s=11.0, same=True)
    made = [row] + [
        drafts.DraftRow(kind=kind, mode=mode, number=0, seconds=0.5, tokens_per_s=22.0, same=mode != "suffix")
        for kind in drafts.KINDS
        for mode in drafts.MODES
        if (kind, mode) != ("text", "off")
    ]
    monkeypatch.setattr(drafts, "_all", lambda *_: made)
    assert drafts.main([]) == 1
    told = capsys.readouterr()
    assert "text 0 with suffix" in told.err and "2.00 (2.00–2.00)" in told.out
