"""docs/security.md: every promise has a test, and every test that the page names is there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises(text: str) -> list[list[str]]:
    """Return the rows of the table of promises as cells, without its head."""
    table = text.split("<!-- promises -->")[1].split("<!-- end -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows[2:]]


@cache
def _functions(path: str) -> frozenset[str]:
    file = ROOT / path
    if not file.exists():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def unkept(text: str) -> list[str]:
    """Return what is promised without a test, and the tests that are not there."""
    found = []
    for promise, tests in promises(text):
        if promise.startswith("**") and promise.endswith("**"):
            continue  # a heading
        named = NAMED.findall(tests)
        if not named or len(named) != tests.count("`") // 2:
            found.append(promise)
        found += [f"{path}::{name}" for path, name in named if name not in _functions(path)]
    return found


def test_every_promise_has_tests_that_exist() -> None:
    """Guards against promises that nothing holds any more, once a test was renamed or removed."""
    text = PAGE.read_text(encoding="utf-8")
    assert len(promises(text)) > 20
    assert unkept(text) == []


def test_a_promise_without_its_test_shows() -> None:
    table = "<!-- promises -->\n| promise | test |\n|---|---|\n{}\n<!-- end -->"
    here = "`tests/docs/test_security.py::test_a_promise_without_its_test_shows`"
    assert unkept(table.format(f"| **A heading** | |\n| kept | {here} |")) == []
    assert unkept(table.format("| bare | |")) == ["bare"]
    assert unkept(table.format(f"| half | {here}, `tests/docs/none` |")) == ["half"]
    gone = "tests/docs/test_security.py::test_of_last_year"
    assert unkept(table.format(f"| gone | {here}, `{gone}` |")) == [gone]
