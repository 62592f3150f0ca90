"""PromQL from names that are checked: a family, a label or a value that nobody shows is an error when it is written.

A `Scope` fixes what every query of one place has in common: a dashboard selects by its variables and leaves the window
to Grafana; rules take everything over a fixed window.
"""

from dataclasses import dataclass
from functools import cache

from telemetry.dashboards.catalog import OWN, Shown, catalog
from telemetry.families import PREFIX

# Values of these come with the cluster, not with the program.
OPEN_LABELS = frozenset({"peer", "version", "revision", "transport", "policy", "block_size", "dtype"})


class QueryError(ValueError):
    """A query asks for what no process shows."""


@cache
def _shown() -> dict[str, Shown]:
    return catalog()


@dataclass(frozen=True, slots=True)
class Scope:
    """What every query of one place has in common. `everywhere` and `workers` are label matchers put into every
    selector: the latter into those of families that only workers have."""

    window: str
    everywhere: str = ""
    workers: str = ""

    def series(self, name: str, part: str = "", **labels: str) -> str:
        """Write a selector. `name` goes without our prefix; `part` is bucket, sum or count of a histogram; a label's
        value may be alternatives, a|b. Raises QueryError for what no process shows."""
        family = _find(name)
        full = f"{family.name}_{part}" if part else family.name
        if full not in family.samples:
            raise QueryError(f"{full} is no series of the {family.kind} {family.name}")
        matchers = [self.everywhere, "" if {"router", "supervisor"} & {*family.pools} else self.workers]
        for label, value in labels.items():
            _check(family, label, value)
            matchers.append(f'{label}{"=~" if "|" in value else "="}"{value}"')
        inside = ",".join(m for m in matchers if m)
        return f"{full}{{{inside}}}" if inside else full

    def rate(self, name: str, by: str = "", part: str = "", **labels: str) -> str:
        """Write the sum of rates per second, by the labels named in `by`."""
        return f"{_sum(by)} (rate({self.series(name, part, **labels)}[{self.window}]))"

    def grown(self, name: str, window: str, by: str = "", **labels: str) -> str:
        """Write how much a counter has grown within `window`."""
        return f"{_sum(by)} (increase({self.series(name, **labels)}[{window}]))"

    def sum(self, name: str, by: str = "", **labels: str) -> str:
        """Write the sum of a gauge."""
        return f"{_sum(by)} ({self.series(name, **labels)})"

    def seen(self, name: str, by: str, window: str = "", over: str = "") -> str:
        """Write the most that any router sees of each worker, or of what else `by` names: a gauge, or how much a
        counter has grown within `window`. Routers look at the same workers, so that their sum counts each as often as
        there are routers. Summed over all but `over`, where that is given."""
        seen = f"increase({self.series(name)}[{window}])" if window else self.series(name)
        most = f"max by (model, {by}) ({seen})"
        return f"{_sum(over)} ({most})" if over else most

    def quantile(self, q: float, name: str, by: str = "", **labels: str) -> str:
        """Write a quantile of a histogram, interpolated within its bucket."""
        over = f"le, {by}" if by else "le"
        return f"histogram_quantile({q}, {self.rate(name, over, 'bucket', **labels)})"

    def mean(self, name: str, by: str = "", **labels: str) -> str:
        """Write the mean of a histogram; nothing where nothing was observed."""
        total, count = (self.rate(name, by, part, **labels) for part in ("sum", "count"))
        return share(total, count)


def share(part: str, whole: str) -> str:
    """Write `part / whole`, nothing where the whole is nothing: 0 / 0 would be drawn as a gap that looks like an
    outage."""
    return f"{part} / ({whole} > 0)"


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


def _find(name: str) -> Shown:
    for full in (PREFIX + name, name):
        if full in _shown():
            return _shown()[full]
    raise QueryError(f"no process shows {name}")


def _check(family: Shown, label: str, value: str) -> None:
    if label in OWN:
        return
    if label not in family.labels:
        raise QueryError(f"{family.name} has no label {label}")
    unknown = set(value.split("|")) - family.labels[label]
    if unknown and label not in OPEN_LABELS:
        raise QueryError(f"{label} of {family.name} is never {', '.join(sorted(unknown))}")
