"""What each operator makes of a few lines, and what it leaves alone."""

import ast

import pytest

from tests.mutants.catalogue import PACKAGES, Mutant, sample, sources
from tests.mutants.operators import Operator, States, edits

ENUM = """
class Gate(Enum):
    OPEN = "open"
    SHUT = "shut"

MOVES = {(Gate.OPEN, "close"): Gate.SHUT, (Gate.SHUT, "knock"): Gate.OPEN}
"""


def changes(body: str, operator: Operator | None = None) -> list[str]:
    """Return the changes of a function with that body, in the order of the source."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    tree = ast.parse(f"def act(self):\n{lines}\n")
    found = list(edits(tree, States.found([ENUM])))
    return [edit.change for _, edit in found if operator in (None, edit.operator)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", ["a < b => a <= b"]),
        ("return a is b in c", ["a is b in c => a is not b in c", "a is b in c => a is b not in c"]),
        ("return min(a, b)", ["min(a, b) => max(a, b)"]),
        ("x = len(a)", ["len(a) => len(a) + 1", "len(a) => len(a) - 1"]),
        ("x = a - b", ["a - b => a - b + 1"]),
        ("x = len(a) - 1", ["1 => 2", "1 => 0"]),
        ("x = a[0]", ["0 => 1"]),
        ("x = self.have_tokens", ["self.have_tokens => self.have_tokens + 1"]),
        ("x = self.have_tokens()", []),
        ("self.send(a)", ["self.send(a) => pass"]),
        ("del a[b]", ["del a[b] => pass"]),
        ("told += self.send()", ["told += self.send() => pass"]),
        ("return [Send(a), *b]", ["Send(a) => nothing", "*b => nothing"]),
        ("return list(a)", ["list(a) => a"]),
        ("return a and b", ["a and b => b", "a and b => a"]),
        ("return not a", ["not a => a"]),
        ("if a:\n    pass", ["if a => if True", "if a => if False"]),
        ("return [a for a in b if a]", ["a => nothing"]),
        ("return a if b else c", ["a if b else c => a", "a if b else c => c"]),
        ("return True", ["True => False"]),
        ("self.state = a", ["self.state = a => pass"]),
        ("self.move('close')", ["self.move('close') => pass", "'close' => 'knock'"]),
        ("return Gate.SHUT", ["Gate.SHUT => Gate.OPEN"]),
        ('raise ValueError(f"{len(a)} < 1")', []),
        ("assert len(a) == 1", []),
        ("x: dict[int, len(a)] = y", []),
        ('"""Says a < b."""', []),
        ("return zip(a, b, strict=True)", []),
    ],
)
def test_what_becomes_of_a_line(body: str, expected: list[str]) -> None:
    """Guards an operator that finds nothing: its mutants would all be found, since there are none."""
    assert changes(body) == expected


def test_a_table_has_other_states() -> None:
    """Guards the tables of moves, which stand outside any function."""
    found = [edit.change for _, edit in edits(ast.parse(ENUM), States.found([ENUM]))]
    assert found == ["Gate.SHUT => Gate.OPEN", "Gate.OPEN => Gate.SHUT"]


def test_what_asserts_and_describes_is_left_alone() -> None:
    """Guards a score that falls because fewer invariants are checked, or a text reads differently."""
    source = "class A:\n    def check(self):\n        self.b(1)\n    def __repr__(self):\n        return self.c(1)\n"
    assert list(edits(ast.parse(source), States())) == []


def test_every_mutant_compiles_differs_and_has_its_own_key() -> None:
    """Guards a mutant that is the original, or stands under the key of another: it would be counted as judged."""
    keys, found = set(), 0
    for source in sources():
        found += len(source.mutants)
        for mutant, _ in source.mutants[::60]:
            text = source.mutated(mutant)
            compile(text, source.path, "exec")
            assert text != source.unchanged, mutant
        keys.update(mutant.key for mutant, _ in source.mutants)
        assert source.unchanged == ast.unparse(ast.parse(source.unchanged)), "an edit was not undone"
    assert len(keys) == found > 4_000


def test_a_sample_is_the_same_each_time_and_has_a_part_of_every_file() -> None:
    """Guards a sample that leaves a file out, or is drawn again until it pleases."""
    every = [mutant for source in sources() for mutant, _ in source.mutants]
    chosen = sample(every, 600, 1)
    assert chosen == sample(every, 600, 1) != sample(every, 600, 2)
    assert 600 <= len(chosen) < 700
    assert {mutant.file for mutant in chosen} == {mutant.file for mutant in every}
    assert {mutant.package for mutant in chosen} == set(PACKAGES)
    assert {mutant.operator for mutant in chosen} == {operator.value for operator in Operator}
    assert sample(every, None, 1) == every


def test_a_key_outlives_changes_elsewhere() -> None:
    """Guards results that are thrown away, or mean another mutant, whenever a line is added above."""
    mutant = Mutant("engine/kv/layout.py", "f", "return a < b", "comparison", "a < b => a <= b")
    assert mutant.key == Mutant(*[getattr(mutant, name) for name in mutant.__struct_fields__]).key
    assert mutant.key != Mutant(mutant.file, "g", mutant.line, mutant.operator, mutant.change).key
