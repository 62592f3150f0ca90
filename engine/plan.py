"""Decisions that both schedulers make alike: whether a record is sound, which requests get the step's tokens, when a
request is over, what a step costs by now, and where a request's time went. Pure: no torch, no clock; time is an
argument."""

from collections.abc import Callable, Collection, Iterable, Sequence

from engine.constraints.text import check_constraint
from engine.messages import Fault
from engine.step import Row
from engine.types import BeamParams, BlockId, Constraint, FieldError, FinishReason, RequestRecord, TooLongError

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
"""The range of each sampling value, ends included: at the router's border and at the worker's."""

MAX_PRIORITY = 100
MAX_BEAM_WIDTH = 16
LENGTH_PENALTIES = (-10.0, 10.0)
LOGIT_BIASES = (-100.0, 100.0)
MAX_LOGPROBS = 20
"""Alternatives beside a token."""
MAX_OUTPUT_VALUES = 262_144
"""Log probabilities of one answer, all samples together: its tokens, times the alternatives and one. A worker, or a
router, that goes on with an answer is told all of them in one message, which has a limit (`worker/rpc.py`)."""
MAX_PROMPT_VALUES = 65_536
"""Log probabilities of one prompt: its tokens, times the alternatives and one. They travel as one message."""
TOO_MANY_VALUES = "asks for {} values (prompt tokens times alternatives and one); at most {} are given"
TOO_LONG_TO_TELL = "asks for {} values (max_tokens times samples times alternatives and one); at most {} are given"


CompiledConstraint = Callable[[Constraint], bool]
"""Returns True when a worker can hold answers to this constraint, or has found out that it never can; else it has begun
to compile it, and wakes the engine when that is over."""


def refusal(
    record: RequestRecord,
    vocab: int,
    context_tokens: int,
    compiled: CompiledConstraint | None = None,
    adapters: Collection[str] = (),
) -> Fault | None:
    """Return what to answer where `check_record` raises, where a record has an adapter that is not among `adapters`,
    and where it has a constraint that nobody here could hold it to. One that is sound begins to be `compiled`."""
    try:
        check_record(record, vocab, context_tokens)
    except TooLongError as error:
        return Fault("OUT_OF_RANGE", str(error), error.field)
    except FieldError as error:
        return Fault("INVALID_ARGUMENT", str(error), error.field)
    if record.adapter and record.adapter not in adapters:
        return Fault("NOT_FOUND", f"adapter: this worker does not have {record.adapter}", "adapter")
    if record.constraint is not None:
        if compiled is None:
            return Fault("INVALID_ARGUMENT", "constraint: this worker cannot hold answers to one", "constraint")
        compiled(record.constraint)
    return None


def is_compiled(record: RequestRecord, compiled: CompiledConstraint | None) -> bool:
    """Return True unless the record's constraint is still being compiled."""
    return record.constraint is None or compiled is None or compiled(record.constraint)


def check_record(record: RequestRecord, vocab: int, context_tokens: int) -> None:
    """The worker's border: whatever a router let through, no record may upset a step. Raises FieldError or
    TooLongError, naming the field."""
    prompt, output, held = record.prompt_tokens, record.max_tokens, len(record.tokens)
    _require(held > 0, "prompt", "must not be empty")
    _require(1 <= prompt <= held, "prompt_tokens", "must lie in 1 .. {}", held)
    _require(min(record.tokens) >= 0 and max(record.tokens) < vocab, "token_ids", "must lie in 0 .. {}", vocab - 1)
    _require(output >= 1, "max_tokens", "must be at least 1")
    _require(held < prompt + output, "max_tokens", "is already used up by the tokens of this record")
    if prompt + output > context_tokens:
        what = f"{prompt} prompt tokens and {output} output tokens exceed the context of {context_tokens}"
        raise TooLongError("max_tokens", what)
    are_ids = all(0 <= token < vocab for token in record.stop_token_ids)
    _require(are_ids, "stop_token_ids", "must lie in 0 .. {}", vocab - 1)
    _require(0 <= record.seed < 1 << 64, "seed", "must be an unsigned 64-bit number")
    _require(0 <= record.sample_index < 1 << 32, "sample_index", "must be an unsigned 32-bit number")
    for name, limits in SAMPLING_RANGES.items():
        _require_number(name, getattr(record.sampling, name), limits)
    _require(record.sampling.top_k >= 0, "top_k", "must not be negative")
    is_known = -MAX_PRIORITY <= record.priority <= MAX_PRIORITY
    _require(is_known, "priority", "must lie in -{0} .. {0}", MAX_PRIORITY)
    for field in ("logprobs", "prompt_logprobs"):
        wanted = getattr(record, field)
        _require(wanted is None or 0 <= wanted <= MAX_LOGPROBS, field, "must lie in 0 .. {}", MAX_LOGPROBS)
    if record.logprobs is not None:
        values = record.max_tokens * (record.logprobs + 1)
        _require(values <= MAX_OUTPUT_VALUES, "logprobs", TOO_LONG_TO_TELL, values, MAX_OUTPUT_VALUES)
    if record.prompt_logprobs is not None:
        values = prompt * (record.prompt_logprobs + 1)
        _require(values <= MAX_PROMPT_VALUES, "prompt_logprobs", TOO_MANY_VALUES, values, MAX_PROMPT_VALUES)
    are_ids = all(0 <= token < vocab for token, _ in record.logit_bias)
    _require(are_ids, "logit_bias", "must be of tokens in 0 .. {}", vocab - 1)
    for _, amount in record.logit_bias:
        _require_number("logit_bias", amount, LOGIT_BIASES)
    are_ids = all(0 <= token < vocab for token in record.allowed_token_ids)
    _require(are_ids, "allowed_token_ids", "must lie in 0 .. {}", vocab - 1)
    if record.beams is not None:
        check_beams(record.beams)
        for field in ("logit_bias", "allowed_token_ids"):
            _require(not getattr(record, field), field, "is not allowed with beam_width")
        for field in ("logprobs", "prompt_logprobs"):
            _require(getattr(record, field) is None, field, "is not allowed with beam_width")
    if record.constraint is not None:
        check_constraint(record.constraint)
        _require(record.beams is None, "constraint", "is not allowed with beam_width")
        _require(not record.ignore_eos, "ignore_eos", "is not allowed with a constraint, which ends the answer")


def check_beams(beams: BeamParams) -> None:
    """Raise FieldError unless a beam search can be made of it."""
    _require(1 <= beams.width <= MAX_BEAM_WIDTH, "beam_width", "must lie in 1 .. {}", MAX_BEAM_WIDTH)
    _require(1 <= beams.answers <= beams.width, "n", "must not exceed beam_width, which is {}", beams.width)
    _require_number("length_penalty", beams.length_penalty, LENGTH_PENALTIES)


def _require(is_sound: bool, field: str, allowed: str, *limits: float) -> None:
    if not is_sound:
        raise FieldError(field, allowed.format(*limits))


def _require_number(field: str, value: float, limits: tuple[float, float]) -> None:
    low, high = limits
    _require(low <= value <= high, field, "must be a number in {:g} .. {:g}", low, high)  # NaN lies in no range


def finish_reason(
    record: RequestRecord, output_tokens: int, token: int, stop_ids: frozenset[int]
) -> FinishReason | None:
    """Return why the request is over with `token` as its `output_tokens`-th (1-based) output token, if it is. Where
    there is a constraint, an end before `min_tokens` is drawn only if nothing else may follow."""
    is_end = token in record.stop_token_ids or (not record.ignore_eos and token in stop_ids)
    if is_end and (output_tokens > record.min_tokens or record.constraint is not None):
        return FinishReason.STOP
    return FinishReason.LENGTH if output_tokens >= record.max_tokens else None


def end_tokens(record: RequestRecord, stop_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end its text."""
    return frozenset(record.stop_token_ids) | (frozenset() if record.ignore_eos else stop_ids)


def banned_tokens(record: RequestRecord, output_tokens: int, stop_ids: frozenset[int]) -> tuple[int, ...]:
    """The ids that may not follow `output_tokens` output tokens: they would end the text before `min_tokens`."""
    if output_tokens >= record.min_tokens:
        return ()
    ends = end_tokens(record, stop_ids)
    if record.allowed_token_ids and ends.issuperset(record.allowed_token_ids):
        return ()  # nothing else may be drawn
    return tuple(sorted(ends))


def row_of(
    record: RequestRecord,
    tokens: Sequence[int],
    start: int,
    end: int,
    blocks: Sequence[BlockId],
    stop_ids: frozenset[int],
    candidates: int = 0,
    follows: bool = False,
    windows: tuple[Sequence[BlockId], ...] = (),
) -> Row:
    """A sequence's part of a step, which draws where it computes the last of `tokens`, prompt and output so far, or the
    token after them, if it `follows` the step that draws it. `windows`: `Row.windows`."""
    length = len(tokens) + follows
    banned = banned_tokens(record, length - record.prompt_tokens, stop_ids)
    scored = 0 if record.prompt_logprobs is None else max(0, min(end, record.prompt_tokens - 1) - start)
    return Row(
        *(record.request, record, tokens, start, end, blocks, end == length, banned, candidates, follows, scored),
        windows=windows,
    )


MUCH_SHORTER = 2
"""How many times as long a prompt is at least that a shorter one goes before."""


def saving_most(runs: Iterable[tuple[int, float]], compute_s: float) -> int:
    """Return how many of the first blocks to load, where computing one takes `compute_s` seconds: as many as save most.
    Each of `runs` has a number of blocks, and the seconds that each of these takes. Workers and routers go by it."""
    best, best_saved_s, count, saved_s = 0, 0.0, 0, 0.0
    for blocks, block_s in runs:
        count += blocks
        saved_s += blocks * (compute_s - block_s)
        if saved_s > best_saved_s:
            best, best_saved_s = count, saved_s
    return best


def share_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Divide one step's tokens among prompts in the order of their priority; `remaining[i]` > 0 are still to compute.

    The first in line runs at full speed, except that much shorter ones behind it, the shortest first, take up to half
    of the step together: so a short prompt, and a crowd of them that fits, waits for no more than one chunk of a long
    one, and a long one never loses more than half its speed. What the first cannot use goes down the line.
    """
    shares = [0] * len(remaining)
    for_shorter = budget // 2
    for left, at in sorted((left, at) for at, left in enumerate(remaining) if MUCH_SHORTER * left <= remaining[0]):
        shares[at] = min(left, for_shorter)
        for_shorter -= shares[at]
    budget -= sum(shares)
    for at, left in enumerate(remaining):
        more = min(left - shares[at], budget)
        shares[at] += more
        budget -= more
    return shares


NEWEST = 0.2
"""Share of the newest measurement in a running mean."""


def mean(known: float, latest: float) -> float:
    """The running mean after the newest measurement; `known` 0.0: there was none."""
    return latest if known == 0.0 else known + NEWEST * (latest - known)


class TokenSpeed:
    """The time of a prompt token, as measured, the latest steps counting most; by token, since a step of a few tokens
    says little of what many take. Mutable state: seconds and tokens, both fading."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def measured(self, seconds: float, tokens: int) -> None:
        """Take in that `tokens` tokens, at least 1, took so many seconds."""
        self._seconds = (1.0 - NEWEST) * self._seconds + seconds
        self._tokens = (1.0 - NEWEST) * self._tokens + tokens

    @property
    def s_per_token(self) -> float:
        """0.0 until measured."""
        return self._seconds / self._tokens if self._tokens else 0.0


class StageClock:
    """Consecutive intervals of one request on one process's clock: at any time it is in exactly one stage."""

    __slots__ = ("_since", "seconds", "stage")

    def __init__(self, stage: str, now: float) -> None:
        self.seconds: dict[str, float] = {}
        self.resume(stage, now)

    def enter(self, stage: str, now: float) -> None:
        """The current stage ends and `stage` begins. Entering it again adds to what it has."""
        self._add(self.stage, now - self._since)
        self.resume(stage, now)

    def resume(self, stage: str, now: float) -> None:
        """Go on in `stage` after all: the time since the request was taken to be over belongs to no stage."""
        self.stage, self._since = stage, now

    def split(self, queue_s: float, run_s: float, now: float) -> None:
        """End a wait of which the other side says that `queue_s` and `run_s` went into its prefill: the rest is what
        the migration did not hide. The durations are cut to the interval measured here."""
        waited = now - self._since
        run_s = min(run_s, waited)
        queue_s = min(queue_s, waited - run_s)
        self._add("prefill_queue", queue_s)
        self._add("prefill_run", run_s)
        self._add("migrate", waited - run_s - queue_s)
        self._since = now

    def _add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
