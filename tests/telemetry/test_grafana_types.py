"""The committed dashboards against Grafana's own types. Grafana itself is in no package registry, and is not run."""

import json
from pathlib import Path
from typing import Any

import pytest

from telemetry.dashboards.__main__ import DASHBOARD_FOLDER
from telemetry.dashboards.pages import DASHBOARDS
from tests.telemetry.grafana_types import faults

ROOT = Path(__file__).parents[2]


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / DASHBOARD_FOLDER / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", [dashboard.name for dashboard in DASHBOARDS])
def test_grafana_knows_every_field(name: str) -> None:
    """Guards against a field or a value that Grafana ignores, or cannot read."""
    assert faults(load(name)) == []


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ((), ("titel", "x"), "titel is unknown"),
        (("fieldConfig",), ("default", {}), "panels.fieldConfig.default is unknown"),
        (("fieldConfig", "defaults"), ("units", "s"), "units is unknown"),
        (("fieldConfig", "defaults", "custom"), ("showPoints", "no"), "show_points cannot be 'no'"),
        (("fieldConfig", "defaults", "custom", "stacking"), ("mode", "all"), "mode cannot be 'all'"),
        (("options", "legend"), ("displayMode", "lists"), "display_mode cannot be 'lists'"),
        (("options", "tooltip"), ("mode", "many"), "mode cannot be 'many'"),
        (("gridPos",), ("w", "12"), "w cannot be '12'"),
        (("targets", 0), ("expression", "up"), "panels.targets.expression is unknown"),
        (("links", 0), ("link", "x"), "links cannot be"),
        (("links", 0), ("targetBlank", "yes"), "links cannot be"),
        (("targets", 0), ("format", "graph"), "format_val cannot be 'graph'"),
    ],
)
def test_a_slip_is_seen(path: tuple[Any, ...], value: tuple[str, Any], fault: str) -> None:
    """Guards the check itself."""
    dashboard = load("memory")
    place = next(panel for panel in dashboard["panels"] if panel["type"] == "timeseries")
    for step in path:
        place = place[step]
    place[value[0]] = value[1]
    found = faults(dashboard)
    assert len(found) == 1 and fault in found[0], found
