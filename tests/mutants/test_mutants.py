"""Mutants in a running process, what is kept of them, and a whole run over one file."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from tests.mutants import runner
from tests.mutants.catalogue import PACKAGES, ROOT, Equivalent, Mutant, Source, equivalents, gone, sources
from tests.mutants.operators import States
from tests.mutants.patch import CannotPatch, plant, running
from tests.mutants.report import count, tell
from tests.mutants.results import Outcome, Result, Results, digest_of_tests
from tests.mutants.runner import MutantRunner

CODE = """
from enum import Enum
from functools import wraps

class Gate(Enum):
    OPEN = "open"
    SHUT = "shut"

MOVES = {(Gate.OPEN, "close"): Gate.SHUT}

class Door:
    def __init__(self):
        self.state = Gate.OPEN

    @property
    def is_wide(self):
        return [n for n in range(3) if n > 1] == [2]

def close(door):
    door.state = MOVES[door.state, "close"]
"""


@pytest.fixture
def door(tmp_path: Path) -> ModuleType:
    """A module of this test's own, imported from a file, so that changing it for good does no harm."""
    (tmp_path / "door.py").write_text(CODE)
    spec = importlib.util.spec_from_file_location("a_door", tmp_path / "door.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["a_door"] = module
    spec.loader.exec_module(module)
    return module


def put(door: ModuleType, function: str, change: str) -> None:
    assert door.__file__ is not None
    path = Path(door.__file__)
    source = Source(path.name, States.found([CODE]), path.parent)
    mutant = next(m for m, _ in source.mutants if (m.function, m.change) == (function, change))
    plant(source, mutant, running({str(path)}))


def test_a_function_that_others_hold_is_changed(door: ModuleType) -> None:
    """Guards a mutant that only changes what is imported after it: everybody else would run the original."""
    held, one = door.close, door.Door()
    held(one)
    assert one.state is door.Gate.SHUT
    put(door, "close", "door.state = MOVES[door.state, 'close'] => pass")
    other = door.Door()
    held(other)
    assert other.state is door.Gate.OPEN


def test_a_property_is_changed_with_what_it_holds(door: ModuleType) -> None:
    """Guards mutants behind decorators and inside comprehensions, which are code of their own."""
    one = door.Door()
    assert one.is_wide
    put(door, "Door.is_wide", "n > 1 => n >= 1")
    assert not one.is_wide


def test_a_table_keeps_its_members(door: ModuleType) -> None:
    """Guards a table whose states are those of a class defined anew: they would equal nobody's."""
    moves = door.MOVES
    put(door, "", "Gate.SHUT => Gate.OPEN")
    assert moves == {(door.Gate.OPEN, "close"): door.Gate.OPEN}


def test_what_is_not_there_cannot_be_changed(door: ModuleType) -> None:
    """Guards a mutant that changes nothing and is reported as a survivor."""
    del door.close
    with pytest.raises(CannotPatch):
        put(door, "close", "door.state = MOVES[door.state, 'close'] => pass")


@cache
def every() -> list[Mutant]:
    return [mutant for source in sources() for mutant, _ in source.mutants]


def result(mutant: Mutant, outcome: Outcome, stage: str, tests: str = "one") -> Result:
    return Result(mutant.key, mutant, 1, outcome, stage, "by", 0.1, tests)


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """Guards judging everything again, and a survivor that is believed after its test was written."""
    one, other = every()[:2]
    path = tmp_path / "below" / "results.jsonl"
    results = Results(path)
    assert results.is_due(one, "tests", "one")
    results.add(result(one, Outcome.FOUND, "tests"))
    results.add(result(other, Outcome.SURVIVED, "tests"))
    again = Results(path)
    assert not again.is_due(one, "tests", "another") and not again.is_due(other, "tests", "one")
    assert again.is_due(other, "tests", "another")
    again.add(result(other, Outcome.FOUND, "sim"))
    final = Results(path).final(other)
    assert final is not None and final.outcome is Outcome.FOUND
    path.write_bytes(path.read_bytes() + b'{"key": 1}\n')
    with pytest.raises(msgspec.ValidationError):
        Results(path)


def test_the_report_counts_survivors_and_names_them(tmp_path: Path) -> None:
    """Guards a score that counts what is equivalent, or what never ran, as found."""
    found, by_sim, survivor, same, never = every()[:5]
    results = Results(tmp_path / "results.jsonl")
    for mutant, outcome, stage in (
        (found, Outcome.FOUND, "tests"),
        (by_sim, Outcome.SURVIVED, "tests"),
        (by_sim, Outcome.FOUND, "sim"),
        (survivor, Outcome.SURVIVED, "tests"),
        (survivor, Outcome.SURVIVED, "sim"),
        (same, Outcome.SURVIVED, "tests"),
    ):
        results.add(result(mutant, outcome, stage))
    entry = Equivalent(same.file, same.function, same.line, same.operator, same.change, "it reads the same")
    counts = count([found, by_sim, survivor, same, never], [entry], results)
    of = counts[found.package]
    assert (of.by_tests, of.by_sim, of.survived, of.equivalent, of.not_run) == (1, 1, 1, 1, 1)
    assert of.run == 3
    told = tell(counts, [], 95.0)
    assert "3 mutants that are not equivalent ran, 66.7 % were found (the goal of 95 % is missed)" in told
    assert survivor.change in told and by_sim.change not in told and "--show KEY" in told
    assert "goal of 66 % is met" in tell(counts, [], 66.0)
    assert "--show KEY" not in tell(count([found], [], results), [], 95.0), "nothing is left to be done"


def test_the_list_of_equivalent_mutants_gives_reasons() -> None:
    """Guards a survivor that is excused without a reason, or twice; and a reason that is of a line of before."""
    listed = equivalents()
    assert all(len(entry.reason) > 20 for entry in listed)
    names = [(e.file, e.function, e.line, e.operator, e.change) for e in listed]
    assert len(set(names)) == len(names)
    assert not gone(listed, every()), "a line has changed: is it still so?"


def test_mutants_of_one_file_from_end_to_end(tmp_path: Path) -> None:
    """Guards a runner whose tests all pass whatever it changes, or all fail."""
    path = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.mutants", "--only", "prefill_worker/scheduler/order.py"]
    command += ["--sample", "6", "--seed", "4", "--seconds", "0", "--results", str(path), "--goal", "50"]
    command += ["--tests", "tests/prefill_worker"]  # the files that the rest is left to take half a minute
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"\d+ of \d+ mutants \(seed 4\), of which \d+ are listed as equivalent\.\n", done.stdout)
    assert str(path) in done.stdout and "simulator" not in done.stdout.partition("Results:")[0]
    lines = [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]
    assert len(lines) >= 6
    found = [one for one in lines if one.outcome is Outcome.FOUND]
    assert len(found) > len(lines) / 2
    assert any("test_order.py::test_" in one.by for one in found)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and len(path.read_bytes().splitlines()) == len(lines)


@pytest.mark.parametrize(("quick_s", "expected"), [(0.0, "mabo"), (3.0, "ma"), (0.1, "m"), (3.5, "mab")])
def test_a_first_look_asks_the_nearest_tests_for_so_long(tmp_path: Path, quick_s: float, expected: str) -> None:
    """Guards a first look that begins with the slowest tests, or asks none; and one whose survivors count as judged."""
    mutant = next(m for m in every() if m.package == "router/core" and m.function)
    judges = MutantRunner("router/core", [], Results(tmp_path / "results.jsonl"), 1, {}, quick_s)
    place = (str(ROOT / mutant.file), mutant.function, 1)
    names = {
        "b": ("tests/router/core/test_core.py::b", 0.5),
        "o": ("tests/sim/test_transcripts.py::o", 0.1),
        "a": ("tests/router/core/test_core.py::a", 0.25),
        "m": (f"tests/router/core/test_{Path(mutant.file).name}::m", 2.75),
    }
    judges.enters = {place: list(names.values()), ("other.py", mutant.function, 1): [("other", 0.0)]}
    assert [name[-1] for name, _ in judges._chosen(mutant)] == list(expected)


def test_what_outlived_some_tests_is_judged_again_by_others(tmp_path: Path) -> None:
    """Guards survivors of a first look, or of tests that were named and have changed since: they counted as judged."""
    own, named = tmp_path / "tests/router/core/test_it.py", tmp_path / "tests/elsewhere.py"
    for path in (own, named, *(tmp_path / place for place in PACKAGES["router/core"][1:])):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one")

    def digests() -> list[str]:
        judges: list[tuple[float, list[str]]] = [(0.0, []), (3.0, []), (9.0, []), (0.0, ["tests/elsewhere.py"])]
        return [digest_of_tests("router/core", quick_s=quick_s, only=only, root=tmp_path) for quick_s, only in judges]

    before = digests()
    assert len(set(before)) == len(before) and digests() == before
    named.write_text("two")
    assert [one == other for one, other in zip(before, digests(), strict=True)] == [True, True, True, False]
    own.write_text("two")
    assert not set(before) & set(digests())


@pytest.mark.parametrize("failed", [0, 3, 4])
def test_what_fails_without_a_mutant_is_left_out_as_long_as_it_is_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, failed: int
) -> None:
    """Guards a whole run against one test that a busy machine has made late; and a score that is of a broken tree."""
    names = [f"test_it.py::test_{n}" for n in range(6)]
    said = {"failed": names[:failed], "tests": {name: (0.1, [("a.py", "f", 1)]) for name in names}}
    child = os.posix_spawnp("true", ["true"], os.environ)
    pipe, end = os.pipe()
    os.write(end, json.dumps(said).encode())
    os.close(end)
    monkeypatch.setattr(runner, "_fork", lambda *_: (child, pipe))
    judges = MutantRunner("router/core", [], Results(tmp_path / "results.jsonl"), 1, {})
    if failed > runner.FEW_FAIL:
        with pytest.raises(pytest.Session.Failed):
            judges._enter(request.session, [], set())
    else:
        assert list(judges._enter(request.session, [], set())) == names[failed:]
