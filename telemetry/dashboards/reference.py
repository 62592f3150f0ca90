"""Writes the page of all metrics: each family with its labels, its meaning, and who asks for it; and the rules."""

import re
from collections.abc import Iterator, Mapping

from telemetry.dashboards.alerts import ALERTS
from telemetry.dashboards.catalog import EVERYWHERE, Shown, catalog
from telemetry.dashboards.pages import DASHBOARDS, UNPLOTTED
from telemetry.dashboards.panel import INFINITY
from telemetry.dashboards.promql import OPEN_LABELS
from telemetry.dashboards.rules import RECORDINGS

_NAME = re.compile(r"\b(?:headrace|process)_[a-z0-9_]+\b")
MANY = 10
"""The most values of a label that a table still lists."""
_INTRODUCTION = """\
# Metrics

Made by `python -m telemetry.dashboards` from the families themselves: change those, not this.

Every series carries `model`, `pool` (supervisor, router, prefill or decode) and `worker`, the stable name of a slot: a
worker that is started again continues its series. Every combination of labels that can be known exists at zero from the
start.
[observability.md](observability.md) says how to scrape and what to look at.
"""


def askers() -> dict[str, list[str]]:
    """Return, family by family, the dashboards and rules that ask for it."""
    families = catalog()
    of_sample = {name: family.name for family in families.values() for name in family.samples}
    found: dict[str, list[str]] = {name: [] for name in families}
    for place, expr in _queries():
        for name in dict.fromkeys(_NAME.findall(expr)):
            family = of_sample[name]
            if place not in found[family]:
                found[family].append(place)
    return found


def _queries() -> Iterator[tuple[str, str]]:
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                yield dashboard.name, query.expr
    for rule in (*RECORDINGS, *ALERTS):
        yield "rules", rule.expr


def render() -> str:
    """Return the page, as Markdown."""
    families, asked = catalog(), askers()
    lines = [_INTRODUCTION]
    for title, wanted in (
        ("The supervisor", {"supervisor"}),
        ("The router", {"router"}),
        ("The router and workers", {"router", "prefill", "decode"}),
        ("Workers", {"prefill", "decode"}),
        ("Decode workers", {"decode"}),
        ("Every process", set(EVERYWHERE)),
    ):
        lines += [f"## {title}", "", "| name | type | labels | what it is | asked for by |"]
        lines.append("|---|---|---|---|---|")
        lines += [
            _line(family, asked) for family in families.values() if set(family.pools) == wanted
        ]
        lines.append("")
    return "\n".join([*lines, *_rules()]).rstrip() + "\n"


def _rules() -> Iterator[str]:
    yield from ("## Recordings", "", "| name | range in a sound cluster |", "|---|---|")
    for recording in RECORDINGS:
        yield f"| `{recording.name}` | {_range(recording.low, recording.high)} |"
    yield from (
        "",
        "## Alerts",
        "",
        "| alert | severity | after | what to do |",
        "|---|---|---|---|",
    )
    for alert in ALERTS:
        after = f"{alert.for_s} s" if alert.for_s else "at once"
        yield f"| [{alert.name}]({alert.runbook}) | {alert.severity} | {after} | {alert.action} |"


def _range(low: float, high: float) -> str:
    return f"{low:g} and more" if high == INFINITY else f"{low:g} to {high:g}"


def _line(family: Shown, asked: Mapping[str, list[str]]) -> str:
    labels = "; ".join(_label(name, values) for name, values in sorted(family.labels.items()))
    who = ", ".join(asked[family.name]) or f"nobody: {UNPLOTTED.get(family.name, '?')}"
    return f"| `{family.name}` | {family.kind} | {labels or '–'} | {family.text} | {who} |"


def _label(name: str, values: set[str]) -> str:
    if name in OPEN_LABELS:
        return f"`{name}`"
    if len(values) > MANY:
        return f"`{name}`: {len(values)} values"
    return f"`{name}`: {', '.join(sorted(values))}"
