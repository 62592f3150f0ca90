"""What became of each mutant, one line of JSON for each attempt, so that a run goes on where the last one ended."""

import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from tests.mutants.catalogue import PACKAGES, ROOT, Mutant

FOLDER = ROOT / ".mutants"


class Outcome(StrEnum):
    FOUND = "found"
    SURVIVED = "survived"
    UNMADE = "unmade"
    """It could not be put into a running process: it counts as not run."""


class Result(msgspec.Struct, frozen=True):
    """One mutant, after its tests or after the simulator. `tests`: a digest of what judged it."""

    key: str
    mutant: Mutant
    line: int
    outcome: Outcome
    stage: str
    """"tests" or "sim"."""
    by: str
    """The test that failed, or how the simulator did; of a survivor, how much it outlived."""
    seconds: float
    tests: str


class Results:
    """Mutable state: the latest result of each stage by key, and the file that grows with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.folder = path.parent
        self._latest: dict[tuple[str, str], Result] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                result = msgspec.json.decode(line, type=Result)
                self._latest[result.key, result.stage] = result

    def add(self, result: Result) -> None:
        self._latest[result.key, result.stage] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")

    def of(self, mutant: Mutant, stage: str) -> Result | None:
        return self._latest.get((mutant.key, stage))

    def is_due(self, mutant: Mutant, stage: str, tests: str) -> bool:
        """Say whether it must be judged: it never was, or it outlived tests that were others than `tests`."""
        known = self.of(mutant, stage)
        return known is None or (known.outcome is not Outcome.FOUND and known.tests != tests)

    def final(self, mutant: Mutant) -> Result | None:
        """Return where it was found, if anywhere, else how it survived last."""
        stages = [self.of(mutant, "tests"), self.of(mutant, "sim")]
        known = [result for result in stages if result is not None]
        found = [result for result in known if result.outcome is Outcome.FOUND]
        return found[0] if found else known[-1] if known else None


def digest(places: Iterable[str], root: Path = ROOT) -> str:
    """Return one digest over every Python file of `places`, folders or files."""
    sums = hashlib.sha256()
    for folder in places:
        at = root / folder
        for path in sorted(at.rglob("*.py")) if at.is_dir() else [at]:
            sums.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return sums.hexdigest()[:16]


def digest_of_tests(package: str, *, quick_s: float = 0.0, only: Sequence[str] = (), root: Path = ROOT) -> str:
    """Return a digest of what judges a package's mutants: its tests, so many seconds of them (0.0: all), and of them
    and others those of `only`. These may share what stands beside the package's tests, which counts too."""
    places = digest([*PACKAGES[package], *only], root)
    return " ".join([places, *([f"quick {quick_s:g}"] if quick_s else []), *only])
