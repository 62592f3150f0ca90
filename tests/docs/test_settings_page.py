"""docs/configuration.md is made from the structs, and says of every setting what it means."""

from pathlib import Path

import pytest

from cluster import settings_page
from cluster.config import fields
from cluster.settings_page import main, page


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a page that says what the code did once."""
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_is_out_of_date_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_page, "PAGE", tmp_path / "page.md")
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert main(["--check"]) == 0


def test_every_setting_is_there_with_its_meaning() -> None:
    """Guards against a new field without a word under it."""
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    said = [row for row in rows if len(row) == 5]
    assert [row[0] for row in said if row[4].startswith("(") or row[4].strip(" |") == ""] == []
    assert len(said) == len(list(fields()))
