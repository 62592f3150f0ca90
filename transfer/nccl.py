"""KV blocks between GPUs over NCCL, with a communicator of two ranks for each pair of workers.

Bytes never land in a pool by NCCL's hand. A piece of a chunk is packed out of the sender's pool into a slot, goes from
slot to slot, and is scattered into the receiver's pool by the receiver's own kernel once it is all there. So a receive
can be cancelled at any time, and a peer that dies or freezes in the middle can spoil a slot and nothing else.

The parts: `nccl_pair` and `nccl_wire` settle what goes next, `nccl_lane` carries it out, `nccl_communicator` is what it
goes over, `nccl_peer` and `nccl_meeting` how the two ends meet, `nccl_room` which pairs have a communicator. These are
made when two workers meet, as long as there is room, and warmed up (the first operation of a pair takes most of a
second); afterwards when they are needed. Every wait has a limit: the loss of the socket, an error of the library or a
limit that has passed costs the pair, whose receives end as LOST, and nobody else.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec
from torch import Tensor

from engine.messages import Endpoint
from engine.types import Incarnation
from transfer.config import NcclConfig
from transfer.device import Device, DeviceMemory, flat, settle, words_of
from transfer.device_landing import DeviceLanding
from transfer.link import chunk_key
from transfer.nccl_communicator import Communicator, Stage
from transfer.nccl_lane import Deed, Job, Lane
from transfer.nccl_library import NcclError, NcclLibrary
from transfer.nccl_meeting import Meeting
from transfer.nccl_pair import Chunk, Pair, Piece
from transfer.nccl_peer import Peer
from transfer.nccl_room import is_due, spare
from transfer.nccl_wire import Build, Drop, Dropped, Go, Gone, Joined, Ready, Said, Spare
from transfer.pulse import Pulse
from transfer.scatter import Copy, Scatter, Slots
from transfer.transport import Completion, Move, Outcome, Span, Ticket, TransferError

log = logging.getLogger(__name__)

WARM_WORDS = 2


class NcclReport(msgspec.Struct):
    """Since the start, but for `communicators`. `pair_bytes` is the device memory of the communicator made last."""

    communicators: int = 0
    built: int = 0
    dropped: int = 0
    lost: int = 0
    pair_bytes: int = 0
    slot_bytes: int = 0


class NcclTransport:
    """`transfer.transport.Transport[DeviceLanding]` over NCCL. Raises TransferError if it cannot listen on `host`."""

    name = "nccl"
    reads_remotely = False

    # Mutable state: the peers, the chunks by ticket, whose operation is in the lane, and those that wait for it.

    def __init__(
        self,
        memory: DeviceMemory,
        incarnation: Incarnation,
        host: str,
        stall_s: float,
        config: NcclConfig,
        device: Device,
        library: NcclLibrary,
    ) -> None:
        self.device = device
        self.scrapped_bytes = 0
        self.report = NcclReport()
        self._memory = memory
        self._config = config
        self._library = library
        self._peers: dict[Incarnation, Peer] = {}
        self._chunks: dict[Ticket, tuple[Peer, Chunk, Move, DeviceLanding | None]] = {}
        self._completions: list[Completion] = []
        self._last_ticket = 0
        self._lane = Lane(device, library)
        self._current: tuple[Peer, Piece | None] | None = None
        self._called: deque[tuple[Peer, Go]] = deque()
        self._scatter = Scatter(device)
        self._packing = device.stream()
        self._outgoing = Slots(device, 1)
        self._incoming = Slots(device, 2)
        self._warm = device.words(WARM_WORDS)
        self._meeting = Meeting(
            incarnation, host, stall_s, config.join_s, self._peers, self._heard, self._lose
        )
        self._pulse = Pulse()
        self._meeting.watch(self._pulse)
        self._moved = False
        self._free_bytes = 0

    # ---- the contract

    def describe(self) -> Endpoint:
        details = self._meeting.details(
            self._memory.block_bytes, self._library.version, self.device.name
        )
        return Endpoint(transport=self.name, details=msgspec.structs.asdict(details))

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: Span, received: Span) -> None:
        """Begin to meet `peer`, and to make a communicator if there is room; forgets what there was with it."""
        details = self._meeting.check(endpoint, received, self._library.version)
        if details.gpu == self.device.name and not self._config.share_gpu:
            raise TransferError("both workers have one GPU: NCCL needs transfer.nccl.share_gpu for that")
        words_of(self._memory.memory, sent)
        self.disconnect(peer)
        self._outgoing.reserve(self._slot_words(sent))
        self._incoming.reserve(self._slot_words(received))
        self.report.slot_bytes = self._outgoing.nbytes + self._incoming.nbytes
        self._peers[peer] = self._meeting.begin(peer, details, sent, received)
        self._meeting.ring()

    def send(self, peer: Incarnation, move: Move) -> Ticket:
        found = self._known(peer)
        ticket = self._ticket()
        for block in move.local:
            if not 0 <= block < self._memory.blocks:
                raise TransferError(f"no block {block} in this pool")
        key = chunk_key(move, len(move.local), found.sent.nbytes)
        chunk, said = found.pair.post(True, ticket, key, len(move.local))
        self._posted(found, chunk, said, move, None)
        return ticket

    def recv(self, peer: Incarnation, move: Move, landing: DeviceLanding | None) -> Ticket:
        found = self._known(peer)
        ticket = self._ticket()
        if found.lost:
            self._complete(ticket, Outcome.LOST, found.lost)
        elif landing is None:
            # Nothing comes for it, so there is nothing to drain.
            found.say(*found.pair.skip())
            self._complete(ticket, Outcome.DONE)
        else:
            key = chunk_key(move, len(move.remote), found.received.nbytes)
            chunk, said = found.pair.post(False, ticket, key, len(move.remote))
            self._posted(found, chunk, said, move, landing)
        return ticket

    def fileno(self) -> int:
        return self._meeting.fileno()

    def poll(self, timeout_s: float) -> list[Completion]:
        self._moved = False
        self._meeting.poll(timeout_s)
        self._pulse.hush()
        self._step(time.monotonic())
        self._meeting.hush()
        completions, self._completions = self._completions, []
        return completions

    def cancel(self, ticket: Ticket) -> bool:
        if ticket not in self._chunks:
            return False
        peer, chunk, _, _ = self._chunks.pop(ticket)
        if not chunk.sends:
            self._scatter.drop(chunk)
        elif self._current is not None and self._carries(chunk):
            assert self._lane.job is not None and self._lane.job.packed is not None
            settle(self._lane.job.packed)
        chunk.verdict = (Outcome.CANCELLED, "")
        peer.say(*peer.pair.give_up(chunk))
        self._complete(ticket, Outcome.CANCELLED)
        return True

    def disconnect(self, peer: Incarnation) -> None:
        found = self._peers.get(peer)
        if found is not None:
            self._lose(found, "disconnected", Outcome.FAILED)
            del self._peers[peer]

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._meeting.close()
        self._pulse.close()

    # ---- one turn

    def _step(self, now: float) -> None:
        self._meeting.step(now)
        for peer in list(self._peers.values()):
            self._guarded(peer, self._tend, now)
        if self._current is not None:
            self._guarded(self._current[0], self._collect, now)
        else:
            self._lane.poll(now)
        for copy in self._scatter.poll():
            self._moved = True
            assert isinstance(copy.owner, Chunk)
            self._rest(copy.owner)
        self._launch_next(now)
        self._meeting.flush()
        waiting = not self._lane.is_free or len(self._scatter) or self._meeting.is_dialling
        making = any(self._is_making(peer) for peer in self._peers.values())
        self._pulse.set(bool(waiting or making), now, afresh=self._moved)

    def _tend(self, peer: Peer, now: float) -> None:
        """A peer's communicator and silence. Raises TransferError when it is to be lost."""
        communicator = peer.communicator
        if communicator is not None and communicator.poll(now, self._config.join_s):
            self._moved = True
            if not peer.pair.leads:
                peer.say(Joined(communicator.epoch))
        if communicator is not None and peer is not (self._current or (None,))[0]:
            self._part(peer, communicator, now)
        self._make_room(peer, now)
        due = any(not chunk.sends for chunk in peer.pair.chunks)
        if peer.watchdog.is_stuck(peer.progress if due else None, now):
            raise TransferError("nothing came although some was due")

    def _make_room(self, peer: Peer, now: float) -> None:
        count = sum(other.communicator is not None for other in self._peers.values())
        has_room = count < self._config.communicators
        if not peer.invited and not is_due(peer, has_room):
            return
        if not has_room:
            victim = spare(self._peers.values(), self._busy())
            if victim is not None and victim.pair.leads:
                self._drop(victim, now)
            elif victim is not None and victim.communicator is not None:
                victim.spare_asked = True
                victim.say(Spare(victim.communicator.epoch))
            return
        if peer.pair.leads:
            peer.epoch += 1
            unique_id = self.device.unique_id()
            peer.say(Build(peer.epoch, unique_id))
        else:
            unique_id, peer.invited = peer.invited, b""
        self._free_bytes = self.device.free_bytes()
        rank = 0 if peer.pair.leads else 1
        name = f"headrace-{peer.incarnation:x}"
        with self._packing.use():
            peer.communicator = Communicator(
                self._library, peer.epoch, unique_id, rank, self._config.channels, name, now
            )
        self._moved = True

    def _part(self, peer: Peer, communicator: Communicator, now: float) -> None:
        """Let a communicator go that somebody wants to be rid of. Nothing of it is under way."""
        if communicator.stage is Stage.WARM and peer.spare_asked and peer.pair.leads:
            self._drop(peer, now)
        elif communicator.stage is Stage.DROPPING and not peer.pair.leads:
            if all(other is not peer for other, _ in self._called):
                self._abort(peer)
                peer.say(Dropped(communicator.epoch))
                self.report.dropped += 1

    def _drop(self, peer: Peer, now: float) -> None:
        """Leader: begin to give a communicator up. It is not in the lane."""
        assert peer.communicator is not None
        peer.communicator.stage = Stage.DROPPING
        peer.communicator.began_s = now
        peer.say(Drop(peer.communicator.epoch))

    def _launch_next(self, now: float) -> None:
        """The operation that a leader has called for, or else, as a leader, one of its own."""
        while self._lane.is_free:
            if self._called:
                peer, go = self._called[0]
                if go.nbytes and go.leader_sends and not self._incoming.has_free:
                    return
                self._guarded(peer, self._follow, now)
                continue
            by_use = sorted(self._peers.values(), key=_last_use)
            if not any(self._guarded(peer, self._lead, now) for peer in by_use):
                return

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
        most = {True: self._most(peer.sent), False: self._most(peer.received)}
        piece = peer.pair.next_piece(most, self._incoming.has_free)
        if piece is None:
            return False
        span = peer.sent if piece.sends else peer.received
        nbytes = piece.count * span.nbytes
        peer.say(Go(communicator.epoch, piece.sends, piece.number, piece.first, nbytes))
        self._launch(peer, communicator, piece, now)
        return True

    def _follow(self, peer: Peer, now: float) -> bool:
        """Launch what the leader has launched. Raises TransferError."""
        _, go = self._called.popleft()
        communicator = peer.communicator
        if communicator is None or communicator.epoch != go.epoch:
            raise TransferError(f"{go} is for no communicator of this pair")
        piece = None
        if go.nbytes:
            span = peer.received if go.leader_sends else peer.sent
            piece = peer.pair.piece(go, span.nbytes)
        self._launch(peer, communicator, piece, now)
        return True

    def _launch(
        self, peer: Peer, communicator: Communicator, piece: Piece | None, now: float
    ) -> None:
        self._moved = True
        comm, other = communicator.comm, 1 - communicator.rank
        self._current = (peer, piece)
        if piece is None:
            job = Job(Deed.WARM, comm, other, self._warm, 0, self._config.join_s)
            self._lane.launch(job, now)
            return
        communicator.used_s = now
        span = peer.sent if piece.sends else peer.received
        nbytes = piece.count * span.nbytes
        slots = self._outgoing if piece.sends else self._incoming
        deed = Deed.SEND if piece.sends else Deed.RECEIVE
        slot = slots.take(nbytes // 8)
        job = Job(deed, comm, other, slot, nbytes, self._config.limit_s)
        if piece.chunk is not None:
            piece.chunk.launched += piece.count
            piece.chunk.busy += 1
            if piece.sends:
                self._pack(peer, piece, job)
        self._lane.launch(job, now)

    def _pack(self, peer: Peer, piece: Piece, job: Job) -> None:
        assert piece.chunk is not None
        _, _, move, _ = self._chunks[piece.chunk.ticket]
        blocks = move.local[piece.first : piece.first + piece.count]
        source, shape = flat(words_of(self._memory.memory, peer.sent))
        target, _ = flat(self._view(job.slot, piece.count, peer.sent))
        with self._packing.use():
            self.device.copy(source, target, blocks, range(piece.count), shape)
            job.packed = self._packing.record()

    def _collect(self, peer: Peer, now: float) -> None:
        """The lane's operation, once it has ended. Raises TransferError."""
        job = self._lane.poll(now)
        if job is None:
            return
        assert self._current is not None
        (_, piece), self._current = self._current, None
        self._moved = True
        peer.progress += 1
        if piece is None:
            self._warmed(peer, now)
        elif piece.sends:
            self._outgoing.give_back(job.slot)
            self._rest(piece.chunk)
        else:
            self._received(peer, piece, job)

    def _received(self, peer: Peer, piece: Piece, job: Job) -> None:
        chunk = piece.chunk
        if chunk is None or chunk.verdict is not None:
            self.scrapped_bytes += job.nbytes
            self._incoming.give_back(job.slot)
            self._rest(chunk)
            return
        _, _, _, landing = self._chunks[chunk.ticket]
        assert landing is not None
        source = self._view(job.slot, piece.count, peer.received)
        slot = job.slot
        self._scatter.begin(
            Copy(
                chunk, landing, piece.first, source, range(piece.count),
                lambda: self._incoming.give_back(slot),
            )  # fmt: skip
        )

    def _warmed(self, peer: Peer, now: float) -> None:
        communicator = peer.communicator
        assert communicator is not None
        communicator.stage = Stage.WARM
        took_s, communicator.began_s = now - communicator.began_s, now
        communicator.used_s = now
        found = communicator.memory_bytes()
        self.report.pair_bytes = found or max(0, self._free_bytes - self.device.free_bytes())
        self.report.built += 1
        log.info(
            "communicator with %x: %.2f s, %.1f MiB of device memory",
            peer.incarnation, took_s, self.report.pair_bytes / 2**20,
        )  # fmt: skip

    # ---- what a peer says

    def _heard(self, peer: Peer, said: Said) -> None:
        """Raises TransferError for what the protocol does not know."""
        self._moved = True
        communicator = peer.communicator
        match said:
            case Ready() | Gone():
                chunk = peer.pair.heard(said)
                if chunk is not None and chunk.is_over:
                    self._finish(chunk)
            case Go() if not peer.pair.leads:
                self._called.append((peer, said))
            case Build() if not peer.pair.leads and communicator is None:
                peer.epoch, peer.invited = said.epoch, said.unique_id
            case Joined() if communicator is not None and said.epoch == communicator.epoch:
                communicator.peer_joined = True
            case Spare() if peer.pair.leads:
                if communicator is not None and communicator.epoch == said.epoch:
                    peer.spare_asked = True
            case Drop() if communicator is not None and said.epoch == communicator.epoch:
                communicator.stage = Stage.DROPPING
                communicator.began_s = time.monotonic()
            case Dropped() if communicator is not None and said.epoch == communicator.epoch:
                self._abort(peer)
                self.report.dropped += 1
            case _:
                raise TransferError(f"{said} makes no sense to {peer!r}")

    # ---- ends

    def _guarded(
        self, peer: Peer, act: Callable[[Peer, float], bool | None], now: float
    ) -> bool:
        """Whatever goes wrong with one peer costs that peer, and nobody else."""
        try:
            return bool(act(peer, now))
        except TransferError as error:
            self._lose(peer, str(error))
            return False

    def _lose(self, peer: Peer, why: str, outcome: Outcome = Outcome.LOST) -> None:
        """The way to a peer is broken: abort what is under way with it, fail what is posted."""
        if not peer.lost and outcome is Outcome.LOST:
            log.warning("the way to %x is lost: %s", peer.incarnation, why)
            self.report.lost += 1
        self._meeting.leave(peer)
        peer.lost = why
        self._called = deque((other, go) for other, go in self._called if other is not peer)
        self._abort(peer)
        peer.invited = b""
        for ticket, (other, chunk, _, _) in list(self._chunks.items()):
            if other is peer:
                self._scatter.drop(chunk)
                del self._chunks[ticket]
                chunk.verdict = (outcome, why)
                self._complete(ticket, Outcome.FAILED if chunk.sends else outcome, why)
        peer.pair = Pair(peer.pair.leads)

    def _abort(self, peer: Peer) -> None:
        communicator, peer.communicator = peer.communicator, None
        peer.spare_asked = False
        if communicator is None:
            return
        try:
            if self._current is not None and self._current[0] is peer:
                (_, piece), self._current = self._current, None
                job = self._lane.abort(communicator.abort, time.monotonic())
                if job is not None and piece is not None:
                    # Free again only when the lane is: until its kernels have ended, nothing is launched.
                    slots = self._outgoing if piece.sends else self._incoming
                    slots.give_back(job.slot)
            else:
                communicator.abort()
        except NcclError as error:
            log.error("abort of the communicator with %x: %s", peer.incarnation, error)

    def _rest(self, chunk: Chunk | None) -> None:
        """A piece of a chunk has ended."""
        if chunk is not None:
            chunk.busy -= 1
            if chunk.is_over and chunk.ticket in self._chunks:
                self._finish(chunk)

    def _finish(self, chunk: Chunk) -> None:
        peer, _, _, _ = self._chunks.pop(chunk.ticket)
        peer.pair.forget(chunk)
        self._complete(chunk.ticket, *(chunk.verdict or (Outcome.DONE, "")))

    # ---- small things

    def _posted(
        self,
        peer: Peer,
        chunk: Chunk,
        said: list[Said],
        move: Move,
        landing: DeviceLanding | None,
    ) -> None:
        self._chunks[chunk.ticket] = (peer, chunk, move, landing)
        peer.say(*said)
        if chunk.is_over:
            self._finish(chunk)
        self._meeting.ring()

    def _carries(self, chunk: Chunk) -> bool:
        piece = self._current[1] if self._current is not None else None
        return piece is not None and piece.chunk is chunk

    def _busy(self) -> Communicator | None:
        return self._current[0].communicator if self._current is not None else None

    @staticmethod
    def _is_making(peer: Peer) -> bool:
        return bool(peer.invited) or (
            peer.communicator is not None and peer.communicator.stage is not Stage.WARM
        )

    def _most(self, span: Span) -> int:
        return max(1, self._config.piece_bytes // span.nbytes)

    def _slot_words(self, span: Span) -> int:
        return self._most(span) * span.nbytes // 8

    @staticmethod
    def _view(slot: Tensor, count: int, span: Span) -> Tensor:
        return slot[: count * span.nbytes // 8].view(count, -1)

    def _complete(self, ticket: Ticket, outcome: Outcome, error: str = "") -> None:
        self._completions.append(Completion(ticket, outcome, error))
        self._meeting.ring()

    def _known(self, peer: Incarnation) -> Peer:
        found = self._peers.get(peer)
        if found is None:
            raise TransferError(f"{peer} is not connected")
        return found

    def _ticket(self) -> Ticket:
        self._last_ticket += 1
        return Ticket(self._last_ticket)


def _last_use(peer: Peer) -> float:
    return peer.communicator.used_s if peer.communicator is not None else 0.0
