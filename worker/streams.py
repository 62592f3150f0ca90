"""The streams that others open to a worker: routers, who hear its reports, and readers, who ask it for KV blocks.

To a router a worker first says who it is (`WorkerInfo`) and how it stands. A reader's stream begins with a hello in
either direction: the reader names every way to its memory, the answer names the one that was chosen. Readers come to a
prefill worker, and to a decode worker for the requests that it yields; they are watched until proof of their death.
Between two lives blocks go one way only, so a peer is a reader or is read from, never both. What they say is put into
the inbox that `worker/worker.py` empties.

Both ends have proven their role, name and incarnation before (`engine/handshake.py`), which is all that a reader may
speak for. Which process a life is, by whose death alone its blocks come free, is not its own to say: a router tells
what the launcher knows (`ProcessesTold`), and a reader whose life is not listed waits until it is.
"""

import hmac
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.handshake import Party
from engine.messages import (
    Hello,
    Landed,
    LifeOfProcess,
    Record,
    StartPrefill,
    Stop,
    decode_router_frame,
    decode_to_prefill_frame,
)
from engine.types import Incarnation
from transfer.handoff.commands import Connect, FromReader, ReaderDead, ReaderEvent, ReaderLost, ReaderUp
from transfer.handoff.negotiation import NegotiationError, negotiate
from transfer.liveness import ProcessWatch
from transfer.ranks.movers import Way
from transfer.registry import choose
from worker.rpc import InboxStream, Put, Send, ServedStream

log = logging.getLogger(__name__)

Hear = Callable[[ReaderEvent], None]

READ = "/headrace.v1.KVSource/Attach"
ATTACH = {"prefill": "/headrace.v1.PrefillWorker/Attach", "decode": "/headrace.v1.DecodeWorker/Attach"}
"""The service that routers dial, named by role: one that dials the address of an earlier worker finds nobody."""


RENEWAL_BYTES = 16
MAX_LISTED = 65_536
LISTED_S = 2.0
"""How long a reader that is not listed may wait for it: its router knows it already, and tells everybody at once."""


class RouterStream(InboxStream):
    """One stream; `link` is the number by which a scheduler knows it. It is itself an item: that it is open."""

    def __init__(self, link: int, router: Party, send: Send, put: Put) -> None:
        super().__init__(send, put)
        self.link = link
        self.router = router
        self.protocol = 1
        """What its hello says that it understands."""

    def decode(self, data: bytes) -> list[Record]:
        return self.records_of(data, decode_router_frame, f"router stream {self.link}")


class ReaderStream(InboxStream):
    """One stream. Its hello was answered if it has a renewal, which names it among those of the same life."""

    renewal = b""
    refused = False

    def __init__(self, reader: Party, send: Send, put: Put) -> None:
        super().__init__(send, put)
        self.reader = reader

    def decode(self, data: bytes) -> list[Record]:
        return self.records_of(data, decode_to_prefill_frame, f"reader {self.reader.name}")


def methods(role: str, put: Put) -> dict[str, ServedStream]:
    """Return what a worker of this role serves, by path."""
    links = itertools.count(1)

    def attach(send: Send, router: Party) -> RouterStream:
        stream = RouterStream(next(links), router, send, put)
        put(stream)
        return stream

    return {
        ATTACH[role]: ServedStream(frozenset({"router"}), attach),
        READ: ServedStream(frozenset({"decode"}), lambda send, reader: ReaderStream(reader, send, put)),
    }


@dataclass(eq=False, repr=False)
class Readers:
    """Mutable state: the streams of readers by life, and the processes behind living and lost ones, as far as this host
    knows them. Owner: the engine thread."""

    hello: Hello
    """This worker's hello, whose endpoints are filled in by the one that asks."""
    transports: Mapping[str, Way]
    submit: Callable[[Connect], None]
    _streams: dict[Incarnation, ReaderStream] = field(default_factory=dict)
    _unlisted: dict[ReaderStream, tuple[Hello, float]] = field(default_factory=dict)
    """Hellos of lives that are not listed, and when they came."""
    _listed: dict[int, dict[str, LifeOfProcess]] = field(default_factory=dict)
    """The life of every worker by name, as each attached router has told them."""
    _told: dict[str, LifeOfProcess] = field(default_factory=dict)
    """The same of routers that are gone: who comes after them may not have met everybody yet."""
    _watches: dict[Incarnation, ProcessWatch] = field(default_factory=dict)
    _lost: dict[Incarnation, ProcessWatch] = field(default_factory=dict)

    def send(self, peer: Incarnation, records: list[Record]) -> None:
        """Send nothing to a reader that is gone: its loss is known, or on its way to the scheduler."""
        stream = self._streams.get(peer)
        if stream is not None:
            stream.say(records)

    def listed(self, link: int, processes: Sequence[LifeOfProcess], hear: Hear) -> None:
        """Take in which workers there are, from the router of a link. Who is listed by any router is listed: one that
        was frozen for a while says what was."""
        self._listed[link] = {process.name: process for process in processes}
        for stream, (hello, _) in list(self._unlisted.items()):
            if self._process(stream) is not None:
                del self._unlisted[stream]
                self._welcome(stream, hello, hear)

    def router_lost(self, link: int) -> None:
        """Keep what a router has told as what was last told."""
        self._told |= self._listed.pop(link, {})
        while len(self._told) > MAX_LISTED:
            del self._told[next(iter(self._told))]

    def _process(self, stream: ReaderStream) -> LifeOfProcess | None:
        """Return the process of the life that has opened a stream, as those know who started it."""
        named = (lives.get(stream.reader.name) for lives in (*self._listed.values(), self._told))
        return next((life for life in named if life and life.incarnation == stream.reader.incarnation), None)

    def records(self, stream: ReaderStream, records: Sequence[Record], hear: Hear, now: float) -> None:
        """Tell `hear` what records mean to the scheduler. Each event has been acted on when `hear` returns: a lost
        stream is closed in the transfer thread before its successor is opened there."""
        peer = stream.reader.incarnation
        for record in records:
            if self._has_ended(stream):
                return
            if isinstance(record, Hello) and self._is_first(stream, record):
                if self._process(stream) is None:
                    self._unlisted[stream] = (record, now)
                else:
                    self._welcome(stream, record, hear)
            elif isinstance(record, StartPrefill | Landed | Stop) and stream.renewal and self._is_own(record, peer):
                hear(FromReader(peer, record))
            else:
                self._refuse(stream, f"it says what it may not, a {type(record).__name__}", hear)

    def _has_ended(self, stream: ReaderStream) -> bool:
        """Say whether a stream was refused, or another has taken its place: what it says is dropped."""
        held = self._streams.get(stream.reader.incarnation)
        return stream.refused or (bool(stream.renewal) and held is not stream)

    def _is_first(self, stream: ReaderStream, hello: Hello) -> bool:
        """Say whether this is a stream's one hello, in the name of the one that has opened it."""
        info = hello.info
        is_its = stream.reader.is_called(info.role, info.name, info.incarnation)
        return is_its and not stream.renewal and stream not in self._unlisted

    def _is_own(self, record: StartPrefill | Landed | Stop, peer: Incarnation) -> bool:
        """Say whether a record is about a handoff of that reader's own, and asks this life for blocks, no other. A
        reader may end handoffs with others here: between two hellos it cannot know whom they reach."""
        begins = isinstance(record, StartPrefill)
        here = record.handoff.prefill == self.hello.info.incarnation
        return record.handoff.decode == peer and (here or not begins)

    def _refuse(self, stream: ReaderStream, why: str, hear: Hear, level: int = logging.ERROR) -> None:
        log.log(level, "reader %s is refused: %s", stream.reader.name, why)
        stream.refused = True
        stream.send(None)
        self.ended(stream, why, hear)

    def _welcome(self, stream: ReaderStream, hello: Hello, hear: Hear) -> None:
        """Answer with this worker's own hello. Both sides compare the two; a reader that does not fit leaves."""
        peer, host = hello.info.incarnation, self.hello.info.host
        known, process = self._streams.get(peer), self._process(stream)
        assert process is not None
        # 1. Another stream has this life. The life's own next one brings what only that stream was told; if that was
        #    lost on its way, the life comes again until the end of the old stream has been noticed.
        if known is not None and not hmac.compare_digest(known.renewal, hello.renewal):
            return self._refuse(stream, "its life has a stream already", hear, logging.WARNING)
        # 2. It is not the process that it says it is: neither its death nor its memory would be found there.
        if (hello.info.pid, hello.info.host) != (process.pid, process.host):
            return self._refuse(stream, f"it says that it is pid {hello.info.pid}, its launcher does not", hear)
        # 3. It cannot read our blocks. It hears why, and leaves.
        name = choose(self.transports, host, process.host)
        transport = self.transports[name]
        renewal = os.urandom(RENEWAL_BYTES)
        try:
            agreement = negotiate(self.hello, hello)
        except NegotiationError as error:
            log.error("decode worker %s is refused: %s", hello.info.name, error)
            stream.refused = True
            stream.say([msgspec.structs.replace(self.hello, endpoints=[], renewal=renewal)])
            return
        ranks = next((len(endpoint.ranks) for endpoint in hello.endpoints if endpoint.transport == name), 0)
        endpoints = [transport.describe(peer, ranks or 1)]
        answer = msgspec.structs.replace(self.hello, endpoints=endpoints, renewal=renewal)
        # 4. It could never be known to be dead.
        try:
            watch = ProcessWatch(process.pid) if process.host == host else None
        except OSError as error:
            return self._refuse(stream, f"its process cannot be looked at: {error}", hear, logging.WARNING)
        # 5. It is a reader from now on.
        if known is not None:
            # The end of the older stream has not been heard of yet. What was said on it may be lost.
            known.send(None)
            hear(ReaderLost(peer))
        stream.renewal = renewal
        self._streams[peer] = stream
        for endpoint in hello.endpoints:
            if endpoint.transport == name:
                self.submit(Connect(peer, endpoint, agreement))
        if watch is not None:
            self._watches[peer] = watch
        self._lost.pop(peer, None)
        stream.say([answer])
        hear(ReaderUp(peer, transport.reads_remotely, tuple(hello.unfinished)))

    def ended(self, stream: ReaderStream, why: str, hear: Hear) -> None:
        peer = stream.reader.incarnation
        self._unlisted.pop(stream, None)
        if self._streams.get(peer) is not stream:
            return
        log.info("reader %x left: %s", peer, why)
        del self._streams[peer]
        watch = self._watches.pop(peer, None)
        if watch is not None:
            self._lost[peer] = watch
        hear(ReaderLost(peer))

    def drop(self, peer: Incarnation, why: str, hear: Hear) -> None:
        """Give up a reader that nothing can be sent to (any more). It dials anew, and the hellos then make a new way on
        both ends."""
        stream = self._streams.get(peer)
        if stream is not None:
            log.warning("reader %s is given up: %s", stream.reader.name, why)
            stream.send(None)
            self.ended(stream, why, hear)

    def tick(self, hear: Hear, now: float) -> None:
        """Refuse whom nobody has listed in time."""
        if not self._unlisted:
            return
        for stream, (_, since) in list(self._unlisted.items()):
            if now - since >= LISTED_S:
                del self._unlisted[stream]
                # As where no router can be reached. It will come again.
                self._refuse(stream, "no router lists it", hear, logging.WARNING)

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
        for stream in (*self._streams.values(), *self._unlisted):
            stream.send(None)
