"""Decode steps beside an earlier checkout's."""

import shutil
from pathlib import Path

import pytest

from benchmarks import before


def copied(folder: Path) -> Path:
    """Another checkout: this one's packages that a step needs, their kernels built."""
    for package in ("engine", "kernels", "access", "telemetry", "protos", "transfer"):
        if (before.ROOT / package).is_dir():
            shutil.copytree(before.ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    sizes = ["--model", "hollow", "--rows", "2", "--tokens", "20", "--turns", "3", "--steps", "2"]
    monkeypatch.setattr("sys.argv", ["before", "--before", str(checkout), *sizes])
    before.main()


@pytest.mark.slow
def test_two_checkouts_are_timed_on_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a comparison of work that is not the same."""
    run(monkeypatch, copied(tmp_path / "before"))
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["before", "now", "now", "the"]
    assert told[3] == "the same tokens" and "3 turns" in told[2]
    assert 0.2 < float(told[2].split()[3]) < 5.0


def test_a_checkout_without_an_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a ratio of 1 that an installed engine beside an empty folder would give."""
    with pytest.raises(AssertionError, match=f"is not of {tmp_path}"):
        run(monkeypatch, tmp_path)


def test_a_checkout_is_not_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a ratio of 1 that compares nothing, by whichever name this checkout goes."""
    (tmp_path / "link").symlink_to(before.ROOT)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "link")
    assert "--before is this checkout itself" in capsys.readouterr().err
