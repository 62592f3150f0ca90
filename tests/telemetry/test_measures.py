"""What a panel's query makes of a story, said by Prometheus' own rule tester."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from telemetry.dashboards import measures
from telemetry.dashboards.measures import RULES, TARGET
from telemetry.dashboards.pages import DASHBOARDS
from tests.telemetry.alert_cases import OWN, ROUTER, pressure

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def complaint(folder: Path, series: dict[str, str], expr: str, at_m: int) -> str:
    """What the tester says where `expr` must have exactly one series, of any labels, at this minute; nothing if so."""
    assert PROMTOOL is not None
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": f"count({expr})", "eval_time": f"{at_m}m", "exp_samples": [{"labels": "{}", "value": 1}]}
        ],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps({"rule_files": [], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def plotted(dashboard: str, title: str) -> str:
    """The one query of a panel, with nothing left out by the variables."""
    (query,) = next(p.queries for d in DASHBOARDS if d.name == dashboard for p in d.panels if p.title == title)
    return query.expr.replace("$model", ".*")


@needs_promtool
def test_what_two_routers_see_is_there_once(tmp_path: Path) -> None:
    """Guards panels that showed each worker as often as there are routers. Of two clusters, all are shown."""
    series: dict[str, str] = {}
    for model, router in (("m", 0), ("m", 1), ("n", 0)):
        own = f'model="{model}",worker="router-{router}",pool="router"'
        for number in range(2):
            worker = f'{own},peer="decode-{number}"'
            series[f'headrace_worker_state{{{worker},role="decode",state="ready"}}'] = "1x60"
            series[f"headrace_router_index_blocks{{{worker}}}"] = "100x60"
            series[f'headrace_worker_losses_total{{{worker},role="decode",how="lost"}}'] = "0x10 1x50"
            series[f'headrace_worker_ejections_total{{{worker},role="decode"}}'] = "0x10 1x50"
        series[f'headrace_pool_ready_workers{{{own},role="decode"}}'] = "2x60"
    for dashboard, title, wanted in (
        ("overview", "Workers by state", "== 4"),
        ("pools", "Ready workers", "== 4"),
    ):
        assert complaint(tmp_path, series, f"{plotted(dashboard, title)} {wanted}", 20) == "", title
    for dashboard, title, wanted in (
        ("processes", "State", "== 1"),
        ("processes", "Lost", "< 1.1"),
        ("processes", "Ejected", "< 1.1"),
        ("router", "Blocks in the index", "== 100"),
    ):
        # One value for each of the four workers.
        every = f"count({plotted(dashboard, title)} {wanted}) == 4"
        assert complaint(tmp_path, series, every, 20) == "", title


@needs_promtool
def test_an_engine_is_never_busier_than_it_can_be(tmp_path: Path) -> None:
    """Guards a panel that showed 200 %: a step of 20 minutes, which a histogram counts when it is over."""
    idle = "0+0x20 0+60x20"
    series = {
        f'headrace_engine_seconds_total{{{OWN},state="busy"}}': "0+60x20 1200+0x20",
        f'headrace_engine_seconds_total{{{OWN},state="idle"}}': idle,
        f"headrace_step_seconds_sum{{{OWN}}}": "0x19 1200x21",
    }
    assert complaint(tmp_path, series, f"{RULES.rate('step_seconds', TARGET, 'sum')} > 2", 22) == ""
    for by in (TARGET, "pool"):
        busy = measures.busy(RULES, by)
        assert complaint(tmp_path, series, f"{busy} == 1", 15) == "", "while the step is under way"
        assert complaint(tmp_path, series, f"({busy} > 0) < 1", 22) == ""
        assert complaint(tmp_path, series, f"{busy} == 0", 35) == ""


@needs_promtool
def test_copies_of_two_workers_are_no_more_than_all_the_time(tmp_path: Path) -> None:
    """Guards a sum over workers, and a copy that counts in full when it ends."""
    name = "headrace_swap_seconds_total"
    both = {f'{name}{{model="m",worker="decode-{n}",pool="decode",way="out"}}': "0+45x30" for n in range(2)}
    spent = measures.spent(RULES, "swap_seconds_total", "way")
    assert complaint(tmp_path, both, f"{spent} == 0.75", 20) == ""
    late = {f'{name}{{{OWN},way="out"}}': "0x19 900x21"}
    assert complaint(tmp_path, late, f"{spent} == 1", 20) == ""


def met(share: float) -> dict[str, str]:
    """60 requests a minute, of which a share has its first token in time and all have their tokens."""
    name = "headrace_slo_requests_total"
    good = round(60 * share)
    return {
        f'{name}{{{ROUTER},slo="ttft",met="true"}}': f"0+{good}x60",
        f'{name}{{{ROUTER},slo="ttft",met="false"}}': f"0+{60 - good}x60",
        f'{name}{{{ROUTER},slo="itl",met="true"}}': "0+60x60",
        f'{name}{{{ROUTER},slo="itl",met="false"}}': "0+0x60",
    }


@needs_promtool
@pytest.mark.parametrize(
    ("prefill_sum", "gap_sum", "share", "value"),
    [
        ("0+6x60", "0+0.6x60", 1.0, 0),
        # The means are well within the targets; four requests of ten are not.
        ("0+6x60", "0+0.6x60", 0.6, 2),
        ("0+60x60", "0+0.6x60", 0.6, 1),
        ("0+6x60", "0+6x60", 0.6, -1),
    ],
)
def test_nobody_is_told_that_all_is_well_beside_a_missed_target(
    prefill_sum: str, gap_sum: str, share: float, value: int, tmp_path: Path
) -> None:
    series = {**pressure(prefill_sum, gap_sum), **met(share)}
    words = dict(measures.HINTS)
    assert complaint(tmp_path, series, f"{measures.verdict(RULES)} == {value}", 20) == "", words[value]
    assert ("met" in words[value]) is (value == 0)


@needs_promtool
@pytest.mark.parametrize("stage", ["route", "reserve"])
def test_who_waits_for_room_asks_for_decode_workers(stage: str, tmp_path: Path) -> None:
    """Guards the hint where pools are full: who waits for room is in the router's line, or waits for a worker."""
    series = {**pressure("0+6x60", "0+0.6x60"), **met(0.6)}
    for name in ("route", "reserve"):
        labels = f'{ROUTER},stage="{name}"'
        series[f"headrace_request_stage_seconds_sum{{{labels}}}"] = "0+60x60" if name == stage else "0x60"
        series[f"headrace_request_stage_seconds_count{{{labels}}}"] = "0+60x60"
    assert complaint(tmp_path, series, f"{measures.verdict(RULES)} == -1", 20) == ""


@needs_promtool
def test_the_tester_can_say_no(tmp_path: Path) -> None:
    assert "FAILED" in complaint(tmp_path, {**pressure("0+6x60", "0+0.6x60"), **met(1.0)}, "vector(1) > 2", 20)


def test_no_share_has_room_above_one() -> None:
    """Guards a panel in per cent whose bound, which `make observe` asks a real Prometheus about, is above the whole."""
    shares = {(d.name, p.title): p.high for d in DASHBOARDS for p in d.panels if p.unit == "percentunit"}
    assert len(shares) > 15 and {name: high for name, high in shares.items() if high > 1} == {}
