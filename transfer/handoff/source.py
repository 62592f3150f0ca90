"""The serving side of handoffs: who reads from this worker, and what each handoff has been offered so far. Pure.

A prefill worker has one for the prompts that it computes, a leaving decode worker one for the requests that it yields.
The blocks belong to whoever holds their leases, the `Holder`: it says what is ready, and hears when nobody can read it
any more. The theory of operation is in `transfer.handoff.migration`, the states are the sender's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine import identity
from engine.identity import in_group
from engine.kv.groups import GONE, migrated, place
from engine.kv.manager import KVCacheManager, Lease
from engine.messages import Fault, FirstToken, Handoff, Landed, PrefillFailed, StartPrefill, Stop
from engine.types import DrawnToken, Incarnation, RequestRecord, TokenLogprobs, id_of
from transfer.handoff.commands import (
    Broken,
    Command,
    Emit,
    FromReader,
    OutgoingBlock,
    Posted,
    ReaderDead,
    ReaderEvent,
    ReaderLost,
    ReaderUp,
    Sent,
    Settled,
)
from transfer.handoff.sender import KVSender

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)


class Holder(Protocol[T_in]):
    """The holder of the leases of what is served. `item` is what it gave to `HandoffSource.open`."""

    def start(self, peer: Incarnation, message: StartPrefill, now: float) -> list[Command]:
        """A handoff that is not open is asked for: open it, or refuse it."""

    def unwanted(self, item: T_in) -> None:
        """The reader wants no more blocks, or its handoff has failed."""

    def reader_lost(self, item: T_in, now: float) -> None:
        """The reader is lost, and may still read."""

    def settled(self, item: T_in, handoff: Handoff) -> None:
        """Note that nobody reads a block of this handoff any more."""


@dataclass(slots=True, eq=False)
class _Served(Generic[T]):
    item: T
    record: RequestRecord
    offered_blocks: int
    chunks: int = 0
    identities: list[bytes] | None = None


class HandoffSource(Generic[T]):
    """Mutable state, all of it: the readers, what is served to them, quarantines that have ended, and what `sender`
    owns. Owner: the scheduler."""

    def __init__(self, kv: KVCacheManager, fingerprint: str, holder: Holder[T]) -> None:
        self.sender = KVSender()
        self.quarantined_since: list[float] = []
        """The beginnings of quarantines that have ended since `take_quarantined`; the holder adds to them."""
        self._kv = kv
        self._fingerprint = fingerprint
        self._holder = holder
        self._readers: dict[Incarnation, bool] = {}
        self._served: dict[Handoff, _Served[T]] = {}
        self._silent_since: dict[Incarnation, float] = {}

    @property
    def items(self) -> list[T]:
        """Return what is served, once per handoff."""
        return [served.item for served in self._served.values()]

    def take_quarantined(self) -> list[float]:
        """Return when the quarantines began that have ended since the last call."""
        taken, self.quarantined_since = self.quarantined_since, []
        return taken

    def silent(self, escalate_s: float, now: float) -> list[Incarnation]:
        """Readers whose channel is lost and for whom, since they may still read, blocks have been kept for `escalate_s`
        without a break. To be asked regularly: a quarantine is counted from when it is first seen. Nothing can be done
        about them here; the router knows whether anybody else still hears of them (docs/handoff.md, "The ladder")."""
        lost = sorted({handoff.decode for handoff in self.sender.quarantined})
        self._silent_since = {peer: self._silent_since.get(peer, now) for peer in lost}
        return [peer for peer, since in self._silent_since.items() if now - since >= escalate_s]

    def handle(self, event: ReaderEvent | Posted | Sent, now: float) -> list[Command]:
        """Handle what a reader says, what is heard of one, or what the transfer thread has done; return what the shell
        must do."""
        match event:
            case FromReader(peer, StartPrefill() as message):
                if message.handoff in self._served:
                    return []  # every verb is idempotent on its handoff's name
                return self._holder.start(peer, message, now)
            case FromReader(_, Landed() as message):
                return self._settle(self.sender.landed(message))
            case FromReader(_, Stop() as message):
                return self._stop(message)
            case Posted(handoff, seq, digests, more):
                return self._settle(self.sender.posted(handoff, seq, digests, more))
            case Sent(handoff, seq, error):
                return self._settle(self.sender.sent(handoff, seq, error))
            case ReaderUp(peer, reads_remotely, unfinished):
                # Whatever is kept for it, and not by its own account, it will never read again.
                self._readers[peer] = reads_remotely
                unclaimed = self.sender.unclaimed(peer, unfinished)
                return [c for handoff in unclaimed for c in self._stop(Stop(handoff))]
            case ReaderLost(peer):
                return self._lost(peer, now)
            case ReaderDead(peer):
                return self._settle(self.sender.peer_dead(peer))
        raise TypeError(f"not an event: {event!r}")

    def open(self, peer: Incarnation, message: StartPrefill, item: T) -> None:
        """Serve what `message` asks for, from blocks of `item`."""
        have_blocks = message.have_tokens // self._kv.block_size
        self.sender.open(message.handoff, self._readers[peer])
        self._served[message.handoff] = _Served(item, message.record, have_blocks)

    def offer(self, handoff: Handoff, lease: Lease, known_tokens: int) -> list[Command]:
        """Offer the blocks of `lease` that are complete and not offered yet, of a sequence with `known_tokens` rows of
        KV; its last one may be partly filled. Of layer groups with a window: those of its tail at the sequence's end,
        which must not have slid away."""
        served, size = self._served[handoff], self._kv.block_size
        total = len(served.record.tokens)
        ready = self._kv.blocks_for(total) if known_tokens == total else known_tokens // size
        if ready <= served.offered_blocks:
            return []
        if served.identities is None:
            root = identity.root(served.record.space, self._fingerprint)
            served.identities = identity.blocks(root, served.record.tokens, size)
        generation, tables, identities = self._kv.pool.generation, lease.tables, served.identities
        blocks = []
        for at, group in migrated(self._kv.groups, range(served.offered_blocks, ready), total, size):
            block, ident = tables[group][at], in_group(identities[at], group)
            assert block != GONE, f"block {at} of group {group} has slid away before it was offered"
            index = place(at, group, len(tables))
            blocks.append(OutgoingBlock(block, generation(block), index, min(size, total - at * size), ident))
        served.offered_blocks = ready
        served.chunks += 1
        return self._settle(self.sender.offer(handoff, blocks))

    def finish(
        self,
        handoff: Handoff,
        drawn: Sequence[DrawnToken],
        *,
        queue_s: float,
        run_s: float,
        cached_tokens: int,
        scores: Sequence[TokenLogprobs] = (),
    ) -> list[Command]:
        """Name the tokens that follow, at least one, when all is offered; `scores` are of the prompt's tokens."""
        token, *more = drawn
        chunks = self._served[handoff].chunks
        first = FirstToken(
            handoff=handoff,
            token=id_of(token),
            logprobs=None if isinstance(token, int) else token,
            more=more,
            prompt_logprobs=list(scores),
            chunks=chunks,
            queue_s=queue_s,
            run_s=run_s,
            cached_tokens=cached_tokens,
        )
        return [Emit(handoff.decode, first), *self._settle(self.sender.close(handoff))]

    def fail(self, handoff: Handoff, fault: Fault) -> list[Command]:
        """Give a handoff up and say so; the receiver's `Stop` settles what it may still be reading."""
        self._holder.unwanted(self._served[handoff].item)
        said = Emit(handoff.decode, PrefillFailed(handoff, fault))
        closed = self.sender.close(handoff) if self.sender.is_open(handoff) else []
        return [said, *self._settle(closed)]

    def _stop(self, message: Stop) -> list[Command]:
        if message.handoff in self._served:
            self._holder.unwanted(self._served[message.handoff].item)
        return self._settle(self.sender.stop(message))

    def _lost(self, peer: Incarnation, now: float) -> list[Command]:
        self._readers.pop(peer, None)
        for handoff, served in self._served.items():
            if handoff.decode == peer:
                self._holder.unwanted(served.item)
        commands = self._settle(self.sender.peer_lost(peer))
        for handoff, served in self._served.items():
            if handoff.decode == peer:
                self._holder.reader_lost(served.item, now)
        return commands

    def _settle(self, commands: Iterable[Command]) -> list[Command]:
        """Act on what the sender says of a handoff; return the rest, which goes to the shell."""
        rest: list[Command] = []
        for command in commands:
            match command:
                case Settled(handoff):
                    self._holder.settled(self._served.pop(handoff).item, handoff)
                case Broken(handoff, why):
                    rest += self.fail(handoff, Fault("UNAVAILABLE", f"KV blocks could not be sent: {why}"))
                case _:
                    rest.append(command)
        return rest

    def check(self) -> None:
        """Recompute the invariants."""
        self.sender.check()
        assert self._served.keys() == set(self.sender.unsettled)
