"""One state of a handoff's two sides and of all that is between them (`tests.sim.explore`)."""

from collections.abc import Hashable
from copy import copy

from engine.messages import Fault, Handoff, Landed, Offer, PrefillFailed, Stop
from engine.types import BlockId, Incarnation, RequestId
from tests.sim.clock import Violation
from transfer.handoff import commands as c
from transfer.handoff.migration import S
from transfer.handoff.receiver import KVReceiver, _Receiving
from transfer.handoff.sender import KVSender, _Chunk, _Sending

Message = Offer | PrefillFailed | Landed | Stop
Key = tuple[Handoff, int]
Layout = tuple[tuple[int, int], ...]


class State:
    """One state of everything. Cloned before it is changed."""

    def __init__(self, layout: Layout, chunks: tuple[int, ...], remote: bool) -> None:
        self.chunks = chunks
        self.remote = remote
        self.senders = [KVSender(), KVSender()]
        self.receivers = [KVReceiver(), KVReceiver()]
        self.alive = [True, True, True, True]  # receivers, then senders
        self.cut: frozenset[tuple[int, int]] = frozenset()  # (receiver, sender)
        self.notices: frozenset[tuple[str, int, int]] = frozenset()
        self.lanes: dict[tuple[int, int, int], tuple[Message, ...]] = {}  # 0: to the sender
        self.sends: dict[Key, bool] = {}
        self.copies: frozenset[Key] = frozenset()
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
        return (
            senders,
            receivers,
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

    # ---- what the shells and schedulers do with commands

    def carry_out(self, commands: list[c.Command]) -> None:
        for command in commands:
            match command:
                case c.PostSend(move=move):
                    self.sends[move.handoff, move.seq] = False
                case c.PostRecv(move=move):
                    self._may_read(move.handoff)
                    self.copies |= {(move.handoff, move.seq)}
                case c.Emit(record=record):
                    self.say(record)  # type: ignore[arg-type]
                case c.Settled(handoff=name):
                    if any(key[0] == name for key in self.sends):
                        raise Violation(f"{name} is settled while a send of it runs")
                    if self.remote and any(key[0] == name for key in self.copies):
                        raise Violation(f"{name} is settled while it is being read")
                    self.pinned -= {name}
                case c.Arrived(handoff=name) | c.Fenced(handoff=name):
                    if any(key[0] == name for key in self.copies):
                        raise Violation(f"{name} is let go while a copy into it runs")
                    self.reserved -= {name}
                case c.Broken(handoff=name):
                    if name.decode in self._reading(name):
                        self.carry_out(self.receivers[name.decode].stop(name))
                case _:
                    pass  # disconnect, scrap and cancel: what they do is chosen by the moves

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

    def _may_read(self, name: Handoff) -> None:
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
        twin = _Receiving(receiving.expected)
        twin.state = receiving.state
        twin.seen = set(receiving.seen)
        twin.outstanding = dict(receiving.outstanding)
        twin.landed = set(receiving.landed)
        new._handoffs[name] = twin
    return new
