"""Decides which pairs have a communicator. Each holds device memory at both ends, so there is a limit at each end.

A pair is given one when its workers meet, as long as there is room, and later when both ends have posted a chunk. Who
needs room takes it from the pair that was used least recently: a leader drops its communicator, a follower asks for
that. Neither end aborts in peace before the other has ended its part: hence `DropCommunicator` and
`CommunicatorDropped`.
"""

import logging
from collections.abc import Iterable, Mapping

import msgspec

from engine.types import Incarnation
from transfer.config import NcclConfig
from transfer.gpu.device import Device
from transfer.nccl.communicator import Communicator, Stage
from transfer.nccl.dispatch import PieceDispatcher
from transfer.nccl.library import LateError, NcclError, NcclLibrary
from transfer.nccl.packing import blocks_within
from transfer.nccl.peer import NcclPeer
from transfer.nccl.ring import open_ring
from transfer.nccl.wire import (
    BuildCommunicator,
    CommunicatorDropped,
    CommunicatorJoined,
    DropCommunicator,
    RequestDrop,
    Said,
)
from transfer.transport import TransferError

log = logging.getLogger(__name__)


class NcclReport(msgspec.Struct):
    """Counts since the start, and bytes of device memory: of the communicator made last, and of all slots."""

    built: int = 0
    rings: int = 0
    """The number of those built that put into a ring."""
    dropped: int = 0
    lost: int = 0
    pair_bytes: int = 0
    slot_bytes: int = 0


class CommunicatorBudget:
    """Makes communicators and lets them go. Used by the transfer thread alone."""

    def __init__(
        self,
        config: NcclConfig,
        device: Device,
        library: NcclLibrary,
        peers: Mapping[Incarnation, NcclPeer],
        report: NcclReport,
    ) -> None:
        self._config = config
        self._device = device
        self._library = library
        self._peers = peers
        self._report = report
        self._stream = device.stream()
        self._free_bytes = 0
        self.can_put = config.one_sided and library.can_put
        """False from the first time on that rings turned out not to work here."""

    @property
    def is_busy(self) -> bool:
        """True while a communicator is on its way, in or out."""
        return any(
            peer.invited
            or (peer.communicator is not None and peer.communicator.stage is not Stage.WARM)
            for peer in self._peers.values()
        )

    def tend(self, peer: NcclPeer, dispatch: PieceDispatcher, now: float) -> None:
        """Do what is due with the communicator of one pair. Raises TransferError when the pair is to be given up."""
        communicator = peer.communicator
        if communicator is not None:
            if communicator.poll(now, self._config.join_s) and not peer.pair.leads:
                peer.say(CommunicatorJoined(communicator.epoch))
            if dispatch.busy is not peer:
                self._part(peer, communicator, dispatch, now)
        count = sum(other.communicator is not None for other in self._peers.values())
        has_room = count < self._config.communicators
        if peer.invited or is_due(peer, has_room):
            if has_room:
                self._make(peer, dispatch, now)
            else:
                self._take_room(dispatch, now)

    def heard(self, peer: NcclPeer, said: Said, dispatch: PieceDispatcher, now: float) -> None:
        """Raises TransferError for what makes no sense."""
        communicator = peer.communicator
        leads = peer.pair.leads
        if isinstance(said, BuildCommunicator) and not leads and communicator is None:
            if said.slot_bytes and not self.can_put:
                raise TransferError("a ring that this worker said it cannot have")
            peer.epoch, peer.invited, peer.slot_bytes = said.epoch, said.unique_id, said.slot_bytes
            return
        if isinstance(said, RequestDrop) and leads:
            # It may have been dropped meanwhile.
            peer.spare_asked = communicator is not None and communicator.epoch == said.epoch
            return
        if communicator is None or getattr(said, "epoch", None) != communicator.epoch:
            raise TransferError(f"{said} makes no sense to {peer!r}")
        match said:
            case CommunicatorJoined() if leads:
                communicator.peer_joined = True
            case DropCommunicator() if not leads:
                communicator.stage, communicator.began_s = Stage.DROPPING, now
            case CommunicatorDropped() if leads and communicator.stage is Stage.DROPPING:
                self._report.dropped += 1
                self.abort(peer, dispatch, now)
            case _:
                raise TransferError(f"{said} makes no sense to {peer!r}")

    def warmed(self, peer: NcclPeer, now: float) -> None:
        """The first operation of a pair has ended."""
        communicator = peer.communicator
        assert communicator is not None
        took_s = now - communicator.began_s
        communicator.stage = Stage.WARM
        communicator.began_s = communicator.used_s = now
        found = communicator.memory_bytes()
        if found is None:
            found = max(0, self._free_bytes - self._device.free_bytes())
        self._report.pair_bytes = found
        self._report.built += 1
        self._report.rings += communicator.puts is not None
        log.info("communicator with %x: %.2f s, %.1f MiB", peer.incarnation, took_s, found / 2**20)

    def abort(self, peer: NcclPeer, dispatch: PieceDispatcher, now: float) -> None:
        """End a pair's communicator at this end, if it has one."""
        communicator, peer.communicator = peer.communicator, None
        peer.spare_asked = False
        peer.invited = b""
        if communicator is not None:
            try:
                dispatch.abort(peer, communicator, now)
            except NcclError as error:
                log.error("abort of the communicator with %x: %s", peer.incarnation, error)

    def _make(self, peer: NcclPeer, dispatch: PieceDispatcher, now: float) -> None:
        if peer.pair.leads:
            peer.epoch += 1
            unique_id = self._device.unique_id()
            peer.slot_bytes = self._slot_bytes(peer) if self.can_put and peer.can_put else 0
            peer.say(BuildCommunicator(peer.epoch, unique_id, peer.slot_bytes))
        else:
            unique_id, peer.invited = peer.invited, b""
        self._free_bytes = self._device.free_bytes()
        rank, name = 0 if peer.pair.leads else 1, f"headrace-{peer.incarnation:x}"
        ring = None
        if peer.slot_bytes:
            try:
                ring = open_ring(self._library, self._device, peer.slot_bytes, self._stream)
            except NcclError as error:
                self.forbid(error)
                raise
        try:
            with self._stream.use():
                peer.communicator = Communicator(
                    self._library, peer.epoch, unique_id, rank, self._config.channels, name, now, ring
                )
        except NcclError:
            dispatch.retire(ring)
            raise

    def forbid(self, why: NcclError) -> None:
        """Rings do not work here: none is made any more, and pairs that are made anew send and receive."""
        if self.can_put:
            log.warning("no one-sided transfers any more: %s", why)
        self.can_put = False

    def suspect(self, peer: NcclPeer, error: TransferError) -> None:
        """A pair is to be given up: if the library refused to do its part before the first piece went through its
        ring, the ring is why. A peer that is gone or slow is another matter."""
        communicator = peer.communicator
        if communicator is None or communicator.ring is None or isinstance(error, LateError):
            return
        early = communicator.stage in (Stage.REGISTERING, Stage.JOINED)
        if early and isinstance(error, NcclError):
            self.forbid(error)

    def _slot_bytes(self, peer: NcclPeer) -> int:
        """Return how much the largest piece of either direction takes."""
        spans = (peer.sent, peer.received)
        return max(blocks_within(self._config.put_bytes, span) * span.nbytes for span in spans)

    def _take_room(self, dispatch: PieceDispatcher, now: float) -> None:
        victim = spare(self._peers.values(), dispatch.busy)
        if victim is None or victim.communicator is None:
            return
        if victim.pair.leads:
            self._drop(victim, victim.communicator, now)
        else:
            victim.spare_asked = True
            victim.say(RequestDrop(victim.communicator.epoch))

    def _part(self, peer: NcclPeer, communicator: Communicator, dispatch: PieceDispatcher, now: float) -> None:
        """Let a communicator go on which nothing is under way, if somebody wants to be rid of it."""
        leads = peer.pair.leads
        if leads and peer.spare_asked and communicator.stage is Stage.WARM:
            self._drop(peer, communicator, now)
        dropped = communicator.stage is Stage.DROPPING and not leads
        if dropped and not dispatch.is_called_by(peer):
            self._report.dropped += 1
            self.abort(peer, dispatch, now)
            peer.say(CommunicatorDropped(communicator.epoch))

    @staticmethod
    def _drop(peer: NcclPeer, communicator: Communicator, now: float) -> None:
        communicator.stage, communicator.began_s = Stage.DROPPING, now
        peer.say(DropCommunicator(communicator.epoch))


def is_due(peer: NcclPeer, has_room: bool) -> bool:
    """Leader: shall this pair's communicator be made now, or room for it?"""
    if peer.communicator is not None or not peer.is_met or peer.lost or not peer.pair.leads:
        return False
    return peer.pair.is_wanted or (has_room and not peer.epoch)


def spare(peers: Iterable[NcclPeer], busy: NcclPeer | None) -> NcclPeer | None:
    """Return the peer whose communicator shall go: one that nothing waits for, if there is such a one, else one that
    has served since it was made. None while one is on its way out already, or none can be missed."""
    found: list[tuple[bool, float, NcclPeer]] = []
    for peer in peers:
        communicator = peer.communicator
        if communicator is None:
            continue
        if communicator.stage is Stage.DROPPING or peer.spare_asked:
            return None
        has_served = communicator.used_s > communicator.began_s
        may_go = peer.pair.is_idle or has_served
        if communicator.stage is Stage.WARM and may_go and peer is not busy:
            found.append((not peer.pair.is_idle, communicator.used_s, peer))
    return min(found, key=lambda entry: entry[:2])[2] if found else None
