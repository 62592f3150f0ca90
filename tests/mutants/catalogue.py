"""The mutants of the pure folders, each under a key that outlives changes elsewhere in its file."""

import ast
import hashlib
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from tests.mutants.operators import Edit, States, edits

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent.toml"

STORIES = "tests/sim/test_transcripts.py"
COLOCATED, GROUPS, LOGPROBS, SWAP, TIERS = (
    f"tests/integration/test_{name}_fake.py" for name in ("colocated", "layer_groups", "logprobs", "swap", "tiers")
)
WHOLE = (
    *(f"tests/integration/test_{name}_fake.py" for name in ("beams", "constraints", "preemption", "samples")),
    "tests/integration/test_swap_ends.py",
    *(COLOCATED, GROUPS, LOGPROBS, SWAP, TIERS),
)
PACKAGES: dict[str, tuple[str, ...]] = {
    "engine/kv": ("tests/engine/kv", STORIES, GROUPS, SWAP, TIERS),
    "prefill_worker/scheduler": ("tests/prefill_worker", STORIES, COLOCATED, GROUPS),
    "decode_worker/scheduler": ("tests/decode_worker", STORIES, *WHOLE),
    "router/core": ("tests/router/core", STORIES),
    "transfer/handoff": ("tests/transfer/handoff", STORIES, COLOCATED, GROUPS),
}
"""The pure folders, and the fast tests of each: first the folder that mirrors it, then the files that the tests there
leave the rest to, with everything in one process and a device that only pretends."""
DEFINES_STATES = ("engine/types.py",)


class Mutant(msgspec.Struct, frozen=True):
    """One small wrong change. `line` is the text of its line, `nth` counts those that read the same in the function."""

    file: str
    function: str
    line: str
    operator: str
    change: str
    nth: int = 0

    @property
    def key(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    @property
    def package(self) -> str:
        return next(folder for folder in PACKAGES if self.file.startswith(f"{folder}/"))

    def __str__(self) -> str:
        return f"{self.file} {self.function or 'table'}: {self.operator}: {self.change}"


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mutants that nobody can tell from the original, and why: all of that `change`, in that line of that function."""

    file: str
    function: str
    line: str
    operator: str
    change: str
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        mine = (self.file, self.function, self.line, self.operator, self.change)
        return mine == (mutant.file, mutant.function, mutant.line, mutant.operator, mutant.change)


@dataclass
class Source:
    """A file of a pure folder. `mutated` changes its tree for a moment, so one thread at a time may use it."""

    path: str
    states: States
    root: Path = ROOT
    _edits: dict[str, Edit] = field(default_factory=dict)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse((self.root / self.path).read_text(encoding="utf-8"))

    @cached_property
    def mutants(self) -> list[tuple[Mutant, int]]:
        """All mutants of the file, each with the number of its line."""
        lines = (self.root / self.path).read_text(encoding="utf-8").splitlines()
        seen: Counter[tuple[str, ...]] = Counter()
        found = []
        for function, edit in edits(self.tree, self.states):
            name = (self.path, function, lines[edit.line - 1].strip(), edit.operator.value, edit.change)
            mutant = Mutant(*name, nth=seen[name])
            seen[name] += 1
            self._edits[mutant.key] = edit
            found.append((mutant, edit.line))
        return found

    @property
    def unchanged(self) -> str:
        """The file's text without the comments, as `mutated` gives it."""
        return ast.unparse(self.tree)

    def mutated(self, mutant: Mutant) -> str:
        """Return the file's text with that mutant in it, without the comments. Raises KeyError for one it has not."""
        edit = self._known(mutant)
        edit.make()
        try:
            return ast.unparse(self.tree)
        finally:
            edit.undo()

    def tree_with(self, mutant: Mutant) -> ast.Module:
        """Return the file's tree with that mutant in it, for good. Raises KeyError for one it has not."""
        self._known(mutant).make()
        return self.tree

    def _known(self, mutant: Mutant) -> Edit:
        _ = self.mutants
        return self._edits[mutant.key]


def sources(root: Path = ROOT) -> Iterator[Source]:
    """Yield every file of the pure folders, in order."""
    paths = [path for folder in PACKAGES for path in sorted((root / folder).rglob("*.py"))]
    named = [*paths, *(root / file for file in DEFINES_STATES)]
    states = States.found([path.read_text(encoding="utf-8") for path in named])
    for path in paths:
        yield Source(path.relative_to(root).as_posix(), states, root)


def sample(mutants: list[Mutant], wanted: int | None, seed: int) -> list[Mutant]:
    """Choose `wanted` of them, the same for the same seed: of each file a share as large as its mutants, one at least.
    What else is in a file hardly changes which of its mutants are chosen."""
    if wanted is None or wanted >= len(mutants):
        return mutants
    files: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        files[mutant.file].append(mutant)
    chosen = set()
    for of_file in files.values():
        ranked = sorted(of_file, key=lambda mutant: hashlib.sha256(f"{seed}/{mutant.key}".encode()).digest())
        chosen.update(mutant.key for mutant in ranked[: -(-len(of_file) * wanted // len(mutants))])
    return [mutant for mutant in mutants if mutant.key in chosen]


def equivalents(path: Path = EQUIVALENT) -> list[Equivalent]:
    """Raises msgspec.ValidationError for a list that has something else in it."""
    if not path.exists():
        return []
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []), list[Equivalent])


def gone(listed: Iterable[Equivalent], every: Iterable[Mutant]) -> list[Equivalent]:
    """Return the entries that no mutant answers to."""
    there = {(m.file, m.function, m.line, m.operator, m.change) for m in every}
    return [e for e in listed if (e.file, e.function, e.line, e.operator, e.change) not in there]
