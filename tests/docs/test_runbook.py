"""docs/operations.md: the runbook sends nobody to a panel or a setting that is not there."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cluster.cli import hints
from cluster.config import ClusterConfig
from telemetry.dashboards import measures
from telemetry.dashboards.pages import DASHBOARDS

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
PANELS = {
    d.title.removeprefix("Headrace: "): {panel.title for panel in d.panels} for d in DASHBOARDS
}
NAMED = (
    "long chats run out of memory",
    "throughput stalls after",
    "benchmark's gain does not show",
    "TTFT swings while decoding is fine",
    "latency explodes once memory is swapped",
    "the context does not fit",
)


def rows(text: str) -> list[list[str]]:
    """Return the rows of the table of symptoms as cells, without the head."""
    table = [line for line in text.split("## Symptoms")[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def missing_panels(cell: str) -> list[str]:
    """Panels that a cell names and that their dashboard lacks."""
    missing = []
    for part in cell.split("; "):
        dashboard, _, rest = part.partition(": ")
        names = re.findall(r"\*(.+?)\*", rest)
        if dashboard not in PANELS or not names:
            missing.append(part)
        missing += [
            f"{dashboard}: {name}" for name in names if name not in PANELS.get(dashboard, ())
        ]
    return missing


def settings(config: object, before: str = "") -> Iterable[str]:
    for field in msgspec.structs.fields(type(config)):
        value, name = getattr(config, field.name), f"{before}{field.name}"
        yield name
        if isinstance(value, msgspec.Struct):
            yield from settings(value, f"{name}.")


def test_every_symptom_has_a_panel_that_exists_and_something_to_do() -> None:
    """Guards against a runbook that was written for other dashboards."""
    found = rows(PAGE.read_text())
    assert [name for name in NAMED if not any(name in row[0] for row in found)] == []
    for symptom, panel, also, action in found:
        assert also and action, symptom
        assert panel == "–" or missing_panels(panel) == [], symptom


def test_a_panel_that_is_gone_is_seen() -> None:
    assert missing_panels("router: *Honesty*") == []
    assert missing_panels("router: *Honesty*, *Candour*; cellar: *Wine*") == [
        *["router: Candour", "cellar: *Wine*", "cellar: Wine"]
    ]


def test_settings_are_those_that_there_are() -> None:
    """Guards against advice to change what has another name."""
    known = set(settings(ClusterConfig()))
    text = " ".join(cell for row in rows(PAGE.read_text()) for cell in row)
    named = set(re.findall(r"`((?:prefill|decode|router|ray|restart)\.[a-z_.]+)\b", text))
    assert len(named) >= 5 and named <= known, named - known


def test_the_rule_of_thumb_is_the_one_that_is_computed() -> None:
    """`tests/cluster/cli/test_top.py` has it fire; docs and targets name the same bounds."""
    text = PAGE.read_text()
    router = ClusterConfig().router
    assert f"TTFT over {router.slo_ttft_s * 1e3:.0f} ms" in text
    assert f"{router.slo_itl_s * 1e3:.0f} ms the decode" in text
    assert hints.GOAL == measures.GOAL
