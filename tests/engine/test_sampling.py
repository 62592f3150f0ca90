"""Sampling against its reference, and the random numbers against published vectors. The kernel is in
tests/kernels/test_sample.py, whole answers are in tests/parity/test_samples.py and tests/parity/test_beams.py."""

import pytest
import torch

from engine.sampling import adjusted, sample
from engine.step import Row
from engine.types import RequestId, RequestRecord, SamplingParams
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


@pytest.mark.parametrize("temperature", [1e-308, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Guards an overflow that drew the vocabulary's last token, with status OK."""
    torch.manual_seed(1)
    logits = torch.randn(1, 64) * 9
    params = SamplingParams(temperature=temperature)
    (token,) = sample(logits, [_row(_record(sampling=params), [1, 2, 3])])
    assert token == int(logits.argmax())


def test_candidates_are_the_models_own_likeliest() -> None:
    """Guards a beam search: a banned token is none, and its share goes to nobody."""
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))
    row = Row(RequestId("r"), _record(sampling=SamplingParams(temperature=0.0)), [1, 2, 3], 2, 3, [], True, (0,), 9)
    (found,) = sample(logits, [row])
    assert isinstance(found, tuple)
    assert [token for token, _ in found] == [1, 2, 3]
    assert [value for _, value in found] == pytest.approx(torch.log(torch.tensor([0.25, 0.15, 0.1])).tolist())


def test_each_row_has_its_own_logits() -> None:
    """Guards greedy rows, which are taken together, between rows that draw."""
    logits = torch.full((3, 8), -40.0)
    for row, token in enumerate((4, 1, 6)):
        logits[row, token] = 0.0
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
    rows = [_row(_record(sampling=params), [1, 2, 3]) for params in (greedy, drawn, greedy)]
    assert sample(logits, rows) == [4, 1, 6]


def test_a_recovered_answer_draws_as_if_nothing_had_happened() -> None:
    """Guards the position of a draw: another worker takes the output so far for a part of its record, and the next
    token is keyed by where it stands in the sequence, whoever draws it and whatever it was given to begin with."""
    torch.manual_seed(3)
    logits, params = torch.randn(1, 4096), SamplingParams(temperature=1.0)
    tokens = [1, 2, 3, 60, 61, 62]
    for seed in range(8):
        drawn = set()
        for begun in range(3, 7):
            record = _record(sampling=params, seed=seed, tokens=tokens[:begun], max_tokens=9)
            drawn.add(sample(logits, [_row(record, tokens)])[0])
        probs = probabilities(logits[0], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        assert drawn == {draw(probs, philox_uniform(seed, 0, len(tokens)))}


def test_penalties_and_bans_ask_the_device_nothing() -> None:
    """Guards the step behind: a size or an index that depends on what lies on a GPU would wait for all that is queued
    there. A meta tensor has no values that could be asked for."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)
    row = _row(_record(sampling=params), [1, 2, 3, 7, 7], banned=(4, 5))
    assert adjusted(torch.empty(11, device="meta"), row).shape == (11,)
    logits = torch.linspace(-2.0, 3.0, 11)
    here = adjusted(logits, row)
    assert (here[[4, 5]] == float("-inf")).all() and float(here[7]) == pytest.approx(1.5 / 1.3 - 0.5 - 0.2 * 2)
    assert float(here[1]) == pytest.approx(-1.5 * 1.3)
    assert here[10] == logits[10]
