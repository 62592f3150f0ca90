"""What becomes of the tokens that are drawn: sent on, searched on, or the last of their request. Pure.

A prefill worker draws a request's first token; all others are drawn by steps here. A request that is prefilled here is
READY with its first one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.beams import Beams
from decode_worker.scheduler.departures import Departures
from decode_worker.scheduler.events import Tell
from decode_worker.scheduler.filling import Filling
from decode_worker.scheduler.handoffs import Handoffs
from decode_worker.scheduler.outcomes import Finished, Result
from decode_worker.scheduler.request import Request, RequestState
from engine.messages import FirstToken, Tokens
from engine.plan import finish_reason
from engine.step import Candidates, Drawn, StepPlan


@dataclass(slots=True, eq=False, repr=False)
class Drawing:
    """Mutable state: what is counted, until the shell has taken it; all else that it changes belongs to the parts that
    it is given. Each result is to be acted on before the next is asked for."""

    stop_ids: frozenset[int]
    batch: Batch
    beams: Beams
    handoffs: Handoffs
    departures: Departures
    """Those that left the batch with a row still to be computed."""
    filling: Filling
    """Makes ready who has its prompt and its first token."""
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens computed here."""
    recomputed_tokens: int = 0
    """Prompt tokens computed here because a worker that had computed them, or was to, is lost."""

    def first(self, message: FirstToken, now: float) -> Iterator[Result]:
        """A prefill worker has named it."""
        request = self.handoffs.first_token(message)
        if request is None:
            return
        if request.output_tokens == 0:
            request.prefill_cached_tokens = message.cached_tokens
        if request.arrived:
            request.known = len(request.tokens)
        if request.record.beams is None:
            yield from self.drawn(request, message.token)
        if request.arrived and request.state is not RequestState.ENDING:
            self.filling.admit(request, now)

    def complete(self, plan: StepPlan, drawn: Sequence[Drawn], now: float) -> Iterator[Result]:
        """The step has run."""
        for request, row, token in self.batch.complete(plan, drawn):
            is_local = request.state is RequestState.LOCAL
            if is_local and request.is_recovering:
                self.recomputed_tokens += row.end - row.start
            elif is_local:
                self.prefilled_tokens += row.end - row.start
            if token is None:
                continue
            if not isinstance(token, int):
                yield from self._searched(request, token)
                continue
            if request.state is RequestState.DEPARTED:
                yield from self.departures.complete(request, token, now)
                continue
            if request.record.beams is None:
                yield from self.drawn(request, token)
            if is_local and request.state is RequestState.LOCAL:
                self.batch.remove(request)
                self.filling.admit(request, now)

    def _searched(self, request: Request, candidates: Candidates) -> Iterator[Result]:
        """What may follow one hypothesis is known; the last one's may end the search."""
        self.generated_tokens += 1
        answers = self.beams.complete(request, candidates)
        if answers is not None:
            kept = sum(len(beam.ids) for beam in answers)
            yield Finished(request, answers[0].reason, kept, tuple(answers))

    def drawn(self, request: Request, token: int) -> Iterator[Result]:
        """The next token of a request is known: send it on, and see whether it is the last."""
        index = request.output_tokens
        request.tokens.append(token)
        self.generated_tokens += 1
        yield Tell(request.link, Tokens(request.record.request, request.placement, index, [token]))
        reason = finish_reason(request.record, request.output_tokens, token, self.stop_ids)
        if reason is not None:
            yield Finished(request, reason)
