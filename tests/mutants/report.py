"""What a run of mutants came to: a table of the packages, the survivors, and what is known to be equivalent."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.mutants.catalogue import PACKAGES, Equivalent, Mutant
from tests.mutants.results import Outcome, Result, Results

LEGEND = """\
How many small wrong changes of each package were tried; how many its tests found, how many the simulator alone, and how
many nobody; the share that was found. Then those that nobody could tell from the original (they are listed as such),
that could not be tried, and that were not."""
ADVICE = """\
What survived, above, changes something that no test looks at: write a test of that behaviour, or, where nobody can tell
it from the original, give it an entry with the reason in tests/mutants/equivalent.toml. `--show KEY` prints it."""


@dataclass
class Counts:
    """How many mutants of a package there are, by what became of them."""

    by_tests: int = 0
    by_sim: int = 0
    survived: int = 0
    unmade: int = 0
    not_run: int = 0
    equivalent: int = 0
    survivors: list[Result] = field(default_factory=list)

    @property
    def run(self) -> int:
        return self.by_tests + self.by_sim + self.survived

    @property
    def found_share(self) -> float:
        return (self.by_tests + self.by_sim) / self.run if self.run else 1.0

    def add(self, other: "Counts") -> None:
        for name in ("by_tests", "by_sim", "survived", "unmade", "not_run", "equivalent", "survivors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def count(mutants: Iterable[Mutant], equivalent: Iterable[Equivalent], results: Results) -> dict[str, Counts]:
    """Return the counts of each package. An equivalent mutant counts as such whatever became of it."""
    known = {(e.file, e.function, e.line, e.operator, e.change) for e in equivalent}
    counts = {package: Counts() for package in PACKAGES}
    for mutant in mutants:
        of = counts[mutant.package]
        result = results.final(mutant)
        if (mutant.file, mutant.function, mutant.line, mutant.operator, mutant.change) in known:
            of.equivalent += 1
        elif result is None:
            of.not_run += 1
        elif result.outcome is Outcome.UNMADE:
            of.unmade += 1
        elif result.outcome is Outcome.SURVIVED:
            of.survived += 1
            of.survivors.append(result)
        elif result.stage == "sim":
            of.by_sim += 1
        else:
            of.by_tests += 1
    return counts


def tell(counts: dict[str, Counts], gone: list[Equivalent], goal: float) -> str:
    """Return the report. `gone`: entries of the list of equivalent mutants that no mutant answers to."""
    total = Counts()
    rows = []
    for package, of in counts.items():
        total.add(of)
        rows.append(_row(package, of))
    lines = [LEGEND, ""]
    lines += [f"{'':26}{'run':>6}{'tests':>7}{'sim':>6}{'survive':>9}{'found':>9}   equivalent, unmade, not run"]
    lines += [*rows, _row("all", total)]
    for result in total.survivors:
        lines += ["", f"{result.mutant.file}:{result.line} {result.mutant.function}: {result.mutant.operator}"]
        lines += [f"    {result.mutant.change}", f"    key {result.key}, outlived {result.by} ({result.stage})"]
    if gone:
        lines += ["", "Listed as equivalent, but no such mutant is there (any more):"]
        lines += [f"    {entry.file} {entry.function}: {entry.operator}: {entry.change}" for entry in gone]
    share = 100 * total.found_share
    is_met = "met" if share >= goal else "missed"
    if total.survivors:
        lines += ["", ADVICE]
    lines += ["", f"{total.run} mutants that are not equivalent ran, {share:.1f} % were found"]
    lines[-1] += f" (the goal of {goal:g} % is {is_met})"
    return "\n".join(lines)


def _row(name: str, of: Counts) -> str:
    return (
        f"{name:26}{of.run:6}{of.by_tests:7}{of.by_sim:6}{of.survived:9}{100 * of.found_share:8.1f}%"
        f"   {of.equivalent}, {of.unmade}, {of.not_run}"
    )
