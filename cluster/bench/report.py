"""A load run as a table for people and as JSON for programs."""

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.bench.driver import Level, LoadPlan
from cluster.bench.goodput import SearchOutcome
from cluster.bench.stats import Spread

MIB = 1024 * 1024


class LoadReport(msgspec.Struct, frozen=True):
    """All that is needed to compare two runs: what was sent, on what, and what it gave. The levels of a search are its
    probes, in their order."""

    plan: LoadPlan
    environment: dict[str, str | int]
    levels: list[Level]
    search: SearchOutcome | None = None


def to_json(report: LoadReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def print_probe(level: Level, console: Console) -> None:
    """Print one line on a probe of a search."""
    assert level.slo is not None
    missed = ", ".join(f"{count} x {name}" for name, count in level.slo.missed.items())
    console.print(
        f"{level.name}: {level.slo.share:.1%} of {level.summary.requests} requests kept the limits"
        f" in {level.summary.wall_s:.0f} s" + (f"; missed: {missed}" if missed else ""),
        markup=False,
        highlight=False,
    )


def print_report(report: LoadReport, console: Console) -> None:
    """Print the figures of every level; of a search, what it found, and the figures of the two ends of the interval."""
    levels = report.levels if report.search is None else _ends(report.levels, report.search)
    table = Table(title=Text(_title(report.plan), "table.title"), title_justify="left")
    table.add_column("")
    for level in levels:
        table.add_column(level.name, justify="right")
    for name, cells in _rows(levels):
        table.add_row(name, *cells)
    console.print(table)
    for level in levels:
        for code, count in level.summary.errors.items():
            console.print(Text(f"at {level.name}: {count} x {code}: {level.messages[code]}", "red"))
        if level.summary.is_client_late:
            console.print(f"at {level.name}: the client itself was late, and is part of the figures", style="red")
    environment = report.environment
    console.print(f"{environment['cpu']}, {environment['cores']} cores", markup=False)
    if report.search is not None:
        said = _found(report.plan, report.search)
        if report.search.passed is not None:
            said += _short(report.plan, levels)
        console.print(said, markup=False, highlight=False, soft_wrap=True)


def _title(plan: LoadPlan) -> str:
    load = plan.workload
    shape = f"{load.input_tokens} in / {load.output_tokens} out"
    if plan.trace:
        shape = f"{plan.trace}, {shape} in the mean"
    if load.turns > 1:
        shape = f"{load.turns} turns of {shape}, {load.think_s:g} s between"
    if load.prefix_tokens:
        shape = f"{load.groups} prefixes of {load.prefix_tokens} tokens, " + shape
    if plan.slo is not None:
        shape += f", limits {plan.slo}"
    least = "at least " if plan.search is not None and not plan.trace else ""
    return f"{load.kind}: {shape}, {least}{plan.requests} requests, {plan.target} {plan.address}"


def _ends(probes: list[Level], outcome: SearchOutcome) -> list[Level]:
    """Return the probes at the largest load that passed and at the smallest that missed."""
    wanted = [load for load in (outcome.passed, outcome.missed) if load is not None]
    of = {(probe.trace_speed or probe.rate_per_s): probe for probe in probes}
    return [of[load] for load in wanted]


def _found(plan: LoadPlan, outcome: SearchOutcome) -> str:
    assert plan.search is not None
    kept = f"{100 * plan.search.attainment:g} % of the requests kept {plan.slo}"
    unit = "times the trace's speed" if plan.trace else "requests/s"
    if outcome.passed is None:
        flag = "--trace-speed" if plan.trace else "--rate"
        said = f"none found: at {outcome.missed:.3g} {unit}, the lowest tried, less than {kept}; {flag} may begin lower"
    elif outcome.missed is None:
        said = f"at least {outcome.passed:.3g} {unit}: there at least {kept}; more was not tried"
    else:
        said = f"{outcome.passed:.3g} {unit}: there at least {kept}, and not at {outcome.missed:.3g}"
    stopped = f"; the search was stopped: {outcome.stopped}" if outcome.stopped else ""
    return f"goodput: {said}{stopped}"


def _short(plan: LoadPlan, ends: list[Level]) -> str:
    """Say so where a trace, which is as long as it is, ends before a server that falls behind would have shown it."""
    best, least_s = ends[0], plan.search.probe_s if plan.search is not None else 0.0
    lasted_s = best.summary.requests / best.rate_per_s if best.rate_per_s else 0.0
    if not plan.trace or lasted_s >= least_s:
        return ""
    return f"; the trace was over in {lasted_s:.0f} s, and only {least_s:.0f} s show a server that falls behind"


def _rows(levels: list[Level]) -> list[tuple[str, list[str]]]:
    runs = [level.summary for level in levels]
    rows = [
        ("failed", [str(run.failed) for run in runs]),
        ("requests/s", [f"{run.requests_per_s:.2f}" for run in runs]),
        ("output tok/s", [f"{run.output_tokens_per_s:.1f}" for run in runs]),
        ("total tok/s", [f"{run.total_tokens_per_s:.1f}" for run in runs]),
    ]
    kept = [level.slo for level in levels if level.slo is not None]
    if kept:
        rows.append(("attainment", [f"{slo.share:.1%}" for slo in kept]))
        rows.append(("goodput, requests/s", [f"{slo.goodput_per_s:.2f}" for slo in kept]))
        for limit in dict.fromkeys(limit for slo in kept for limit in slo.missed):
            rows.append((f"missed: {limit}", [str(slo.missed.get(limit, 0)) for slo in kept]))
    spreads = {
        "TTFT": [run.ttft_s for run in runs],
        "ITL": [run.itl_s for run in runs],
        "E2E": [run.e2e_s for run in runs],
        "migration": [run.migration_s for run in runs],
        "client late": [run.late_s for run in runs],
    }
    for name, cells in spreads.items():
        if name != "client late" or any(cells):
            rows.append((f"{name} ms, mean p50 p90 p99", [_spread(cell) for cell in cells]))
    rows.append(("cached / prompt tokens", [f"{run.hit_rate:.1%}" for run in runs]))
    rows.append(("blocks migrated", [str(run.migrated_blocks) for run in runs]))
    rows.append(("MiB migrated", [f"{run.migrated_bytes / MIB:.1f}" for run in runs]))
    for stage in dict.fromkeys(stage for run in runs for stage in run.stages):
        cells_ms = [f"{run.stages.get(stage, 0.0) * 1000:.1f}" for run in runs]
        rows.append((f"{stage} ms, mean", cells_ms))
    if any(level.peak_pss_bytes is not None for level in levels):
        peaks = [level.peak_pss_bytes or 0 for level in levels]
        rows.append(("peak PSS MiB", [f"{peak / MIB:.0f}" for peak in peaks]))
    return rows


def _spread(cell: Spread | None) -> str:
    if cell is None:
        return "-"
    return "  ".join(f"{s * 1000:.1f}" for s in (cell.mean, cell.p50, cell.p90, cell.p99))
