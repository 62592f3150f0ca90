"""A load run as a table for people and as JSON for programs."""

import msgspec
from rich.console import Console
from rich.table import Table

from cluster.bench.driver import Level, LoadPlan
from cluster.bench.stats import Spread

MIB = 1024 * 1024


class LoadReport(msgspec.Struct, frozen=True):
    """All that is needed to compare two runs: what was sent, on what, and what it gave."""

    plan: LoadPlan
    environment: dict[str, str | int]
    levels: list[Level]


def to_json(report: LoadReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def print_report(report: LoadReport, console: Console) -> None:
    plan, load = report.plan, report.plan.workload
    shape = f"{load.input_tokens} in / {load.output_tokens} out"
    if load.prefix_tokens:
        shape = f"{load.groups} prefixes of {load.prefix_tokens} tokens, " + shape
    title = f"{load.kind}: {shape}, {plan.requests} requests, {plan.target} {plan.address}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for level in report.levels:
        table.add_column(f"{level.concurrency} at once", justify="right")
    for name, cells in _rows(report.levels):
        table.add_row(name, *cells)
    console.print(table)
    for level in report.levels:
        for code, count in level.summary.errors.items():
            message = f"{count} x {code}: {level.messages[code]}"
            console.print(f"at {level.concurrency}: {message}", style="red", markup=False)
    environment = report.environment
    console.print(f"{environment['cpu']}, {environment['cores']} cores", markup=False)


def _rows(levels: list[Level]) -> list[tuple[str, list[str]]]:
    runs = [level.summary for level in levels]
    rows = [
        ("failed", [str(run.failed) for run in runs]),
        ("output tok/s", [f"{run.output_tokens_per_s:.1f}" for run in runs]),
        ("total tok/s", [f"{run.total_tokens_per_s:.1f}" for run in runs]),
    ]
    spreads = {
        "TTFT": [run.ttft_s for run in runs],
        "ITL": [run.itl_s for run in runs],
        "E2E": [run.e2e_s for run in runs],
        "migration": [run.migration_s for run in runs],
    }
    for name, cells in spreads.items():
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
