"""The route of a peer whose blocks go from device to device: `transfer.route`, with digests that the device makes."""

from typing import cast

from engine.kv.layout import KVLayout
from transfer.digest import Tally, binding, combine, is_sampled
from transfer.gpu.device import Device, DeviceMemory, words_of
from transfer.gpu.landing import (
    DeviceInPlace,
    DeviceRepacked,
    Verifier,
    unsigned,
)
from transfer.gpu.narrow import DevicePacked, DeviceWidened, heads_of, warm_up
from transfer.handoff.commands import PostRecv, PostSend
from transfer.handoff.negotiation import AS_STORED, WP64, Agreement, digest_shape
from transfer.route import Checked, Route
from transfer.transport import KVMemory, Transport


class DeviceRoute(Route):
    """To and from a peer. Raises ValueError where blocks are not whole 64-bit words per head, and for an agreement on
    digests that a device does not make."""

    def __init__(
        self,
        transport: Transport,
        memory: KVMemory,
        layout: KVLayout,
        agreement: Agreement,
        tally: Tally,
    ) -> None:
        super().__init__(transport, memory, layout, agreement, tally)
        if agreement.digest != WP64 and agreement.digest_share:
            raise ValueError(f"transfer.digest_algorithm is {agreement.digest}: on a device it must be {WP64}")
        self._device = cast(Device, transport.device)
        self._pool = cast(DeviceMemory, memory)
        self._stream = self._device.digest_stream
        self._shape = digest_shape(self.outgoing)
        if self.wire != AS_STORED:
            self._stored = heads_of(self._pool.memory, layout, self.outgoing)
            with self._stream.use():
                warm_up(self._device, self._pool.memory, layout, self.outgoing, self.incoming)
            return
        words = words_of(self._pool.memory, self.sent)
        self._source = words.unflatten(1, (self.outgoing.kv_heads, -1))

    def pack(self, command: PostSend) -> DevicePacked | None:
        if self.wire == AS_STORED:
            return None
        blocks = [block.source for block in command.blocks]
        return DevicePacked(self._device, self._stored, self.outgoing, blocks)

    def digests(self, command: PostSend, packed: DevicePacked | None) -> tuple[int, ...]:
        """Waits for the kernels that make them: they read the chunk once, and what they make of it, if anything."""
        handoff = command.move.handoff
        bounds = [binding(b.identity, b.generation, handoff) for b in command.blocks]
        chosen = [at for at, bound in enumerate(bounds) if is_sampled(bound, self._share)]
        found = [0] * len(bounds)
        if chosen:
            blocks = [command.blocks[at] for at in chosen]
            sources = [block.source for block in blocks]
            tokens = [block.tokens for block in blocks]
            with self._stream.use():
                if packed is not None:
                    pieces = packed.digests(chosen, tokens)
                else:
                    made = self._device.copy(self._source, None, sources, sources, self._shape, tokens)
                    assert made is not None
                    pieces = [made]
                heads = [of_block for piece in pieces for of_block in unsigned(piece)]
            for at, block, of_heads in zip(chosen, blocks, heads, strict=True):
                found[at] = combine(of_heads, block.tokens, bounds[at])
        self._tally.made += len(chosen)
        return tuple(found)

    def landing(self, command: PostRecv) -> Checked:
        verifier = Verifier(command.move.handoff, self._share, self._tally)
        if self.incoming == self._layout:
            return DeviceInPlace(
                self._device, self._pool, self._layout, command.blocks, verifier
            )
        kind = DeviceRepacked if self.wire == AS_STORED else DeviceWidened
        return kind(
            self._device, self._pool, self._layout, self.incoming, command.blocks, verifier
        )
