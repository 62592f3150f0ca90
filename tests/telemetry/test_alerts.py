"""Every alert fires in its story and resolves after it: Prometheus' own rule tester says so."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from telemetry.dashboards.alerts import ALERTS, Alert
from tests.telemetry.alert_cases import CASES, Case, starts

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules/headrace.yml"
PROMTOOL = shutil.which("promtool")
BEFORE_M = 0

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def run(folder: Path, alert: Alert, case: Case, fires_m: int, calm_m: tuple[int, ...]) -> str:
    """What promtool has to say where the alert must fire at `fires_m` and not at any of `calm_m`."""
    assert PROMTOOL is not None
    # How many alerts, not with which words: an expression asks for the number that fire, by name.
    firing = f'count(ALERTS{{alertname="{alert.name}",alertstate="firing"}}) or vector(0)'
    checks = [(fires_m, case.count), *((minute, 0) for minute in calm_m)]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in case.series.items()],
                "promql_expr_test": [
                    {
                        "expr": firing,
                        "eval_time": f"{minute}m",
                        "exp_samples": [{"labels": "{}", "value": count}],
                    }
                    for minute, count in checks
                ],
            }
        ],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps(test))  # JSON is YAML
    done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_every_alert_has_its_story() -> None:
    """Guards against an alert that is added without a proof that it fires."""
    assert set(CASES) == {alert.name for alert in ALERTS}


@needs_promtool
@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_and_resolves(alert: Alert, tmp_path: Path) -> None:
    case = CASES[alert.name]
    assert run(tmp_path, alert, case, case.fires_m, (BEFORE_M, case.calm_m)) == ""


@needs_promtool
def test_one_restart_is_one_whoever_else_saw_it(tmp_path: Path) -> None:
    """Guards against a restart that counts once for each router, and a router's that counts for every worker: a router
    that was started again meets all of them anew."""
    alert = next(a for a in ALERTS if a.name == "HeadraceWorkerRestarts")

    def lives(router: int, peer: str, values: str) -> dict[str, str]:
        own = f'model="m",worker="router-{router}",pool="router"'
        return {f'headrace_worker_lives_total{{{own},peer="{peer}",role="decode"}}': values}

    once = starts("decode-0", "decode", "1x4 2x55")
    for router in range(3):
        once |= lives(router, "decode-0", "1x4 2x55")
    routers = starts("router-0", "router", "1x4 2 2x2 3 3x2 4x50") | starts("decode-0", "decode", "1x60")
    routers |= lives(0, "decode-0", "1x4 0 1x2 0 1x2 0 1x50")
    for series in (once, routers):
        assert run(tmp_path, alert, Case(series, 8, 13, count=0), 8, (13,)) == ""


@needs_promtool
def test_the_tester_can_say_no(tmp_path: Path) -> None:
    """Guards against tests of rules that pass whatever the rules do."""
    alert = next(a for a in ALERTS if a.name == "HeadraceProcessDown")
    case = CASES[alert.name]
    assert "FAILED" in run(tmp_path, alert, case, case.calm_m, ())
    assert "FAILED" in run(tmp_path, alert, case, case.fires_m, (case.fires_m,))


@needs_promtool
def test_shipped_configuration_is_valid() -> None:
    assert PROMTOOL is not None
    for what, file in (("config", ROOT / "deploy/prometheus/prometheus.yml"), ("rules", RULES)):
        done = subprocess.run([PROMTOOL, "check", what, str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
