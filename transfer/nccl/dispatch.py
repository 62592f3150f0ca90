"""Carries out the pieces that pairs agree on: from a pool into a slot, from slot to slot, and into the other pool."""

import logging
from collections import deque
from collections.abc import Callable, Mapping

from engine.types import Incarnation
from transfer.config import NcclConfig
from transfer.gpu.device import Device, DeviceMemory, settle
from transfer.gpu.scatter import Copy, Scatter, Slots
from transfer.nccl.communicator import Communicator, Stage
from transfer.nccl.lane import Lane, Operation, OperationKind
from transfer.nccl.library import NcclError, NcclLibrary
from transfer.nccl.packing import Packing, blocks_within, piece_blocks, slot_blocks
from transfer.nccl.pair import Chunk, ChunkPiece
from transfer.nccl.peer import NcclPeer, PostedChunk
from transfer.nccl.ring import SLOTS, Ring
from transfer.nccl.wire import Go, Grant
from transfer.transport import BlockSlice, Ticket, TransferError

WARM_WORDS = 2

log = logging.getLogger(__name__)

Guard = Callable[[NcclPeer, Callable[[NcclPeer, float], bool | None], float], bool]
"""Calls for a peer; what goes wrong costs that peer. True if the call said so."""


class PieceDispatcher:
    """`rest` is called when a piece of a chunk has ended, `warmed` when a communicator is warm."""

    # Mutable state: whose operation is in the lane, and those that leaders have called for and wait for it.

    def __init__(
        self,
        memory: DeviceMemory,
        config: NcclConfig,
        device: Device,
        library: NcclLibrary,
        posted: Mapping[Ticket, PostedChunk],
        rest: Callable[[Chunk], None],
        warmed: Callable[[NcclPeer, float], None],
    ) -> None:
        self._config = config
        self._device = device
        self._posted = posted
        self._rest = rest
        self._warmed = warmed
        self._lane = Lane(device, library, config.drain_s)
        self._current: tuple[NcclPeer, ChunkPiece | None] | None = None
        self._called: deque[tuple[NcclPeer, Go]] = deque()
        self._scatter = Scatter(device)
        self.packing = Packing(memory, config, device, posted, rest)
        self._incoming = Slots(device, 2)
        self._warm = device.words(WARM_WORDS)
        self._retired: list[Ring] = []
        self.scrapped_bytes = 0
        self.progress = 0
        """Changes with every operation that begins or ends."""

    @property
    def busy(self) -> NcclPeer | None:
        """The peer whose operation is in the lane."""
        return self._current[0] if self._current is not None else None

    @property
    def is_waiting(self) -> bool:
        return not self._lane.is_free or bool(self._scatter) or self.packing.is_busy

    def reserve(self, sent: BlockSlice, received: BlockSlice) -> int:
        """Make slots for pieces of a new peer's blocks; returns what all slots take, in bytes."""
        most = self._config.piece_bytes
        outgoing = self.packing.reserve(blocks_within(most, sent) * sent.nbytes // 8)
        self._incoming.reserve(blocks_within(most, received) * received.nbytes // 8)
        return outgoing + self._incoming.nbytes

    def call(self, peer: NcclPeer, go: Go) -> None:
        """The peer's leader has launched an operation: so must this end."""
        self._called.append((peer, go))

    def granted(self, peer: NcclPeer, grant: Grant) -> None:
        """The peer, which follows, has room for what this end has said that it puts. Raises TransferError."""
        job = self._lane.job
        mine = self.busy is peer and job is not None and job.deed is OperationKind.PUT and job.at < 0
        communicator = peer.communicator
        if not mine or communicator is None or communicator.epoch != grant.epoch:
            raise TransferError(f"{grant} is for nothing that this end does")
        if not 0 <= grant.slot < SLOTS:
            raise TransferError(f"{grant} names no slot")
        self._lane.granted(grant.slot)

    def is_called_by(self, peer: NcclPeer) -> bool:
        return any(other is peer for other, _ in self._called)

    def step(self, now: float, peers: Mapping[Incarnation, NcclPeer], guarded: Guard) -> None:
        """Collect what has ended, launch what is next, and pack what comes after it."""
        if self._current is not None:
            guarded(self._current[0], self._collect, now)
        else:
            self._lane.poll(now)
        for copy in self._scatter.poll():
            self.progress += 1
            assert isinstance(copy.owner, Chunk)
            self._ended(copy.owner)
        self.packing.tidy()
        if self._retired and self._lane.is_free and not self._scatter:
            self._free_rings()
        while self._lane.is_free and self._launch_next(now, peers, guarded):
            pass
        if self._current is not None:
            called = [peer for peer, go in self._called if go.nbytes and not go.leader_sends]
            self.packing.look_ahead(list(peers.values()), called)

    def fence(self, chunk: Chunk) -> None:
        """Let nothing of a chunk touch the pool any more. Waits for copies under way, if any."""
        if not chunk.sends:
            self._scatter.drop(chunk)
            return
        self.packing.fence(chunk)
        piece = self._current[1] if self._current is not None else None
        if piece is not None and piece.chunk is chunk:
            assert self._lane.job is not None and self._lane.job.packed is not None
            settle(self._lane.job.packed)

    def abort(self, peer: NcclPeer, communicator: Communicator, now: float) -> None:
        """End a communicator, with the operation that is under way on it, if any. Raises NcclError."""
        self._called = deque((other, go) for other, go in self._called if other is not peer)
        self.packing.fence(peer)
        self.retire(communicator.ring)
        if self._current is None or self._current[0] is not peer:
            communicator.abort()
            return
        (_, piece), self._current = self._current, None
        job = self._lane.abort(communicator.abort, now)
        if job is not None and piece is not None and job.ring is None:
            # Nothing is launched, or packed ahead, before the kernels of the aborted operation have ended.
            if piece.sends:
                self.packing.give_back(job.slot, None)
            else:
                self._incoming.give_back(job.slot)

    def retire(self, ring: Ring | None) -> None:
        """Free the ring of a communicator that is gone, as soon as nothing is under way."""
        if ring is not None:
            self._retired.append(ring)

    def close(self) -> None:
        """Free the rings, once all communicators are gone. What the device still works on keeps its memory until the
        process ends."""
        if self._lane.is_free and not self._scatter:
            self._free_rings()

    # ---- launching

    def _launch_next(self, now: float, peers: Mapping[Incarnation, NcclPeer], guarded: Guard) -> bool:
        """False where there is nothing to launch now."""
        if self._called:
            peer, go = self._called[0]
            if go.nbytes and go.leader_sends and not self._may_receive(peer):
                return False
            guarded(peer, self._follow, now)
            return True
        return any(guarded(peer, self._lead, now) for peer in sorted(peers.values(), key=_last_use))

    def _lead(self, peer: NcclPeer, now: float) -> bool:
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
        most = {sends: piece_blocks(self._config, peer, ring, sends) for sends in (True, False)}
        piece = peer.pair.next_piece(most, self._may_receive(peer))
        if piece is None:
            return False
        nbytes = piece.count * peer.span(piece.sends).nbytes
        slot = ring.take() if ring is not None and not piece.sends else -1
        peer.say(Go(communicator.epoch, piece.sends, piece.number, piece.first, nbytes, slot))
        self._launch(peer, communicator, piece, now, slot)
        return True

    def _follow(self, peer: NcclPeer, now: float) -> None:
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
        self, peer: NcclPeer, communicator: Communicator, piece: ChunkPiece | None, now: float, slot: int = -1
    ) -> None:
        self.progress += 1
        self._current = (peer, piece)
        comm, other = communicator.comm, 1 - communicator.rank
        if piece is None:
            warm = Operation(OperationKind.WARM, comm, other, self._warm, 0, self._config.join_s, communicator.puts)
            self._lane.launch(warm, now)
            return
        communicator.used_s = now
        nbytes = piece.count * peer.span(piece.sends).nbytes
        ring, packed = communicator.puts, None
        if piece.sends:
            deed = OperationKind.SEND if ring is None else OperationKind.PUT
            words, packed = self.packing.pack(peer, piece, ring)
        elif ring is None:
            deed, words = OperationKind.RECEIVE, self._incoming.take(nbytes // 8)
        else:
            deed, words = OperationKind.TAKE, ring.slot(slot)
        job = Operation(deed, comm, other, words, nbytes, self._config.limit_s, ring, slot, packed)
        if piece.chunk is not None:
            piece.chunk.launched += piece.count
            piece.chunk.busy += 1
        self._lane.launch(job, now)

    # ---- collecting

    def _collect(self, peer: NcclPeer, now: float) -> None:
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
            self.packing.give_back(job.slot, job.ring)
            if piece.chunk is not None:
                self._ended(piece.chunk)
        else:
            self._received(peer, piece, job)

    def _received(self, peer: NcclPeer, piece: ChunkPiece, job: Operation) -> None:
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
        source = slot_blocks(slot, piece.count, peer.received)
        blocks = self._scatter.order(piece.count)
        self._scatter.begin(Copy(chunk, landing, piece.first, source, blocks, over))

    def _ended(self, chunk: Chunk) -> None:
        chunk.busy -= 1
        self._rest(chunk)

    def _may_receive(self, peer: NcclPeer) -> bool:
        ring = peer.communicator.puts if peer.communicator is not None else None
        return ring.has_free if ring is not None else self._incoming.has_free

    def _free_rings(self) -> None:
        """Free the retired rings, when nothing is under way."""
        rings, self._retired = self._retired, []
        for ring in rings:
            try:
                ring.free()
            except NcclError as error:
                log.error("a ring of %d bytes is not freed: %s", ring.nbytes, error)


def _last_use(peer: NcclPeer) -> float:
    return peer.communicator.used_s if peer.communicator is not None else 0.0
