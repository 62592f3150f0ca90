"""`headrace replay`: repeats the decisions of a router's log, and asks other policies about the same views."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from router.core.decisions import Decision, RepeatablePolicy, compare
from router.core.policies import POLICIES, settings
from router.core.policy import Choice
from router.decision_log import BrokenLineError, decision_of


class ReplayError(Exception):
    """The log cannot be read; the message names the line."""


class Difference(msgspec.Struct, frozen=True):
    """The first decision that is not repeated."""

    line: int
    request: str
    what: str


class OtherPolicy(msgspec.Struct, frozen=True):
    """What another policy would have done with the same views. `cost_s` are quantiles of how much higher the predicted
    cost of its pair is, over all decisions with a choice; below zero it gains."""

    decisions: int
    otherwise: int
    cost_mean_s: float
    cost_p50_s: float
    cost_p99_s: float


class ReplayReport(msgspec.Struct, frozen=True):
    """`missing`: decisions that were dropped between those of the log. `is_torn`: the last line is not whole."""

    decisions: int
    equal: int
    policies: dict[str, int]
    missing: int
    is_torn: bool
    first_difference: Difference | None
    others: dict[str, OtherPolicy]


@dataclass(slots=True)
class _Other:
    name: str
    policy: RepeatablePolicy | None = None
    seed: int = 0
    otherwise: int = 0
    costs_s: list[float] = field(default_factory=list)

    def ask(self, decision: Decision) -> None:
        """Ask it, its lots drawn from the log's own seed."""
        seed = decision.before.seed
        if self.policy is None or seed != self.seed:
            self.policy, self.seed = RepeatablePolicy(self.name, seed), seed
        if decision.choice is not None:
            choice = self.policy.choose(decision.demand, decision.prefills, decision.decodes)
            found = compare(decision, choice)
            self.otherwise += not found.same
            self.costs_s.append(found.cost_s)

    def report(self) -> OtherPolicy:
        costs = sorted(self.costs_s) or [0.0]
        p50, p99 = (costs[min(len(costs) - 1, len(costs) * share // 100)] for share in (50, 99))
        return OtherPolicy(len(self.costs_s), self.otherwise, statistics.fmean(costs), p50, p99)


def replay(path: Path, others: Sequence[str] = ()) -> ReplayReport:
    """Repeat every decision of a log. Raises OSError, and ReplayError for a line that is no decision of this version
    or that names an unknown policy, and for a log without decisions."""
    repeating: dict[str, RepeatablePolicy] = {}
    asked = [_Other(name) for name in dict.fromkeys(others)]
    policies: Counter[str] = Counter()
    equal, missing, last, is_torn = 0, 0, 0, False
    first: Difference | None = None
    for number, read in _decisions(path):
        if isinstance(read, str):
            is_torn = True
            continue
        decision = read
        if decision.policy not in POLICIES:
            raise ReplayError(f"{path}, line {number}: this program has no policy {decision.policy!r}")
        policies[decision.policy] += 1
        missing += decision.number - last - 1 if decision.number > last and last else 0
        last = decision.number
        policy = repeating.setdefault(decision.policy, RepeatablePolicy(decision.policy, decision.before.seed))
        what = _difference(decision, policy)
        equal += what is None
        if what is not None and first is None:
            first = Difference(number, decision.request, what)
        for other in asked:
            other.ask(decision)
    if not policies:
        raise ReplayError(f"{path}: there is no decision in it")
    reports = {other.name: other.report() for other in asked}
    return ReplayReport(policies.total(), equal, dict(policies), missing, is_torn, first, reports)


def _decisions(path: Path) -> Iterator[tuple[int, Decision | str]]:
    """Read line after line; a word in the place of a last one that has no end and cannot be read."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, decision_of(line)
            except BrokenLineError as error:
                if line.endswith(b"\n"):
                    raise ReplayError(f"{path}, line {number}: {error}") from error
                yield number, str(error)


def _difference(decision: Decision, policy: RepeatablePolicy) -> str | None:
    """Repeat a decision; return how the choice differs, or None if it is the same to the last bit."""
    try:
        policy.resume(decision.before)
        again = policy.choose(decision.demand, decision.prefills, decision.decodes)
    except Exception as error:
        return f"the policy fails: {type(error).__name__}: {error}"
    # As it would come back from a log: the types of the fields, 0.0 for 0.
    repeated = msgspec.convert(msgspec.to_builtins(again), Choice | None)
    if repr(repeated) == repr(decision.choice):
        return None
    what = _first_difference("", msgspec.to_builtins(decision.choice), msgspec.to_builtins(repeated))
    now = settings(decision.policy)
    if now != decision.settings:
        what += f"; it was decided with other settings, {decision.settings} and not {now}"
    return what


def _first_difference(where: str, logged: object, repeated: object) -> str:
    if isinstance(logged, dict) and isinstance(repeated, dict) and logged.keys() == repeated.keys():
        for key in logged:
            if repr(logged[key]) != repr(repeated[key]):
                return _first_difference(f"{where}.{key}" if where else key, logged[key], repeated[key])
    return f"{where or 'the choice'} was {logged!r}, and is {repeated!r} when repeated"


def text(path: Path, report: ReplayReport) -> str:
    """Return the report as people read it."""
    by = ", ".join(f"{count:,} by {name}" for name, count in report.policies.items())
    lines = [f"{path}: {report.decisions:,} decisions ({by}), {report.equal:,} repeated bit for bit"]
    if report.missing:
        lines.append(f"{report.missing:,} decisions between them were dropped when they were made")
    if report.is_torn:
        lines.append("the last line is torn, as when the router was killed while it wrote: left out")
    if report.first_difference is not None:
        first = report.first_difference
        lines.append(f"first difference: line {first.line} (request {first.request}): {first.what}")
    for name, other in report.others.items():
        share = other.otherwise / other.decisions if other.decisions else 0.0
        lines.append(
            f"{name} chooses otherwise in {other.otherwise:,} of {other.decisions:,} ({share:.1%}); its predicted cost "
            f"is higher by {other.cost_mean_s:.6f} s (mean), {other.cost_p50_s:.6f} (p50), {other.cost_p99_s:.6f} (p99)"
        )
    return "\n".join(lines)
