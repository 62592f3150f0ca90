"""A public class name stands for one thing in the whole project, and the glossary names only what there is."""

import ast
import re
from collections import defaultdict

from tests.test_imports import OURS, ROOT, relative, sources

GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRY = re.compile(r"^\| \*\*")


def classes() -> dict[str, list[str]]:
    """Return files by the public top-level classes that they define; generated code has names of its own."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(*OURS):
        if "_pb2" in path.name:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(relative(path))
    return found


def test_a_class_name_stands_for_one_thing() -> None:
    """Guards a reader, or a search, that finds another `Request`, `Slot` or `Outcome` than was meant."""
    assert {name: files for name, files in classes().items() if len(files) > 1} == {}


def test_the_glossary_is_sound() -> None:
    """Guards a page that explains what is gone, or one word twice."""
    entries = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if ENTRY.match(line)]
    words = [word for line in entries for word in re.findall(r"\*\*([^*]+)\*\*", line.split("|")[1])]
    assert len(words) > 60
    assert sorted(word for word in set(words) if words.count(word) > 1) == []
    named = {name for line in entries for name in re.findall(r"`([A-Z]\w*[a-z]\w*)`", line)}
    assert named and named <= set(classes())
