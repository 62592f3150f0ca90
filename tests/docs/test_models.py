"""docs/models.md: its table has every family, its tests exist."""

import re
from pathlib import Path

from engine.model.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/models.md").read_text()


def test_the_table_has_every_family_and_no_other() -> None:
    """Guards a family that is run and nowhere said to be, or said to be and refused."""
    table = PAGE.partition("<!-- families -->")[2].partition("<!-- end -->")[0]
    rows = dict(re.findall(r"`([\w.-]+)`", line)[:2] for line in table.splitlines()[3:] if line.startswith("| `"))
    # Where a family has no name of its own in GGUF, its files have another's.
    wanted = {family.hugging_face: family.gguf or rows.get(family.hugging_face) for family in FAMILIES.values()}
    assert rows == wanted


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py|test_\w+\.py)`", PAGE)
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "tests/engine/model" / name).exists(), name
