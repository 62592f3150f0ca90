"""The tables of docs/handoff.md, made from the code they describe: `python -m tests.docs.handoff_tables --write`.

Without `--write` it compares and ends with status 1 where the page has drifted.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import get_args

from decode_worker.scheduler.request import MOVES
from engine import messages
from telemetry.labels import HANDOFF_DROPS
from tests.chaos.rows import RAY_ROWS, ROWS, TCP_ROWS
from transfer.handoff.migration import RECEIVER_TABLE, SENDER_TABLE, R, S

PAGE = Path(__file__).parents[2] / "docs" / "handoff.md"
BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def machine(states: type[Enum], moves: Mapping[tuple[Enum, str], Enum]) -> str:
    """Draw a state machine: states down, events across; a dash is a move that raises."""
    events = list(dict.fromkeys(event for _, event in moves))
    rows = []
    for state in states:
        ends = [moves.get((state, event)) for event in events]
        rows.append([f"**{state.value}**", *("–" if e is None else str(e.value) for e in ends)])
    return table(["state", *events], rows)


def request() -> str:
    """The states of a request on its decode worker, and what each may become."""
    rows = []
    for state, ends in MOVES.items():
        names = [to.value for to in type(state) if to in ends]
        rows.append([f"**{state.value}**", ", ".join(names) or "–"])
    return table(["state", "may become"], rows)


def names() -> str:
    """Return the fields of a handoff, which every message carries."""
    makers = {
        "request": "router",
        "placement": "router: counts the times it has placed this request; "
        "one that it adopts is counted on from the time of its own start, in ms",
        "attempt": "decode worker: counts its tries below one placement",
        "decode": "decode worker, once per process, at random",
        "prefill": "the worker that is read from, once per process, at random",
    }
    fields = messages.Handoff.__struct_fields__
    return table(["part", "who draws it"], ([f"`{field}`", makers[field]] for field in fields))


def wire() -> str:
    """Every record between two workers, or between router and decode worker, that a handoff needs."""
    ways = (
        ("router → decode", messages.RouterRecord),
        ("decode → router", messages.DecodeRecord),
        ("decode → prefill", messages.DecodeToPrefill),
        ("prefill → decode", messages.PrefillToDecode),
    )
    skipped = (messages.WorkerInfo, messages.Load)
    rows = []
    for way, union in ways:
        for kind in get_args(union):
            if kind in skipped:
                continue
            fields = ", ".join(f"`{field}`" for field in kind.__struct_fields__)
            said = inspect.getdoc(kind) if kind.__doc__ else ""
            rows.append([way, f"`{kind.__name__}`", fields, " ".join((said or "").split())])
    return table(["way", "record", "fields", "meaning"], rows)


def chaos() -> str:
    """The rows that `make chaos` runs, with the endings that it demands."""
    grounds = (("shm", ROWS), ("tcp", TCP_ROWS), ("Ray, shm", RAY_ROWS))
    rows = []
    for ground, some in grounds:
        for row in some:
            when = f"token {row.token}" if row.token else str(row.moment)
            end = " or ".join(f"`{ending}`" for ending in row.expect)
            rows.append([str(row.fault), " and ".join(row.targets), when, ground, end])
    return table(["fault", "worker", "when", "over", "the request ends"], rows)


def drops() -> str:
    """What either side of a handoff drops, by the label of its counter."""
    rows = [
        [f"`{side}`", f"`{what}`", meaning]
        for side, kinds in HANDOFF_DROPS.items()
        for what, meaning in kinds.items()
    ]
    return table(["side", "what", "is"], rows)


def text(page: str) -> str:
    """The page with every table made anew. Raises KeyError for a table of an unknown name."""
    made = {
        "names": names,
        "wire": wire,
        "sender": lambda: machine(S, SENDER_TABLE),
        "receiver": lambda: machine(R, RECEIVER_TABLE),
        "request": request,
        "chaos": chaos,
        "drops": drops,
    }
    return BLOCK.sub(lambda found: found[1] + made[found[2]]() + found[3], page)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check or rewrite the tables of docs/handoff.md.")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args(argv)
    page = PAGE.read_text(encoding="utf-8")
    fresh = text(page)
    if chosen.write:
        PAGE.write_text(fresh, encoding="utf-8")
    elif fresh != page:
        print(f"{PAGE.name} has drifted: python -m tests.docs.handoff_tables --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
