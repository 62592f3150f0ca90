"""One state of a handoff's two sides and of all that is between them (`tests.sim.explore`). A worker may have several
ranks with a mover each: the product's own group makes parts of its chunks, and one chunk of what becomes of them."""

from collections.abc import Hashable
from copy import copy
from dataclasses import replace
from typing import NamedTuple

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Fault, Handoff, Landed, Offer, PrefillFailed, RankEndpoint, Stop
from engine.types import BlockId, Incarnation, RequestId
from tests.sim.clock import Violation
from transfer.handoff import commands as c
from transfer.handoff.migration import S
from transfer.handoff.negotiation import Agreement
from transfer.handoff.receiver import KVReceiver, _Receiving
from transfer.handoff.sender import KVSender, _Chunk, _Sending
from transfer.ranks.group import MoverGroup, Told, ToRank, part_of

Message = Offer | PrefillFailed | Landed | Stop
Layout = tuple[tuple[int, int], ...]
KV = KVLayout(kv_heads=2, layers=1, block_size=1, head_dim=1)


class Part(NamedTuple):
    """A send or a receive of one rank of a worker, by the name that its mover has for it."""

    at: int
    rank: int
    name: Handoff
    seq: int

    def __str__(self) -> str:
        return f"{self.name.request} chunk {self.seq} at rank {self.rank} of {self.at}"


class State:
    """One state of everything. Cloned before it is changed."""

    def __init__(
        self, layout: Layout, chunks: tuple[int, ...], remote: bool, ranks: tuple[int, int] = (1, 1)
    ) -> None:
        """`ranks`: of each sender, and of each receiver: 1 or 2."""
        self.chunks = chunks
        self.ranks = ranks
        self.movers = [self.group(at) for at in range(4)]
        self.remote = remote
        self.senders = [KVSender(), KVSender()]
        self.receivers = [KVReceiver(), KVReceiver()]
        self.alive = [True, True, True, True]  # receivers, then senders
        self.cut: frozenset[tuple[int, int]] = frozenset()  # (receiver, sender)
        self.notices: frozenset[tuple[str, int, int]] = frozenset()
        self.lanes: dict[tuple[int, int, int], tuple[Message, ...]] = {}  # 0: to the sender
        self.sends: dict[Part, bool] = {}
        self.copies: frozenset[Part] = frozenset()
        self.landed: frozenset[Part] = frozenset()
        """Parts of chunks that have not ended as a whole."""
        self.pinned: frozenset[Handoff] = frozenset()
        self.reserved: frozenset[Handoff] = frozenset()
        self.offered: dict[Handoff, int] = {}
        self.faults = 0
        for at, (d, p) in enumerate(layout):
            name = Handoff(RequestId(f"r{at}"), 1, 0, Incarnation(d), Incarnation(p))
            blocks = {
                i: c.ExpectedBlock((c.Rows(0, BlockId(i), 0, 1),), b"", 1) for i in range(chunks[at])
            }
            self.receivers[d].expect(name, blocks)
            self.senders[p].open(name, remote)
            self.reserved |= {name}
            self.pinned |= {name}
            self.offered[name] = 0

    def clone(self) -> "State":
        new = copy(self)
        new.senders = [_clone_sender(s) for s in self.senders]
        new.receivers = [_clone_receiver(r) for r in self.receivers]
        new.movers = [_clone_group(m) for m in self.movers]
        new.alive = list(self.alive)
        new.lanes = dict(self.lanes)
        new.sends = dict(self.sends)
        new.offered = dict(self.offered)
        return new

    def key(self) -> tuple[Hashable, ...]:
        """Return what is equal for states that behave alike."""
        senders = tuple(
            (h.request, s.state, tuple((k.sending, k.reading, k.posted) for k in s.chunks))
            for sender in self.senders
            for h, s in sender._handoffs.items()
        )
        receivers = tuple(
            (h.request, r.state, frozenset(r.seen), frozenset(r.outstanding), frozenset(r.landed))
            for receiver in self.receivers
            for h, r in receiver._handoffs.items()
        )
        lanes = tuple(
            (lane, tuple((type(m), m.handoff.request, getattr(m, "seq", -1)) for m in queue))
            for lane, queue in sorted(self.lanes.items())
            if queue
        )
        movers = tuple(
            (at, name.request, seq, frozenset(k.digests), bool(k.error), k.cancelled)
            for at, mover in enumerate(self.movers)
            for (name, seq), k in mover._chunks.items()
        )
        return (
            senders,
            receivers,
            movers,
            self.landed,
            lanes,
            tuple(self.alive),
            self.cut,
            self.notices,
            frozenset(self.sends.items()),
            self.copies,
            self.pinned,
            self.reserved,
            tuple(self.offered.values()),
            self.faults,
        )

    # ---- the movers of a worker's ranks: receivers are 0 and 1, senders 2 and 3

    def group(self, at: int) -> MoverGroup:
        """Return the movers of a worker that knows both of the other role."""
        own, theirs = (_heads(ranks) for ranks in (self.ranks if at >= 2 else self.ranks[::-1]))
        group = MoverGroup(own)
        for peer in map(Incarnation, range(2)):
            group.submit(c.Connect(peer, _endpoint(theirs), Agreement(KV)))
        return group

    def move(self, at: int, command: c.PostSend | c.PostRecv | c.CancelSend | c.CancelRecv) -> None:
        """Give a command to a worker's movers; what they do of it is chosen by the moves."""
        self._told(at, self.movers[at].submit(command))

    def tell(self, part: Part, event: c.Posted | c.Sent | c.Received) -> None:
        """Let a rank's mover report."""
        self._told(part.at, self.movers[part.at].heard(part.rank, event))

    def _told(self, at: int, told: list[Told]) -> None:
        for one in told:
            match one:
                case ToRank(rank, c.PostSend(move=move)):
                    self.sends[Part(at, rank, move.handoff, move.seq)] = False
                case ToRank(rank, c.PostRecv(move=move)):
                    self._may_read(move.handoff)
                    self.copies |= {Part(at, rank, move.handoff, move.seq)}
                case c.Posted(name, seq, digests, more):
                    self.sender_says(at - 2, self.senders[at - 2].posted(name, seq, digests, more))
                case c.Sent(name, seq, error):
                    self.sender_says(at - 2, self.senders[at - 2].sent(name, seq, error))
                case c.Received(name, seq, error):
                    if not error:
                        self._must_be_whole(name, seq)
                    self.landed = frozenset(part for part in self.landed if not _is_of(part, name, seq))
                    self.carry_out(self.receivers[at].received(name, seq, error))
                case _:
                    pass  # disconnect and cancel: as above

    def _must_be_whole(self, name: Handoff, seq: int) -> None:
        held = {rank: set[int]() for rank in range(self.ranks[1])}
        for part in self.landed:
            if _is_of(part, name, seq):
                lives = [part_of(name.prefill, rank) for rank in range(self.ranks[0])]
                sender = lives.index(part.name.prefill)
                held[part.rank] |= {*_heads(self.ranks[0])[sender]} & {*_heads(self.ranks[1])[part.rank]}
        if any(heads != {*_heads(self.ranks[1])[rank]} for rank, heads in held.items()):
            raise Violation(f"chunk {seq} of {name} has landed with heads missing: {held}")

    # ---- what the shells and schedulers do with commands

    def carry_out(self, commands: list[c.Command]) -> None:
        for command in commands:
            match command:
                case c.PostSend(move=move):
                    self.move(2 + move.handoff.prefill, command)
                case c.PostRecv(move=move):
                    self.move(move.handoff.decode, command)
                case c.CancelSend(handoff=name):
                    self.move(2 + name.prefill, command)
                case c.CancelRecv(handoff=name):
                    self.move(name.decode, command)
                case c.Emit(record=record):
                    self.say(record)  # type: ignore[arg-type]
                case c.Settled(handoff=name):
                    if any(_is_of(part, name) for part in self.sends):
                        raise Violation(f"{name} is settled while a send of it runs")
                    if self.remote and any(_is_of(part, name) for part in self.copies):
                        raise Violation(f"{name} is settled while it is being read")
                    self.pinned -= {name}
                case c.Arrived(handoff=name) | c.Fenced(handoff=name):
                    if any(_is_of(part, name) for part in self.copies):
                        raise Violation(f"{name} is let go while a copy into it runs")
                    self.reserved -= {name}
                case c.Broken(handoff=name):
                    if name.decode in self._reading(name):
                        self.carry_out(self.receivers[name.decode].stop(name))
                case _:
                    pass  # disconnect and scrap: what they do is chosen by the moves

    def sender_says(self, p: int, commands: list[c.Command]) -> None:
        """Act as `PrefillScheduler` does: a broken send is given up and reported."""
        broken = [command.handoff for command in commands if isinstance(command, c.Broken)]
        self.carry_out([command for command in commands if not isinstance(command, c.Broken)])
        for name in broken:
            self.give_up(p, name)

    def give_up(self, p: int, name: Handoff) -> None:
        self.say(PrefillFailed(name, Fault("UNAVAILABLE", "")))
        if self.senders[p].is_open(name):
            self.carry_out(self.senders[p].close(name))

    def say(self, message: Message) -> None:
        d, p = message.handoff.decode, message.handoff.prefill
        if (d, p) not in self.cut:
            lane = (0 if isinstance(message, Landed | Stop) else 1, d, p)
            self.lanes[lane] = (*self.lanes.get(lane, ()), message)

    def _reading(self, name: Handoff) -> tuple[int, ...]:
        known = self.receivers[name.decode].is_expected(name)
        return (name.decode,) if known else ()

    def _may_read(self, part: Handoff) -> None:
        (name,) = (name for name in self.offered if name.request == part.request)
        if name not in self.reserved:
            raise Violation(f"a copy for {name} into blocks that were let go")
        if self.remote and self.alive[2 + name.prefill] and name not in self.pinned:
            raise Violation(f"a read of {name}, whose blocks were let go")

    def deliver(self, message: Message) -> None:
        d, p = message.handoff.decode, message.handoff.prefill
        match message:
            case Offer():
                self.carry_out(self.receivers[d].offer(message))
            case PrefillFailed():
                if self.receivers[d].is_expected(message.handoff):
                    self.carry_out(self.receivers[d].stop(message.handoff))
            case Landed():
                self.sender_says(p, self.senders[p].landed(message))
            case Stop():
                self.sender_says(p, self.senders[p].stop(message))

    def check(self) -> None:
        for at, part in enumerate((*self.receivers, *self.senders)):
            if self.alive[at]:
                part.check()
                self.movers[at].check()

    def check_quiet(self) -> None:
        """Check a state in which nothing can move: what is left is a leak, unless its reader lives and cannot be
        reached."""
        if self.reserved:
            raise Violation(f"target blocks are never let go: {self.reserved} {self.receivers}")
        for name in self.pinned:
            sending = self.senders[name.prefill]._handoffs.get(name)
            unreachable = (name.decode, name.prefill) in self.cut and self.alive[name.decode]
            if not (unreachable and self.remote and sending and sending.state is S.LOST):
                raise Violation(f"source blocks are never let go: {name} {self.senders}")


def _is_of(part: Part, name: Handoff, seq: int | None = None) -> bool:
    """True if it moves a part of this handoff: each request has one."""
    return part.name.request == name.request and seq in (None, part.seq)


def _heads(ranks: int) -> list[range]:
    return [range(rank * 2 // ranks, (rank + 1) * 2 // ranks) for rank in range(ranks)]


def _endpoint(heads: list[range]) -> Endpoint:
    told = [RankEndpoint(first_head=own.start, kv_heads=len(own), details=[{}]) for own in heads]
    return Endpoint(transport="", ranks=told if len(told) > 1 else [])


def _clone_group(old: MoverGroup) -> MoverGroup:
    new = copy(old)  # nobody connects any more
    new._chunks, new._named = {}, {}
    for key, chunk in old._chunks.items():
        twin = new._chunks[key] = replace(chunk, waiting=dict(chunk.waiting), digests=dict(chunk.digests))
        new._named |= {(name, key[1]): twin for name in twin.waiting}
    return new


def _clone_sender(old: KVSender) -> KVSender:
    new = KVSender()
    for name, sending in old._handoffs.items():
        twin = _Sending(sending.reads_remotely)
        twin.state = sending.state
        for chunk in sending.chunks:
            other = _Chunk(chunk.blocks)
            other.sending, other.reading, other.posted = chunk.sending, chunk.reading, chunk.posted
            twin.chunks.append(other)
        new._handoffs[name] = twin
    return new


def _clone_receiver(old: KVReceiver) -> KVReceiver:
    new = KVReceiver()
    for name, receiving in old._handoffs.items():
        twin = _Receiving(receiving.expected, set(receiving.wanted))
        twin.state = receiving.state
        twin.seen = set(receiving.seen)
        twin.outstanding = dict(receiving.outstanding)
        twin.landed = set(receiving.landed)
        new._handoffs[name] = twin
    return new
