"""One answer's samples: a stream each, and one reader that takes from all of them. A beam search's are its answers.

A new reader takes the answer over; an old one that still waits, on a connection that its client has lost, is sent
away.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from engine.messages import Fault
from engine.types import FinishReason, RequestId, TokenLogprobs
from router.core.endings import RESUMED_ELSEWHERE
from router.core.events import Complete
from router.front.api import ApiError, Delta, Position, Started, invalid
from router.front.outlet import Outlet, ReaderSignal, WakeQueue
from router.front.stream import Reader, SampleStream

EVENTS_AT_ONCE = 64
"""Events that a reader takes before others have their turn: an answer that is read again is there as a whole."""


Remember = Callable[[str, list[int]], Awaitable[bool]]


class Samples:
    """`remember` takes the text and ids of a finished sample, for the chat's next turn, and returns whether that is all
    of the answer that is kept; None where it is no chat.
    `tenant` is whose answer it is: who shares a cache shares no answers."""

    # Mutable state: the streams by sample index (None: not adopted), and the present reader.

    def __init__(
        self,
        started: Started,
        turns: WakeQueue,
        remember: Remember | None = None,
        tenant: str = "",
    ) -> None:
        self.started = started
        self.tenant = tenant
        self.remember = remember
        self.changed = ReaderSignal(turns)
        self.reader: SamplesReader | None = None
        self.is_given_over = False
        """Another router goes on with some of them; set by the frontend."""
        self._streams: list[SampleStream | None] = [None] * started.samples

    @property
    def streams(self) -> list[SampleStream]:
        """The streams that exist, in order."""
        return [stream for stream in self._streams if stream is not None]

    @property
    def is_whole(self) -> bool:
        """True where every sample has its stream."""
        return None not in self._streams

    def put(self, index: int, stream: SampleStream) -> None:
        """Take a sample's stream, in the place of an earlier one. A reader is sent away: nothing comes any more to what
        it reads."""
        before = self._streams[index]
        if before is not None:
            before.replaced()
        self._streams[index] = stream
        if self.reader is not None:
            self.reader.is_outdated = True
            self.reader = self.changed.deliver = None
            self.changed.call()

    def drop(self, index: int) -> None:
        """Forget a sample that another router goes on with; whoever reads it now keeps what it has."""
        self._streams[index] = None

    def read(self, positions: Sequence[Position] | None = None, outlet: Outlet | None = None) -> "SamplesReader":
        """Read from the start, or behind `positions` (empty: from the start, as a resumption). Raises ApiError for
        positions that it cannot have reached, and where a sample was lost together with an earlier router."""
        wanted = self.started.samples
        behind: Sequence[Position | None] = [None] * wanted
        if positions is not None:
            behind = positions or [Position()] * wanted
        if len(behind) != wanted:
            raise invalid("positions", f"{len(behind)} are given, the answer has {wanted} samples")
        if len(self.streams) < wanted:
            raise ApiError("UNAVAILABLE", "a sample of this request was lost together with the router")
        streams = self.streams
        readers = [stream.read(at) for stream, at in zip(streams, behind, strict=True)]
        self.reader = SamplesReader(self, streams, readers, outlet, is_known=positions is not None)
        self.changed.deliver = self.reader.deliver if outlet is not None else None
        self.changed.call()
        return self.reader

    def leave(self, reader: "SamplesReader") -> None:
        """Let go of a reader that has ended, and of its client's connection with it; an answer may be kept for longer.
        """
        if self.reader is reader:
            self.reader = self.changed.deliver = None

    def end_all(self, now: float, why: ApiError | None = None) -> list[RequestId]:
        """End the streams for good; `why` is what a reader that comes back is told. Return the requests to be let go,
        the last sample first: each of them may wait for one before it."""
        streams = self.streams[::-1]
        for stream in streams:
            stream.left(now, why)
        return [RequestId(stream.started.request_id) for stream in streams]


class SamplesReader:
    """Takes the events of all samples, each sample's in order. Only the newest reader of an answer gets any.

    A resumable answer begins once all samples were accepted, so that each can be found again. `is_known`: its client
    has what it needs to come back. `streams` are all samples' as they were when it began: one that another router goes
    on with is still read here to where it was left.
    """

    # Mutable state: whether it has begun, whether it is known, whether one of its streams was replaced, whether
    # somebody waits for the next event, how many were taken without a pause, whose turn it is, and which samples have
    # ended.

    __slots__ = (
        "_ended", "_given", "_has_started", "_is_awaited", "_outlet", "_readers", "_samples", "_turn", "is_known",
        "is_outdated", "streams",
    )  # fmt: skip

    def __init__(
        self,
        samples: Samples,
        streams: Sequence[SampleStream],
        readers: list[Reader],
        outlet: Outlet | None = None,
        *,
        is_known: bool,
    ) -> None:
        self.streams = streams
        self._samples = samples
        self._outlet = outlet
        self._is_awaited = False
        self._given = 0
        self._readers = readers
        self._turn = 0
        self._ended: set[int] = set()
        self._has_started = False
        self.is_known = is_known
        self.is_outdated = False

    async def next(self) -> Started | tuple[int, Delta | Complete] | None:
        """Return `Started`, then events with their sample's index; the last of a sample is Complete, and None is the
        end. Raises ApiError for a request of which a sample failed."""
        if self._given == EVENTS_AT_ONCE:
            self._given = 0
            await asyncio.sleep(0)
        while True:
            if self.is_outdated:
                raise ApiError("UNAVAILABLE", "this stream goes on at another worker; resume it")
            if self._samples.reader is not self:
                raise ApiError(RESUMED_ELSEWHERE.code, RESUMED_ELSEWHERE.message)
            if not self._has_started:
                ready = [reader.is_ready() for reader in self._readers]
                if all(ready) if self._samples.started.resume_token else any(ready):
                    self._has_started = True
                    return self._samples.started
            elif len(self._ended) == len(self._readers):
                return None
            elif (event := self._poll()) is not None:
                self._given += 1
                return event
            self._given = 0
            self._is_awaited = True
            try:
                await self._samples.changed.wait()
            finally:
                self._is_awaited = False
            if self._samples.reader is self:
                self._samples.changed.clear()
                for reader in self._readers:
                    reader.look()

    def deliver(self) -> bool:
        """Give new output to the outlet, past `next`; return whether `next` has nothing to return."""
        take = self._outlet.take if self._outlet is not None else None
        if take is None or not self._is_awaited or not self._has_started or self._samples.reader is not self:
            return False
        if len(self._readers) == 1:
            return bool(self._ended) or self._readers[0].deliver(take)
        is_done = True
        for at, reader in enumerate(self._readers):
            if at not in self._ended:
                is_done &= reader.deliver(partial(_of_sample, take, at) if at else take)
        return is_done

    def _poll(self) -> tuple[int, Delta | Complete] | None:
        """Take from the samples in turns, so that no sample waits for a long one."""
        count = len(self._readers)
        for at in [(self._turn + step) % count for step in range(count)]:
            event = None if at in self._ended else self._readers[at].poll()
            if isinstance(event, Complete):
                self._ended.add(at)
            if event is not None:
                self._turn = at + 1
                return at, event
        return None


def _of_sample(take: Callable[[Delta], bool], at: int, delta: Delta) -> bool:
    return take(msgspec.structs.replace(delta, sample=at))


class BeamSink:
    """Fulfils `router.hub.Sink`. Nothing comes before the search is over; then all answers do, best first."""

    def __init__(self, streams: Sequence[SampleStream]) -> None:
        self._streams = streams

    def offered(self, now: float) -> None:
        for stream in self._streams:
            stream.offered(now)

    def accepted(self, now: float) -> None:
        for stream in self._streams:
            stream.accepted(now)

    def interrupted(self, now: float) -> None:
        for stream in self._streams:
            stream.interrupted(now)

    def moved(self, stages: dict[str, float], now: float) -> None:
        for stream in self._streams:
            stream.moved(stages, now)

    def tokens(
        self,
        ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> int | None:
        raise AssertionError("a search says no token before it is over")

    def completed(self, end: Complete, now: float) -> None:
        for stream, beam in zip(self._streams, end.beams, strict=True):
            stream.tokens(beam.ids, now)
            stats = msgspec.structs.replace(end.stats, output_tokens=len(beam.ids))
            one = msgspec.structs.replace(end, reason=beam.reason, stats=stats, beams=(beam,))
            stream.completed(one, now)

    def failed(self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float) -> None:
        for stream in self._streams:
            stream.failed(fault, outcome, retry_after_s, now)
