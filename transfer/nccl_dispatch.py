"""Carries out the pieces that pairs agree on: from a pool into a slot, from slot to slot, and into the other pool."""

import logging
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
from torch import Tensor

from engine.types import Incarnation
from transfer.config import NcclConfig
from transfer.device import Device, DeviceMemory, flat, settle, words_of
from transfer.device_landing import DeviceLanding
from transfer.device_narrow import DevicePacked
from transfer.nccl_communicator import Communicator, Stage
from transfer.nccl_lane import Deed, Job, Lane
from transfer.nccl_library import NcclError, NcclLibrary
from transfer.nccl_pair import Chunk, Piece
from transfer.nccl_peer import Peer
from transfer.nccl_ring import SLOTS, Ring
from transfer.nccl_wire import Go, Grant
from transfer.scatter import Copy, Scatter, Slots
from transfer.transport import Move, Span, Ticket, TransferError

WARM_WORDS = 2

log = logging.getLogger(__name__)


class Posted(msgspec.Struct, frozen=True):
    """A chunk that has not ended, with what it takes to carry it out."""

    peer: Peer
    chunk: Chunk
    move: Move
    landing: DeviceLanding | None
    packed: DevicePacked | None


Guard = Callable[[Peer, Callable[[Peer, float], bool | None], float], bool]
"""Calls for a peer; what goes wrong costs that peer. True if the call said so."""


class Dispatch:
    """`rest` is called when a piece of a chunk has ended, `warmed` when a communicator is warm."""

    # Mutable state: whose operation is in the lane, and those that leaders have called for and wait for it.

    def __init__(
        self,
        memory: DeviceMemory,
        config: NcclConfig,
        device: Device,
        library: NcclLibrary,
        posted: Mapping[Ticket, Posted],
        rest: Callable[[Chunk], None],
        warmed: Callable[[Peer, float], None],
    ) -> None:
        self._memory = memory
        self._config = config
        self._device = device
        self._posted = posted
        self._rest = rest
        self._warmed = warmed
        self._lane = Lane(device, library)
        self._current: tuple[Peer, Piece | None] | None = None
        self._called: deque[tuple[Peer, Go]] = deque()
        self._scatter = Scatter(device)
        self._packing = device.stream()
        self._outgoing = Slots(device, 1)
        self._incoming = Slots(device, 2)
        self._warm = device.words(WARM_WORDS)
        self._retired: list[Ring] = []
        self.scrapped_bytes = 0
        self.progress = 0
        """Changes with every operation that begins or ends."""

    @property
    def busy(self) -> Peer | None:
        """Whose operation is in the lane."""
        return self._current[0] if self._current is not None else None

    @property
    def is_waiting(self) -> bool:
        return not self._lane.is_free or bool(self._scatter)

    def reserve(self, sent: Span, received: Span) -> int:
        """Make slots for pieces of a new peer's blocks; returns what all slots take, in bytes."""
        most = self._config.piece_bytes
        self._outgoing.reserve(pieces(most, sent) * sent.nbytes // 8)
        self._incoming.reserve(pieces(most, received) * received.nbytes // 8)
        return self._outgoing.nbytes + self._incoming.nbytes

    def call(self, peer: Peer, go: Go) -> None:
        """The peer's leader has launched an operation: so must this end."""
        self._called.append((peer, go))

    def granted(self, peer: Peer, grant: Grant) -> None:
        """The peer, which follows, has room for what this end has said that it puts. Raises TransferError."""
        job = self._lane.job
        mine = self.busy is peer and job is not None and job.deed is Deed.PUT and job.at < 0
        communicator = peer.communicator
        if not mine or communicator is None or communicator.epoch != grant.epoch:
            raise TransferError(f"{grant} is for nothing that this end does")
        if not 0 <= grant.slot < SLOTS:
            raise TransferError(f"{grant} names no slot")
        self._lane.granted(grant.slot)

    def is_called_by(self, peer: Peer) -> bool:
        return any(other is peer for other, _ in self._called)

    def step(self, now: float, peers: Mapping[Incarnation, Peer], guarded: Guard) -> None:
        """Collect what has ended, and launch what is next."""
        if self._current is not None:
            guarded(self._current[0], self._collect, now)
        else:
            self._lane.poll(now)
        for copy in self._scatter.poll():
            self.progress += 1
            assert isinstance(copy.owner, Chunk)
            self._ended(copy.owner)
        if self._retired and self._lane.is_free and not self._scatter:
            self._free_rings()
        while self._lane.is_free:
            if self._called:
                peer, go = self._called[0]
                if go.nbytes and go.leader_sends and not self._may_receive(peer):
                    return
                guarded(peer, self._follow, now)
            elif not any(guarded(p, self._lead, now) for p in sorted(peers.values(), key=_last_use)):
                return

    def fence(self, chunk: Chunk) -> None:
        """Nothing of a chunk touches the pool any more when this returns. It waits for copies under way, if any."""
        if not chunk.sends:
            self._scatter.drop(chunk)
            return
        piece = self._current[1] if self._current is not None else None
        if piece is not None and piece.chunk is chunk:
            assert self._lane.job is not None and self._lane.job.packed is not None
            settle(self._lane.job.packed)

    def abort(self, peer: Peer, communicator: Communicator, now: float) -> None:
        """End a communicator, with the operation that is under way on it, if any. Raises NcclError."""
        self._called = deque((other, go) for other, go in self._called if other is not peer)
        self.retire(communicator.ring)
        if self._current is None or self._current[0] is not peer:
            communicator.abort()
            return
        (_, piece), self._current = self._current, None
        job = self._lane.abort(communicator.abort, now)
        if job is not None and piece is not None and job.ring is None:
            # Nothing is launched into it before the kernels of the aborted operation have ended.
            (self._outgoing if piece.sends else self._incoming).give_back(job.slot)

    def retire(self, ring: Ring | None) -> None:
        """Its communicator is gone: free it as soon as nothing is under way."""
        if ring is not None:
            self._retired.append(ring)

    def close(self) -> None:
        """All communicators are gone. What the device still works on keeps its memory until the process ends."""
        if self._lane.is_free and not self._scatter:
            self._free_rings()

    # ---- launching

    def _lead(self, peer: Peer, now: float) -> bool:
        """Launch an operation with a follower, if there is one. Raises TransferError."""
        communicator = peer.communicator
        if communicator is None or not peer.pair.leads:
            return False
        if communicator.stage is Stage.JOINED and communicator.peer_joined:
            peer.say(Go(communicator.epoch, True, 0, 0, 0))
            self._launch(peer, communicator, None, now)
            return True
        if communicator.stage is not Stage.WARM:
            return False
        ring = communicator.puts
        size = ring.slot_bytes if ring is not None else self._config.piece_bytes
        most = {True: pieces(size, peer.sent), False: pieces(size, peer.received)}
        piece = peer.pair.next_piece(most, self._may_receive(peer))
        if piece is None:
            return False
        nbytes = piece.count * peer.span(piece.sends).nbytes
        slot = ring.take() if ring is not None and not piece.sends else -1
        peer.say(Go(communicator.epoch, piece.sends, piece.number, piece.first, nbytes, slot))
        self._launch(peer, communicator, piece, now, slot)
        return True

    def _follow(self, peer: Peer, now: float) -> None:
        """Launch what the leader has launched. Raises TransferError."""
        _, go = self._called.popleft()
        communicator = peer.communicator
        if communicator is None or communicator.epoch != go.epoch:
            raise TransferError(f"{go} is for no communicator of this pair")
        span = peer.span(not go.leader_sends)
        piece = peer.pair.piece(go, span.nbytes) if go.nbytes else None
        slot, ring = go.slot, communicator.puts
        if ring is not None and piece is not None:
            fits = go.nbytes <= ring.slot_bytes and (0 <= slot < SLOTS) == piece.sends
            if not fits:
                raise TransferError(f"{go} does not fit {ring!r}")
            if not piece.sends:
                slot = ring.take()
                peer.say(Grant(communicator.epoch, slot))
        self._launch(peer, communicator, piece, now, slot)

    def _launch(
        self,
        peer: Peer,
        communicator: Communicator,
        piece: Piece | None,
        now: float,
        slot: int = -1,
    ) -> None:
        self.progress += 1
        self._current = (peer, piece)
        comm, other = communicator.comm, 1 - communicator.rank
        if piece is None:
            warm = Job(Deed.WARM, comm, other, self._warm, 0, self._config.join_s, communicator.puts)
            self._lane.launch(warm, now)
            return
        communicator.used_s = now
        nbytes = piece.count * peer.span(piece.sends).nbytes
        ring = communicator.puts
        if ring is not None:
            deed = Deed.PUT if piece.sends else Deed.TAKE
            words = ring.outgoing if piece.sends else ring.incoming(slot)
        else:
            slots, deed = (
                (self._outgoing, Deed.SEND) if piece.sends else (self._incoming, Deed.RECEIVE)
            )
            words = slots.take(nbytes // 8)
        job = Job(deed, comm, other, words, nbytes, self._config.limit_s, ring, slot)
        if piece.chunk is not None:
            piece.chunk.launched += piece.count
            piece.chunk.busy += 1
            if piece.sends:
                self._pack(peer, piece, piece.chunk, job)
        self._lane.launch(job, now)

    def _pack(self, peer: Peer, piece: Piece, chunk: Chunk, job: Job) -> None:
        posted = self._posted[chunk.ticket]
        slot = _view(job.slot, piece.count, peer.sent)
        with self._packing.use():
            if posted.packed is not None:
                posted.packed.pack(piece.first, slot)
            else:
                blocks = posted.move.local[piece.first : piece.first + piece.count]
                source, shape = flat(words_of(self._memory.memory, peer.sent))
                self._device.copy(source, flat(slot)[0], blocks, range(piece.count), shape)
            job.packed = self._packing.record()

    # ---- collecting

    def _collect(self, peer: Peer, now: float) -> None:
        """The lane's operation, once it has ended. Raises NcclError."""
        job = self._lane.poll(now)
        if job is None:
            return
        assert self._current is not None
        (_, piece), self._current = self._current, None
        self.progress += 1
        peer.progress += 1
        if piece is None:
            self._warmed(peer, now)
        elif piece.sends:
            if job.ring is None:
                self._outgoing.give_back(job.slot)
            if piece.chunk is not None:
                self._ended(piece.chunk)
        else:
            self._received(peer, piece, job)

    def _received(self, peer: Peer, piece: Piece, job: Job) -> None:
        chunk, slot = piece.chunk, job.slot

        def over() -> None:
            if job.ring is None:
                self._incoming.give_back(slot)
            else:
                job.ring.give_back(job.at)

        if chunk is None or chunk.verdict is not None:
            self.scrapped_bytes += job.nbytes
            over()
            if chunk is not None:
                self._ended(chunk)
            return
        landing = self._posted[chunk.ticket].landing
        assert landing is not None
        source = _view(slot, piece.count, peer.received)
        blocks = range(piece.count)
        self._scatter.begin(Copy(chunk, landing, piece.first, source, blocks, over))

    def _ended(self, chunk: Chunk) -> None:
        chunk.busy -= 1
        self._rest(chunk)

    def _may_receive(self, peer: Peer) -> bool:
        ring = peer.communicator.puts if peer.communicator is not None else None
        return ring.has_free if ring is not None else self._incoming.has_free

    def _free_rings(self) -> None:
        """Nothing is under way."""
        rings, self._retired = self._retired, []
        for ring in rings:
            try:
                ring.free()
            except NcclError as error:
                log.error("a ring of %d bytes is not freed: %s", ring.nbytes, error)


def pieces(most_bytes: int, span: Span) -> int:
    """How many blocks a piece has at most."""
    return max(1, most_bytes // span.nbytes)


def _view(slot: Tensor, count: int, span: Span) -> Tensor:
    return slot[: count * span.nbytes // 8].view(count, -1)


def _last_use(peer: Peer) -> float:
    return peer.communicator.used_s if peer.communicator is not None else 0.0
