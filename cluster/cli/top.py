"""`headrace top`: a live view of pools, batches, blocks, migrations and latency.

`batch` runs in a step, `line` waits; `tokens` are uncached prompt tokens in it. `speed` is a prefill worker's rate and
a decode worker's time per step. In the bar: █ active, ▒ reserved, ! quarantined, ░ cached, · free.
"""

import time

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.admin import ProcessStatus, Status
from cluster.admin_client import AdminClient
from cluster.cli.hints import hints
from cluster.cli.status_view import STYLES, duration, ranks_lines, silent_lines
from cluster.processes.spec import LaunchError
from cluster.sizes import format_size
from router.status.journal import Recent
from router.status.overview import Overview, WorkerOverview

BAR_CELLS = 10
BLOCKS = (("active", "█", "green"), ("reserved", "▒", "yellow"), ("quarantined", "!", "red"))
CACHED = ("cached", "░", "cyan")


def run_top(client: AdminClient, once: bool, interval_s: float) -> int:
    """Show the cluster until interrupted; with `once`, show one frame, and return 1 where a router is missing from it.
    Raises LaunchError if the cluster cannot be asked, or ends."""
    console = Console(highlight=False)
    if once:
        status, overview = client.status(), client.overview()
        console.print(frame(status, overview))
        return 1 if overview.silent else 0
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            status = client.status()
            try:
                live.update(frame(status, client.overview()), refresh=True)
            except LaunchError as error:  # a router that is being replaced
                live.update(Group(head(status), Text(str(error), "red")), refresh=True)
            time.sleep(max(interval_s, 0.1))


def frame(status: Status, overview: Overview) -> RenderableType:
    """One picture of the cluster."""
    said = [Text(f"→ {hint}", "yellow") for hint in hints(overview)]
    return Group(
        head(status),
        _requests(overview),
        *silent_lines(overview.silent),
        _recent(overview.recent),
        _pools(status, overview),
        *(Text(line) for one in overview.workers if one.ranks for line in ranks_lines(one.name, one.ranks)),
        *(Text(line) for line in map(_groups_line, overview.workers) if line),
        *said,
    )


def head(status: Status) -> Text:
    return Text(
        f"headrace {status.name}  {status.state} {duration(status.up_s)}  gRPC {status.grpc}"
        + (f"  HTTP {status.http}" if status.http else ""),
        "bold",
    )


def _requests(overview: Overview) -> Text:
    ready = "ready" if overview.ready else "NOT READY"
    return Text(
        f"{overview.model}  {ready}  open {overview.open}, waiting for room {overview.waiting}"
    )


def _recent(recent: Recent) -> Text:
    ended = ", ".join(f"{n} {outcome}" for outcome, n in sorted(recent.outcomes.items())) or "none"
    rate = recent.output_tokens / recent.window_s
    lines = [
        f"last {recent.window_s:.0f} s  ended: {ended}  output {rate:.1f} tokens/s",
        f"  TTFT         {_ms(recent.ttft_p50_s)} median, {_ms(recent.ttft_p99_s)} p99",
        f"  inter-token  {_ms(recent.itl_p50_s)} median, {_ms(recent.itl_p99_s)} p99",
        f"  migrated     {recent.migrated_blocks} blocks of {recent.migrated_requests} requests, "
        f"{format_size(recent.migrated_bytes)} in {recent.migration_s * 1e3:.1f} ms{_speed(recent)}",
    ]
    return Text("\n".join(lines))


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _speed(recent: Recent) -> str:
    if not recent.migration_s:
        return ""
    return f" ({format_size(round(recent.migrated_bytes / recent.migration_s))}/s)"


def _pools(status: Status, overview: Overview) -> Table:
    """Draw both pools, within 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("worker", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("batch", "line", "tokens", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV", no_wrap=True)
    for name in ("speed", "heard"):
        table.add_column(name, justify="right", no_wrap=True)
    views = {worker.name: worker for worker in overview.workers}
    for process in status.processes:
        if process.kind != "router":
            table.add_row(*_row(process, views.get(process.name)))
    return table


def _row(process: ProcessStatus, view: WorkerOverview | None) -> list[RenderableType]:
    state: RenderableType = Text(process.state, STYLES.get(process.state, ""))
    if view is None or view.load is None:
        return [process.name, state, "–", "–", "–", "–", "", "–", "–"]
    load = view.load
    used = load.active_blocks + load.reserved_blocks + load.quarantined_blocks
    is_prefill = view.role == "prefill"
    speed = "–"
    if load.s_per_token:
        speed = f"{1 / load.s_per_token:.0f} tok/s" if is_prefill else f"{load.s_per_token * 1e3:.1f} ms"
    return [
        process.name,
        state,
        str(load.running_requests),
        str(load.waiting_requests),
        str(load.waiting_tokens) if is_prefill or load.waiting_tokens else "",
        f"{used}/{view.blocks}",
        _bar(view),
        speed,
        f"{view.age_s:.1f}s",
    ]


def _groups_line(view: WorkerOverview) -> str:
    """Say what is held of each layer group, where there are several."""
    held = view.load.group_blocks if view.load is not None else {}
    told = ", ".join(f"{name}: {blocks}" for name, blocks in held.items())
    return f"{view.name} holds by layer group: {told}" if told else ""


def _bar(view: WorkerOverview) -> Text:
    """Draw the pool as a bar; a state that any block is in gets at least one cell."""
    load = view.load
    assert load is not None
    bar, left = Text(), BAR_CELLS
    for state, sign, style in (*BLOCKS, CACHED):
        count = getattr(load, f"{state}_blocks")
        cells = min(left, max(1, round(BAR_CELLS * count / view.blocks))) if count else 0
        bar.append(sign * cells, style)
        left -= cells
    return bar.append("·" * left, "dim")
