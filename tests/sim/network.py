"""Streams between processes: ordered, delayed, cut, partitioned; on request also hostile with single records.

A stream is what gRPC gives: bytes in order until it breaks, then both ends are told, each in its own time, and what was
on its way may or may not arrive first. Its first three words, by which both ends prove who they are, are taken as
proven, and take their time. `Wire.meddle` lets a fault change the frames of the handoff on their way.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from engine.handshake import HandshakeError, Party
from engine.types import Incarnation
from tests.sim.clock import Clock, Process, Violation
from worker.rpc import ServedStream


class Session(Protocol):
    def frame(self, data: bytes) -> None: ...

    def closed(self, why: str) -> None: ...


class DialerSession(Session, Protocol):
    def proven(self, peer: Party) -> None: ...


Send = Callable[[bytes | None], None]
Open = Callable[[Send], DialerSession]
Meddle = Callable[["Stream", int, bytes], Sequence[bytes]]

KEEPALIVE_S = 2.0
"""A stream to a peer that does not answer for so long breaks."""
PATIENCE_S = (0.0001, 0.0012)
_LEAST_S, _SPREAD_S = PATIENCE_S[0], PATIENCE_S[1] - PATIENCE_S[0]


class _Lane:
    """One direction of a stream. The queue holds (ready, act); an act runs in the process at the far end."""

    __slots__ = ("blocked_until", "clock", "last", "pumping", "queue", "target")

    def __init__(self, clock: Clock, target: Process) -> None:
        self.clock = clock
        self.target = target
        self.queue: deque[tuple[float, Callable[[], None]]] = deque()
        self.last = 0.0
        self.blocked_until = 0.0
        self.pumping = False

    def push(self, act: Callable[[], None], slow_s: float = 0.0) -> None:
        clock = self.clock
        due = clock.now + (_LEAST_S + _SPREAD_S * clock.random()) + slow_s
        if due > self.last:
            self.last = due
        self.queue.append((self.last, act))
        if not self.pumping:
            self._arm()

    def _arm(self) -> None:
        self.pumping = True
        due, now = self.queue[0][0], self.clock.now
        if due < self.blocked_until:
            due = self.blocked_until
        self.clock.at(due - now if due > now else 0.0, self._pump)

    def _pump(self) -> None:
        self.pumping = False
        queue, now = self.queue, self.clock.now
        while queue and queue[0][0] <= now and self.blocked_until <= now:
            act = queue.popleft()[1]
            if self.target.runs:
                act()
            else:
                self.target.run(act)
        if queue and not self.pumping:
            self._arm()


class Stream:
    """One stream from a client process to a method of a server process."""

    def __init__(self, wire: "Wire", number: int, client: Process, server: Process, method: str) -> None:
        self.number = number
        self.client = client
        self.server = server
        self.method = method
        self.is_handoff = client.role == "decode"
        self.open = True
        self.sessions: list[Session | None] = [None, None]
        self._wire = wire
        clock = wire.clock
        self.lanes = (_Lane(clock, server), _Lane(clock, client))  # [0] to the server, [1] to the client

    def sender(self, lane: int) -> Send:
        """Return what the end that sends on `lane` calls; after the end it does nothing."""

        def send(data: bytes | None) -> None:
            if not self.open:
                return
            if data is None:
                self._end(lane)
                return
            wire = self._wire
            random = wire.clock.random
            meddle = wire.meddle if self.is_handoff else wire.forge
            frames = (data,) if meddle is None else meddle(self, lane, data)
            for frame in frames:
                slow_s = 0.008 * random() if random() < 0.04 else 0.0
                self.lanes[lane].push(partial(self._frame, lane, frame), slow_s)

        return send

    def inject(self, lane: int, data: bytes) -> None:
        """Deliver a frame that nobody has sent now."""
        self.lanes[lane].push(lambda: self._frame(lane, data))

    def _frame(self, lane: int, frame: bytes) -> None:
        session = self.sessions[lane]
        if session is not None:
            if self._wire.trace is not None:
                self._wire.trace(self, lane, frame)
            session.frame(frame)

    @property
    def under_way(self) -> int:
        return sum(len(lane.queue) for lane in self.lanes)

    def block(self, seconds: float) -> None:
        """Let nothing through for a while, in either direction."""
        for lane in self.lanes:
            lane.blocked_until = max(lane.blocked_until, lane.clock.now + seconds)

    def cut(self, why: str) -> None:
        """Break the stream. Each end hears of it in its own time; how much of what was on its way still arrives is
        chance."""
        if not self.open:
            return
        self.open = False
        self._wire.on_cut(self)
        rng = self._wire.clock.rng
        for at, lane in enumerate(self.lanes):
            lane.blocked_until = 0.0
            keep = rng.choice((0, len(lane.queue), rng.randint(0, len(lane.queue))))
            while len(lane.queue) > keep:
                lane.queue.pop()
            late = rng.choice((0.0, 0.0, 0.01, 0.08))
            lane.push(partial(self._closed, at, why), rng.uniform(0, late))

    def _end(self, lane: int) -> None:
        """End the direction of whoever sends on `lane`: all that it said arrives first; what is on its way to it may be
        lost."""
        self.open = False
        why = "the other end closed the stream"
        self.lanes[lane].push(partial(self._closed, lane, why))
        back = self.lanes[1 - lane]
        keep = self._wire.clock.rng.randint(0, len(back.queue))
        while len(back.queue) > keep:
            back.queue.pop()
        back.push(partial(self._closed, 1 - lane, why))

    def _closed(self, lane: int, why: str) -> None:
        session, self.sessions[lane] = self.sessions[lane], None
        if session is not None:
            self._wire.on_told(self, lane, why)
            session.closed(why)


class Wire:
    """All listeners and all streams. The world sets `meddle` (streams of handoffs), `forge` (streams of routers) and
    `trace`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.streams: list[Stream] = []
        self.meddle: Meddle | None = None
        self.forge: Meddle | None = None
        self.trace: Callable[[Stream, int, bytes], None] | None = None
        self.on_told: Callable[[Stream, int, str], None] = lambda stream, lane, why: None
        self.on_cut: Callable[[Stream], None] = lambda stream: None
        self._partitions: dict[frozenset[str], float] = {}
        self._servers: dict[str, tuple[Process, dict[str, ServedStream]]] = {}
        self._made = 0

    def listen(self, address: str, process: Process, methods: dict[str, ServedStream]) -> None:
        self._servers[address] = (process, methods)

    def connect(self, client: Process, address: str, method: str, open_session: Open) -> None:
        """Connect as `RpcLoop.connect` does: returns at once, the session hears of everything."""
        server, methods = self._servers.get(address, (None, {}))
        if server is None or not server.alive:
            session = open_session(lambda data: None)
            client.later(
                self.clock.rng.uniform(*PATIENCE_S), lambda: session.closed("nobody listens")
            )
            return
        self.streams = [stream for stream in self.streams if stream.open]
        self._made += 1
        stream = Stream(self, self._made, client, server, method)
        self.streams.append(stream)
        self._hold(stream)
        session = open_session(stream.sender(0))
        stream.sessions[1] = session
        stream.lanes[0].push(lambda: stream.lanes[1].push(lambda: self._proven(stream, session, methods[method])))

    def partition(self, stream: Stream, seconds: float) -> None:
        """Keep the two processes of a stream from reaching each other for a while, over new streams neither."""
        pair = frozenset((stream.client.name, stream.server.name))
        self._partitions[pair] = self.clock.now + seconds
        for one in self.streams:
            if one.open and pair == {one.client.name, one.server.name}:
                self._hold(one)

    def _hold(self, stream: Stream) -> None:
        until = self._partitions.get(frozenset((stream.client.name, stream.server.name)), 0.0)
        left = until - self.clock.now
        if left > 0:
            stream.block(left)
            if left > KEEPALIVE_S:
                self.clock.at(KEEPALIVE_S, lambda: stream.cut("keepalive"))

    def _proven(self, stream: Stream, session: DialerSession, served: ServedStream) -> None:
        """Both ends know each other: the far one makes its session, before anything that this one says."""
        if stream.sessions[1] is not session:
            return
        stream.lanes[0].push(lambda: self._accept(stream, served))
        try:
            session.proven(_party(stream.server))
        except HandshakeError:
            stream.sender(0)(None)

    def _accept(self, stream: Stream, served: ServedStream) -> None:
        party = _party(stream.client)
        if party.role not in served.roles:
            raise Violation(f"a {party.role} opens {stream.method}")
        stream.sessions[0] = served.accept(stream.sender(1), party)

    def of(self, process: Process) -> list[Stream]:
        return [s for s in self.streams if s.open and process in (s.client, s.server)]


def _party(process: Process) -> Party:
    return Party(process.role, process.name, Incarnation(process.incarnation))  # type: ignore[arg-type]
