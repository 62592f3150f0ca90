"""The streams that others open to a worker: routers, who hear its reports, and readers, who ask it for KV blocks.

To a router a worker first says who it is (`WorkerInfo`) and how it stands. A reader's stream begins with a hello in
either direction: the reader names every way to its memory, the answer names the one that was chosen. Readers come to a
prefill worker, and to a decode worker for the requests that it yields; they are watched until proof of their death.
Between two lives blocks go one way only, so a peer is a reader or is read from, never both. What they say is put into
the inbox that `worker/worker.py` empties.
"""

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from engine.messages import Hello, Landed, Record, StartPrefill, Stop, decode_to_prefill_frame, encode
from engine.types import Incarnation
from transfer.handoff.commands import Connect, FromReader, ReaderDead, ReaderEvent, ReaderLost, ReaderUp
from transfer.handoff.negotiation import NegotiationError, negotiate
from transfer.liveness import ProcessWatch
from transfer.registry import choose
from transfer.transport import Transport
from worker.rpc import Accept, InboxStream, Put, Send, records_of

log = logging.getLogger(__name__)

READ = "/headrace.v1.KVSource/Attach"
ATTACH = {"prefill": "/headrace.v1.PrefillWorker/Attach", "decode": "/headrace.v1.DecodeWorker/Attach"}
"""The service that routers dial, named by role: one that dials the address of an earlier worker finds nobody."""


class RouterStream(InboxStream):
    """One stream; `link` is the number by which a scheduler knows it. It is itself an item: that it is open."""

    def __init__(self, link: int, send: Send, put: Put) -> None:
        super().__init__(send, put)
        self.link = link


class ReaderStream(InboxStream):
    """One stream. `peer` and `number` are known once its hello has come."""

    peer: Incarnation | None = None
    number = 0


def methods(role: str, put: Put) -> dict[str, Accept]:
    """Return what a worker of this role serves, by path."""
    links = itertools.count(1)

    def attach(send: Send) -> RouterStream:
        stream = RouterStream(next(links), send, put)
        put(stream)
        return stream

    return {ATTACH[role]: attach, READ: lambda send: ReaderStream(send, put)}


@dataclass(eq=False, repr=False)
class Readers:
    """Mutable state: the streams of readers by life, and the processes behind living and lost ones, as far as this host
    knows them. Owner: the engine thread."""

    hello: Hello
    """This worker's hello, whose endpoints are filled in by the one that asks."""
    transports: Mapping[str, Transport]
    submit: Callable[[Connect], None]
    _streams: dict[Incarnation, ReaderStream] = field(default_factory=dict)
    _watches: dict[Incarnation, ProcessWatch] = field(default_factory=dict)
    _lost: dict[Incarnation, ProcessWatch] = field(default_factory=dict)

    def send(self, peer: Incarnation, records: list[Record]) -> None:
        """Send nothing to a reader that is gone: its loss is known, or on its way to the scheduler."""
        stream = self._streams.get(peer)
        if stream is not None:
            stream.send(encode(records))

    def frame(self, stream: ReaderStream, data: bytes, hear: Callable[[ReaderEvent], None]) -> None:
        """Tell `hear` what a frame means to the scheduler. Each event has been acted on when `hear` returns: a lost
        stream is closed in the transfer thread before its successor is opened there."""
        for record in records_of(data, decode_to_prefill_frame, "a reader"):
            peer, what = stream.peer, type(record).__name__
            if isinstance(record, Hello) and peer is None:
                self._welcome(stream, record, hear)
            elif peer is None or self._streams.get(peer) is not stream:
                log.info("%s on a stream that is not a peer's: dropped", what)
            elif isinstance(record, Hello) or not self._is_own(record, peer):
                log.error("reader %x says what it may not, a %s: its stream is ended", peer, what)
                stream.send(None)
                self.ended(stream, "it broke the protocol", hear)
                return
            else:
                hear(FromReader(peer, record))

    def _is_own(self, record: StartPrefill | Landed | Stop, peer: Incarnation) -> bool:
        """Say whether a record is about a handoff of that reader's own, and asks this life for blocks, no other. A
        reader may end handoffs with others here: between two hellos it cannot know whom they reach."""
        begins = isinstance(record, StartPrefill)
        here = record.handoff.prefill == self.hello.info.incarnation
        return record.handoff.decode == peer and (here or not begins)

    def _welcome(self, stream: ReaderStream, hello: Hello, hear: Callable[[ReaderEvent], None]) -> None:
        """Answer with this worker's own hello. Both sides compare the two; a reader that does not fit leaves."""
        peer, host = hello.info.incarnation, self.hello.info.host
        known = self._streams.get(peer)
        if known is not None and known.number > hello.stream:
            stream.send(None)
            return
        name = choose(self.transports, host, hello.info.host)
        transport = self.transports[name]
        answer = msgspec.structs.replace(self.hello, endpoints=[transport.describe()])
        try:
            agreement = negotiate(answer, hello)
        except NegotiationError as error:
            log.error("decode worker %s is refused: %s", hello.info.name, error)
            stream.send(encode([answer]))
            return
        if known is not None:
            # The end of the older stream has not been heard of yet. What was said on it may be lost.
            known.send(None)
            hear(ReaderLost(peer))
        stream.peer, stream.number = peer, hello.stream
        self._streams[peer] = stream
        for endpoint in hello.endpoints:
            if endpoint.transport == name:
                self.submit(Connect(peer, endpoint, agreement))
        if hello.info.host == host:
            self._watches[peer] = ProcessWatch(hello.info.pid)
        self._lost.pop(peer, None)
        stream.send(encode([answer]))
        hear(ReaderUp(peer, transport.reads_remotely, tuple(hello.unfinished)))

    def ended(self, stream: ReaderStream, why: str, hear: Callable[[ReaderEvent], None]) -> None:
        peer = stream.peer
        if peer is None or self._streams.get(peer) is not stream:
            return
        log.info("reader %x left: %s", peer, why)
        del self._streams[peer]
        watch = self._watches.pop(peer, None)
        if watch is not None:
            self._lost[peer] = watch
        hear(ReaderLost(peer))

    def deaths(self) -> list[ReaderDead]:
        """Return the lost readers whose processes have ended since the last look."""
        if not self._lost:
            return []
        dead = [peer for peer, watch in self._lost.items() if watch.is_dead()]
        for peer in dead:
            del self._lost[peer]
        return [ReaderDead(peer) for peer in dead]

    def close(self) -> None:
        """End every stream, behind what was said on it."""
        for stream in self._streams.values():
            stream.send(None)
