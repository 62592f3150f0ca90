"""Measure the core, its spine and its wings, as docs/architecture.md lists them: `python -m tests.docs.house`.

The page says by hand which files are the spine, in reading order, what the wings are, and what was added since the
limits were met. This program counts, prints, and with `--write` puts the figures into the page. Status 1: a limit is
passed, a file of the core is in neither spine nor wing or in two, or the page's figures are further off than `DRIFT`.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.docs.handoff_tables import BLOCK, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
CORE = ("decode_worker", "engine", "prefill_worker", "router", "transfer", "worker")

SPINE_FILES = 80
SPINE_LINES = 12_500
CORE_LINES = 26_000

DRIFT = 0.02
"""How far a figure of the page may be from the one counted, as a share; figures below 1,000 by 20."""

STAGE = re.compile(r"^\d+\. \*\*(.+?)\*\*: (.+?)(?=^\d+\. |^<!--|\Z)", re.MULTILINE | re.DOTALL)
WING = re.compile(r"^\*\*([^*]+?)\*\*\s\((`[^)]+`)\)\.\s", re.MULTILINE)
PLACE = re.compile(r"`([\w/]+(?:/|\.py))`")
ADDED = re.compile(r"^\| (?!added for)(?!-)(.+?) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)
NUMBER = re.compile(r"\d[\d,]*")


@dataclass(frozen=True)
class House:
    """What the page says, and the files that are there. Paths are relative to the project."""

    stages: dict[str, tuple[str, ...]]
    """The spine: its files by stage, in reading order."""
    wings: dict[str, tuple[str, ...]]
    """The files of each wing."""
    added: dict[str, tuple[int, int]]
    """Lines that later work says it added to the core and to the spine."""
    lines: dict[str, int]
    """The lines of each file of the core, `__init__.py` left out."""

    @property
    def spine(self) -> tuple[str, ...]:
        return tuple(path for stage in self.stages.values() for path in stage)

    def sum(self, paths: Sequence[str]) -> int:
        return sum(self.lines[path] for path in paths)


def section(page: str, title: str) -> str:
    return re.split(rf"^### {title}\n", page, flags=re.MULTILINE)[1].split("\n## ")[0].split("\n### ")[0]


def read(page: str, root: Path = ROOT) -> House:
    """Raises KeyError for a file of the spine that is not there, ValueError for a wing's place without files."""
    paths = [
        path
        for package in CORE
        for path in sorted((root / package).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    lines = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in paths
    }
    stages = {
        name: tuple(PLACE.findall(rest)) for name, rest in STAGE.findall(section(page, "The spine"))
    }
    for path in (path for stage in stages.values() for path in stage):
        if path not in lines:
            raise KeyError(f"the spine names {path}, which is not there")
    wings = {}
    for name, places in WING.findall(section(page, "The wings")):
        found: list[str] = []
        for place in PLACE.findall(places):
            some = [path for path in lines if path == place or (place.endswith("/") and path.startswith(place))]
            if not some:
                raise ValueError(f"the wing {name} names {place}, which is not there")
            found += some
        wings[name] = tuple(found)
    added = {
        what: (int(core.replace(",", "")), int(spine.replace(",", "")))
        for what, core, spine in ADDED.findall(section(page, "What was added since"))
    }
    return House(stages, wings, added, lines)


class Uses(NamedTuple):
    """What a file uses, by name: its `from` imports, what may hold an instance and the names said of it, and how often
    each plain name and each attribute stands there."""

    imports: list[ast.ImportFrom]
    holders: list[tuple[str, set[str]]]
    names: Counter[str]
    attributes: Counter[str]


@cache
def uses_of(reader: ast.Module) -> Uses:
    """One walk over a file; every wing asks for the same."""
    found = Uses([], [], Counter(), Counter())
    for node in ast.walk(reader):
        match node:
            case ast.ImportFrom():
                found.imports.append(node)
            case ast.Name():
                found.names[node.id] += 1
            case ast.Attribute():
                found.attributes[node.attr] += 1
        match node:
            case ast.arg(arg=holder, annotation=ast.expr() as said):
                found.holders.append((holder, _mentioned(said)))
            case ast.AnnAssign(target=ast.Name(id=holder) | ast.Attribute(attr=holder), annotation=said):
                found.holders.append((holder, _mentioned(said)))
            case ast.Assign(targets=[ast.Name(id=holder) | ast.Attribute(attr=holder)], value=ast.Call(func=made)):
                found.holders.append((holder, _mentioned(made)))
    return found


def _mentioned(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def names_of(wing: Sequence[str], reader: ast.Module) -> tuple[set[str], int]:
    """The names that a file imports from a wing, and by how many statements."""
    modules = {path.removesuffix(".py").replace("/", ".") for path in wing}
    names: set[str] = set()
    statements = 0
    for node in uses_of(reader).imports:
        taken = {
            alias.asname or alias.name
            for alias in node.names
            if node.module in modules or f"{node.module}.{alias.name}" in modules
        }
        names |= taken
        statements += bool(taken)
    return names, statements


def holders(names: set[str], reader: ast.Module) -> set[str]:
    """The variables and attributes that hold something of these names: annotated as such, or made by calling one."""
    return {holder for holder, said in uses_of(reader).holders if said & names}


def places(house: House, wing: Sequence[str], root: Path = ROOT) -> int:
    """How often the spine names a wing: imports from it, uses of what they import, and of what holds an instance."""
    trees = [_parsed((root / path).read_text(encoding="utf-8")) for path in house.spine]
    imported = [names_of(wing, tree) for tree in trees]
    held = {holder for tree, (names, _) in zip(trees, imported, strict=True) for holder in holders(names, tree)}
    # A plain name says nothing in another file; an attribute is the same there.
    count = 0
    for tree, (names, statements) in zip(trees, imported, strict=True):
        uses, mine = uses_of(tree), names | holders(names, tree)
        count += statements + sum(uses.names[name] for name in mine) + sum(uses.attributes[name] for name in held)
    return count


def unsorted(house: House) -> list[str]:
    """Files of the core that are in neither the spine nor a wing, or in more than one of them."""
    seen = Counter([*house.spine, *(path for wing in house.wings.values() for path in wing)])
    return [f"{path} stands {seen[path]} times" for path in house.lines if seen[path] != 1]


def passed_limits(house: House) -> list[str]:
    """Which limits are passed, by how much. Lines that later work says it added count for nothing."""
    core, spine = (sum(figures[i] for figures in house.added.values()) for i in (0, 1))
    limits = (
        ("files in the spine", len(house.spine), SPINE_FILES),
        ("lines in the spine", house.sum(house.spine), SPINE_LINES + spine),
        ("lines in the core", house.sum(tuple(house.lines)), CORE_LINES + core),
    )
    return [f"{found:,} {what}, {limit:,} allowed" for what, found, limit in limits if found > limit]


def spine_table(house: House) -> str:
    rows = [
        [name, f"{len(paths)}", f"{house.sum(paths):,}"] for name, paths in house.stages.items()
    ]
    total = ["**the spine**", f"**{len(house.spine)}**", f"**{house.sum(house.spine):,}**"]
    return table(["stage", "files", "lines"], [*rows, total])


def wing_table(house: House) -> str:
    rows = [
        [name, f"{len(paths)}", f"{house.sum(paths):,}", f"{places(house, paths)}"]
        for name, paths in house.wings.items()
    ]
    return table(["wing", "files", "lines", "places in the spine that name it"], rows)


def folder_table(house: House) -> str:
    folders: dict[str, list[str]] = {}
    for path in house.lines:
        folders.setdefault(path.rpartition("/")[0] + "/", []).append(path)
    rows = [
        [f"`{folder}`", f"{len(paths)}", f"{house.sum(paths):,}"] for folder, paths in sorted(folders.items())
    ]
    total = ["**the core**", f"**{len(house.lines)}**", f"**{house.sum(tuple(house.lines)):,}**"]
    return table(["folder", "files", "lines"], [*rows, total])


def text(page: str, house: House) -> str:
    made = {"spine": spine_table, "wings": wing_table, "folders": folder_table}
    return BLOCK.sub(lambda found: found[1] + made[found[2]](house) + found[3], page)


def has_drifted(old: str, new: str) -> bool:
    """Whether two versions of the page differ by more than `DRIFT` in a figure, or at all in a word."""
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return True
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    figures = ((int(a.replace(",", "")), int(b.replace(",", ""))) for a, b in pairs)
    return any(abs(a - b) > max(20, DRIFT * b) for a, b in figures)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the core against docs/architecture.md.")
    parser.add_argument("--write", action="store_true", help="put the figures into the page")
    chosen = parser.parse_args(argv)
    page = PAGE.read_text(encoding="utf-8")
    house = read(page)
    fresh = text(page, house)
    if chosen.write:
        PAGE.write_text(fresh, encoding="utf-8")
        page = fresh
    print(spine_table(house), wing_table(house), folder_table(house), sep="", end="")
    wrong = [*unsorted(house), *passed_limits(house)]
    if has_drifted(page, fresh):
        wrong.append(f"{PAGE.name} has drifted: python -m tests.docs.house --write")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
