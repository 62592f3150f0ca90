"""The decode worker's streams to those it reads from: one per peer, opened when a placement first names it. A peer is a
prefill worker, or another decode worker that yields its requests.

A stream begins with a hello in either direction. A peer that does not fit (`transfer.handoff.negotiation`) is refused
at once and by name; otherwise its memory is made known to the transfer thread and the peer is up.
"""

import logging
from collections.abc import Callable, Iterator

import msgspec

from decode_worker.scheduler.events import FromPeer, PeerDown, PeerUp
from engine.kv.layout import KVLayout
from engine.messages import (
    Handoff,
    Hello,
    PeerAddress,
    PrefillToDecode,
    Record,
    Stop,
    decode_from_prefill_frame,
    encode,
)
from engine.types import Incarnation
from transfer.handoff.commands import Connect
from transfer.handoff.negotiation import (
    Agreement,
    NegotiationError,
    check_whole,
    narrow_bytes,
    negotiate,
)
from worker.readers import METHOD
from worker.rpc import RpcLoop, Send

log = logging.getLogger(__name__)

REDIAL_S = 0.5
MAX_REDIALS = 60
"""Attempts to reach a lost peer again, before it is only dialled when a placement names it."""

Event = PeerUp | PeerDown | FromPeer


class PeerFrame(msgspec.Struct, frozen=True):
    """Bytes from a worker to read from."""

    link: "PeerLink"
    data: bytes


class PeerGone(msgspec.Struct, frozen=True):
    link: "PeerLink"
    why: str


class PeerLink:
    """One stream to one worker to read from; `incarnation` is known once its hello has come. Identity is by object."""

    def __init__(
        self,
        address: PeerAddress,
        send: Send,
        put: Callable[[object], None],
        stream: int,
        claimed: list[Handoff],
    ) -> None:
        self.address = address
        self.send = send
        self.stream = stream
        self.claimed = claimed
        self.incarnation: Incarnation | None = None
        self._put = put

    def frame(self, data: bytes) -> None:
        self._put(PeerFrame(self, data))

    def closed(self, why: str) -> None:
        self._put(PeerGone(self, why))


class Peers:
    """All streams to workers to read from. Owner: the engine thread."""

    def __init__(
        self,
        rpc: RpcLoop,
        hello: Hello,
        put: Callable[[object], None],
        reach: Callable[[Connect], None],
        unfinished: Callable[[], list[Handoff]],
    ) -> None:
        self._rpc = rpc
        self._hello = hello
        self._put = put
        self._reach = reach
        self._unfinished = unfinished
        self._links: dict[Incarnation, PeerLink] = {}
        self._opening: dict[PeerAddress, int] = {}
        self._lost: dict[PeerAddress, int] = {}
        self._streams = 0

    def connect(self, address: PeerAddress) -> None:
        """Open a stream, unless one is open or being opened. Its outcome comes as an item: PeerFrame or PeerGone. The
        hello says which handoffs this worker still reads for."""
        if address in self._opening or any(k.address == address for k in self._links.values()):
            return
        self._streams += 1
        stream = self._opening[address] = self._streams
        claimed = self._unfinished()
        hello = msgspec.structs.replace(self._hello, stream=stream, unfinished=claimed)

        def accept(send: Send) -> PeerLink:
            send(encode([hello]))
            return PeerLink(address, send, self._put, stream, claimed)

        self._rpc.connect(address.address, METHOD, accept)

    def send(self, peer: Incarnation, records: list[Record]) -> None:
        """To a peer that is gone nothing is sent: its loss is on its way to the scheduler."""
        link = self._links.get(peer)
        if link is not None:
            link.send(encode(records))

    def events(self, item: PeerFrame | PeerGone) -> Iterator[Event]:
        """What an item of a link means to the scheduler. Each event must be acted on before the next is asked for: a
        lost stream is closed in the transfer thread before its successor is opened there."""
        link = item.link
        if isinstance(item, PeerGone):
            yield from self._gone(link, item.why)
            return
        try:
            records = decode_from_prefill_frame(item.data)
        except msgspec.MsgspecError as error:
            log.error("%s: a frame is not of this protocol, and is dropped: %s", link.address, error)
            return
        for record in records:
            yield from self._event(link, record)

    def _event(self, link: PeerLink, record: PrefillToDecode) -> Iterator[Event]:
        if isinstance(record, Hello):
            yield from self._welcome(link, record)
        elif link.incarnation is None:
            log.error("%s speaks before its hello: %s is dropped", link.address, type(record).__name__)
        else:
            yield FromPeer(link.incarnation, record)

    def _welcome(self, link: PeerLink, hello: Hello) -> Iterator[Event]:
        if not self._has_opened(link):
            log.error("worker %s says hello twice: dropped", link.address.name)
            return
        try:
            agreement = fit(self._hello, hello)
        except NegotiationError as error:
            log.error("worker %s is refused: %s", link.address.name, error)
            link.send(None)
            yield PeerDown(link.address, None, str(error))
            return
        known = self._links.pop(hello.info.incarnation, None)
        if known is not None:
            # Dialled under another address. It answers the newer stream alone: what was said on the older may be lost.
            known.send(None)
            yield PeerDown(known.address, hello.info.incarnation, "it has a newer stream")
        link.incarnation = hello.info.incarnation
        self._lost.pop(link.address, None)
        self._links[link.incarnation] = link
        endpoint = hello.endpoints[0]
        self._reach(Connect(link.incarnation, endpoint, agreement))
        # What ended between our hello and the answer could not be told; it is claimed no longer.
        ended = set(link.claimed) - set(self._unfinished())
        if ended:
            link.send(encode([Stop(handoff) for handoff in sorted(ended)]))
        mine = msgspec.convert(self._hello.layout, KVLayout)
        nbytes = narrow_bytes(mine, agreement, endpoint.transport)
        size = agreement.layout.block_size
        yield PeerUp(link.incarnation, link.address, endpoint.transport, size, nbytes)

    def _has_opened(self, link: PeerLink) -> bool:
        """Was it being opened until now? The end of an older stream must not be taken for that of one that is."""
        if self._opening.get(link.address) != link.stream:
            return False
        del self._opening[link.address]
        return True

    def _gone(self, link: PeerLink, why: str) -> list[Event]:
        if self._has_opened(link):
            return [PeerDown(link.address, None, why)]
        if link.incarnation is None or self._links.get(link.incarnation) is not link:
            return []  # an older stream to a peer that was refused or dropped, or has a newer one
        del self._links[link.incarnation]
        # It may live, and keep blocks for us: the next hello tells it what we still read.
        self._lost[link.address] = 0
        return [PeerDown(link.address, link.incarnation, why)]

    def redial(self) -> None:
        """Try to reach lost peers again; call every `REDIAL_S`."""
        for address, tries in list(self._lost.items()):
            if tries >= MAX_REDIALS:
                del self._lost[address]
            else:
                self._lost[address] = tries + 1
                self.connect(address)

    def close(self) -> None:
        """End every stream, behind what was said on it."""
        for link in self._links.values():
            link.send(None)

    def drop(self, peer: Incarnation, why: str) -> list[Event]:
        """Its memory cannot be reached (any more): as good as gone. The next placement that names it dials anew, and
        the hellos then make a new way to its memory on both ends."""
        link = self._links.pop(peer, None)
        if link is None:
            return []
        log.warning("worker %s is given up: %s", link.address.name, why)
        link.send(None)
        return [PeerDown(link.address, peer, why)]


def fit(mine: Hello, theirs: Hello) -> Agreement:
    """How blocks come from another worker to this one. Raises NegotiationError if they cannot."""
    agreement = negotiate(mine, theirs)
    check_whole(agreement.layout, msgspec.convert(mine.layout, KVLayout))
    if len(theirs.endpoints) != 1:
        raise NegotiationError("it names no single way to reach its memory")
    return agreement
