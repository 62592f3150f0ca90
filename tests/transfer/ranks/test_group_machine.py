"""Handoffs between workers whose ranks each have a pool and a mover, in random orders: each rank late, stopped, or
failing; and bugs planted in the group, which random schedules find."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Handoff, Landed, Offer, RankEndpoint, Stop
from engine.types import BlockId, Incarnation, RequestId
from transfer.handoff.commands import (
    Arrived,
    Broken,
    CancelRecv,
    CancelSend,
    Connect,
    Emit,
    ExpectedBlock,
    Fenced,
    OutgoingBlock,
    Posted,
    PostRecv,
    PostScrap,
    PostSend,
    Received,
    Rows,
    Sent,
    Settled,
)
from transfer.handoff.migration import HandoffError
from transfer.handoff.negotiation import Agreement
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender
from transfer.ranks import group as product
from transfer.ranks.group import MoverGroup, ToRank, part_of

PREFILL, DECODE = Incarnation(11), Incarnation(22)
H = Handoff(RequestId("r"), 1, 1, DECODE, PREFILL)
LAYOUT = KVLayout(kv_heads=6, layers=1, block_size=4, head_dim=8)
BLOCKS, CHUNK = 6, 2
SEEDS = 300


class Violation(Exception):
    """A promise that a schedule has broken."""


@dataclass
class Rank:
    """One rank's pool and mover: `memory` by block and head."""

    heads: range
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    commands: deque[Any] = field(default_factory=deque)
    events: deque[Any] = field(default_factory=deque)
    copies: list[list[Any]] = field(default_factory=list)  # command and how many blocks of it have landed
    ways: dict[Incarnation, range] = field(default_factory=dict)
    stopped: int = 0


class Schedule:
    """One schedule of one handoff. Blocks of the sender go to blocks of the receiver 100 higher."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.sides = [self._ranks(rng.choice((1, 2, 3))), self._ranks(rng.choice((1, 2, 3, 6)))]
        self.groups = [MoverGroup([rank.heads for rank in side]) for side in self.sides]
        self.sender, self.receiver = KVSender(), KVReceiver()
        self.wires: list[deque[Any]] = [deque(), deque()]  # to the sender, to the receiver
        self.told: list[Any] = []
        self.freed = {"source": False, "target": False}
        for rank in self.sides[0]:
            rank.memory |= {(block, head): 1000 * block + head for block in range(BLOCKS) for head in rank.heads}
        for side, peer in ((0, DECODE), (1, PREFILL)):
            ranks = [
                RankEndpoint(first_head=one.heads.start, kv_heads=len(one.heads), details=[{}])
                for one in self.sides[1 - side]
            ]
            connect = Connect(peer, Endpoint(transport="shm", ranks=ranks), Agreement(LAYOUT))
            self.do(side, self.groups[side].submit(connect))
        rows = {i: ExpectedBlock((Rows(0, BlockId(100 + i), 0, 4),), bytes([i]), 4) for i in range(BLOCKS)}
        self.receiver.expect(H, rows)
        self.sender.open(H, reads_remotely=True)
        self.offered = 0
        self.may_stop = rng.random() < 0.4
        self.may_fail = rng.random() < 0.3
        self.is_stopped = False

    @staticmethod
    def _ranks(count: int) -> list[Rank]:
        return [Rank(range(6 * rank // count, 6 * (rank + 1) // count)) for rank in range(count)]

    def do(self, side: int, told: list[Any]) -> None:
        """Carry out what a group, or a side of the handoff, asks for."""
        for one in told:
            match one:
                case ToRank(rank, command):
                    self.sides[side][rank].commands.append(command)
                case Emit(record=record):
                    self.wires[1 - side].append(record)
                case Posted():
                    self.do(0, self.sender.posted(one.handoff, one.seq, one.digests, one.more))
                case Sent():
                    self.do(0, self.sender.sent(one.handoff, one.seq, one.error))
                case Received():
                    self.do(1, self.receiver.received(one.handoff, one.seq, one.error))
                case Settled():
                    self.freed["source"] = True
                    self.told.append(one)
                case Arrived():
                    for reader in self.sides[1]:
                        for block in range(BLOCKS):
                            for head in reader.heads:
                                if reader.memory.get((100 + block, head)) != 1000 * block + head:
                                    raise Violation(f"head {head} of block {block} is computed with unlanded")
                    self.freed["target"] = True  # nothing may change them any more
                    self.told.append(one)
                case Fenced():
                    self.freed["target"] = True
                    self.told.append(one)
                case Broken():
                    self.do(side, self.receiver.stop(H) if side else self.sender.close(H))
                case _:
                    self.do(side, self.groups[side].submit(one))

    def step(self) -> bool:
        """Let one thing happen. False: nothing is left."""
        moves: list[Callable[[], None]] = []
        if self.offered < BLOCKS and self.sender.is_open(H):
            moves.append(self._offer)
        if self.offered == BLOCKS and self.sender.is_open(H):
            moves.append(lambda: self.do(0, self.sender.close(H)))
        for side, wire in enumerate(self.wires):
            if wire:
                moves.append(lambda side=side: self._hear(side))  # type: ignore[misc]
        if self.may_stop and self.receiver.is_expected(H) and self.rng.random() < 0.05:
            moves.append(self._stop)
        for side, ranks in enumerate(self.sides):
            for number, rank in enumerate(ranks):
                if rank.stopped:
                    rank.stopped -= 1
                    moves.append(lambda: None)
                    continue
                if rank.events:
                    moves.append(lambda side=side, number=number: self._report(side, number))  # type: ignore[misc]
                if rank.commands:
                    moves.append(lambda side=side, rank=rank: self._execute(rank))  # type: ignore[misc]
                if rank.copies:
                    moves.append(lambda rank=rank: self._copy(rank))  # type: ignore[misc]
        if not moves:
            return False
        self.rng.choice(moves)()
        if self.rng.random() < 0.02:
            self.rng.choice(self.rng.choice(self.sides)).stopped = 30
        for group in self.groups:
            group.check()
        return True

    def _stop(self) -> None:
        self.may_stop, self.is_stopped = False, True
        self.do(1, self.receiver.stop(H))

    def _offer(self) -> None:
        some = range(self.offered, self.offered + CHUNK)
        self.offered += CHUNK
        blocks = [OutgoingBlock(BlockId(i), 0, i, 4, bytes([i])) for i in some]
        self.do(0, self.sender.offer(H, blocks))

    def _hear(self, side: int) -> None:
        match self.wires[side].popleft():
            case Offer() as offer:
                self.do(1, self.receiver.offer(offer))
            case Landed() as landed:
                self.do(0, self.sender.landed(landed))
            case Stop() as stop:
                told = self.sender.stop(stop)
                self.do(0, told)

    def _report(self, side: int, number: int) -> None:
        self.do(side, self.groups[side].heard(number, self.sides[side][number].events.popleft()))

    def _execute(self, rank: Rank) -> None:
        match command := rank.commands.popleft():
            case Connect(peer, _, agreement):
                rank.ways[peer] = agreement.layout.heads
            case PostSend(peer, move, blocks):
                both = sorted(set(rank.heads) & set(rank.ways[peer]))
                digests = tuple(hash((move.handoff, *(rank.memory[b.source, head] for head in both))) for b in blocks)
                rank.events += [Posted(move.handoff, move.seq, digests), Sent(move.handoff, move.seq, "", 0.0)]
            case PostRecv():
                rank.copies.append([command, 0])
            case CancelRecv(name, seq):
                for copy in [c for c in rank.copies if (c[0].move.handoff, c[0].move.seq) == (name, seq)]:
                    rank.copies.remove(copy)
                    rank.events.append(Received(name, seq, "cancelled", 0.0, 0))
            case CancelSend() | PostScrap():
                pass

    def _copy(self, rank: Rank) -> None:
        """Read one block more of the oldest receive from the rank that sends it."""
        copy = rank.copies[0]
        command, at = copy
        move, block = command.move, command.blocks[at]
        number = next(n for n in range(len(self.sides[0])) if part_of(PREFILL, n) == command.peer)
        source = self.sides[0][number]
        if self.freed["source"]:
            raise Violation("a rank reads blocks that are settled")
        if self.freed["target"]:
            raise Violation("a rank writes to blocks that are fenced, or in use")
        found = []
        for head in sorted(set(rank.heads) & set(source.heads)):
            found.append(source.memory[move.remote[at][0], head])
            rank.memory[block.rows[0].target, head] = found[-1]
        error = "" if hash((move.handoff, *found)) == block.digest else "digest mismatch"
        if self.may_fail and self.rng.random() < 0.1:
            error = "failed"
        copy[1] += 1
        if error or copy[1] == len(command.blocks):
            rank.copies.remove(copy)
            rank.events.append(Received(move.handoff, move.seq, error, 0.0, 0))

    def run(self) -> None:
        while self.step():
            pass
        ends = {type(one) for one in self.told}
        if Settled not in ends or not ends & {Arrived, Fenced}:
            raise Violation(f"the handoff never ends: {self.sender} {self.receiver}")
        if Fenced in ends and not self.may_fail and not self.is_stopped:
            raise Violation("the handoff broke although nothing had failed")


def _forgetful(self: MoverGroup, name: Any, seq: int, *rest: Any) -> Any:
    return _ended(self, name, seq, *rest) if (name, seq) in self._named else []


_ended = MoverGroup._ended
Plant = dict[str, Any]


def landed_with_the_first_rank() -> Plant:
    """A chunk has landed when the first of its parts has."""

    def early(self: MoverGroup, name: Any, seq: int, *rest: Any) -> Any:
        chunk = self._named.get((name, seq))
        if chunk is not None and isinstance(chunk.command, PostRecv):
            for other in [other for other in chunk.waiting if other != name]:
                del chunk.waiting[other], self._named[other, seq]
        return _forgetful(self, name, seq, *rest)

    return {"_ended": early}


def fenced_at_rank_0_only() -> Plant:
    """A cancel goes to rank 0's mover, and the others' parts are forgotten."""

    def own(self: MoverGroup, chunk: Any) -> Iterator[Any]:
        for name, (rank, _) in list(chunk.waiting.items()):
            if rank == 0:
                yield ToRank(rank, CancelRecv(name, chunk.command.move.seq))
            elif any(rank == 0 for rank, _ in chunk.waiting.values()):
                del chunk.waiting[name], self._named[name, chunk.command.move.seq]

    return {"_cancel": own, "_ended": _forgetful}


def digests_of_other_heads() -> Plant:
    """The digests of a block's parts come in the order in which the ranks have posted them."""
    posted = MoverGroup._posted

    def shuffled(self: MoverGroup, chunk: Any, name: Any, digests: Any) -> Any:
        rank, _ = chunk.waiting[name]
        chunk.waiting[name] = rank, len(chunk.digests)
        return posted(self, chunk, name, digests)

    return {"_posted": shuffled}


BUGS = (landed_with_the_first_rank, fenced_at_rank_0_only, digests_of_other_heads)


@contextmanager
def planted(bug: Callable[[], Plant]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, method in bug().items():
            patch.setattr(MoverGroup, name, method)
        yield


def test_no_schedule_breaks_a_promise() -> None:
    """Guards against heads that are missing, ranks that read what is freed or write where they may not, and handoffs
    that never end."""
    ends = set()
    for seed in range(SEEDS):
        world = Schedule(seed)
        world.run()
        ends |= {type(one) for one in world.told}
    assert {Arrived, Fenced, Settled} <= ends


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Callable[[], Plant]) -> None:
    """Guards the schedules against blindness. What is told twice of a chunk, the handoff refuses."""
    with planted(bug), pytest.raises((Violation, HandoffError)):
        for seed in range(SEEDS):
            Schedule(seed).run()


def test_a_wrong_range_of_heads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the schedules against blindness: each rank takes the heads of the rank with its own number."""
    monkeypatch.setattr(
        product, "parts", lambda s, r: [product.HeadsPart(min(at, len(s) - 1), at) for at in range(len(r))]
    )
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            Schedule(seed).run()
