"""The decode worker's streams to those it reads from: one per peer, opened when a placement first names it. A peer is a
prefill worker, or another decode worker that yields its requests.

Once the other end has proven who it is, and is the worker that was named, a stream begins with a hello in either
direction. A peer that does not fit (`transfer.handoff.negotiation`) is refused at once and by name; otherwise its
memory is made known to the transfer thread and the peer is up. A prefill worker's side begins in
`prefill_worker/role.py`. It answers in `worker/streams.py`. A life has one stream, by whichever address it was found:
one that is named by a second address is up there too.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from decode_worker.scheduler.events import FromPeer, PeerDown, PeerUp
from engine.handshake import HandshakeError, Party
from engine.kv.layout import KVLayout
from engine.messages import (
    FirstToken,
    Handoff,
    Hello,
    Offer,
    PeerAddress,
    PrefillFailed,
    Record,
    Stop,
    decode_from_prefill_frame,
)
from engine.types import Incarnation
from transfer.handoff.commands import Connect
from transfer.handoff.negotiation import Agreement, NegotiationError, check_whole, narrow_bytes, negotiate
from transfer.ranks.movers import Way
from worker.rpc import InboxStream, Put, RpcLoop, Send
from worker.streams import READ

log = logging.getLogger(__name__)

REDIAL_S = 0.5
MAX_RENEWALS = 4096
MAX_REDIALS = 60
"""Attempts to reach a lost peer again, before it is only dialled when a placement names it."""

PeerEvent = PeerUp | PeerDown | FromPeer
Hear = Callable[[PeerEvent], None]
"""Takes an event, which has been acted on when it returns: a lost stream is closed in the transfer thread before its
successor is opened there."""


class PeerStream(InboxStream):
    """One stream to one worker to read from. `peer` is known once it has proven itself, `up` once its hello has come;
    `claimed` is what our hello has said."""

    peer: Party | None = None
    up: PeerUp | None = None

    def __init__(self, address: PeerAddress, send: Send, put: Put, number: int) -> None:
        super().__init__(send, put)
        self.address, self.number = address, number
        self.claimed: list[Handoff] = []

    def decode(self, data: bytes) -> list[Record]:
        return self.records_of(data, decode_from_prefill_frame, self.address.name)

    def proven(self, peer: Party) -> None:
        """Raises HandshakeError where another worker answers: it has taken the port of an earlier one."""
        if peer.name != self.address.name:
            raise HandshakeError(f"{peer.name!r} answers at the address of {self.address.name!r}")
        super().proven(peer)


@dataclass(eq=False, repr=False)
class Peers:
    """Mutable state: all streams to workers to read from, those that are being opened, and those that were lost. Owner:
    the engine thread."""

    rpc: RpcLoop
    hello: Hello
    """This worker's hello, whose endpoints are filled in for each peer."""
    ways: Sequence[Way]
    put: Put
    reach: Callable[[Connect], None]
    unfinished: Callable[[], list[Handoff]]
    _streams: dict[Incarnation, PeerStream] = field(default_factory=dict)
    _renewals: dict[Incarnation, bytes] = field(default_factory=dict)
    """The latest that a life has given us, which lets our next stream take the place of one that it still holds."""
    _opening: dict[PeerAddress, int] = field(default_factory=dict)
    _lost: dict[PeerAddress, int] = field(default_factory=dict)
    """Redials, by worker."""
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    _redialled_at: float = 0.0

    def connect(self, address: PeerAddress) -> None:
        """Open a stream, unless one is open or being opened. Its outcome comes as an item: its proof, then a frame; or
        its end."""
        if address in self._opening or any(s.address == address for s in self._streams.values()):
            return
        number = self._opening[address] = next(self._numbers)
        self.rpc.connect(address.address, READ, lambda send: PeerStream(address, send, self.put, number))

    def send(self, peer: Incarnation, records: list[Record]) -> None:
        """Send nothing to a peer that is gone: its loss is on its way to the scheduler."""
        stream = self._streams.get(peer)
        if stream is not None:
            stream.say(records)

    def proven(self, stream: PeerStream, peer: Party, hear: Hear) -> None:
        """Say hello to a worker that has proven who it is, and which handoffs this worker still reads for."""
        if self._opening.get(stream.address) != stream.number:
            stream.send(None)
            return
        known = self._streams.get(peer.incarnation)
        if known is not None and known.up is not None:
            # Another name for where it is. What is under way on its stream goes on.
            del self._opening[stream.address]
            self._lost.pop(stream.address, None)
            stream.send(None)
            hear(msgspec.structs.replace(known.up, address=stream.address))
            return
        stream.peer, stream.claimed = peer, self.unfinished()
        renewal = self._renewals.get(peer.incarnation, b"")
        endpoints = [way.describe(peer.incarnation) for way in self.ways]
        hello = msgspec.structs.replace(self.hello, endpoints=endpoints, renewal=renewal, unfinished=stream.claimed)
        stream.say([hello])

    def records(self, stream: PeerStream, records: Sequence[Record], hear: Hear) -> None:
        """Tell `hear` what records mean to the scheduler."""
        for record in records:
            if isinstance(record, Hello):
                self._welcome(stream, record, hear)
            elif stream.up is None:
                what = type(record).__name__
                log.error("%s speaks before its hello: %s is dropped", stream.address, what)
            elif isinstance(record, Offer | FirstToken | PrefillFailed) and record.handoff.prefill == stream.up.peer:
                hear(FromPeer(stream.up.peer, record))
            else:
                log.error("%s says what it may not, a %s: dropped", stream.address, type(record).__name__)

    def _welcome(self, stream: PeerStream, hello: Hello, hear: Hear) -> None:
        if not self._has_opened(stream):
            log.error("worker %s says hello twice: dropped", stream.address.name)
            return
        try:
            agreement = fit(self.hello, hello, stream.peer)
        except NegotiationError as error:
            log.error("worker %s is refused: %s", stream.address.name, error)
            stream.send(None)
            hear(PeerDown(stream.address, None, str(error)))
            return
        peer, endpoint = hello.info.incarnation, hello.endpoints[0]
        self._renewals.pop(peer, None)
        self._renewals[peer] = hello.renewal
        if len(self._renewals) > MAX_RENEWALS:
            del self._renewals[next(iter(self._renewals))]
        self._lost.pop(stream.address, None)
        self._streams[peer] = stream
        self.reach(Connect(peer, endpoint, agreement))
        # What ended between our hello and the answer could not be told; it is claimed no longer.
        ended = set(stream.claimed) - set(self.unfinished())
        if ended:
            stream.say([Stop(handoff) for handoff in sorted(ended)])
        mine = msgspec.convert(self.hello.layout, KVLayout)
        nbytes = narrow_bytes(mine, agreement, endpoint.transport)
        stream.up = PeerUp(peer, stream.address, endpoint.transport, agreement.layout.block_size, nbytes)
        hear(stream.up)

    def _has_opened(self, stream: PeerStream) -> bool:
        """Say if it was being opened until now. The end of an older stream must not be taken for this one's."""
        if self._opening.get(stream.address) != stream.number:
            return False
        del self._opening[stream.address]
        return True

    def ended(self, stream: PeerStream, why: str, hear: Hear) -> None:
        if self._has_opened(stream):
            hear(PeerDown(stream.address, None, why))
            return
        if stream.up is None or self._streams.get(stream.up.peer) is not stream:
            return  # an older stream to a peer that was refused or dropped, or has a newer one
        del self._streams[stream.up.peer]
        # It may live, and keep blocks for us: the next hello tells it what we still read.
        self._lost[stream.address] = 0
        hear(PeerDown(stream.address, stream.up.peer, why))

    def redial(self, now: float) -> None:
        """Try to reach lost peers again, every `REDIAL_S`."""
        if now - self._redialled_at < REDIAL_S:
            return
        self._redialled_at = now
        for address, tries in list(self._lost.items()):
            if tries >= MAX_REDIALS:
                del self._lost[address]
            else:
                self._lost[address] = tries + 1
                self.connect(address)

    def close(self) -> None:
        """End every stream, behind what was said on it."""
        for stream in self._streams.values():
            stream.send(None)

    def drop(self, peer: Incarnation, why: str, hear: Hear) -> None:
        """Give up a peer whose memory cannot be reached (any more). The next placement that names it dials anew, and
        the hellos then make a new way to its memory on both ends."""
        stream = self._streams.pop(peer, None)
        if stream is not None:
            log.warning("worker %s is given up: %s", stream.address.name, why)
            stream.send(None)
            hear(PeerDown(stream.address, peer, why))


def fit(mine: Hello, theirs: Hello, peer: Party | None) -> Agreement:
    """Return how blocks come from another worker to this one. Raises NegotiationError if they cannot, and where the
    hello is not that of the `peer` which has proven itself."""
    info = theirs.info
    if peer is None or not peer.is_called(info.role, info.name, info.incarnation):
        raise NegotiationError(f"it has proven to be {peer}, and says that it is {theirs.info.name!r}")
    agreement = negotiate(mine, theirs)
    check_whole(agreement.layout, msgspec.convert(mine.layout, KVLayout))
    if len(theirs.endpoints) != 1:
        raise NegotiationError("it names no single way to reach its memory")
    return agreement
