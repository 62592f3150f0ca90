"""The decode worker's streams to those it reads from: one per peer, opened when a placement first names it. A peer is a
prefill worker, or another decode worker that yields its requests.

A stream begins with a hello in either direction. A peer that does not fit (`transfer.handoff.negotiation`) is refused
at once and by name; otherwise its memory is made known to the transfer thread and the peer is up. A prefill worker
answers in `prefill_worker/role.py`.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from decode_worker.scheduler.events import FromPeer, PeerDown, PeerUp
from engine.kv.layout import KVLayout
from engine.messages import Handoff, Hello, PeerAddress, Record, Stop, decode_from_prefill_frame, encode
from engine.types import Incarnation
from transfer.handoff.commands import Connect
from transfer.handoff.negotiation import Agreement, NegotiationError, check_whole, narrow_bytes, negotiate
from worker.rpc import InboxStream, Put, RpcLoop, Send, records_of
from worker.streams import READ

log = logging.getLogger(__name__)

REDIAL_S = 0.5
MAX_REDIALS = 60
"""Attempts to reach a lost peer again, before it is only dialled when a placement names it."""

PeerEvent = PeerUp | PeerDown | FromPeer
Hear = Callable[[PeerEvent], None]
"""Takes an event, which has been acted on when it returns: a lost stream is closed in the transfer thread before its
successor is opened there."""


class PeerStream(InboxStream):
    """One stream to one worker to read from; `incarnation` is known once its hello has come."""

    incarnation: Incarnation | None = None

    def __init__(self, address: PeerAddress, send: Send, put: Put, number: int, claimed: list[Handoff]) -> None:
        super().__init__(send, put)
        self.address, self.number, self.claimed = address, number, claimed


@dataclass(eq=False, repr=False)
class Peers:
    """Mutable state: all streams to workers to read from, those that are being opened, and those that were lost. Owner:
    the engine thread."""

    rpc: RpcLoop
    hello: Hello
    put: Put
    reach: Callable[[Connect], None]
    unfinished: Callable[[], list[Handoff]]
    _streams: dict[Incarnation, PeerStream] = field(default_factory=dict)
    _opening: dict[PeerAddress, int] = field(default_factory=dict)
    _lost: dict[PeerAddress, int] = field(default_factory=dict)
    """Redials, by worker."""
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    _redialled_at: float = 0.0

    def connect(self, address: PeerAddress) -> None:
        """Open a stream, unless one is open or being opened. Its outcome comes as an item: a frame, or its end. The
        hello says which handoffs this worker still reads for."""
        if address in self._opening or any(s.address == address for s in self._streams.values()):
            return
        number = self._opening[address] = next(self._numbers)
        claimed = self.unfinished()
        hello = msgspec.structs.replace(self.hello, stream=number, unfinished=claimed)

        def accept(send: Send) -> PeerStream:
            send(encode([hello]))
            return PeerStream(address, send, self.put, number, claimed)

        self.rpc.connect(address.address, READ, accept)

    def send(self, peer: Incarnation, records: list[Record]) -> None:
        """Send nothing to a peer that is gone: its loss is on its way to the scheduler."""
        stream = self._streams.get(peer)
        if stream is not None:
            stream.send(encode(records))

    def frame(self, stream: PeerStream, data: bytes, hear: Hear) -> None:
        """Tell `hear` what a frame means to the scheduler."""
        for record in records_of(data, decode_from_prefill_frame, stream.address.name):
            if isinstance(record, Hello):
                self._welcome(stream, record, hear)
            elif stream.incarnation is None:
                what = type(record).__name__
                log.error("%s speaks before its hello: %s is dropped", stream.address, what)
            else:
                hear(FromPeer(stream.incarnation, record))

    def _welcome(self, stream: PeerStream, hello: Hello, hear: Hear) -> None:
        if not self._has_opened(stream):
            log.error("worker %s says hello twice: dropped", stream.address.name)
            return
        try:
            agreement = fit(self.hello, hello)
        except NegotiationError as error:
            log.error("worker %s is refused: %s", stream.address.name, error)
            stream.send(None)
            hear(PeerDown(stream.address, None, str(error)))
            return
        known = self._streams.pop(hello.info.incarnation, None)
        if known is not None:
            # Dialled under another address. It answers the newer stream alone: what was said on the older may be lost.
            known.send(None)
            hear(PeerDown(known.address, hello.info.incarnation, "it has a newer stream"))
        stream.incarnation = hello.info.incarnation
        self._lost.pop(stream.address, None)
        self._streams[stream.incarnation] = stream
        endpoint = hello.endpoints[0]
        self.reach(Connect(stream.incarnation, endpoint, agreement))
        # What ended between our hello and the answer could not be told; it is claimed no longer.
        ended = set(stream.claimed) - set(self.unfinished())
        if ended:
            stream.send(encode([Stop(handoff) for handoff in sorted(ended)]))
        mine = msgspec.convert(self.hello.layout, KVLayout)
        nbytes = narrow_bytes(mine, agreement, endpoint.transport)
        size = agreement.layout.block_size
        hear(PeerUp(stream.incarnation, stream.address, endpoint.transport, size, nbytes))

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
        if stream.incarnation is None or self._streams.get(stream.incarnation) is not stream:
            return  # an older stream to a peer that was refused or dropped, or has a newer one
        del self._streams[stream.incarnation]
        # It may live, and keep blocks for us: the next hello tells it what we still read.
        self._lost[stream.address] = 0
        hear(PeerDown(stream.address, stream.incarnation, why))

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


def fit(mine: Hello, theirs: Hello) -> Agreement:
    """Return how blocks come from another worker to this one. Raises NegotiationError if they cannot."""
    agreement = negotiate(mine, theirs)
    check_whole(agreement.layout, msgspec.convert(mine.layout, KVLayout))
    if len(theirs.endpoints) != 1:
        raise NegotiationError("it names no single way to reach its memory")
    return agreement
