"""The house as docs/architecture.md lists and measures it: nothing lies outside, and its limits hold."""

import ast
from dataclasses import replace

import pytest

from tests.docs import house
from tests.docs.house import main, names_of, passed_limits, places, read, unsorted
from tests.docs.test_reading_order import reading_order

PAGE = house.PAGE.read_text(encoding="utf-8")
HOUSE = read(PAGE)


def test_the_page_lists_all_of_the_core_and_its_limits_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a core that grows unsaid, a file that nobody can place, and figures of last month."""
    assert main([]) == 0, capsys.readouterr().out


def test_the_spine_goes_the_way_of_the_reading_order() -> None:
    """Guards against a spine that leaves out what every reader was told to open."""
    assert set(reading_order()) <= set(HOUSE.spine)


@pytest.mark.parametrize("what", ["in two", "in none"])
def test_a_file_without_one_place_shows(what: str) -> None:
    """Guards against a program that counts only what it was told of."""
    wings = dict(HOUSE.wings)
    wings["HTTP"] = (*wings["HTTP"], HOUSE.spine[0]) if what == "in two" else wings["HTTP"][1:]
    assert len(unsorted(replace(HOUSE, wings=wings))) == 1


def test_a_limit_that_is_passed_shows_and_what_is_added_is_said() -> None:
    """Guards against limits that nothing reaches, and against added lines that count although they are said."""
    spare = house.CORE_LINES + sum(core for core, _ in HOUSE.added.values()) - sum(HOUSE.lines.values())
    grown = replace(HOUSE, lines={**HOUSE.lines, "router/http/more.py": spare + 1})
    assert len(passed_limits(grown)) == 1 and "lines in the core" in passed_limits(grown)[0]
    assert passed_limits(replace(grown, added={**grown.added, "more HTTP": (1, 0)})) == []


def test_the_page_says_what_was_added() -> None:
    """Guards against a row that the program does not see."""
    head = "| added for | core | spine |\n|---|---|---|\n"
    page = PAGE.replace(head, f"{head}| the seventh sense | 1,234 | 56 |\n")
    assert read(page).added["the seventh sense"] == (1234, 56)


def test_what_is_not_there_is_refused() -> None:
    """Guards against a list that outlives its files."""
    with pytest.raises(KeyError, match="gone"):
        read(PAGE.replace("`router/hub.py`, ", "`router/gone.py`, "))
    with pytest.raises(ValueError, match="gone"):
        read(PAGE.replace("(`router/http/`)", "(`router/gone/`)"))


def test_places_are_imports_and_uses() -> None:
    """Guards against a count that misses a module imported by name, or counts another's names."""
    reader = ast.parse("from a.b import C, D\nfrom a import b as e\nfrom x import F\nC(e, F)")
    assert names_of(["a/b.py"], reader) == ({"C", "D", "e"}, 2)
    assert places(HOUSE, HOUSE.wings["Several answers"]) > 0


def test_what_holds_an_instance_counts_too() -> None:
    """Guards against a wing that is named all over the spine, through attributes alone."""
    reader = ast.parse(
        "def f(one: C | None): ...\nclass K:\n    two: dict[int, D]\n    def __init__(self): self.three, x = 1, C()\n"
        "    def g(self): self.four = C(1)\n"
    )
    assert house.holders({"C", "D"}, reader) == {"one", "two", "four"}


def test_small_drift_is_let_pass_and_no_other() -> None:
    """Guards against a page that must be written again at each line, and against one that may say anything."""
    assert not house.has_drifted("| a | 4 | 1,000 |", "| a | 5 | 1,019 |")
    assert house.has_drifted("| a | 4 | 1,000 |", "| a | 4 | 1,021 |")
    assert house.has_drifted("| a | 4 | 10,000 |", "| a | 4 | 10,300 |")
    assert house.has_drifted("| a | 4 |", "| b | 4 |")
