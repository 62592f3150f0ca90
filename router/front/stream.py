"""The client's side of one sample: what it was given so far, and what is still to be read.

The hub fills it as output arrives; one reader at a time takes events from it (`router.front.samples`), and what it has
taken is let go. A resumable stream outlives its reader: it keeps what was given, packed (never more than `max_tokens`),
and the next reader says what it has. It gets the rest, once. A chat's is kept too, for its next turn.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import msgspec

from access.limits import TenantAdmission
from engine.messages import Fault
from engine.types import FinishReason, TokenLogprobs
from router.core.endings import LEFT
from router.core.events import Complete
from router.front.api import ApiError, Delta, Finished, Position, Started, invalid
from router.front.output import Output, OutputHistory
from router.front.timing import Timeline
from router.status.journal import RouterJournal
from router.status.observer import Observer
from router.status.traffic import RequestSummary

DEADLINE_SLACK_S = 0.01
"""gRPC ends a call at its deadline by itself, and may be so much ahead of us: its client did not leave, it was late."""


MAX_JOINED = 4096
"""Deltas that are joined at most: what waits for a client that reads again leaves as several."""


TAKEN_AT_ONCE = 64
"""Deltas that a history takes together before they are given again."""


class Signal(Protocol):
    """Tells the reader that there is something new."""

    def set(self) -> None: ...


class SampleStream:
    # Slots, here and along a token's way: where many streams take turns, none is in the processor's caches, and a token
    # costs as much as it touches of them. Mutable state: the deltas that no reader has taken yet, what was taken, how
    # the request ended, and whether it has had a reader.

    __slots__ = (
        "_admission", "_counted", "_deadline_s", "_deltas", "_finished", "_is_adopted", "_is_charged",
        "_is_read", "_journal", "_observer", "_timeline", "begun", "changed", "end", "history", "output", "started",
    )  # fmt: skip

    def __init__(
        self,
        started: Started,
        output: Output,
        timeline: Timeline,
        observer: Observer,
        changed: Signal,
        journal: RouterJournal,
        *,
        is_adopted: bool = False,
        deadline_s: float = float("inf"),
        admission: TenantAdmission | None = None,
        history: OutputHistory | None = None,
    ) -> None:
        """`admission` is charged with the output, and told of the end. `history` keeps what was taken; without it the
        stream is read once."""
        self.started = started
        self.output = output
        self._deltas: list[Delta] = []
        self.history = history
        self.end: Complete | ApiError | None = None
        self.begun = is_adopted
        self._is_read = False
        self.changed = changed
        self._finished: Finished | None = None
        self._timeline = timeline
        self._observer = observer
        self._journal = journal
        self._is_adopted = is_adopted
        self._deadline_s = deadline_s
        self._counted = False
        self._admission = admission
        self._is_charged = admission is not None and admission.is_limited

    @property
    def ids(self) -> list[int]:
        """All output, as far as it is kept."""
        taken = self.history.ids if self.history is not None else []
        return taken + [token for delta in self._deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        taken = self.history.text if self.history is not None else ""
        return taken + "".join(delta.text for delta in self._deltas)

    @property
    def untaken(self) -> int:
        """How many deltas have come that no reader has taken."""
        return len(self._deltas)

    # ---- what the hub tells

    def offered(self, now: float) -> None:
        self._timeline.offered(now)

    def accepted(self, now: float) -> None:
        self._timeline.accepted(now)
        self.begun = True
        self.changed.set()

    def interrupted(self, now: float) -> None:
        self._timeline.interrupted(now)

    def moved(self, stages: dict[str, float], now: float) -> None:
        self._timeline.moved(stages, now)

    def tokens(
        self,
        ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> int | None:
        if self._is_charged and self._admission is not None:
            self._admission.spend(len(ids))
        text, kept = self.output.push(ids)
        if kept:
            self._timeline.tokens(len(kept), now)
            if logprobs or prompt_logprobs:
                told = tuple(logprobs[: len(kept)])
                self._deltas.append(Delta(text, tuple(kept), 0, told, tuple(prompt_logprobs)))
            else:
                self._deltas.append(Delta(text, tuple(kept)))
            self.changed.set()
        stopped = self.output.stopped
        return stopped.tokens_kept if stopped is not None else None

    def replayed(self, ids: list[int], now: float, logprobs: Sequence[TokenLogprobs] = ()) -> int | None:
        if self._is_charged and self._admission is not None:
            self._admission.spend(len(ids))
        texts = self.output.push_each(ids)
        ids, told = ids[: len(texts)], logprobs[: len(texts)]
        if ids:
            self._timeline.tokens(len(ids), now)
            assert self.history is not None, "what is taken over can be resumed"
            self.history.add_each(texts, ids, told)
            self.changed.set()
        stopped = self.output.stopped
        return stopped.tokens_kept if stopped is not None else None

    def completed(self, end: Complete, now: float) -> None:
        self._timeline.ended_s = now
        if rest := self.output.flush():
            self._deltas.append(Delta(rest, ()))
        self.end = end
        self._let_go()
        self.changed.set()

    def failed(self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float) -> None:
        self._count(outcome, now, {})
        if outcome is FinishReason.REJECTED and not self.begun and self._admission is not None:
            self._admission.sample_refused(self.started.prompt_tokens)
        self.end = ApiError(fault.code, fault.message, fault.field, retry_after_s)
        self._let_go()
        self.changed.set()

    def replaced(self) -> None:
        """Note that another stream is made for its sample: a worker has a later placement of it."""
        self._let_go()

    def left(self, now: float, why: ApiError | None = None) -> None:
        """Note that its client is gone for good, whether or not it saw the end. A reader that still waits is told
        `why`."""
        # 1. It is complete. An adopted one without a reader was read from the earlier router, which has counted it.
        if isinstance(self.end, Complete):
            if self._is_adopted and not self._is_read:
                return
            self.account(self.end, now)
        # 2. It was still running. 3. It has failed, and was counted then.
        elif self.end is None:
            self.end = why or ApiError(LEFT.code, LEFT.message)
            self._let_go()
            self.changed.set()
        late = now >= self._deadline_s - DEADLINE_SLACK_S
        self._count(FinishReason.DEADLINE if late else FinishReason.CANCELLED, now, {})

    # ---- what a reader takes

    def read(self, at: Position | None = None) -> "Reader":
        """Begin, or go on behind what the client has. Raises ApiError for a position that it cannot have reached; of
        an adopted stream, the reader does so at the end, as an earlier router may have given more than has come here
        yet."""
        reader = Reader(self, at)
        if at is not None:
            reader.is_ready()
        self._is_read = True
        return reader

    def is_behind(self, at: Position) -> bool:
        """Return whether a client may have more than has come here, and it may still come."""
        if not self._is_adopted or self.end is not None:
            return False
        size = self._size()
        return at.next_index > size.next_index or at.text_bytes > size.text_bytes

    def checked(self, at: Position) -> OutputHistory:
        """Return the history that is given again from a position on. Raises ApiError if there is no such position, or
        none any more."""
        size = self._size()
        is_beyond = at.next_index > size.next_index or at.text_bytes > size.text_bytes
        if self._is_adopted and is_beyond and isinstance(self.end, ApiError):
            raise self.end
        if not 0 <= at.next_index <= size.next_index:
            raise invalid("next_index", f"must lie in 0 to {size.next_index}")
        if not 0 <= at.text_bytes <= size.text_bytes:
            raise invalid("text_bytes", f"must lie in 0 to {size.text_bytes}")
        if at.text_bytes < size.text_bytes and self._text_byte(at.text_bytes) & 0xC0 == 0x80:
            raise invalid("text_bytes", "lies inside a character")
        if self.history is None or not self.history.keeps_events:
            raise AssertionError("a stream that keeps no events is read again")
        return self.history

    def account(self, end: Complete, now: float) -> Finished:
        """Return the account of a request that ended well; the same however often it is asked for."""
        if self._finished is None:
            stopped = self.output.stopped
            reason = FinishReason.STOP if stopped is not None else end.reason
            stats = msgspec.structs.replace(end.stats, prompt_tokens=self.started.prompt_tokens)
            finished = self._timeline.finished(reason, stats, stopped.matched if stopped is not None else "", now)
            score = end.beams[0].score if end.beams else None
            counted = self.output.reasoning_tokens
            self._finished = msgspec.structs.replace(finished, beam_score=score, reasoning_tokens=counted)
            self._count(reason, now, self._finished.stats.stages)
        return self._finished

    def join(self, count: int) -> Delta:
        """Return the next `count` deltas, at least one, as one. It takes their place, so that whoever reads the stream
        again gets what was given before."""
        deltas = self._deltas
        if count > 1:
            count = min(count, MAX_JOINED)
            parts = deltas[:count]
            ids = tuple(chain.from_iterable([part.token_ids for part in parts]))
            logprobs = parts[0].logprobs and tuple(chain.from_iterable([part.logprobs for part in parts]))
            text, prompt = "".join([part.text for part in parts]), parts[0].prompt_logprobs
            deltas[:count] = [Delta(text, ids, logprobs=logprobs, prompt_logprobs=prompt)]
        return deltas[0]

    def taken(self, count: int = 1) -> None:
        """Note that the reader has the next `count` deltas."""
        deltas, history = self._deltas, self.history
        if history is not None:
            history.add(deltas[:count])
        del deltas[:count]

    def _size(self) -> Position:
        """How far all output that is kept reaches."""
        taken, deltas = self.history.size if self.history is not None else Position(), self._deltas
        tokens = sum([len(delta.token_ids) for delta in deltas])
        text_bytes = len("".join([delta.text for delta in deltas]).encode())
        return Position(taken.next_index + tokens, taken.text_bytes + text_bytes)

    def _text_byte(self, at: int) -> int:
        """Return a byte of all text that is kept, in UTF-8."""
        if self.history is not None:
            taken = self.history.size.text_bytes
            if at < taken:
                return self.history.text_byte(at)
            at -= taken
        return "".join([delta.text for delta in self._deltas]).encode()[at]

    def _let_go(self) -> None:
        """Give the tenant's place back, once."""
        if self._admission is not None:
            self._admission.sample_ended()
            self._admission = None

    def _count(self, outcome: FinishReason, now: float, stages: dict[str, float]) -> None:
        if self._counted:
            return
        self._counted = True
        line = self._timeline
        first_s = line.first_token_s
        ttft_s = None if first_s is None else first_s - line.received_s
        e2e_s = now - line.received_s
        self._observer.request(outcome.value, ttft_s, line.gaps_s, e2e_s, stages)
        summary = RequestSummary(
            request=self.started.request_id,
            outcome=outcome,
            at_s=now,
            e2e_s=e2e_s,
            ttft_s=ttft_s,
            gaps_s=line.gaps_s,
            stages=stages,
            stats=self._finished.stats if self._finished is not None else None,
        )
        self._journal.ended(summary)
        line.gaps_s = array("d")


class Reader:
    """Takes a stream's events in order. Only the newest reader of a stream gets any.

    `position` is what its client has, and nothing is given before the stream is there; None where it is the first.
    """

    # Mutable state: whether its client's position is reached; the next event of the history that is given again, and
    # their end, which counts deltas of the stream that the history is yet to take; and how many deltas behind those may
    # be given.

    __slots__ = ("_again", "_again_end", "_is_first", "_is_reached", "_position", "_stream", "_until")

    def __init__(self, stream: SampleStream, position: Position | None = None) -> None:
        self._stream = stream
        self._is_first = position is None
        self._position = position or Position()
        self._is_reached = position is None
        self._again = self._again_end = self._until = 0

    def is_ready(self) -> bool:
        """Return whether the client can be told that its request has begun, or goes on. Raises ApiError for one that
        failed before, and for a position that there is not."""
        stream = self._stream
        if not self._is_reached and not stream.is_behind(self._position):
            history = stream.checked(self._position)
            self._again, self._again_end = history.first_behind(self._position), len(history) + stream.untaken
            self._until, self._is_reached = 0, True
        if self._is_first and not stream.begun:
            if isinstance(stream.end, ApiError):
                raise stream.end
            return False
        return self._is_reached

    def look(self) -> None:
        """It is the reader's turn: what has come until now may be polled."""
        self._until = self._stream.untaken - self._covered

    def deliver(self, take: Callable[[Delta], bool]) -> bool:
        """Give new output to `take`, if it takes it; return whether nothing is left to read."""
        stream = self._stream
        if not self._is_reached or self._again < self._again_end:
            return False
        deltas = stream._deltas
        while deltas:
            if not take(deltas[0] if len(deltas) == 1 else stream.join(len(deltas))):
                return False
            stream.taken()
        return stream.end is None

    @property
    def _covered(self) -> int:
        """How many of the stream's deltas are given again."""
        history = self._stream.history
        return max(0, self._again_end - len(history)) if history is not None else 0

    def _next_again(self) -> Delta | None:
        """Return the next event that is given again. What the stream has of them is taken from it piece by piece, and
        only now: another reader had it until this one's turn."""
        history, at = self._stream.history, self._position
        while history is not None and self._again < self._again_end:
            if self._again == len(history):
                self._stream.taken(min(self._covered, TAKEN_AT_ONCE))
                self._again = max(self._again, history.first_behind(at))
                continue
            delta = history.event(self._again, at)
            self._again += 1
            if delta.text or delta.token_ids:
                return delta
        return None

    def poll(self) -> Delta | Complete | None:
        """Take the next event, if there is one; the last is Complete. Raises ApiError for a request that failed. Output
        that had come by the last turn is one event."""
        stream = self._stream
        if not self.is_ready():
            return None
        if self._again < self._again_end and (delta := self._next_again()) is not None:
            return delta
        if self._until:
            count = stream.untaken
            delta = stream.join(self._until)
            stream.taken()
            self._until -= count - stream.untaken
            return delta
        if stream.untaken:
            return None
        if isinstance(stream.end, ApiError):
            raise stream.end
        return stream.end
