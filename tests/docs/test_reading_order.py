"""The reading order of docs/architecture.md: from a front to the first token, each file leads to the next."""

import ast
import re
from itertools import pairwise

from tests.test_imports import ROOT, statements, under

LIMIT = 20
ENTRY = re.compile(r"^\d+\. `([\w/]+\.py)`", re.MULTILINE)
HTTP_FRONT = "router/http/routes.py"


def reading_order() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("\n## The reading order\n")[1].split("\n## ")[0]
    assert f"`{HTTP_FRONT}`" in section
    return ENTRY.findall(section)


def leads_to(path: str, following: str) -> bool:
    """Say whether a file imports the next one, or names it in its head."""
    module = following.removesuffix(".py").replace("/", ".")
    head = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
    imported = any(under(name, module) for _, name in statements(ROOT / path))
    return imported or f"`{following}`" in head or f"`{module}`" in head


def test_each_file_leads_to_the_next() -> None:
    """Guards against a page that sends its reader through files which have moved, or which no longer lie on the way."""
    order = reading_order()
    assert [path for path in order if not (ROOT / path).is_file()] == []
    assert order[0] == "router/grpc/service.py" and order[-1] == "engine/sampling.py"
    broken = [
        f"{path} -> {following}"
        for path, following in pairwise(order)
        if not leads_to(path, following)
    ]
    assert broken == []
    assert leads_to(HTTP_FRONT, order[1]), "over HTTP the way begins there"


def test_the_way_is_short_and_goes_in_one_direction() -> None:
    """Guards against a detour: more rooms than a reader keeps in mind, or one that is entered twice."""
    order = reading_order()
    assert len(order) <= LIMIT
    assert len(set(order)) == len(order)
