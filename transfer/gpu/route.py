"""The route of a peer whose blocks go from device to device: `transfer.route`, with digests that the device makes."""

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from engine.types import BlockId, Incarnation, RequestId
from transfer.digest import Binding, Tally, Verifier, combine, is_sampled
from transfer.gpu.device import Device, DeviceMemory, flat, words_of
from transfer.gpu.landing import DeviceInPlace, DeviceRepacked, unsigned
from transfer.gpu.narrow import DevicePacked, DeviceWidened, heads_of
from transfer.handoff.commands import IncomingBlock, PostRecv, PostSend, Rows
from transfer.handoff.negotiation import AS_STORED, WP64, Agreement, digest_shape
from transfer.route import CheckedLanding, Route
from transfer.transport import KVMemory, Transport

NOBODYS = Handoff(RequestId(""), 0, 0, Incarnation(0), Incarnation(0))


class DeviceRoute(Route):
    """The way to and from a peer. Raises ValueError where blocks are not whole 64-bit words per head, and for an
    agreement on digests that a device does not make."""

    def __init__(
        self, transport: Transport, memory: KVMemory, layout: KVLayout, agreement: Agreement, tally: Tally
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
            return
        words = words_of(self._pool.memory, self.sent)
        self._source = words.unflatten(1, (self.outgoing.kv_heads, -1))

    def warm_up(self) -> None:
        """Each kernel is launched once as it will be, on memory that nobody uses: those that pack and digest what is
        sent, and those that store what comes. Waits for the device."""
        with self._stream.use():
            self._send_nothing()
            self._receive_nothing()

    def _send_nothing(self) -> None:
        scratch = self._scratch(self._layout.block_bytes)
        if self.wire != AS_STORED:
            stored = heads_of(scratch, self._layout, self.outgoing)
            for piece in DevicePacked(self._device, stored, self.outgoing, [0]).digests([0], [1]):
                unsigned(piece)
            return
        words = words_of(scratch, self.sent)
        by_head = words.unflatten(1, (self.outgoing.kv_heads, -1))
        first, tokens = self._device.numbers([0], [1])
        made = self._device.copy(by_head, None, first, first, self._shape, tokens)
        assert made is not None
        unsigned(made)
        if not self.transport.reads_remotely:
            (source, shape), (slot, _) = flat(words), flat(words.new_empty(1, words.shape[1]))
            self._device.copy(source, slot, first, first, shape)

    def _receive_nothing(self) -> None:
        words = words_of(self._scratch(self.received.block_bytes), self.received)
        if not self.transport.reads_remotely:
            words = words.contiguous()  # as in a slot
        block = IncomingBlock((Rows(0, BlockId(0), 0, 1),), generation=0, tokens=1, identity=b"", digest=0)
        landing = self._land(self._scratch(self._layout.block_bytes), (block,), Verifier(NOBODYS, 0.0, Tally()))
        landing.land(0, words, self._device.numbers([0])[0])
        landing.landed()

    def _scratch(self, block_bytes: int) -> Tensor:
        """Two blocks, so that the distance from one to the next is that of a pool."""
        return self._pool.memory.new_zeros(2, block_bytes)

    def pack(self, command: PostSend) -> DevicePacked | None:
        if self.wire == AS_STORED:
            return None
        blocks = [block.source for block in command.blocks]
        return DevicePacked(self._device, self._stored, self.outgoing, blocks)

    def digests(self, command: PostSend, packed: DevicePacked | None) -> tuple[int, ...]:
        """Waits for the kernels that make them: they read the chunk once, and what they make of it, if anything."""
        binding = Binding(command.move.handoff)
        bounds = [binding.of(block.identity, block.generation) for block in command.blocks]
        chosen = [at for at, bound in enumerate(bounds) if is_sampled(bound, self._share)]
        found = [0] * len(bounds)
        if chosen:
            blocks = [command.blocks[at] for at in chosen]
            tokens = [block.tokens for block in blocks]
            with self._stream.use():
                if packed is not None:
                    pieces = packed.digests(chosen, tokens)
                else:
                    sources, valid = self._device.numbers([block.source for block in blocks], tokens)
                    made = self._device.copy(self._source, None, sources, sources, self._shape, valid)
                    assert made is not None
                    pieces = [made]
                heads = [of_block for piece in pieces for of_block in unsigned(piece)]
            for at, block, of_heads in zip(chosen, blocks, heads, strict=True):
                found[at] = combine(of_heads, block.tokens, bounds[at])
        self._tally.made += len(chosen)
        return tuple(found)

    def landing(self, command: PostRecv) -> CheckedLanding:
        verifier = Verifier(command.move.handoff, self._share, self._tally)
        return self._land(self._pool.memory, command.blocks, verifier)

    def _land(self, memory: Tensor, blocks: Sequence[IncomingBlock], verifier: Verifier) -> DeviceInPlace:
        kind = DeviceInPlace
        if self.incoming != self._layout:
            kind = DeviceRepacked if self.wire == AS_STORED else DeviceWidened
        return kind(self._device, memory, self._layout, self.incoming, blocks, verifier)
