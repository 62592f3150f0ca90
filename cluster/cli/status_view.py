"""`headrace status` as a table, or as JSON."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.admin import Status
from cluster.sizes import format_size
from engine.messages import RankUse

STYLES = {"up": "green", "failed": "red", "pausing": "red", "leaving": "yellow"}


def print_json(record: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(record), indent=2).decode())


def print_status(status: Status, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    console.print(
        f"{status.name}: {status.state} for {duration(status.up_s)}, supervisor {status.pid}, "
        f"{status.launcher} launcher, {status.model}"
    )
    if status.grpc:
        fronts = f"gRPC {status.grpc}" + (f", HTTP {status.http}" if status.http else "")
        console.print(fronts)
    table = Table()
    for name in ("process", "state", "pid", "address", "incarnation"):
        table.add_column(name)
    table.add_column("deaths", justify="right")
    for one in status.processes:
        table.add_row(
            one.name,
            Text(one.state, STYLES.get(one.state, "")),
            str(one.pid or "–"),
            one.address,
            one.incarnation if one.kind != "router" else "",
            str(one.deaths),
        )
    console.print(table)
    for one in status.processes:
        if one.ranks:
            console.print("\n".join(ranks_lines(one.name, one.ranks)), markup=False)
    for one in status.processes:
        if one.deaths:
            console.print(f"{one.name} died last of: {one.why}", markup=False)


def ranks_lines(worker: str, ranks: Sequence[RankUse]) -> list[str]:
    """Say of which processes a tensor-parallel worker is, rank 0 first, and the weights of each; and, on GPUs, by which
    way they add up."""
    pids = ", ".join(str(rank.pid) for rank in ranks)
    parts = sorted({rank.weights_bytes for rank in ranks})
    weights = " to ".join(format_size(nbytes) for nbytes in dict.fromkeys((parts[0], parts[-1])))
    sums = [f"{worker} adds up over its ranks {ranks[0].sums}"] if ranks[0].sums else []
    return [f"{worker} is {len(ranks)} ranks: pids {pids}; {weights} of weights each", *sums]


def duration(seconds: float) -> str:
    """Write a duration as people say it: 41 s, 3 min 5 s, 7 h 2 min, 4 d 3 h."""
    units = [("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)]
    whole, parts = int(seconds), list[str]()
    for unit, size in units:
        count, whole = divmod(whole, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
