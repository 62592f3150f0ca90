"""What a worker has settled with one peer: over which transport blocks go, in which form, and with which digests."""

from typing import Protocol

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from transfer.commands import IncomingBlock, OutgoingBlock, PostRecv, PostSend
from transfer.digest import Tally, binding, block_digest, is_sampled
from transfer.landing import InPlace, Repacked
from transfer.negotiation import Agreement, unit
from transfer.transport import KVMemory, Span, Transport


class Checked(Protocol):
    """A landing that compares digests."""

    wrong: int
    """Blocks that are not what was offered."""


class Route:
    """To and from a peer. `outgoing` and `incoming` are the forms in which blocks travel; `tally` counts digests.
    Raises ValueError if the two workers have no KV head in common. Used by the transfer thread alone."""

    def __init__(
        self,
        transport: Transport,
        memory: KVMemory,
        layout: KVLayout,
        agreement: Agreement,
        tally: Tally,
    ) -> None:
        self.transport = transport
        self.outgoing = unit(layout, agreement.layout)
        self.incoming = unit(agreement.layout, layout)
        self.sent = _span(self.outgoing, layout)
        self.received = _span(self.incoming, agreement.layout)
        self._memory = memory
        self._layout = layout
        self._share = agreement.digest_share
        self._algorithm = agreement.digest
        self._tally = tally

    def digests(self, command: PostSend) -> tuple[int, ...]:
        """Of each block to be sent; 0 for one that has none by the agreement."""
        return tuple(self._digest(block, command.move.handoff) for block in command.blocks)

    def landing(self, command: PostRecv) -> Checked:
        """Where the blocks of a receive go; it compares nothing where the agreement has no digest."""
        handoff = command.move.handoff

        def check(view: memoryview, block: IncomingBlock) -> bool:
            return self._has_its_digest(view, block, handoff)

        if self.incoming == self._layout:
            return InPlace(self._memory, command.blocks, check)
        return Repacked(self._memory, command.blocks, check, self.incoming, self._layout)

    def _digest(self, block: OutgoingBlock, handoff: Handoff) -> int:
        bound = binding(block.identity, block.generation, handoff)
        if not is_sampled(bound, self._share):
            return 0
        self._tally.made += 1
        start, end = self.sent.offset, self.sent.offset + self.sent.nbytes
        view = self._memory.block(block.source)[start:end]
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


def _span(form: KVLayout, layout: KVLayout) -> Span:
    """The bytes of a block of `layout` that hold the heads of `form`."""
    offset = (form.first_head - layout.first_head) * layout.head_bytes
    return Span(offset, form.block_bytes, layout.block_bytes)


def open_route(
    transport: Transport,
    memory: KVMemory,
    layout: KVLayout,
    agreement: Agreement,
    tally: Tally,
) -> Route:
    """The route for the memory that `transport` moves. Raises ValueError, as `Route` does."""
    if transport.device is None:
        return Route(transport, memory, layout, agreement, tally)
    from transfer.device_route import DeviceRoute

    return DeviceRoute(transport, memory, layout, agreement, tally)
