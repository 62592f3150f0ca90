"""The sending side of handoffs (in a prefill worker, or a leaving decode worker). The theory of operation is in
`transfer.handoff.migration`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from engine.messages import BlockOffer, Handoff, Landed, Offer, Stop
from engine.types import Incarnation
from transfer.handoff.commands import Broken, CancelSend, Command, Disconnect, Emit, OutgoingBlock, PostSend, Settled
from transfer.handoff.migration import SENDER_TABLE, HandoffError, S
from transfer.transport import Move


@dataclass(slots=True, eq=False)
class _Chunk:
    blocks: tuple[OutgoingBlock, ...]
    sending: bool = True  # the transfer thread may touch the source blocks
    reading: bool = True  # the receiver may, now or once it is offered them
    posted: bool = False


@dataclass(slots=True, eq=False)
class _Sending:
    reads_remotely: bool
    state: S = S.OPEN
    chunks: list[_Chunk] = field(default_factory=list)


class KVSender:
    """The sending side of every handoff of one worker. Used by its engine thread alone."""

    def __init__(self) -> None:
        self._handoffs: dict[Handoff, _Sending] = {}
        self.dropped: Counter[str] = Counter()

    def open(self, handoff: Handoff, reads_remotely: bool) -> None:
        """Begin. `reads_remotely` is the property of the transport that serves this peer."""
        if handoff in self._handoffs:
            raise HandoffError(f"{handoff} is already open")
        self._handoffs[handoff] = _Sending(reads_remotely)

    def offer(self, handoff: Handoff, blocks: Sequence[OutgoingBlock]) -> list[Command]:
        """Send one chunk. Its blocks stay pinned by the caller until `Settled(handoff)`."""
        sending = self._known(handoff)
        if not blocks:
            raise HandoffError(f"{handoff}: an offer without blocks")
        self._move(handoff, sending, "offer")
        chunk = _Chunk(tuple(blocks))
        sending.chunks.append(chunk)
        local = tuple(block.source for block in blocks)
        move = Move(handoff, len(sending.chunks) - 1, local)
        return [PostSend(handoff.decode, move, chunk.blocks)]

    def posted(
        self, handoff: Handoff, seq: int, digests: Sequence[int], more: Sequence[Sequence[int]] = ()
    ) -> list[Command]:
        """The transfer thread has posted a chunk."""
        sending, chunk = self._outstanding(handoff, seq)
        if chunk.posted or len(digests) != len(chunk.blocks) or len(more) not in (0, len(digests)):
            raise HandoffError(f"{handoff} chunk {seq}: posted twice, or digests do not fit")
        chunk.posted = True
        if sending.state is S.LOST or (sending.state is S.STOPPED and sending.reads_remotely):
            # Nobody to tell; but a living receiver must learn of bytes that are on their way.
            chunk.reading = False
            return []
        offers = [
            BlockOffer(block.source, block.generation, block.index, block.tokens, digest)
            for block, digest in zip(chunk.blocks, digests, strict=True)
        ]
        if more:
            pairs = zip(offers, more, strict=True)
            offers = [msgspec.structs.replace(offer, more=list(others)) for offer, others in pairs]
        return [Emit(handoff.decode, Offer(handoff, seq, offers))]

    def sent(self, handoff: Handoff, seq: int, error: str) -> list[Command]:
        """The transfer thread's send of a chunk has ended."""
        sending, chunk = self._outstanding(handoff, seq)
        chunk.sending = False
        commands: list[Command] = []
        if error:
            if not chunk.posted or not sending.reads_remotely:
                chunk.reading = False
            if sending.state in (S.OPEN, S.CLOSED):
                commands.append(Broken(handoff, f"send of chunk {seq} failed: {error}"))
        elif not chunk.posted:
            raise HandoffError(f"{handoff} chunk {seq}: sent before it was posted")
        return commands + self._settle(handoff, sending)

    def landed(self, message: Landed) -> list[Command]:
        sending = self._handoffs.get(message.handoff)
        if sending is None:
            return self._drop("landed: unknown handoff")
        if not 0 <= message.seq < len(sending.chunks):
            return self._drop("landed: unknown chunk")
        chunk = sending.chunks[message.seq]
        if not chunk.posted or not chunk.reading:
            return self._drop("landed: duplicate")
        chunk.reading = False
        return self._settle(message.handoff, sending)

    def stop(self, message: Stop) -> list[Command]:
        sending = self._handoffs.get(message.handoff)
        if sending is None:
            return self._drop("stop: unknown handoff")
        if sending.state is S.STOPPED:
            return self._drop("stop: duplicate")
        self._move(message.handoff, sending, "stop")
        busy = [seq for seq, chunk in enumerate(sending.chunks) if chunk.sending and not sending.reads_remotely]
        # A receiver that has stopped may never come for the bytes: the send would wait for ever.
        return [*(CancelSend(message.handoff, seq) for seq in busy), *self._settle(message.handoff, sending)]

    def close(self, handoff: Handoff) -> list[Command]:
        """There will be no further offers: all were made, or this side gives up."""
        sending = self._known(handoff)
        self._move(handoff, sending, "close")
        return self._settle(handoff, sending)

    def peer_lost(self, peer: Incarnation) -> list[Command]:
        """The channel to `peer` is gone. Blocks that it may still read stay pinned: quarantined until `peer_dead`."""
        return [Disconnect(peer), *self._all(peer, "lost")]

    def peer_dead(self, peer: Incarnation) -> list[Command]:
        """The process of `peer` is proven dead: it reads nothing any more."""
        return [Disconnect(peer), *self._all(peer, "dead")]

    def is_open(self, handoff: Handoff) -> bool:
        """True while `offer` is allowed."""
        sending = self._handoffs.get(handoff)
        return sending is not None and sending.state is S.OPEN

    def unclaimed(self, peer: Incarnation, unfinished: Sequence[Handoff]) -> list[Handoff]:
        """Return handoffs that a reader which just said hello no longer claims."""
        claimed = frozenset(unfinished)
        return [h for h in self._handoffs if h.decode == peer and h not in claimed]

    @property
    def unsettled(self) -> list[Handoff]:
        return list(self._handoffs)

    @property
    def quarantined(self) -> list[Handoff]:
        """Handoffs whose receiver is lost but not proven dead."""
        return [name for name, sending in self._handoffs.items() if sending.state is S.LOST]

    def check(self) -> None:
        """Raise if a handoff is kept that nobody could read any more, or a chunk is offered before it is posted."""
        for handoff, sending in self._handoffs.items():
            if self._is_settled(sending):
                raise HandoffError(f"{handoff} is settled but kept")
            for seq, chunk in enumerate(sending.chunks):
                if not (chunk.sending or chunk.posted or not chunk.reading):
                    raise HandoffError(f"{handoff} chunk {seq} was never posted, yet may be read")

    def __repr__(self) -> str:
        parts = [
            f"{name.request}/{name.placement}.{name.attempt}:{sending.state.value}"
            f"(sending {sum(c.sending for c in sending.chunks)},"
            f" reading {sum(c.reading for c in sending.chunks)} of {len(sending.chunks)})"
            for name, sending in self._handoffs.items()
        ]
        return f"KVSender({', '.join(parts)})"

    def _known(self, handoff: Handoff) -> _Sending:
        sending = self._handoffs.get(handoff)
        if sending is None:
            raise HandoffError(f"{handoff} is not open")
        return sending

    def _outstanding(self, handoff: Handoff, seq: int) -> tuple[_Sending, _Chunk]:
        sending = self._known(handoff)
        if not 0 <= seq < len(sending.chunks) or not sending.chunks[seq].sending:
            raise HandoffError(f"{handoff} chunk {seq}: no send is outstanding")
        return sending, sending.chunks[seq]

    def _move(self, handoff: Handoff, sending: _Sending, event: str) -> None:
        target = SENDER_TABLE.get((sending.state, event))
        if target is None:
            raise HandoffError(f"{handoff}: {event} while {sending.state.value}")
        sending.state = target

    def _all(self, peer: Incarnation, event: str) -> list[Command]:
        commands: list[Command] = []
        for handoff, sending in list(self._handoffs.items()):
            if handoff.decode == peer:
                self._move(handoff, sending, event)
                commands += self._settle(handoff, sending)
        return commands

    @staticmethod
    def _is_settled(sending: _Sending) -> bool:
        # 1. A send of this worker's own may still touch the blocks.
        if any(chunk.sending for chunk in sending.chunks):
            return False
        # 2. The receiver reads no more: it said so, or is dead, or is lost and only ever got what was pushed.
        if sending.state is S.STOPPED or (sending.state is S.LOST and not sending.reads_remotely):
            return True
        # 3. It may still read: settled once no more is offered, and each chunk has landed.
        return sending.state is not S.OPEN and not any(c.reading for c in sending.chunks)

    def _settle(self, handoff: Handoff, sending: _Sending) -> list[Command]:
        if not self._is_settled(sending):
            return []
        del self._handoffs[handoff]
        return [Settled(handoff)]

    def _drop(self, why: str) -> list[Command]:
        self.dropped[why] += 1
        return []
