"""The terms that a worker has settled with one peer: the transport and the form in which blocks go, and their
digests."""

from functools import partial
from typing import Any, Protocol

import msgspec

from engine.kv.layout import KVLayout
from transfer.digest import Binding, Tally, Verifier, block_digest, is_sampled
from transfer.handoff.commands import IncomingBlock, PostRecv, PostSend
from transfer.handoff.negotiation import AS_STORED, Agreement, unit
from transfer.host.landing import InPlace
from transfer.host.repacked import Repacked, convert
from transfer.transport import BlockSlice, KVMemory, Transport


class CheckedLanding(Protocol):
    """A landing that compares digests."""

    wrong: int
    """Blocks that are not what was offered."""


class Route:
    """The way to and from a peer. Blocks travel in the forms `outgoing` and `incoming`; `tally` counts digests. Raises
    ValueError if the two workers have no KV head in common. Used by the transfer thread alone.

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
        """Return what travels of each block to be sent, as its transport takes it; None where that is as it is
        stored."""
        if self.wire == AS_STORED:
            return None
        stored = msgspec.structs.replace(self.outgoing, dtype=self._layout.dtype)
        part = _span(stored, self._layout)
        blocks = (self._memory.block(block.source) for block in command.blocks)
        return [convert(block[part.offset : part.offset + part.nbytes], stored, self.outgoing) for block in blocks]

    def digests(self, command: PostSend, packed: Any) -> tuple[int, ...]:
        """Return the digest of what travels of each block to be sent; 0 for one that has none by the agreement."""
        start, end = self.sent.offset, self.sent.offset + self.sent.nbytes
        views = packed or [self._memory.block(block.source)[start:end] for block in command.blocks]
        found, binding = [0] * len(command.blocks), Binding(command.move.handoff)
        for at, (view, block) in enumerate(zip(views, command.blocks, strict=True)):
            bound = binding.of(block.identity, block.generation)
            if is_sampled(bound, self._share):
                found[at] = block_digest(view, self.outgoing, block.tokens, bound, self._algorithm)
                self._tally.made += 1
        return tuple(found)

    def landing(self, command: PostRecv) -> CheckedLanding:
        """Return the landing of a receive's blocks; it compares nothing where the agreement has no digest."""
        verifier = Verifier(command.move.handoff, self._share, self._tally)

        def check(view: memoryview, block: IncomingBlock) -> bool:
            of = partial(block_digest, view, self.incoming, block.tokens, algorithm=self._algorithm)
            return verifier.fits(block, of)

        if self.incoming == self._layout:
            return InPlace(self._memory, command.blocks, check)
        return Repacked(self._memory, command.blocks, check, self.incoming, self._layout)

    def warm_up(self) -> None:
        """Have everything compiled that this way's blocks need, on their way out and in. Nothing is, for the CPU."""


def _span(form: KVLayout, layout: KVLayout) -> BlockSlice:
    """The bytes of a block of `layout` that hold the heads of `form`, or its size where it is made of them."""
    if form.dtype != layout.dtype:
        return BlockSlice(0, form.block_bytes, layout.block_bytes)
    offset = (form.first_head - layout.first_head) * layout.head_bytes
    return BlockSlice(offset, form.block_bytes, layout.block_bytes)
