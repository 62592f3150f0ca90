"""Remembers the latest requests of the router: their flights, the figures of the last minute, and their spans.

Told of everything by the hub (commands of the core) and by the streams (how a request ended). Owner: the event loop.
"""

import logging
import struct
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from engine.messages import Cancel, Finish, Place, RouterRecord, UsePrefill, Yield
from engine.types import FinishReason, RequestId, RequestRecord
from router.core import events
from router.status.traffic import RequestSummary, TrafficWindow
from telemetry.flight import Fact, FlightRecorder
from telemetry.labels import STAGES
from telemetry.tracing import Span, Tracing, consecutive, unix_offset_s

log = logging.getLogger(__name__)

RECENT_S = 60.0
KEPT = 2048
"""Endings, and requests under way, that are kept: above 34 requests a second the figures are of less than a minute."""
_PACKED = struct.Struct(f"{len(STAGES)}d")


class Recent(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended within the last `window_s` seconds. Quantiles are of single requests' figures, None without
    any; the inter-token time of a request is its mean."""

    window_s: float = RECENT_S
    outcomes: dict[str, int] = {}
    output_tokens: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    in_time: dict[str, tuple[int, int]] = {}
    """How many met each target, `ttft` and `itl`, of how many that it was for: failing first is missing the first."""
    stages: dict[str, float] = {}
    """The mean of each stage, in seconds, over requests that ended well."""
    migrated_requests: int = 0
    migrated_blocks: int = 0
    migrated_bytes: int = 0
    migration_s: float = 0.0


class _Ending(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a `RequestSummary`: thousands of them are, so numbers alone. `stages` are packed in the order
    of STAGES, and empty without any; the other figures are those of its name there, zero or None where it has none."""

    outcome: FinishReason
    at_s: float
    ttft_s: float | None
    itl_s: float | None
    stages: bytes
    output_tokens: int = 0
    migrated_blocks: int = 0
    migrated_bytes: int = 0
    migration_s: float = 0.0

    @classmethod
    def of(cls, end: RequestSummary) -> "_Ending":
        itl_s = sum(end.gaps_s) / len(end.gaps_s) if end.gaps_s else None
        stages = _PACKED.pack(*(end.stages.get(name, 0.0) for name in STAGES)) if end.stages else b""
        figures = (end.outcome, end.at_s, end.ttft_s, itl_s, stages)
        stats = end.stats
        if stats is None:
            return cls(*figures)
        moved = (stats.migrated_blocks, stats.migrated_bytes, stats.migration_s)
        return cls(*figures, stats.output_tokens, *moved)


class RouterJournal:
    # Mutable state: the recorder, the endings of late and the shapes of requests, who has been given a token, and the
    # trace of each open request.

    def __init__(self, tracing: Tracing | None = None, worker: str = "router") -> None:
        self.recorder = FlightRecorder(worker)
        self.traffic = TrafficWindow()
        self._tracing = tracing
        self._endings: deque[_Ending] = deque(maxlen=KEPT)
        self._begun: dict[str, None] = {}

    def received(self, request: str, traceparent: str, at_s: float) -> str:
        """A call has come; returns the context that its workers shall be given."""
        if self._tracing is None:
            return traceparent
        return self._tracing.open(request, "headrace.request", traceparent, at_s + unix_offset_s())

    def submitted(self, record: RequestRecord, now: float) -> None:
        facts: dict[str, Fact] = {"prompt_tokens": record.prompt_tokens, "max_tokens": record.max_tokens}
        self.recorder.note(record.request, "submitted", now, **facts)

    def left(self, request: RequestId, now: float) -> None:
        self.recorder.note(request, "left by its client", now)

    def command(self, command: events.Command, now: float) -> None:
        """The core has decided this."""
        note = self.recorder.note
        match command:
            case events.Deliver(request):
                self._first_token(request, now)
            case events.TellWorker(worker, record, reason):
                self._told(worker, record, reason, now)
            case events.Begin(request):
                note(request, "accepted", now)
            case events.DecodeLost(request, worker, emitted):
                note(request, "decode worker lost", now, worker=worker, emitted_tokens=emitted)
            case events.Moved(request, worker):
                note(request, "yielded", now, worker=worker)
            case events.Poisonous(request, deaths):
                note(request, "poisonous", now, deaths=deaths)
            case events.Adopt(orphan):
                note(orphan.record.request, "adopted", now, emitted_tokens=len(orphan.tokens))
                if orphan.tokens:
                    self._first_token(orphan.record.request, now)
            case events.Fail(request, fault, outcome):
                facts: dict[str, Fact] = {"outcome": outcome.value, "code": fault.code, "message": fault.message}
                note(request, "failed", now, **facts)
                if outcome is FinishReason.ERROR:
                    self.recorder.dump(request, f"the request has failed: {fault.message}")

    def _first_token(self, request: RequestId, now: float) -> None:
        if request not in self._begun:
            self._begun[request] = None
            if len(self._begun) > KEPT:
                del self._begun[next(iter(self._begun))]
            self.recorder.note(request, "first token", now)

    def _told(self, worker: str, record: RouterRecord, reason: str, now: float) -> None:
        note = self.recorder.note
        match record:
            case Place():
                facts: dict[str, Fact] = {"decode": worker, "placement": record.placement}
                facts |= {"prefill": record.prefill.name or worker, "reason": reason}
                note(record.record.request, "offered", now, **facts)
            case UsePrefill(request, _, prefill):
                note(request, "another prefill worker", now, prefill=prefill.name if prefill else worker)
            case Yield(request):
                note(request, "asked to yield", now, worker=worker)
            case Cancel(request, _, why):
                note(request, "cancel", now, worker=worker, reason=why.value)
            case Finish(request, _, tokens_kept):
                note(request, "stop string", now, worker=worker, tokens_kept=tokens_kept)

    def ended(self, end: RequestSummary) -> None:
        """The account of a request is closed."""
        self._begun.pop(end.request, None)
        while self._endings and self._endings[0].at_s < end.at_s - RECENT_S:
            self._endings.popleft()
        self._endings.append(_Ending.of(end))
        self.traffic.ended(end)
        facts: dict[str, Fact] = {"outcome": end.outcome.value, "e2e_s": round(end.e2e_s, 6)}
        if end.ttft_s is not None:
            facts["ttft_s"] = round(end.ttft_s, 6)
        facts |= {f"{name}_s": round(seconds, 6) for name, seconds in end.stages.items()}
        self.recorder.note(end.request, "ended", end.at_s, **facts)
        about = {"request": end.request, "facts": facts}
        log.info("ended: %s after %.3f s", end.outcome.value, end.e2e_s, extra=about)
        if self._tracing is not None:
            self._tracing.close(end.request, _span(end, facts))

    def recent(self, now: float, targets_s: tuple[float, float] | None = None) -> Recent:
        """The figures of the last minute, beside the targets for the first token and for the gaps."""
        last = [end for end in self._endings if end.at_s >= now - RECENT_S]
        moved = [end for end in last if end.migrated_blocks]
        ttfts = sorted(end.ttft_s for end in last if end.ttft_s is not None)
        itls = sorted(end.itl_s for end in last if end.itl_s is not None)
        return Recent(
            outcomes=dict(Counter(end.outcome.value for end in last)),
            stages=_means([end.stages for end in last if end.stages]),
            output_tokens=sum(end.output_tokens for end in last),
            ttft_p50_s=_quantile(ttfts, 50),
            ttft_p99_s=_quantile(ttfts, 99),
            itl_p50_s=_quantile(itls, 50),
            itl_p99_s=_quantile(itls, 99),
            in_time={} if targets_s is None else _in_time(last, *targets_s),
            migrated_requests=len(moved),
            migrated_blocks=sum(end.migrated_blocks for end in moved),
            migrated_bytes=sum(end.migrated_bytes for end in moved),
            migration_s=sum(end.migration_s for end in moved),
        )


def _in_time(ends: Sequence[_Ending], ttft_s: float, itl_s: float) -> dict[str, tuple[int, int]]:
    lost = sum(end.ttft_s is None and end.outcome in (FinishReason.ERROR, FinishReason.DEADLINE) for end in ends)
    firsts = [end.ttft_s <= ttft_s for end in ends if end.ttft_s is not None]
    gaps = [end.itl_s <= itl_s for end in ends if end.itl_s is not None]
    return {"ttft": (sum(firsts), len(firsts) + lost), "itl": (sum(gaps), len(gaps))}


def together(parts: Sequence[Recent]) -> Recent:
    """Return the figures of several routers as one: sums, the largest of the quantiles, and of a stage the mean over
    all that ended."""
    counts = [sum(one.outcomes.values()) for one in parts]
    outcomes: Counter[str] = Counter()
    for one in parts:
        outcomes.update(one.outcomes)
    sums = ("output_tokens", "migrated_requests", "migrated_blocks", "migrated_bytes", "migration_s")
    largest = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
    figures = {name: sum(getattr(one, name) for one in parts) for name in sums}
    figures |= {
        name: max((told for one in parts if (told := getattr(one, name)) is not None), default=None)
        for name in largest
    }
    in_time = {
        name: (sum(one.in_time[name][0] for one in told), sum(one.in_time[name][1] for one in told))
        for name in ("ttft", "itl")
        if (told := [one for one in parts if name in one.in_time])
    }
    return Recent(outcomes=dict(outcomes), in_time=in_time, stages=_mean_stages(parts, counts), **figures)


def _mean_stages(parts: Sequence[Recent], counts: Sequence[int]) -> dict[str, float]:
    told = [(one.stages, count) for one, count in zip(parts, counts, strict=True) if one.stages]
    total = sum(count for _, count in told)
    if not total:
        return {}
    return {name: sum(stages[name] * count for stages, count in told) / total for name in told[0][0]}


def _means(all_stages: list[bytes]) -> dict[str, float]:
    if not all_stages:
        return {}
    columns = zip(*(_PACKED.unpack(stages) for stages in all_stages), strict=True)
    return {name: sum(column) / len(column) for name, column in zip(STAGES, columns, strict=True)}


def _quantile(values: list[float], percent: int) -> float | None:
    """The least of the sorted values that `percent` of them do not exceed."""
    return values[-(-percent * len(values) // 100) - 1] if values else None


def _span(end: RequestSummary, facts: dict[str, Fact]) -> Span:
    """The router's part of the trace: its own four stages. The workers tell theirs."""
    end_s = end.at_s + unix_offset_s()
    begin_s = end_s - end.e2e_s
    stages = end.stages
    children = consecutive(begin_s, [(n, stages.get(n, 0.0)) for n in ("admit", "route", "reserve")])
    out_s = stages.get("stream_out", 0.0)
    children.append(Span("stream_out", end_s - out_s, end_s))
    bad = end.outcome in (FinishReason.ERROR, FinishReason.REJECTED, FinishReason.DEADLINE)
    return Span(
        "headrace.request",
        begin_s,
        end_s,
        {f"headrace.{name}": value for name, value in facts.items()},
        children if stages else [],
        error=end.outcome.value if bad else "",
    )
