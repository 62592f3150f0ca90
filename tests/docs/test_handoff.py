"""docs/handoff.md says what the code does, as far as a table can."""

import pytest

from tests.docs import handoff_tables
from tests.docs.handoff_tables import BLOCK, PAGE, main, text
from transfer.handoff.migration import S


def test_the_pages_tables_are_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a protocol page that describes last month's protocol."""
    found = {name for _, name, _ in BLOCK.findall(PAGE.read_text(encoding="utf-8"))}
    assert found == {"names", "wire", "sender", "receiver", "request", "chaos", "drops"}
    assert main([]) == 0, capsys.readouterr().out


def test_a_changed_move_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a comparison that compares nothing."""
    page = PAGE.read_text(encoding="utf-8")
    moves = {**handoff_tables.SENDER_TABLE, (S.OPEN, "stop"): S.OPEN}
    monkeypatch.setattr(handoff_tables, "SENDER_TABLE", moves)
    assert text(page) != page
