"""What both schedulers decide in the same way: is a record sound, who gets the step's tokens, when is a request over,
and where did its time go. Pure: no torch, no clock; time is an argument."""

import math
from collections.abc import Sequence

from engine.messages import Fault
from engine.types import BeamParams, FieldError, FinishReason, RequestRecord, TooLongError

STAGES = (
    "admit",
    "route",
    "reserve",
    "prefill_queue",
    "prefill_run",
    "migrate",
    "decode_queue",
    "decode_run",
    "stream_out",
)
"""The nine stages of a request's life, in order. What none of them covers is reported as `unattributed`."""

SAMPLING_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""What a sampling value may be, ends included: at the router's border and at the worker's."""


MAX_PRIORITY = 100
MAX_BEAM_WIDTH = 16
LENGTH_PENALTIES = (-10.0, 10.0)


def refusal(record: RequestRecord, vocab: int, context_tokens: int) -> Fault | None:
    """As `check_record`; what to answer instead of raising."""
    try:
        check_record(record, vocab, context_tokens)
    except TooLongError as error:
        return Fault("OUT_OF_RANGE", str(error), error.field)
    except FieldError as error:
        return Fault("INVALID_ARGUMENT", str(error), error.field)
    return None


def check_record(record: RequestRecord, vocab: int, context_tokens: int) -> None:
    """The worker's border: whatever a router let through, no record may upset a step.

    Raises FieldError or TooLongError, naming the field.
    """
    params = record.sampling
    if not record.tokens:
        raise FieldError("prompt", "must not be empty")
    if not 1 <= record.prompt_tokens <= len(record.tokens):
        raise FieldError("prompt_tokens", f"must lie in 1 .. {len(record.tokens)}")
    if min(record.tokens) < 0 or max(record.tokens) >= vocab:
        raise FieldError("token_ids", f"must lie in 0 .. {vocab - 1}")
    if record.max_tokens < 1:
        raise FieldError("max_tokens", "must be at least 1")
    if len(record.tokens) >= record.prompt_tokens + record.max_tokens:
        raise FieldError("max_tokens", "is already used up by the tokens of this record")
    if record.prompt_tokens + record.max_tokens > context_tokens:
        raise TooLongError(
            "max_tokens",
            f"{record.prompt_tokens} prompt tokens and {record.max_tokens} output tokens exceed the "
            f"context of {context_tokens}",
        )
    if any(not 0 <= token < vocab for token in record.stop_token_ids):
        raise FieldError("stop_token_ids", f"must lie in 0 .. {vocab - 1}")
    if not 0 <= record.seed < 1 << 64:
        raise FieldError("seed", "must be an unsigned 64-bit number")
    if not 0 <= record.sample_index < 1 << 32:
        raise FieldError("sample_index", "must be an unsigned 32-bit number")
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(params, name)
        if not math.isfinite(value) or not low <= value <= high:
            raise FieldError(name, f"must be a number in {low:g} .. {high:g}")
    if params.top_k < 0:
        raise FieldError("top_k", "must not be negative")
    if not -MAX_PRIORITY <= record.priority <= MAX_PRIORITY:
        raise FieldError("priority", f"must lie in -{MAX_PRIORITY} .. {MAX_PRIORITY}")
    if record.beams is not None:
        check_beams(record.beams)


def check_beams(beams: BeamParams) -> None:
    """Raise FieldError unless a beam search can be made of it."""
    if not 1 <= beams.width <= MAX_BEAM_WIDTH:
        raise FieldError("beam_width", f"must lie in 1 .. {MAX_BEAM_WIDTH}")
    if not 1 <= beams.answers <= beams.width:
        raise FieldError("n", f"must not exceed beam_width, which is {beams.width}")
    low, high = LENGTH_PENALTIES
    if not low <= beams.length_penalty <= high:
        raise FieldError("length_penalty", f"must be a number in {low:g} .. {high:g}")


def finish_reason(
    record: RequestRecord, output_tokens: int, token: int, stop_ids: frozenset[int]
) -> FinishReason | None:
    """Is the request over with `token` as its `output_tokens`-th (1-based) output token?"""
    if output_tokens > record.min_tokens:
        if token in record.stop_token_ids:
            return FinishReason.STOP
        if not record.ignore_eos and token in stop_ids:
            return FinishReason.STOP
    return FinishReason.LENGTH if output_tokens >= record.max_tokens else None


def end_tokens(record: RequestRecord, stop_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end its text."""
    return frozenset(record.stop_token_ids) | (frozenset() if record.ignore_eos else stop_ids)


def banned_tokens(record: RequestRecord, output_tokens: int, stop_ids: frozenset[int]) -> tuple[int, ...]:
    """Which ids may not follow `output_tokens` output tokens: those that would end the text before `min_tokens`."""
    if output_tokens >= record.min_tokens:
        return ()
    return tuple(sorted(end_tokens(record, stop_ids)))


def share_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Divide one step's tokens among prompts in the order of their priority; `remaining[i]` > 0 are still to compute.

    The first in line runs at full speed, except that a much shorter one behind it takes up to half of the step: so a
    short prompt waits for no more than one chunk of a long one, and a long one never loses more than half its speed.
    What the first cannot use goes down the line.
    """
    shares = [0] * len(remaining)
    if not remaining:
        return shares
    shortest = min(range(len(remaining)), key=lambda at: (remaining[at], at))
    if 2 * remaining[shortest] <= remaining[0]:
        shares[shortest] = min(remaining[shortest], budget // 2)
        budget -= shares[shortest]
    for at, left in enumerate(remaining):
        more = min(left - shares[at], budget)
        shares[at] += more
        budget -= more
    return shares


class StageClock:
    """Consecutive intervals of one request on one process's clock: at any time it is in exactly one stage."""

    __slots__ = ("_since", "_stage", "seconds")

    def __init__(self, stage: str, now: float) -> None:
        self.seconds: dict[str, float] = {}
        self._stage = stage
        self._since = now

    @property
    def stage(self) -> str:
        return self._stage

    def enter(self, stage: str, now: float) -> None:
        """The current stage ends and `stage` begins. Entering it again adds to what it has."""
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def resume(self, stage: str, now: float) -> None:
        """It goes on after all, in `stage`: the time since it was taken to be over belongs to none."""
        self._stage, self._since = stage, now

    def split(self, queue_s: float, run_s: float, now: float) -> None:
        """End a wait of which the other side says that `queue_s` and `run_s` went into its prefill: the rest is what
        the migration did not hide. The durations are cut to the interval measured here."""
        waited = now - self._since
        run_s = min(run_s, waited)
        queue_s = min(queue_s, waited - run_s)
        for stage, seconds in (
            ("prefill_queue", queue_s),
            ("prefill_run", run_s),
            ("migrate", waited - run_s - queue_s),
        ):
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self._since = now
