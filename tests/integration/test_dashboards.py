"""Every panel and every rule, asked of a real Prometheus beside a real cluster of which workers are killed."""

import math
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from telemetry.dashboards.alerts import ALERTS
from telemetry.dashboards.catalog import catalog
from telemetry.dashboards.pages import DASHBOARDS
from telemetry.dashboards.panel import Dashboard, Panel, Proof
from telemetry.dashboards.rules import RECORDINGS
from tests.integration.prometheus import BINARY, PROMTOOL, Prometheus
from tests.integration.scene import VICTIMS, Scene

pytestmark = [
    pytest.mark.observe,
    pytest.mark.skipif(
        not (BINARY and PROMTOOL), reason="prometheus and promtool are not installed"
    ),
]

WINDOW = "10s"
EDGE = 1e-6
"""Rounding: a share of 1 may come out a little above."""
PANELS = [(dashboard, panel) for dashboard in DASHBOARDS for panel in dashboard.panels]


@pytest.fixture(scope="module")
def scene(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("prometheus")
    played = Scene(demo_model, folder)
    try:
        played.play()
        yield played
    finally:
        played.close()


def prometheus(scene: Scene) -> Prometheus:
    assert scene.prometheus is not None
    return scene.prometheus


def filled(expr: str) -> str:
    """Fill in a query as Grafana would, with all models and workers chosen."""
    for variable in ("$model", "$worker"):
        expr = expr.replace(variable, ".*")
    expr = expr.replace("$__rate_interval", WINDOW)
    assert "$" not in expr, expr
    return expr


def in_range(scene: Scene, expr: str, low: float, high: float) -> list[tuple[float, float]]:
    """Return all points of a query; fails if there are none, or any is outside."""
    series = prometheus(scene).over(expr, scene.began_s + 3, scene.ended_s)
    points = [point for _, found in series for point in found]
    assert points, f"no data: {expr}"
    wrong = [(labels, p) for labels, found in series for p in found if not _within(p[1], low, high)]
    assert not wrong, f"outside {low} to {high}: {wrong[:3]} of {expr}"
    return points


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low - EDGE <= value <= high + EDGE


def test_the_load_was_mixed(scene: Scene) -> None:
    """Guards the proofs below against a load that did nothing."""
    assert scene.traffic["answered"] > 10 and scene.traffic["left"] > 0, scene.traffic
    assert scene.traffic["DEADLINE_EXCEEDED"] and scene.traffic["INVALID_ARGUMENT"], scene.traffic


@pytest.mark.parametrize(
    ("dashboard", "panel"), PANELS, ids=[f"{d.name}: {p.title}" for d, p in PANELS]
)
def test_a_panel_shows_what_it_is_for(scene: Scene, dashboard: Dashboard, panel: Panel) -> None:
    """Guards against panels that are dead from the start, or that stay at zero when something happens."""
    points = [
        point
        for query in panel.queries
        for point in in_range(scene, filled(query.expr), panel.low, panel.high)
    ]
    if panel.proof is Proof.LOAD:
        assert any(value for _, value in points), "always zero, under load"
    if panel.proof is Proof.FAULT:
        assert any(value for at, value in points if at >= scene.fault_s), "zero after a fault"


@pytest.mark.parametrize("rule", RECORDINGS, ids=lambda rule: rule.name)
def test_a_recording_has_data(scene: Scene, rule) -> None:  # type: ignore[no-untyped-def]
    in_range(scene, rule.name, rule.low, rule.high)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule.name)
def test_what_an_alert_watches_has_data(scene: Scene, rule) -> None:  # type: ignore[no-untyped-def]
    """Guards against an alert that never fires because its query finds nothing."""
    in_range(scene, rule.value, rule.low, rule.high)


def test_all_rules_are_evaluated_without_an_error(scene: Scene) -> None:
    groups = prometheus(scene).get("/api/v1/rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == {rule.name for rule in (*RECORDINGS, *ALERTS)}
    assert {
        name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"
    } == {}


def test_lost_workers_stay_listed_and_are_seen_down(scene: Scene) -> None:
    """Guards against a worker that vanishes from discovery with its death. The scene has waited for the alert to fire
    for both, and for its end."""
    everybody = {"supervisor", "router", "prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert scene.listed_while_down == everybody == set(scene.discovered())
    # One scrape that came too late, on busy cores, is no death.
    down = prometheus(scene).over("max_over_time(up[3s]) == 0", scene.began_s, scene.ended_s)
    assert {labels["worker"] for labels, _ in down} == set(VICTIMS)
    assert all(labels["instance"] == labels["worker"] for labels, _ in down)
    for name in VICTIMS:
        lost = f'headrace_worker_losses_total{{peer="{name}",how="lost"}}'
        assert prometheus(scene).value(lost) == scene.deaths[name]
        assert prometheus(scene).value(f'headrace_worker_lives_total{{peer="{name}"}}') == scene.deaths[name] + 1


def test_only_the_alerts_of_the_story_were_critical(scene: Scene) -> None:
    """Guards against an alert that cries wolf, and proves that a broken ledger or a bad digest was not seen."""
    calm = {"HeadraceKvLedgerBroken", "HeadraceAuditFailed", "HeadraceDigestMismatch"}
    calm |= {"HeadracePoolEmpty"}
    fired = prometheus(scene).over('ALERTS{alertstate="firing"}', scene.began_s, scene.ended_s)
    assert "HeadraceProcessDown" in {labels["alertname"] for labels, _ in fired}
    assert {labels["alertname"] for labels, _ in fired} & calm == set()


def test_scraped_names_are_those_of_the_catalog(scene: Scene) -> None:
    """Guards both ways: a family that no process shows, and one that dashboards were never told of."""
    known = {name for family in catalog().values() for name in family.samples}
    scraped = {
        name
        for name in prometheus(scene).get("/api/v1/label/__name__/values")
        if name.startswith(("headrace_", "process_"))
    }
    assert scraped == known


def test_pages_are_clean(scene: Scene) -> None:
    """`promtool check metrics` on every process."""
    assert PROMTOOL is not None
    for name, address in scene.discovered().items():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            page = answer.read()
        lint = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True)
        assert (lint.returncode, lint.stdout, lint.stderr) == (0, b"", b""), name


def test_the_range_can_be_missed(scene: Scene) -> None:
    """Guards the proofs themselves: a query that finds nothing, and one outside its range, fail."""
    with pytest.raises(AssertionError, match="no data"):
        in_range(scene, "headrace_no_such_family", 0, 1)
    with pytest.raises(AssertionError, match="outside"):
        in_range(scene, "headrace_kv_pool_blocks", 0, 1)
