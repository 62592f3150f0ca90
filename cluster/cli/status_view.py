"""`headrace status` as a table, or as JSON."""

from collections.abc import Mapping, Sequence

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
    # As Text: rich takes [fd00::1] in a string for markup, and :a: for an emoji.
    said = (
        f"{status.name}: {status.state} for {duration(status.up_s)}, supervisor {status.pid}, "
        f"{status.launcher} launcher, {status.model}"
    )
    console.print(Text(said))
    if status.grpc:
        console.print(Text(f"gRPC {status.grpc}" + (f", HTTP {status.http}" if status.http else "")))
    table = Table()
    for name in ("process", "state", "pid", "address", "incarnation"):
        table.add_column(name)
    table.add_column("deaths", justify="right")
    for one in status.processes:
        table.add_row(
            one.name,
            Text(one.state, STYLES.get(one.state, "")),
            str(one.pid or "–"),
            Text(one.address),
            one.incarnation if one.kind != "router" else "",
            str(one.deaths),
        )
    console.print(table)
    for one in status.processes:
        if one.ranks:
            console.print(Text("\n".join(ranks_lines(one.name, one.ranks))))
    for one in status.processes:
        if one.deaths:
            console.print(Text(f"{one.name} died last of: {one.why}"))


def ranks_lines(worker: str, ranks: Sequence[RankUse]) -> list[str]:
    """Say of which processes a tensor-parallel worker is, rank 0 first, and the weights of each; and, on GPUs, by which
    way they add up."""
    pids = ", ".join(str(rank.pid) for rank in ranks)
    parts = sorted({rank.weights_bytes for rank in ranks})
    weights = " to ".join(format_size(nbytes) for nbytes in dict.fromkeys((parts[0], parts[-1])))
    sums = [f"{worker} adds up over its ranks {ranks[0].sums}"] if ranks[0].sums else []
    return [f"{worker} is {len(ranks)} ranks: pids {pids}; {weights} of weights each", *sums]


def silent_lines(silent: Mapping[str, str]) -> list[Text]:
    """Say which processes could not be asked, and why."""
    return [Text(f"{name} could not be asked: {why}", "red") for name, why in silent.items()]


def duration(seconds: float) -> str:
    """Write a duration as people say it: 41 s, 3 min 5 s, 7 h 2 min, 4 d 3 h."""
    units = [("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)]
    whole, parts = int(seconds), list[str]()
    for unit, size in units:
        count, whole = divmod(whole, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
