"""What a worker has settled with one peer: over which transport blocks go, in which form, and with which digests."""

from typing import Any, Protocol

import msgspec

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from transfer.digest import Tally, binding, block_digest, is_sampled
from transfer.handoff.commands import IncomingBlock, OutgoingBlock, PostRecv, PostSend
from transfer.handoff.negotiation import AS_STORED, Agreement, unit
from transfer.host.landing import InPlace, Repacked, convert
from transfer.transport import BlockSlice, KVMemory, Transport


class Checked(Protocol):
    """A landing that compares digests."""

    wrong: int
    """Blocks that are not what was offered."""


class Route:
    """To and from a peer. `outgoing` and `incoming` are the forms in which blocks travel; `tally` counts digests.
    Raises ValueError if the two workers have no KV head in common. Used by the transfer thread alone.

    Who reads the sender's memory reads blocks as they are stored: there is no wire that 8 bits could relieve."""

    def __init__(
        self, transport: Transport, memory: KVMemory, layout: KVLayout, agreement: Agreement, tally: Tally
    ) -> None:
        self.transport = transport
        self.wire = AS_STORED if transport.reads_remotely else agreement.wire
        self.outgoing = unit(layout, agreement.layout, self.wire)
        self.incoming = unit(agreement.layout, layout, self.wire)
        self.sent = _span(self.outgoing, layout)
        self.received = _span(self.incoming, agreement.layout)
        self._memory = memory
        self._layout = layout
        self._share = agreement.digest_share
        self._algorithm = agreement.digest
        self._tally = tally

    def pack(self, command: PostSend) -> Any:
        """What travels of each block to be sent, as its transport takes it; None where that is as it is stored."""
        if self.wire == AS_STORED:
            return None
        stored = msgspec.structs.replace(self.outgoing, dtype=self._layout.dtype)
        part = _span(stored, self._layout)
        blocks = (self._memory.block(block.source) for block in command.blocks)
        return [convert(block[part.offset : part.offset + part.nbytes], stored, self.outgoing) for block in blocks]

    def digests(self, command: PostSend, packed: Any) -> tuple[int, ...]:
        """Of what travels of each block to be sent; 0 for one that has none by the agreement."""
        start, end = self.sent.offset, self.sent.offset + self.sent.nbytes
        views = packed or [self._memory.block(block.source)[start:end] for block in command.blocks]
        handoff = command.move.handoff
        return tuple(self._digest(view, block, handoff) for view, block in zip(views, command.blocks, strict=True))

    def landing(self, command: PostRecv) -> Checked:
        """Where the blocks of a receive go; it compares nothing where the agreement has no digest."""
        handoff = command.move.handoff

        def check(view: memoryview, block: IncomingBlock) -> bool:
            return self._has_its_digest(view, block, handoff)

        if self.incoming == self._layout:
            return InPlace(self._memory, command.blocks, check)
        return Repacked(self._memory, command.blocks, check, self.incoming, self._layout)

    def warm_up(self) -> None:
        """Have everything compiled that this way's blocks need, on their way out and in. Nothing is, for the CPU."""

    def _digest(self, view: memoryview, block: OutgoingBlock, handoff: Handoff) -> int:
        bound = binding(block.identity, block.generation, handoff)
        if not is_sampled(bound, self._share):
            return 0
        self._tally.made += 1
        return block_digest(view, self.outgoing, block.tokens, bound, self._algorithm)

    def _has_its_digest(self, view: memoryview, block: IncomingBlock, handoff: Handoff) -> bool:
        bound = binding(block.identity, block.generation, handoff)
        if not is_sampled(bound, self._share):
            return True
        found = block_digest(view, self.incoming, block.tokens, bound, self._algorithm)
        fits = found == block.digest
        self._tally.verified += 1
        self._tally.mismatched += not fits
        return fits


def _span(form: KVLayout, layout: KVLayout) -> BlockSlice:
    """The bytes of a block of `layout` that hold the heads of `form`, or its size where it is made of them."""
    if form.dtype != layout.dtype:
        return BlockSlice(0, form.block_bytes, layout.block_bytes)
    offset = (form.first_head - layout.first_head) * layout.head_bytes
    return BlockSlice(offset, form.block_bytes, layout.block_bytes)
