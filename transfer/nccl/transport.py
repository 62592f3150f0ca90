"""KV blocks between GPUs over NCCL, with a communicator of two ranks for each pair of workers.

Bytes never land in a pool by NCCL's hand. A piece of a chunk is packed out of the sender's pool into a slot, goes from
slot to slot, and is scattered into the receiver's pool by the receiver's own kernel once it is all there. So a receive
can be cancelled at any time, and a peer that dies or freezes in the middle can spoil a slot and nothing else.

The parts: `pair` and `wire` settle what goes next, `packing`, `dispatch` and `lane` carry it
out, `budget` says which pairs have a communicator (`communicator`, `library`), `meeting` and
`peer` are how two ends find and hear each other. Communicators are made when two workers meet, as long as there is
room, and warmed up (the first operation of a pair takes most of a second); afterwards when they are needed. Every wait
has a limit: the loss of the socket, an error of the library or a limit that has passed costs the pair, whose receives
end as LOST, and nobody else.
"""

import logging
import time
from collections.abc import Callable

import msgspec

from engine.messages import Endpoint
from engine.types import Incarnation
from transfer.config import NcclConfig
from transfer.gpu.device import Device, DeviceMemory, words_of
from transfer.gpu.landing import DeviceLanding
from transfer.gpu.narrow import DevicePacked
from transfer.gpu.pulse import Pulse
from transfer.host.tcp.link import chunk_key
from transfer.nccl.budget import CommunicatorBudget, NcclReport
from transfer.nccl.dispatch import PieceDispatcher
from transfer.nccl.library import RANKS_ON_A_DEVICE, NcclLibrary, dotted
from transfer.nccl.meeting import Meeting
from transfer.nccl.pair import Chunk, Pair
from transfer.nccl.peer import NcclPeer, PostedChunk
from transfer.nccl.wire import Go, Gone, Grant, Ready, Said
from transfer.polling import CompletionQueue, PeerTable
from transfer.transport import BlockSlice, Completion, Move, Outcome, Ticket, TransferError

log = logging.getLogger(__name__)


class NcclTransport:
    """`transfer.transport.Transport[DeviceLanding]` over NCCL. Raises TransferError if it cannot listen on `host`, and
    for ways to share a GPU that the library has not."""

    name = "nccl"
    reads_remotely = False

    # Mutable state: the peers, and the chunks that have not ended.

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
        if config.share_gpu == "multi_rank" and library.version < RANKS_ON_A_DEVICE:
            raise TransferError(
                f"NCCL {dotted(library.version)} makes no two ranks on one device: {dotted(RANKS_ON_A_DEVICE)} does"
            )
        self.device = device
        self.report = NcclReport()
        self._memory = memory
        self._share_gpu = config.share_gpu != "no"
        self._version = library.version
        self._peers: PeerTable[NcclPeer] = PeerTable()
        self._posted: dict[Ticket, PostedChunk] = {}
        self._room = CommunicatorBudget(config, device, library, self._peers, self.report)
        self._dispatch = PieceDispatcher(memory, config, device, library, self._posted, self._rest, self._room.warmed)
        self._meeting = Meeting(
            incarnation,
            host,
            stall_s,
            config.join_s,
            self._peers,
            self._heard,
            self._lose,
            lambda: self._room.can_put,
        )
        self._reactor = self._meeting.reactor
        self._completions = CompletionQueue(self._reactor.ring)
        self._pulse = Pulse()
        self._reactor.watch(self._pulse, self._pulse.hush)
        self._progress = 0

    @property
    def scrapped_bytes(self) -> int:
        return self._dispatch.scrapped_bytes

    @property
    def communicators(self) -> int:
        """The number of communicators now. From any thread."""
        return sum(peer.communicator is not None for peer in list(self._peers.values()))

    def describe(self, peer: Incarnation) -> Endpoint:
        details = self._meeting.details(peer, self._memory.block_bytes, self._version, self.device.name)
        return Endpoint(transport=self.name, details=msgspec.structs.asdict(details))

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        """Begin to meet `peer`, and to make a communicator if there is room; forgets what there was with it. Allocates
        the slots for its pieces."""
        details = self._meeting.check(endpoint, received, self._version)
        if details.gpu == self.device.name and not self._share_gpu:
            raise TransferError("both workers have one GPU: NCCL needs transfer.nccl.share_gpu for that")
        words_of(self._memory.memory, sent)
        self.disconnect(peer)
        if not self._room.can_put:
            self.report.slot_bytes = self._dispatch.reserve(sent, received)
        self._peers[peer] = self._meeting.begin(peer, details, sent, received)
        self._reactor.ring()

    def send(self, peer: Incarnation, move: Move, packed: DevicePacked | None = None) -> Ticket:
        found = self._peers[peer]
        for block in move.local:
            if not 0 <= block < self._memory.blocks:
                raise TransferError(f"no block {block} in this pool")
        return self._post(found, move, len(move.local), True, None, packed)

    def recv(self, peer: Incarnation, move: Move, landing: DeviceLanding | None) -> Ticket:
        found = self._peers[peer]
        if not found.lost and landing is not None:
            return self._post(found, move, len(move.remote), False, landing)
        ticket = self._completions.ticket()
        if found.lost:
            self._completions.end(ticket, Outcome.LOST, found.lost)
        else:
            # Nothing comes for it, so there is nothing to drain.
            found.say(*found.pair.skip())
            self._completions.end(ticket, Outcome.DONE)
        return ticket

    def fileno(self) -> int:
        return self._reactor.fileno()

    def poll(self, timeout_s: float) -> list[Completion]:
        """Raises StuckStreamError when the device does not end what was aborted: this process cannot go on."""
        self._reactor.wait(timeout_s)
        self._pulse.hush()
        now = time.monotonic()
        self._meeting.step(now)
        for peer in list(self._peers.values()):
            self._guarded(peer, self._tend, now)
        self._dispatch.step(now, self._peers, self._guarded)
        self._meeting.flush()
        is_due = self._set_pulse(now)
        self._reactor.hush()
        if is_due:
            self._reactor.ring()
        return self._completions.take()

    def cancel(self, ticket: Ticket) -> bool:
        posted = self._posted.get(ticket)
        if posted is None:
            return False
        self._dispatch.fence(posted.chunk)
        if self._posted.pop(ticket, None) is None:
            return False  # the fence was all that it waited for
        posted.chunk.verdict = (Outcome.CANCELLED, "")
        posted.peer.say(*posted.peer.pair.give_up(posted.chunk))
        self._completions.end(ticket, Outcome.CANCELLED)
        return True

    def disconnect(self, peer: Incarnation) -> None:
        found = self._peers.get(peer)
        if found is not None:
            self._lose(found, "disconnected", Outcome.FAILED)
            del self._peers[peer]

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._dispatch.close()
        self._meeting.close()
        self._pulse.close()

    # ---- what happens with a peer

    def _tend(self, peer: NcclPeer, now: float) -> None:
        """Raises TransferError when it is to be given up."""
        self._room.tend(peer, self._dispatch, now)
        due = any(not chunk.sends for chunk in peer.pair.chunks)
        if peer.watchdog.is_stuck(peer.progress if due else None, now):
            raise TransferError("nothing came although some was due")

    def _heard(self, peer: NcclPeer, said: Said) -> None:
        """Raises TransferError for what makes no sense."""
        self._progress = -1  # more may follow soon
        match said:
            case Ready() | Gone():
                chunk = peer.pair.heard(said)
                if chunk is not None:
                    self._rest(chunk)
            case Go() if not peer.pair.leads:
                self._dispatch.call(peer, said)
            case Grant() if peer.pair.leads:
                self._dispatch.granted(peer, said)
            case _:
                self._room.heard(peer, said, self._dispatch, time.monotonic())

    def _guarded(self, peer: NcclPeer, act: Callable[[NcclPeer, float], bool | None], now: float) -> bool:
        """Let a failure with one peer cost that peer, and nobody else."""
        try:
            return bool(act(peer, now))
        except TransferError as error:
            self._room.suspect(peer, error)
            self._lose(peer, str(error))
            return False

    def _lose(self, peer: NcclPeer, why: str, outcome: Outcome = Outcome.LOST) -> None:
        """The way to a peer is broken: abort what is under way with it, fail what is posted."""
        if not peer.lost and outcome is Outcome.LOST:
            log.warning("the way to %x is lost: %s", peer.incarnation, why)
            self.report.lost += 1
        self._meeting.leave(peer)
        peer.lost = why
        self._room.abort(peer, self._dispatch, time.monotonic())
        for ticket, posted in list(self._posted.items()):
            if posted.peer is peer:
                self._dispatch.fence(posted.chunk)
                if self._posted.pop(ticket, None) is not None:
                    posted.chunk.verdict = (outcome, why)
                    self._completions.end(ticket, Outcome.FAILED if posted.chunk.sends else outcome, why)
        peer.pair = Pair(peer.pair.leads)

    # ---- chunks

    def _post(
        self,
        peer: NcclPeer,
        move: Move,
        blocks: int,
        sends: bool,
        landing: DeviceLanding | None,
        packed: DevicePacked | None = None,
    ) -> Ticket:
        ticket = self._completions.ticket()
        key = chunk_key(move, blocks, peer.span(sends).nbytes)
        chunk, said = peer.pair.post(sends, ticket, key, blocks)
        self._posted[ticket] = PostedChunk(peer, chunk, move, landing, packed)
        peer.say(*said)
        self._rest(chunk)
        self._reactor.ring()
        return ticket

    def _rest(self, chunk: Chunk) -> None:
        """Something of a chunk has ended: is it over?"""
        if not chunk.is_over or chunk.ticket not in self._posted:
            return
        posted = self._posted.pop(chunk.ticket)
        posted.peer.pair.forget(chunk)
        self._completions.end(chunk.ticket, *(chunk.verdict or (Outcome.DONE, "")))

    def _set_pulse(self, now: float) -> bool:
        waiting = self._dispatch.is_waiting or self._room.is_busy or self._meeting.is_dialling
        afresh = self._progress != self._dispatch.progress
        self._progress = self._dispatch.progress
        return self._pulse.set(waiting, now, afresh=afresh)
