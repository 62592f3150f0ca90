"""Remembers a prefill worker's latest requests (`worker.journal`)."""

from collections.abc import Sequence
from typing import ClassVar

from engine.messages import FirstToken, Handoff, Landed, Offer, PrefillFailed, StartPrefill, Stop
from telemetry.flight import Fact
from telemetry.tracing import Span, consecutive, unix_offset_s
from transfer.handoff.commands import Emit, FromReader
from worker.journal import WorkerJournal


class PrefillJournal(WorkerJournal[Handoff, tuple[str, float]]):
    """Keeps the trace context and start of each handoff under way."""

    ENDS: ClassVar = frozenset({"stopped", "landed", "failed"})

    def heard(self, event: object, now: float) -> None:
        match event:
            case FromReader(_, StartPrefill(handoff=handoff, record=record) as start):
                attempt, tokens, have = handoff.attempt, len(record.tokens), start.have_tokens
                self._note(handoff.request, "asked for", now, attempt=attempt, tokens=tokens, have_tokens=have)
                if self._tracing is not None and record.traceparent:
                    self._trace(handoff, (record.traceparent, now))
            case FromReader(_, Landed(handoff, seq)):
                self._note(handoff.request, "landed", now, chunk=seq)
            case FromReader(_, Stop(handoff)):
                self._note(handoff.request, "stopped", now)
                self._traces.pop(handoff, None)

    def said(self, commands: Sequence[object], now: float) -> None:
        for command in commands:
            match command:
                case Emit(_, Offer(handoff, seq, blocks)):
                    self._note(handoff.request, "offered", now, chunk=seq, blocks=len(blocks))
                case Emit(_, FirstToken() as first):
                    self._first_token(first, now)
                case Emit(_, PrefillFailed(handoff, fault)):
                    self._note(handoff.request, "failed", now, why=fault.message)
                    self._traces.pop(handoff, None)

    def _first_token(self, first: FirstToken, now: float) -> None:
        facts: dict[str, Fact] = {"cached_tokens": first.cached_tokens, "chunks": first.chunks}
        facts |= {"queue_s": round(first.queue_s, 6), "run_s": round(first.run_s, 6)}
        self._note(first.handoff.request, "first token", now, **facts)
        traceparent, began_s = self._traces.pop(first.handoff, ("", now))
        if self._tracing is None or not traceparent:
            return
        offset_s = unix_offset_s()
        stages = [("prefill_queue", first.queue_s), ("prefill_run", first.run_s)]
        begin_s = min(began_s, now - first.queue_s - first.run_s) + offset_s
        about = {f"headrace.{name}": value for name, value in facts.items()}
        span = Span("headrace.prefill", begin_s, now + offset_s, about, consecutive(begin_s, stages))
        self._tracing.add(traceparent, span)
