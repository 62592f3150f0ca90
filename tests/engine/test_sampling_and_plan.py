"""Sampling against its reference, the random numbers against published vectors, and the shared planning rules."""

import pytest
import torch

from engine.plan import StageClock, check_record, finish_reason, share_budget
from engine.sampling import sample
from engine.step import Row
from engine.types import (
    FieldError,
    FinishReason,
    RequestId,
    RequestRecord,
    SamplingParams,
    TooLongError,
)
from kernels import reference
from kernels.sampling import draw, philox4x32, philox_uniform, probabilities


def _record(**changes: object) -> RequestRecord:
    fields = {
        "request": RequestId("r"),
        "tokens": [1, 2, 3],
        "prompt_tokens": 3,
        "max_tokens": 4,
        "seed": 5,
    }
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_philox_equals_the_published_vectors() -> None:
    """Guards every sampled stream: a changed generator changes what a resumed request draws."""
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    want = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox4x32((ones,) * 4, (ones, ones)) == want


def test_uniforms_are_uniform_and_keyed_by_all_three() -> None:
    values = [philox_uniform(7, 0, p) for p in range(4000)]
    assert min(values) >= 0.0 and max(values) < 1.0
    assert abs(sum(values) / 4000 - 0.5) < 0.02
    assert len({philox_uniform(*key) for key in ((7, 0, 1), (7, 1, 1), (8, 0, 1), (7, 0, 2))}) == 4


@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.05])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_filters_equal_the_reference(top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(top_k)
    logits = torch.randn(101) * 3
    options = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    probs = probabilities(logits, **options)
    for step in range(50):
        u = philox_uniform(3, 0, step)
        assert draw(probs, u) == reference.sample(logits, u, **options)


def _row(record: RequestRecord, tokens: list[int], banned: tuple[int, ...] = ()) -> Row:
    return Row(record.request, record, tokens, len(tokens) - 1, len(tokens), [], True, banned)


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    params = SamplingParams(temperature=1.0)
    counts = [0] * 4
    for seed in range(2000):
        (token,) = sample(logits[None], [_row(_record(seed=seed, sampling=params), [1, 2, 3])])
        counts[token] += 1
    assert all(abs(n / 2000 - p) < 0.04 for n, p in zip(counts, (0.5, 0.25, 0.125, 0.125), strict=True))


def test_penalties_are_functions_of_the_tokens() -> None:
    """Guards resumption: penalties must count emitted tokens, and presence and frequency no prompt token."""
    logits = torch.zeros(1, 8)
    logits[0, 1], logits[0, 5] = 2.0, 1.9
    plain = SamplingParams(temperature=0.0)
    assert sample(logits, [_row(_record(sampling=plain), [1, 2, 3])]) == [1]
    repeat = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    assert sample(logits, [_row(_record(sampling=repeat), [1, 2, 3])]) == [5]
    presence = SamplingParams(temperature=0.0, presence_penalty=0.5)
    assert sample(logits, [_row(_record(sampling=presence), [1, 2, 3])]) == [1]
    assert sample(logits, [_row(_record(sampling=presence), [1, 2, 3, 1])]) == [5]
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.06)
    assert sample(logits, [_row(_record(sampling=frequency), [1, 2, 3, 1])]) == [1]
    assert sample(logits, [_row(_record(sampling=frequency), [1, 2, 3, 1, 1])]) == [5]
    assert sample(logits, [_row(_record(sampling=plain), [1, 2, 3], banned=(1,))]) == [5]


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


@pytest.mark.parametrize("temperature", [1e-308, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Guards an overflow that drew the vocabulary's last token, with status OK."""
    torch.manual_seed(1)
    logits = torch.randn(1, 64) * 9
    params = SamplingParams(temperature=temperature)
    (token,) = sample(logits, [_row(_record(sampling=params), [1, 2, 3])])
    assert token == int(logits.argmax())
