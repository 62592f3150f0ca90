"""Streams between processes: ordered, delayed, cut, partitioned; on request also hostile with single records.

A stream is what gRPC gives: bytes in order until it breaks, then both ends are told, each in its own time, and what was
on its way may or may not arrive first. `Wire.meddle` lets a fault change the frames of the handoff on their way.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tests.sim.clock import Clock, Process


class Session(Protocol):
    def frame(self, data: bytes) -> None: ...

    def closed(self, why: str) -> None: ...


Send = Callable[[bytes | None], None]
Accept = Callable[[Send], Session]
Meddle = Callable[["Stream", int, bytes], list[bytes]]

KEEPALIVE_S = 2.0
"""A stream to a peer that does not answer for so long breaks."""
PATIENCE_S = (0.0001, 0.0012)


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
        self.last = max(self.last, clock.now + clock.rng.uniform(*PATIENCE_S) + slow_s)
        self.queue.append((self.last, act))
        if not self.pumping:
            self._arm()

    def _arm(self) -> None:
        self.pumping = True
        due = max(self.queue[0][0], self.blocked_until)
        self.clock.at(max(0.0, due - self.clock.now), self._pump)

    def _pump(self) -> None:
        self.pumping = False
        queue, now = self.queue, self.clock.now
        while queue and queue[0][0] <= now and self.blocked_until <= now:
            self.target.run(queue.popleft()[1])
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
            if self.open and data is None:
                self._end(lane)
            elif self.open and data is not None:
                for frame in self._wire.passing(self, lane, data):
                    self.lanes[lane].push(partial(self._frame, lane, frame), self._wire.slowness())

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
    """All listeners and all streams. `meddle` and `trace` are set by the world."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.streams: list[Stream] = []
        self.meddle: Meddle | None = None
        self.trace: Callable[[Stream, int, bytes], None] | None = None
        self.on_told: Callable[[Stream, int, str], None] = lambda stream, lane, why: None
        self.on_cut: Callable[[Stream], None] = lambda stream: None
        self._partitions: dict[frozenset[str], float] = {}
        self._servers: dict[str, tuple[Process, dict[str, Accept]]] = {}
        self._made = 0

    def listen(self, address: str, process: Process, methods: dict[str, Accept]) -> None:
        self._servers[address] = (process, methods)

    def connect(self, client: Process, address: str, method: str, accept: Accept) -> None:
        """Connect as `RpcLoop.connect` does: returns at once, the session hears of everything."""
        server, methods = self._servers.get(address, (None, {}))
        if server is None or not server.alive:
            session = accept(lambda data: None)
            client.later(
                self.clock.rng.uniform(*PATIENCE_S), lambda: session.closed("nobody listens")
            )
            return
        self.streams = [stream for stream in self.streams if stream.open]
        self._made += 1
        stream = Stream(self, self._made, client, server, method)
        self.streams.append(stream)
        self._hold(stream)
        stream.lanes[0].push(lambda: self._accept(stream, methods[method]))
        stream.sessions[1] = accept(stream.sender(0))

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

    def _accept(self, stream: Stream, accept: Accept) -> None:
        stream.sessions[0] = accept(stream.sender(1))

    def passing(self, stream: Stream, lane: int, data: bytes) -> list[bytes]:
        return self.meddle(stream, lane, data) if stream.is_handoff and self.meddle else [data]

    def slowness(self) -> float:
        random = self.clock.rng.random
        return 0.008 * random() if random() < 0.04 else 0.0

    def of(self, process: Process) -> list[Stream]:
        return [s for s in self.streams if s.open and process in (s.client, s.server)]
