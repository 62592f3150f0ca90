"""The streams on which other workers ask this one for KV blocks: accepted, greeted, watched until proof of death.

A stream begins with a hello in either direction: the reader names every way to its memory, the answer names the one
that was chosen. A worker that serves them (a prefill worker, or a decode worker for the requests that it yields) keeps
one `Readers`. Between two lives blocks go one way only, so a peer is a reader or is read from, never both.
"""

import logging
from collections.abc import Callable, Iterator, Mapping

import msgspec

from engine.messages import Hello, Record, decode_to_prefill_frame, encode
from engine.types import Incarnation
from transfer.handoff.commands import (
    Connect,
    FromReader,
    ReaderDead,
    ReaderEvent,
    ReaderLost,
    ReaderUp,
)
from transfer.handoff.negotiation import NegotiationError, negotiate
from transfer.liveness import ProcessWatch
from transfer.registry import choose
from transfer.transport import Transport
from worker.rpc import Accept, Send

log = logging.getLogger(__name__)

METHOD = "/headrace.v1.KVSource/Attach"


class Link:
    """One stream, as the engine thread knows it. `peer` and `stream` are known once its hello has come. Identity is by
    object."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.peer: Incarnation | None = None
        self.stream = 0


class FrameIn(msgspec.Struct, frozen=True):
    """Bytes from a reader."""

    link: Link
    data: bytes


class LinkLost(msgspec.Struct, frozen=True):
    link: Link
    why: str


class Session:
    """The loop's end of a stream: puts what it hears into the engine's inbox."""

    def __init__(self, link: Link, put: Callable[[FrameIn | LinkLost], None]) -> None:
        self._link = link
        self._put = put

    def frame(self, data: bytes) -> None:
        self._put(FrameIn(self._link, data))

    def closed(self, why: str) -> None:
        self._put(LinkLost(self._link, why))


def attach(put: Callable[[FrameIn | LinkLost], None]) -> dict[str, Accept]:
    """The method by which readers come, for `worker.rpc`."""
    return {METHOD: lambda send: Session(Link(send), put)}


class Readers:
    """All streams of readers. Owner: the engine thread."""

    # Mutable state: the streams by life, and the processes behind living and lost ones, as far as this host knows them.

    def __init__(
        self,
        hello: Hello,
        transports: Mapping[str, Transport],
        submit: Callable[[Connect], None],
    ) -> None:
        """`hello` is this worker's own, whose endpoints are filled in by who asks."""
        self._hello = hello
        self._transports = transports
        self._submit = submit
        self._links: dict[Incarnation, Link] = {}
        self._watches: dict[Incarnation, ProcessWatch] = {}
        self._lost: dict[Incarnation, ProcessWatch] = {}

    def send(self, peer: Incarnation, records: list[Record]) -> None:
        """To a reader that is gone nothing is sent: its loss is known, or on its way to the scheduler."""
        link = self._links.get(peer)
        if link is not None:
            link.send(encode(records))

    def events(self, item: FrameIn | LinkLost) -> Iterator[ReaderEvent]:
        """What an item means to the scheduler. Each event must be acted on before the next is asked for: a lost stream
        is closed in the transfer thread before its successor is opened there."""
        if isinstance(item, LinkLost):
            yield from self._gone(item.link, item.why)
            return
        try:
            records = decode_to_prefill_frame(item.data)
        except msgspec.MsgspecError as error:
            log.error("a frame is not of this protocol, and is dropped: %s", error)
            return
        link = item.link
        for record in records:
            if isinstance(record, Hello):
                yield from self._welcome(link, record)
            elif link.peer is None or self._links.get(link.peer) is not link:
                log.info("%s on a stream that is not a peer's: dropped", type(record).__name__)
            else:
                yield FromReader(link.peer, record)

    def _welcome(self, link: Link, hello: Hello) -> Iterator[ReaderEvent]:
        """Answer with this worker's own hello. Both sides compare the two; a reader that does not fit leaves."""
        peer, host = hello.info.incarnation, self._hello.info.host
        known = self._links.get(peer)
        if known is not None and known.stream > hello.stream:
            link.send(None)
            return
        name = choose(self._transports, host, hello.info.host)
        transport = self._transports[name]
        answer = msgspec.structs.replace(self._hello, endpoints=[transport.describe()])
        try:
            agreement = negotiate(answer, hello)
        except NegotiationError as error:
            log.error("decode worker %s is refused: %s", hello.info.name, error)
            link.send(encode([answer]))
            return
        if known is not None:
            # The end of the older stream has not been heard of yet. What was said on it may be lost.
            known.send(None)
            yield ReaderLost(peer)
        link.peer, link.stream = peer, hello.stream
        self._links[peer] = link
        for endpoint in hello.endpoints:
            if endpoint.transport == name:
                self._submit(Connect(peer, endpoint, agreement))
        if hello.info.host == host:
            self._watches[peer] = ProcessWatch(hello.info.pid)
        self._lost.pop(peer, None)
        link.send(encode([answer]))
        yield ReaderUp(peer, transport.reads_remotely, tuple(hello.unfinished))

    def _gone(self, link: Link, why: str) -> Iterator[ReaderEvent]:
        peer = link.peer
        if peer is None or self._links.get(peer) is not link:
            return
        log.info("reader %x left: %s", peer, why)
        del self._links[peer]
        watch = self._watches.pop(peer, None)
        if watch is not None:
            self._lost[peer] = watch
        yield ReaderLost(peer)

    def deaths(self) -> list[ReaderDead]:
        """Lost readers whose processes have ended since the last look."""
        if not self._lost:
            return []
        dead = [peer for peer, watch in self._lost.items() if watch.is_dead()]
        for peer in dead:
            del self._lost[peer]
        return [ReaderDead(peer) for peer in dead]

    def close(self) -> None:
        """End every stream, behind what was said on it."""
        for link in self._links.values():
            link.send(None)
