"""A public class name stands for one thing in the whole project, the glossary names only what there is, and docstrings
are sentences."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.test_imports import OURS, ROOT, relative, sources

GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRY = re.compile(r"^\| \*\*")
FRAGMENT = re.compile(r"\s*(Of|Whether anybody)\b")


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


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring: a text that stands alone, at a definition's head or below an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_docstrings_are_sentences() -> None:
    """Guards a newcomer against riddles: "Of both pools." says nothing of the thing that it stands at."""
    paths = [path for path in sources(*OURS, "tests") if "_pb2" not in path.name]
    fragments = [
        f"{relative(path)}:{line}: {text.strip().splitlines()[0]}"
        for path in [*paths, ROOT / "setup.py"]
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if FRAGMENT.match(text)
    ]
    assert fragments == []
