"""Remembers a decode worker's latest requests (`worker.journal`)."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from decode_worker.scheduler.events import FromPeer, FromRouter, Tell
from engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Finish,
    FirstToken,
    NeedPrefill,
    Offer,
    Orphan,
    Place,
    PrefillFailed,
    Refused,
    RequestStats,
    StartPrefill,
    Tokens,
    UsePrefill,
    Yield,
    Yielded,
)
from engine.types import FinishReason, RequestId
from telemetry.flight import Fact
from telemetry.tracing import Span, consecutive, unix_offset_s
from transfer.handoff.commands import Emit, Received
from worker.journal import WorkerJournal


class _Trace(msgspec.Struct):
    """The data that an accepted request's spans need. `wire`: first offer and last landing, on this worker's clock."""

    traceparent: str
    accepted_s: float
    wire: tuple[float, float] | None = None
    nbytes: int = 0


class DecodeJournal(WorkerJournal[RequestId, _Trace]):
    ENDS: ClassVar = frozenset({"ended", "refused", "yielded"})

    def heard(self, event: object, now: float) -> None:
        match event:
            case FromRouter(_, message):
                self._from_router(message, now)
            case FromPeer(_, message):
                self._from_peer(message, now)
            case Received(handoff, seq, error, seconds, nbytes):
                failed: dict[str, Fact] = {"error": error} if error else {}
                copy_s = round(seconds, 6)
                self._note(handoff.request, "copied", now, chunk=seq, bytes=nbytes, copy_s=copy_s, **failed)
                trace = self._traces.get(handoff.request)
                if trace is not None and not error:
                    since = trace.wire[0] if trace.wire else now - seconds
                    trace.wire, trace.nbytes = (since, now), trace.nbytes + nbytes

    def said(self, commands: Sequence[object], now: float) -> None:
        for command in commands:
            match command:
                case Tell(_, Tokens()):
                    pass  # every step says some: the first one is known from elsewhere
                case Tell(_, record):
                    self._to_router(record, now)
                case Emit(_, StartPrefill(handoff=handoff, have_tokens=have)):
                    self._note(handoff.request, "prefill asked for", now, attempt=handoff.attempt, have_tokens=have)

    def _from_router(self, message: object, now: float) -> None:
        match message:
            case Place(record=record, placement=placement, prefill=prefill):
                tokens, name = len(record.tokens), prefill.name or self._worker
                self._note(record.request, "placed", now, placement=placement, tokens=tokens, prefill=name)
                if self._tracing is not None and record.traceparent:
                    self._trace(record.request, _Trace(record.traceparent, now))
            case Cancel(request, _, reason):
                self._note(request, "cancelled", now, reason=reason.value)
            case Finish(request, _, kept):
                self._note(request, "stop string", now, tokens_kept=kept)
            case UsePrefill(request, _, prefill):
                name = prefill.name if prefill is not None else self._worker
                self._note(request, "another prefill worker", now, prefill=name)
            case Yield(request):
                self._note(request, "asked to yield", now)

    def _from_peer(self, message: object, now: float) -> None:
        match message:
            case Offer(handoff, seq, blocks):
                self._note(handoff.request, "offered", now, chunk=seq, blocks=len(blocks))
            case FirstToken(handoff=handoff, cached_tokens=cached) as first:
                queue_s, run_s = round(first.queue_s, 6), round(first.run_s, 6)
                self._note(handoff.request, "first token", now, queue_s=queue_s, run_s=run_s, cached_tokens=cached)
            case PrefillFailed(handoff, fault):
                self._note(handoff.request, "prefill failed", now, why=fault.message)

    def _to_router(self, record: object, now: float) -> None:
        match record:
            case Accepted(request, _, cached):
                self._note(request, "accepted", now, cached_tokens=cached)
            case Refused(request, _, blocks):
                self._note(request, "refused", now, blocks_needed=blocks)
                self._traces.pop(request, None)
            case NeedPrefill(request, _, failed):
                self._note(request, "prefill worker lost", now, worker=failed)
            case Orphan(record=mine, tokens=tokens):
                self._note(mine.request, "handed to another router", now, tokens=len(tokens))
            case Yielded(request=request, stats=stats):
                self._ended(request, "yielded", stats, now, {})
            case Ended(request=request, reason=reason, stats=stats, fault=fault):
                facts: dict[str, Fact] = {"outcome": reason.value}
                if fault is not None:
                    facts["fault"] = fault.message
                self._ended(request, "ended", stats, now, facts)
                if reason is FinishReason.ERROR:
                    self.recorder.dump(request, f"the request has failed: {facts.get('fault')}")

    def _ended(self, request: RequestId, what: str, stats: RequestStats, now: float, facts: dict[str, Fact]) -> None:
        facts |= {"output_tokens": stats.output_tokens, "migrated_blocks": stats.migrated_blocks}
        facts |= {"transport": stats.transport, "prefill": stats.prefill_worker}
        facts |= {f"{name}_s": round(seconds, 6) for name, seconds in stats.stages.items()}
        self._note(request, what, now, **facts)
        trace = self._traces.pop(request, None)
        if trace is not None and self._tracing is not None:
            span = _span(trace, stats, now, facts, is_local=stats.prefill_worker == self._worker)
            self._tracing.add(trace.traceparent, span)


def _span(trace: _Trace, stats: RequestStats, now: float, facts: dict[str, Fact], *, is_local: bool) -> Span:
    """The decode worker's part: its stages one behind the other, and the wire beside them. A prefill worker says its
    own two stages itself."""
    offset_s = unix_offset_s()
    names = ("prefill_queue", "prefill_run", "migrate", "decode_queue", "decode_run")
    stages = [(name, stats.stages.get(name, 0.0)) for name in names]
    children = consecutive(trace.accepted_s + offset_s, stages)
    if not is_local:
        children = [span for span in children if not span.name.startswith("prefill_")]
    if trace.wire is not None:
        first_s, last_s = trace.wire
        wire: dict[str, Fact] = {"headrace.bytes": trace.nbytes}
        wire |= {"headrace.blocks": stats.migrated_blocks, "headrace.transport": stats.transport}
        children.append(Span("headrace.wire", first_s + offset_s, last_s + offset_s, wire))
    begin_s, error = trace.accepted_s + offset_s, str(facts.get("fault", ""))
    about = {f"headrace.{name}": value for name, value in facts.items()}
    return Span("headrace.decode", begin_s, now + offset_s, about, children, error)
