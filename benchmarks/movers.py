"""Measures what the transfer threads of both ends cost a handoff: `python -m benchmarks.movers --before DIR`.

Handoffs of one chunk between two pools of this host, both ends in one thread, in CPU time: the pure sides, the movers
that workers have, copies and digests. Processes take turns, in other order each time: of this tree with a worker's
movers, of this tree with a mover that no group of ranks is asked about, and, with `--before`, of another checkout of
this project, whose files alone they import. Ratios are of the same turn.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

SHAPES = {"1 block of 4 KiB": (1, 4, 8), "8 blocks of 720 KiB": (8, 30, 64)}
"""Blocks of a chunk; layers and head size of a block of 16 tokens and three heads."""
HANDOFFS = {"1 block of 4 KiB": 200, "8 blocks of 720 KiB": 4}
OWN, BARE, BEFORE = "movers of a worker", "one mover alone", "before"


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.child:
        return _child(options.child, options.before)
    from rich.table import Table

    from benchmarks.figures import middle, show, write_json

    here = Path(__file__).parents[1]
    trees = {OWN: (here, OWN), BARE: (here, BARE)}
    if options.before is not None:
        trees[BEFORE] = (options.before.resolve(), OWN)
    spent = measure(trees, options.turns)
    title = f"CPU time of a handoff, both ends; median (middle half) of {options.turns} turns"
    table = Table(title=title, title_justify="left")
    for name in ("a chunk of", "whose", "µs", "of that of this tree's worker"):
        table.add_column(name)
    rows = []
    for shape in SHAPES:
        for whose in trees:
            times = [turn[whose][shape] for turn in spent]
            ratios = [turn[OWN][shape] / turn[whose][shape] for turn in spent]
            cost, ratio = middle(times), middle(ratios)
            rows.append({"shape": shape, "whose": whose, "cpu_s": cost, "ours_to_it": ratio})
            table.add_row(shape, whose, cost.cell(1e6), "" if whose == OWN else f"× {ratio.cell(digits=2)} is ours")
    show(table)
    if options.json is not None:
        write_json(options.json, "movers", {"turns": options.turns}, rows)
    return 0


def measure(trees: dict[str, tuple[Path, str]], turns: int) -> list[dict[str, dict[str, float]]]:
    """Return, for each turn, the CPU seconds of a handoff by tree and shape; the first turn warms up and is left
    out."""
    with ExitStack() as stack:
        asked = {}
        for name, (tree, kind) in trees.items():
            # -P: nothing beside this file is taken for a module.
            command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child", kind, "--before", str(tree)]
            process = subprocess.Popen(
                command, env={"PYTHONPATH": str(tree)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            asked[name] = stack.enter_context(process)
            stack.callback(process.kill)
        return [
            {name: _answer(asked[name]) for name in list(trees)[:: 1 if turn % 2 else -1]} for turn in range(turns + 1)
        ][1:]


def _answer(process: "subprocess.Popen[str]") -> dict[str, float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a measuring process has ended: {process.wait()}")
    found: dict[str, float] = json.loads(line)
    return found


def _child(kind: str, tree: Path) -> int:
    """Answer each line that comes with the seconds of a handoff, by shape. Ends at once where what is imported is not
    of the tree that is asked about."""
    from transfer import mover

    if not Path(mover.__file__).is_relative_to(tree):
        sys.exit(f"{mover.__file__} is not of {tree}")
    ends = {name: Ends(kind, *shape) for name, shape in SHAPES.items()}
    for _ in sys.stdin:
        told = {}
        for name, pair in ends.items():
            began_s = time.process_time()
            for _ in range(HANDOFFS[name]):
                pair.hand_over()
            told[name] = (time.process_time() - began_s) / HANDOFFS[name]
        print(json.dumps(told), flush=True)
    return 0


class Ends:
    """A prefill and a decode worker, as far as blocks go from the one to the other. What is imported here is of the
    tree that is measured, which may be older than this file."""

    def __init__(self, kind: str, blocks: int, layers: int, head_dim: int) -> None:
        from engine.kv.layout import KVLayout
        from engine.storage.paged import PagedKV
        from engine.types import BlockId, Incarnation
        from transfer.config import TransferConfig
        from transfer.handoff import commands
        from transfer.handoff.negotiation import Agreement
        from transfer.handoff.receiver import KVReceiver
        from transfer.handoff.sender import KVSender
        from transfer.registry import open_transports

        self._c, self._count, self._number = commands, blocks, 0
        layout = KVLayout(kv_heads=3, layers=layers, block_size=16, head_dim=head_dim)
        self._lives = Incarnation(11), Incarnation(22)
        self._pools = [PagedKV(layout, blocks) for _ in self._lives]
        for block in range(blocks):
            self._pools[0].block(BlockId(block))[:] = bytes([block + 1]) * layout.block_bytes
        self._inboxes: list[list[Any]] = [[], []]
        self._movers = []
        ways = []
        for life, pool, inbox in zip(self._lives, self._pools, self._inboxes, strict=True):
            own = open_transports(pool, life, TransferConfig(transport="shm"), "127.0.0.1")
            ways.append(own["shm"])
            self._movers.append(_mover(kind, own, pool, layout, inbox.append))
        self._remote = ways[0].reads_remotely
        self.sender, self.receiver = KVSender(), KVReceiver()
        for at, other in ((0, 1), (1, 0)):
            endpoint = ways[other].describe(self._lives[at])
            self._movers[at].submit(commands.Connect(self._lives[other], endpoint, Agreement(layout)))

    def hand_over(self) -> None:
        """Hand one chunk over, from its offer until its source is settled."""
        from engine.messages import Handoff
        from engine.types import BlockId, RequestId

        c, rows = self._c, self._c.Rows
        self._number += 1
        handoff = Handoff(RequestId(f"r{self._number}"), 1, 1, self._lives[1], self._lives[0])
        idents = [at.to_bytes(16, "little") for at in range(self._count)]
        expected = {
            at: c.ExpectedBlock((rows(0, BlockId(at), 0, 16),), ident, 16) for at, ident in enumerate(idents)
        }
        offered = [c.OutgoingBlock(BlockId(at), 0, at, 16, ident) for at, ident in enumerate(idents)]
        self._open = {c.Arrived, c.Settled}
        self.receiver.expect(handoff, expected)
        self.sender.open(handoff, self._remote)
        self._carry_out(self.sender.offer(handoff, offered))
        self._carry_out(self.sender.close(handoff))
        while self._open:
            for mover in self._movers:
                mover.run_once()
            for inbox in self._inboxes:
                while inbox:
                    self._hear(inbox.pop(0))

    def _hear(self, event: Any) -> None:
        match type(event).__name__:
            case "Posted":
                self._carry_out(self.sender.posted(event.handoff, event.seq, event.digests))
            case "Sent":
                self._carry_out(self.sender.sent(event.handoff, event.seq, event.error))
            case "Received":
                assert not event.error, event.error
                self._carry_out(self.receiver.received(event.handoff, event.seq, event.error))
            case other:
                raise RuntimeError(f"{other}: {event}")

    def _carry_out(self, commands: Sequence[Any]) -> None:
        for command in commands:
            match type(command).__name__:
                case "PostSend" | "Connect":
                    self._movers[0].submit(command)
                case "PostRecv":
                    self._movers[1].submit(command)
                case "Arrived" | "Settled":
                    self._open.discard(type(command))
                case "Emit":
                    is_offer = type(command.record).__name__ == "Offer"
                    hear: Callable[[Any], Any] = self.receiver.offer if is_offer else self.sender.landed
                    self._carry_out(hear(command.record))
                case other:
                    raise RuntimeError(f"{other}: {command}")


def _mover(kind: str, ways: Any, pool: Any, layout: Any, on_event: Callable[[Any], None]) -> Any:
    """Return what a worker has for its transfer thread: in a tree without ranks, the mover itself."""
    from transfer import mover

    # Looked for beside it: an installed tree may have what this one lacks.
    if kind == BARE or not (Path(mover.__file__).parent / "ranks").is_dir():
        return mover.Mover(ways, pool, layout, on_event)
    from transfer.ranks.movers import RankMovers

    return RankMovers(ways, pool, layout, on_event, [layout.heads], {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--before", type=Path, metavar="DIR", help="another checkout of this project")
    add("--turns", type=int, default=40)
    add("--json", type=Path, metavar="FILE")
    add("--child", choices=(OWN, BARE), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
