"""Packs blocks for the wire, one piece ahead of it: while a piece is on its way, the next one leaves the pool.

Two slots take turns, of the worker or of a pair's ring. The stream that packs is not the one that sends: the lane makes
a piece wait for its own packing, and for nothing else. What is packed ahead is a guess: it is sent when the two ends
come to launch just that, and given up when something else turns out to be next. Until then its chunk is busy, for the
pool is read for it.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
from torch import Tensor

from transfer.config import NcclConfig
from transfer.gpu.device import Device, DeviceMemory, Event, flat, settle, words_of
from transfer.gpu.scatter import Slots
from transfer.nccl.communicator import Stage
from transfer.nccl.pair import Chunk, ChunkPiece
from transfer.nccl.peer import NcclPeer, PostedChunk
from transfer.nccl.ring import Ring
from transfer.transport import BlockSlice, Ticket

OUTGOING_SLOTS = 2


class Packed(msgspec.Struct, frozen=True):
    """Blocks `first .. first + count - 1` of a chunk are in `slot`, of a ring if there is one, once `event` is done."""

    peer: NcclPeer
    chunk: Chunk
    first: int
    count: int
    slot: Tensor
    ring: Ring | None
    event: Event

    def begins(self, piece: ChunkPiece) -> bool:
        """Return True if it has all that the piece needs, from its first block on."""
        return (self.chunk, self.first) == (piece.chunk, piece.first) and piece.count <= self.count


class Packing:
    """Owner of the stream that packs and of the slots that are sent from. Used by the transfer thread alone. `rest` is
    called when a chunk is no longer read for."""

    # Mutable state: the piece that was packed ahead, if any.

    def __init__(
        self,
        memory: DeviceMemory,
        config: NcclConfig,
        device: Device,
        posted: Mapping[Ticket, PostedChunk],
        rest: Callable[[Chunk], None],
    ) -> None:
        self._memory = memory
        self._config = config
        self._device = device
        self._posted = posted
        self._rest = rest
        self._stream = device.stream()
        self._slots = Slots(device, OUTGOING_SLOTS)
        self._ahead: Packed | None = None
        self.ahead = 0
        """Pieces that were packed ahead, and then sent."""

    def __repr__(self) -> str:
        ahead = self._ahead
        told = f"{ahead.count} blocks of {ahead.chunk!r}" if ahead is not None else "nothing"
        return f"Packing({told} ahead, {self._slots!r}, {self.ahead} came true)"

    def reserve(self, words: int) -> int:
        """Make the slots large enough; what they take, in bytes."""
        self._slots.reserve(words)
        return self._slots.nbytes

    @property
    def is_busy(self) -> bool:
        """True while something is being read ahead."""
        return self._ahead is not None and not self._ahead.event.done()

    def pack(self, peer: NcclPeer, piece: ChunkPiece, ring: Ring | None) -> tuple[Tensor, Event | None]:
        """A slot for a piece that is launched now, and when all of it is there. What is of no chunk any more is sent as
        whatever the slot has."""
        if piece.chunk is None:
            return self._slot(piece.count * peer.sent.nbytes, ring), None
        ahead = self._ahead
        if ahead is not None and ahead.begins(piece):
            self._ahead = None
            ahead.chunk.busy -= 1
            self.ahead += 1
        else:
            ahead = self._packed(peer, piece, piece.chunk, ring)
        return ahead.slot, ahead.event

    def look_ahead(self, peers: Sequence[NcclPeer], called: Sequence[NcclPeer]) -> None:
        """Something is on the wire: pack what will be next, if that can be told. `called`: whose leaders wait for
        it."""
        found = _foreseen(self._config, called) or _foreseen(self._config, peers)
        if found is None or (self._ahead is not None and self._ahead.begins(found[1])):
            return
        if self._ahead is not None and not self._give_up(self._ahead):
            return
        peer, piece = found
        assert piece.chunk is not None and peer.communicator is not None
        self._ahead = self._packed(peer, piece, piece.chunk, peer.communicator.puts)
        piece.chunk.busy += 1

    def tidy(self) -> None:
        """Keep nothing for a chunk that is over at the other end."""
        if self._ahead is not None and self._ahead.chunk.verdict is not None:
            self._give_up(self._ahead)

    def fence(self, of: Chunk | NcclPeer) -> None:
        """Forget what was packed ahead of a chunk, or for a peer; the pool is not read for it any more. Waits for
        copies under way, if any."""
        ahead = self._ahead
        if ahead is not None and (ahead.chunk is of or ahead.peer is of):
            settle(ahead.event)
            self._drop(ahead)

    def give_back(self, slot: Tensor, ring: Ring | None) -> None:
        """Release the send buffer."""
        if ring is None:
            self._slots.give_back(slot)
        else:
            ring.give_back_outgoing(slot)

    def _give_up(self, ahead: Packed) -> bool:
        """True once its packing has ended."""
        if not ahead.event.done():
            return False
        self._drop(ahead)
        return True

    def _drop(self, ahead: Packed) -> None:
        self._ahead = None
        self.give_back(ahead.slot, ahead.ring)
        ahead.chunk.busy -= 1
        self._rest(ahead.chunk)

    def _slot(self, nbytes: int, ring: Ring | None) -> Tensor:
        return self._slots.take(nbytes // 8) if ring is None else ring.take_outgoing()

    def _packed(self, peer: NcclPeer, piece: ChunkPiece, chunk: Chunk, ring: Ring | None) -> Packed:
        posted = self._posted[chunk.ticket]
        slot = self._slot(piece.count * peer.sent.nbytes, ring)
        with self._stream.use():
            view = slot_blocks(slot, piece.count, peer.sent)
            if posted.packed is not None:
                posted.packed.pack(piece.first, view)
            else:
                blocks = posted.move.local[piece.first : piece.first + piece.count]
                source, shape = flat(words_of(self._memory.memory, peer.sent))
                sources, order = self._device.numbers(blocks, range(piece.count))
                self._device.copy(source, flat(view)[0], sources, order, shape)
            event = self._stream.record()
        return Packed(peer, chunk, piece.first, piece.count, slot, ring, event)


def _foreseen(config: NcclConfig, peers: Sequence[NcclPeer]) -> tuple[NcclPeer, ChunkPiece] | None:
    """The send that will be launched next, as far as can be told: rather one that the other end surely waits for."""
    found: list[tuple[bool, float, tuple[NcclPeer, ChunkPiece]]] = []
    for peer in peers:
        communicator = peer.communicator
        if communicator is None or communicator.stage is not Stage.WARM:
            continue
        piece = peer.pair.next_send(piece_blocks(config, peer, communicator.puts, sends=True))
        if piece is not None:
            is_sure = peer.pair.leads or piece.first > 0
            found.append((not is_sure, communicator.used_s, (peer, piece)))
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def piece_blocks(config: NcclConfig, peer: NcclPeer, ring: Ring | None, sends: bool) -> int:
    """Return the most blocks of a piece."""
    most_bytes = config.piece_bytes if ring is None else ring.slot_bytes
    return blocks_within(most_bytes, peer.span(sends))


def blocks_within(most_bytes: int, span: BlockSlice) -> int:
    """One at least."""
    return max(1, most_bytes // span.nbytes)


def slot_blocks(slot: Tensor, count: int, span: BlockSlice) -> Tensor:
    """int64 `[count, words]`: the blocks of a piece in its slot."""
    return slot[: count * span.nbytes // 8].view(count, -1)
