"""The client's side of a beam search: one request on its worker, one stream for each answer."""

from collections.abc import Sequence

import msgspec

from engine.messages import Fault
from engine.types import FinishReason
from router.core.events import Complete
from router.front.stream import SampleStream


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

    def tokens(self, ids: list[int], now: float) -> int | None:
        raise AssertionError("a search says no token before it is over")

    def completed(self, end: Complete, now: float) -> None:
        for stream, beam in zip(self._streams, end.beams, strict=True):
            stream.tokens(beam.ids, now)
            stats = msgspec.structs.replace(end.stats, output_tokens=len(beam.ids))
            one = msgspec.structs.replace(end, reason=beam.reason, stats=stats, beams=(beam,))
            stream.completed(one, now)

    def failed(
        self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float
    ) -> None:
        for stream in self._streams:
            stream.failed(fault, outcome, retry_after_s, now)
