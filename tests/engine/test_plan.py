"""What both schedulers decide alike: sound records, the end of a request, the shares of a step, the stages of its time.
Each scheduler's own tests try it too, and tests/router/front/test_intake.py the border before this one."""

import pytest

from engine.messages import Fault
from engine.plan import (
    MAX_BEAM_WIDTH,
    NEWEST,
    StageClock,
    TokenSpeed,
    banned_tokens,
    check_record,
    finish_reason,
    mean,
    refusal,
    row_of,
    share_budget,
)
from engine.types import (
    BeamParams,
    BlockId,
    FieldError,
    FinishReason,
    RequestId,
    RequestRecord,
    SamplingParams,
    TooLongError,
)


def _record(**changes: object) -> RequestRecord:
    fields = {
        "request": RequestId("r"),
        "tokens": [1, 2, 3],
        "prompt_tokens": 3,
        "max_tokens": 4,
        "seed": 5,
    }
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": [], "prompt_tokens": 0}, "prompt"),
        ({"tokens": [1, 2, 99]}, "token_ids"),
        ({"tokens": [1, -2, 3]}, "token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 62}, "max_tokens"),
        ({"prompt_tokens": 1, "max_tokens": 2}, "max_tokens"),
        ({"prompt_tokens": 4}, "prompt_tokens"),
        ({"stop_token_ids": (99,)}, "stop_token_ids"),
        ({"seed": 1 << 64}, "seed"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(top_k=-1)}, "top_k"),
        ({"sampling": SamplingParams(repetition_penalty=float("inf"))}, "repetition_penalty"),
    ],
)
def test_a_bad_record_stops_at_the_border(changes: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        check_record(_record(**changes), vocab=64, context_tokens=64)
    assert caught.value.field == field
    assert isinstance(caught.value, TooLongError) == (changes.get("max_tokens") == 62)


def test_a_good_record_passes_the_border() -> None:
    check_record(_record(), vocab=64, context_tokens=64)


def test_finish_rules() -> None:
    stops = frozenset({9})
    assert finish_reason(_record(), 1, 9, stops) is FinishReason.STOP
    assert finish_reason(_record(min_tokens=1), 1, 9, stops) is None
    assert finish_reason(_record(min_tokens=1), 2, 9, stops) is FinishReason.STOP
    assert finish_reason(_record(ignore_eos=True), 1, 9, stops) is None
    assert finish_reason(_record(ignore_eos=True, stop_token_ids=(9,)), 1, 9, stops) is FinishReason.STOP
    assert finish_reason(_record(), 4, 8, stops) is FinishReason.LENGTH
    assert finish_reason(_record(), 3, 8, stops) is None


@pytest.mark.parametrize(
    ("remaining", "budget", "shares"),
    [
        ([], 128, []),
        ([2000], 128, [128]),
        ([2000, 50], 128, [78, 50]),
        ([2000, 500], 128, [64, 64]),
        ([256, 256, 256], 128, [128, 0, 0]),
        ([50, 2000], 128, [50, 78]),
        ([30, 40, 100], 128, [30, 40, 58]),
        ([2000, 20, 30], 128, [78, 20, 30]),
        ([2000, 30, 40, 20], 128, [64, 30, 14, 20]),
        ([2000, 50, 50, 1500], 128, [64, 50, 14, 0]),
        ([100, 50, 51], 128, [78, 50, 0]),
        ([90, 51, 30], 128, [90, 8, 30]),
        ([40, 20, 20, 20], 25, [13, 12, 0, 0]),
        ([1, 1], 1, [1, 0]),
    ],
)
def test_budget_is_shared(remaining: list[int], budget: int, shares: list[int]) -> None:
    assert share_budget(remaining, budget) == shares


def test_stages_are_consecutive() -> None:
    clock = StageClock("reserve", 10.0)
    clock.enter("prefill", 11.0)
    clock.split(queue_s=0.5, run_s=2.0, now=14.0)
    clock.enter("decode_queue", 14.0)
    clock.enter("decode_run", 15.0)
    clock.enter("done", 18.0)
    clock.seconds.pop("prefill", None)
    assert clock.seconds == {
        "reserve": 1.0,
        "prefill_queue": 0.5,
        "prefill_run": 2.0,
        "migrate": 0.5,
        "decode_queue": 1.0,
        "decode_run": 3.0,
    }


def test_a_peer_that_claims_more_than_passed_is_cut() -> None:
    clock = StageClock("prefill", 0.0)
    clock.split(queue_s=9.0, run_s=3.0, now=4.0)
    assert clock.seconds == {"prefill_queue": 1.0, "prefill_run": 3.0, "migrate": 0.0}


def test_a_stage_that_was_left_too_early_goes_on() -> None:
    """Guards a request that was taken to be over: the time in between is in no stage."""
    clock = StageClock("decode_run", 0.0)
    clock.enter("stream_out", 1.0)
    clock.resume("decode_run", 5.0)
    clock.enter("stream_out", 7.0)
    assert clock.seconds == {"decode_run": 3.0}


def test_a_refusal_says_whose_fault_it_is() -> None:
    """Guards the router, which tries a request that is too long nowhere else, but may cut it."""
    assert refusal(_record(), 64, 64) is None
    assert refusal(_record(max_tokens=62), 64, 64) == Fault(
        "OUT_OF_RANGE",
        "max_tokens: 3 prompt tokens and 62 output tokens exceed the context of 64",
        "max_tokens",
    )
    under = _record(adapter="5ad0")
    assert refusal(under, 64, 64) == Fault("NOT_FOUND", "adapter: this worker does not have 5ad0", "adapter")
    assert refusal(under, 64, 64, adapters={"5ad0"}) is None
    told = refusal(_record(seed=-1), 64, 64)
    assert told is not None and (told.code, told.field) == ("INVALID_ARGUMENT", "seed")


@pytest.mark.parametrize(
    ("beams", "field"),
    [
        (BeamParams(width=0), "beam_width"),
        (BeamParams(width=MAX_BEAM_WIDTH + 1), "beam_width"),
        (BeamParams(width=2, answers=3), "n"),
        (BeamParams(width=2, length_penalty=float("nan")), "length_penalty"),
    ],
)
def test_a_search_that_cannot_be_made_stops_at_the_border(beams: BeamParams, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        check_record(_record(beams=beams), vocab=64, context_tokens=64)
    assert caught.value.field == field


def test_nothing_ends_a_text_before_its_least_length() -> None:
    record = _record(min_tokens=2, stop_token_ids=(7,))
    assert [banned_tokens(record, output, frozenset({9})) for output in (0, 1, 2)] == [(7, 9), (7, 9), ()]
    assert banned_tokens(_record(min_tokens=2, ignore_eos=True), 0, frozenset({9})) == ()


def test_only_the_row_that_computes_the_last_token_draws() -> None:
    """Guards a chunk of a prompt: what it would draw is no token of the answer."""
    record = _record(tokens=[1, 2, 3, 4], min_tokens=2)
    rows = [row_of(record, record.tokens, *span, [BlockId(0)], frozenset({9})) for span in ((0, 2), (2, 4))]
    assert [row.draw for row in rows] == [False, True]
    assert rows[1].banned == (9,), "one output token so far"


def test_a_mean_begins_with_the_first_measurement() -> None:
    assert mean(0.0, 4.0) == 4.0
    assert mean(4.0, 9.0) == pytest.approx(4.0 + NEWEST * 5.0)


def test_a_speed_is_by_token_and_the_latest_counts_most() -> None:
    """Guards predictions of long prompts against the many short ones whose time is that of reading the weights."""
    speed = TokenSpeed()
    assert speed.s_per_token == 0.0
    speed.measured(0.1, 100)
    assert speed.s_per_token == pytest.approx(0.001)
    speed.measured(0.01, 1)
    assert speed.s_per_token == pytest.approx(0.09 / 81)
    for _ in range(40):
        speed.measured(0.2, 100)
    assert speed.s_per_token == pytest.approx(0.002, rel=0.01)
