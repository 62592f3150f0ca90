"""Makes one mover of many: of the worker's commands those of its ranks' movers, and of their reports the worker's.
Pure.

A tensor-parallel worker may have a pool for each rank, with the KV heads that the rank computes with, and a mover for
each. Block numbers and generations are equal on all ranks. Heads travel between a rank of the sender and each rank of
the receiver that lacks them, as *parts* of a block:

    sender, 2 ranks of 3 heads      |  0   1   2  |  3   4   5  |
    receiver, 3 ranks of 2 heads    | 0   1 | 2   3 | 4   5 |
    parts (sender, receiver)        (0, 0)  (0, 1)(1, 1)  (1, 2)

Both ends find the same parts in the same order, that of the receiver's ranks; an offer has a digest for each. Where a
head is with several ranks of the sender, the lowest of them sends it. Of the worker's commands

    Connect, Disconnect       go to each rank that has a part with one of the peer's, once for each
    PostSend, PostRecv        become one for each part; what a rank is sent is named by ranks: `part_of` their workers
    Cancel..                  go where the parts have not ended

and of the ranks' reports

    Posted                    is told when all parts are, with all their digests
    Sent, Received            are told when all parts have ended, with the first error: a block has landed when all its
                              heads have, at every rank, and is fenced when no rank writes to it any more
    Unreachable, MoverDied    are told at once

A part that fails ends the others, which are of no use without it. A worker with one pool is a group of one, whose peers
may have several; while none of them has, it is no group at all (`is_one`). What goes from rank 0 to rank 0 alone is
called what the workers call it: commands and reports pass, and nothing is kept of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import xxhash

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Handoff
from engine.types import Incarnation
from transfer.handoff.commands import (
    CancelRecv,
    CancelSend,
    Connect,
    Disconnect,
    MoverCommand,
    MoverDied,
    MoverEvent,
    Posted,
    PostRecv,
    PostScrap,
    PostSend,
    Received,
    Sent,
    Unreachable,
)
from transfer.transport import Move


def part_of(worker: Incarnation, rank: int) -> Incarnation:
    """Return the life of a worker's rank, as transports know it; that of rank 0 is the worker's own."""
    if rank == 0:
        return worker
    return Incarnation(xxhash.xxh3_64_intdigest(worker.to_bytes(8, "little"), seed=rank))


class HeadsPart(NamedTuple):
    """The heads that rank `sender` of one worker has and rank `receiver` of the other takes from it."""

    sender: int
    receiver: int

    def name(self, handoff: Handoff) -> Handoff:
        """Return what the two ranks call a handoff of their workers."""
        decode, prefill = part_of(handoff.decode, self.receiver), part_of(handoff.prefill, self.sender)
        return msgspec.structs.replace(handoff, decode=decode, prefill=prefill)


_WHOLE = [HeadsPart(0, 0)]


def parts(senders: Sequence[range], receivers: Sequence[range]) -> list[HeadsPart]:
    """Return the parts of a block between ranks that hold these heads."""
    found = []
    for receiver, wanted in enumerate(receivers):
        for sender, held in enumerate(senders):
            is_first = held not in senders[:sender]
            if is_first and max(held.start, wanted.start) < min(held.stop, wanted.stop):
                found.append(HeadsPart(sender, receiver))
    return found


class ToRank(NamedTuple):
    """Give this command to the mover of a rank."""

    rank: int
    command: MoverCommand


Told = ToRank | MoverEvent
"""What a group asks for: commands to ranks, and events to the worker."""


@dataclass(slots=True)
class _Known:
    sending: list[HeadsPart]  # this worker's ranks are the senders
    receiving: list[HeadsPart]

    @property
    def links(self) -> list[tuple[int, int]]:
        """This worker's rank and the peer's, of all between whom there is a part."""
        mine = {(part.sender, part.receiver) for part in self.sending}
        return sorted(mine | {(part.receiver, part.sender) for part in self.receiving})


@dataclass(slots=True, eq=False)
class _Moving:
    """A chunk that is being sent or received."""

    command: PostSend | PostRecv
    waiting: dict[Handoff, tuple[int, int]] = field(default_factory=dict)  # name of a part -> (this worker's rank, at)
    digests: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by part
    parts: int = 0
    error: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    cancelled: bool = False


class MoverGroup:
    """The movers of one worker. `heads`: of each rank's pool. Mutable state: the parts with each peer, the chunks in
    parts that have not all ended, and what follows from both."""

    def __init__(self, heads: Sequence[range]) -> None:
        self._heads = list(heads)
        self._peers: dict[Incarnation, _Known] = {}
        self._workers: dict[Incarnation, Incarnation] = {}  # by the life of a rank
        self._chunks: dict[tuple[Handoff, int], _Moving] = {}
        self._named: dict[tuple[Handoff, int], _Moving] = {}  # by the name of a part
        self._in_parts: set[Incarnation] = set()  # peers with whom blocks are not rank 0's alone
        self.is_one = self._are_all_own()
        """True while all that is moved is rank 0's alone: its mover is the worker's. Any thread may look: this is false
        before a rank hears of a part, and until the last one has ended."""

    def _are_all_own(self) -> bool:
        return not (len(self._heads) > 1 or self._in_parts or self._chunks)

    def passes(self, command: MoverCommand) -> bool:
        """True if rank 0's mover may be given this command as it is. Any thread may ask, for every chunk."""
        if isinstance(command, PostRecv):
            for block in command.blocks:
                if block.more:
                    return False
        return self.is_one and not isinstance(command, (Connect, Disconnect))

    def submit(self, command: MoverCommand) -> list[Told]:
        """Take one of the worker's commands."""
        match command:
            case Connect():
                return self._connect(command)
            case Disconnect(peer):
                return self._disconnect(peer)
            case PostSend() | PostRecv():
                return self._post(command)
            case PostScrap(peer, move):
                return [
                    ToRank(part.receiver, PostScrap(part_of(peer, part.sender), _named(part, move)))
                    for part in self._receiving(peer)
                ]
            case CancelRecv(handoff, seq) | CancelSend(handoff, seq):
                chunk = self._chunks.get((handoff, seq))
                if chunk is None:
                    return [ToRank(0, command)]  # its own, or one that has ended, of which it knows nothing
                chunk.cancelled = True
                return list(self._cancel(chunk))

    def heard(self, rank: int, event: MoverEvent) -> list[Told]:
        """Take what the mover of a rank reports."""
        named = self._named
        match event:
            case Posted(name, seq) | Sent(name, seq) | Received(name, seq) if rank == 0 and (name, seq) not in named:
                return [event]
            case Posted(name, seq, digests):  # a rank's mover has one part
                return self._posted(named[name, seq], name, digests)
            case Sent(name, seq, error, seconds):
                return self._ended(name, seq, rank, error, seconds, 0)
            case Received(name, seq, error, seconds, nbytes):
                return self._ended(name, seq, rank, error, seconds, nbytes)
            case Unreachable(peer, error):
                worker = self._workers.get(peer, peer)
                return [Unreachable(worker, error if len(self._heads) == 1 else f"from rank {rank}: {error}")]
            case MoverDied(error):
                return [MoverDied(error if rank == 0 else f"at rank {rank}: {error}")]

    @property
    def at_work(self) -> set[int]:
        """The ranks that have a part of a chunk to move."""
        return {rank for chunk in self._chunks.values() for rank, _ in chunk.waiting.values()}

    def _connect(self, command: Connect) -> list[Told]:
        peer, layout = command.peer, command.agreement.layout
        found = self._disconnect(peer) if peer in self._peers else []
        try:
            theirs = heads_of(command.endpoint, layout)
        except ValueError as error:
            return [*found, Unreachable(peer, str(error))]
        known = self._peers[peer] = _Known(parts(self._heads, theirs), parts(theirs, self._heads))
        if known != _Known(_WHOLE, _WHOLE):
            self._in_parts.add(peer)
            self.is_one = False
        for mine, other in known.links:
            life, endpoint, own = part_of(peer, other), command.endpoint, layout
            self._workers[life] = peer
            if endpoint.ranks:
                told = endpoint.ranks[other].details
                endpoint = Endpoint(transport=endpoint.transport, details=told[min(mine, len(told) - 1)])
                own = layout.restricted(theirs[other])
            agreement = msgspec.structs.replace(command.agreement, layout=own)
            found.append(ToRank(mine, Connect(life, endpoint, agreement)))
        return found

    def _disconnect(self, peer: Incarnation) -> list[Told]:
        known = self._peers.pop(peer, None)
        if known is None:
            return [ToRank(0, Disconnect(peer))]
        self._in_parts.discard(peer)
        self.is_one = self._are_all_own()
        for _, other in known.links:
            self._workers.pop(part_of(peer, other), None)
        return [ToRank(mine, Disconnect(part_of(peer, other))) for mine, other in known.links]

    def _receiving(self, peer: Incarnation) -> list[HeadsPart]:
        known = self._peers.get(peer)
        return _WHOLE if known is None else known.receiving  # an unknown peer is refused by rank 0's mover

    def _post(self, command: PostSend | PostRecv) -> list[Told]:
        peer, move = command.peer, command.move
        found: list[Told] = []
        if isinstance(command, PostSend):
            known = self._peers.get(peer)
            cut = _WHOLE if known is None else known.sending
        else:
            cut = self._receiving(peer)
            wrong = next((len(b.more) + 1 for b in command.blocks if len(b.more) + 1 != len(cut)), 0)
            if wrong:
                error = f"{wrong} digests were offered of a block that comes in {len(cut)} parts"
                scraps = self.submit(PostScrap(peer, move))
                return [*scraps, Received(move.handoff, move.seq, error, 0.0, 0)]
        if cut == _WHOLE:
            return [ToRank(0, command)]
        chunk = self._chunks[move.handoff, move.seq] = _Moving(command, parts=len(cut))
        self.is_one = False
        for at, part in enumerate(cut):
            name, own = part.name(move.handoff), _named(part, move)
            chunk.waiting[name] = (part.sender if isinstance(command, PostSend) else part.receiver, at)
            self._named[name, move.seq] = chunk
            if isinstance(command, PostSend):
                found.append(ToRank(part.sender, PostSend(part_of(peer, part.receiver), own, command.blocks)))
            else:
                blocks = command.blocks
                if len(cut) > 1:
                    digests = ((block, (block.digest, *block.more)[at]) for block in blocks)
                    blocks = tuple(msgspec.structs.replace(b, digest=digest, more=()) for b, digest in digests)
                found.append(ToRank(part.receiver, PostRecv(part_of(peer, part.sender), own, blocks)))
        return found

    def _posted(self, chunk: _Moving, name: Handoff, digests: tuple[int, ...]) -> list[Told]:
        move, (_, at) = chunk.command.move, chunk.waiting[name]
        chunk.digests[at] = digests
        if len(chunk.digests) < chunk.parts or chunk.error:
            return []
        first, *others = (chunk.digests[part] for part in range(chunk.parts))
        return [Posted(move.handoff, move.seq, first, tuple(zip(*others, strict=True)))]

    def _ended(self, name: Handoff, seq: int, rank: int, error: str, seconds: float, nbytes: int) -> list[Told]:
        chunk = self._named.pop((name, seq))
        del chunk.waiting[name]
        move, sends = chunk.command.move, isinstance(chunk.command, PostSend)
        chunk.seconds = max(chunk.seconds, seconds)
        chunk.nbytes += nbytes
        found: list[Told] = []
        if error and not chunk.error:
            chunk.error = error if chunk.parts == 1 else f"at rank {rank}: {error}"
            if not sends and not chunk.cancelled:
                found += self._cancel(chunk)
            elif sends and len(chunk.digests) < chunk.parts and not chunk.cancelled:
                found += self._cut(chunk)
        if not chunk.waiting:
            del self._chunks[move.handoff, move.seq]
            self.is_one = self._are_all_own()
            if sends:
                found.append(Sent(move.handoff, move.seq, chunk.error, chunk.seconds))
            else:
                landed = 0 if chunk.error else chunk.nbytes
                found.append(Received(move.handoff, move.seq, chunk.error, chunk.seconds, landed))
        return found

    def _cancel(self, chunk: _Moving) -> Iterator[Told]:
        kind = CancelSend if isinstance(chunk.command, PostSend) else CancelRecv
        for name, (rank, _) in chunk.waiting.items():
            yield ToRank(rank, kind(name, chunk.command.move.seq))

    def _cut(self, chunk: _Moving) -> Iterator[Told]:
        """A part could not be posted, so the chunk is never offered, and nobody will come for what other parts have
        sent: their connections end, and what is outstanding there with them. The next chunks need new ones."""
        for name, (rank, _) in chunk.waiting.items():
            yield ToRank(rank, Disconnect(name.decode))
        if chunk.waiting:
            yield Unreachable(chunk.command.peer, f"a part was not sent: {chunk.error}")

    def check(self) -> None:
        """Raise AssertionError if a chunk is kept whose parts have all ended, a part leads nowhere, or it is not known
        whether there is any."""
        for (handoff, seq), chunk in self._chunks.items():
            assert chunk.waiting, f"all parts of {handoff} chunk {seq} have ended"
        named = {(name, chunk.command.move.seq) for chunk in self._chunks.values() for name in chunk.waiting}
        assert named == self._named.keys(), "a part belongs to no chunk"
        assert self.is_one == self._are_all_own(), "commands pass that are not rank 0's alone, or take a detour"


def _named(part: HeadsPart, move: Move) -> Move:
    return msgspec.structs.replace(move, handoff=part.name(move.handoff))


def heads_of(endpoint: Endpoint, layout: KVLayout) -> list[range]:
    """Return the heads of each of a peer's pools. Raises ValueError where these are not those of its layout, each with
    one rank, or with as many as every other."""
    if not endpoint.ranks:
        return [layout.heads]
    found = [range(rank.first_head, rank.first_head + rank.kv_heads) for rank in endpoint.ranks]
    each = list(dict.fromkeys(found))
    # Borders, since a peer may name any number of heads.
    stops = [heads.stop for heads in each]
    follow = [heads.start for heads in each] == [layout.heads.start, *stops[:-1]]
    if not (all(found) and follow and stops[-1] == layout.heads.stop):
        wrong = f"the first of {len(found)} has {_name(found[0])}, the last {_name(found[-1])}"
        raise ValueError(f"the peer's ranks do not share out KV heads {_name(layout.heads)}: {wrong}")
    if not all(rank.details for rank in endpoint.ranks):
        raise ValueError("a rank of the peer does not say how it is reached")
    return found


def _name(heads: range) -> str:
    return f"{heads.start} to {heads.stop - 1}"
