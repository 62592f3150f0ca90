"""Log probabilities of draws against a plain softmax, and the order of what is done to a row's logits.

Whole answers against transformers are in tests/parity/test_logprobs.py, the same on a GPU's path in
tests/engine/backends/gpu/test_logprobs.py, their way to the client in tests/integration/test_logprobs_fake.py.
"""

import msgspec
import pytest
import torch

from engine.plan import MAX_OUTPUT_VALUES, MAX_PROMPT_VALUES, check_record
from engine.sampling import adjusted, sample
from engine.step import Row
from engine.types import BeamParams, FieldError, RequestId, RequestRecord, SamplingParams, TokenLogprobs

VOCAB = 50


def record(**changes: object) -> RequestRecord:
    fields = {"request": RequestId("r"), "tokens": [1, 2, 3], "prompt_tokens": 3, "max_tokens": 4, "seed": 5}
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


def row(one: RequestRecord, banned: tuple[int, ...] = ()) -> Row:
    return Row(one.request, one, one.tokens, 2, 3, [], True, banned)


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 3


GREEDY = SamplingParams(temperature=0.0)
CHANGED = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.7, presence_penalty=1.0)


@pytest.mark.parametrize("params", [GREEDY, CHANGED])
def test_they_are_the_models_own(params: SamplingParams) -> None:
    """Guards against values of the distribution that was drawn from, after temperature, penalties, biases and bans."""
    logits = logits_of(1)
    best = int(logits.argmax())
    one = record(sampling=params, logprobs=5, logit_bias=((best, -50.0),))
    (drawn,) = sample(logits, [row(one, banned=(7,))])
    assert isinstance(drawn, TokenLogprobs) and drawn.token != best
    want = logits[0].log_softmax(-1)
    assert drawn.logprob == pytest.approx(float(want[drawn.token]), abs=1e-5)
    assert [token for token, _ in drawn.top] == want.topk(5).indices.tolist()
    assert [value for _, value in drawn.top] == pytest.approx(want.topk(5).values.tolist(), abs=1e-5)


def test_only_rows_that_ask_have_them_and_each_as_many_as_it_asks_for() -> None:
    """Guards a step of mixed rows: values of another row, or a token that becomes something else where nobody asked."""
    wants = [None, 2, 0, None, 20]
    logits = logits_of(5)
    plain = sample(logits, [row(record(sampling=GREEDY)) for _ in wants])
    drawn = sample(logits, [row(record(sampling=GREEDY, logprobs=want)) for want in wants])
    assert [one if isinstance(one, int) else one.token for one in drawn] == plain
    for at, (one, want) in enumerate(zip(drawn, wants, strict=True)):
        assert isinstance(one, int) == (want is None)
        if isinstance(one, TokenLogprobs):
            assert len(one.top) == want
            assert one.logprob == pytest.approx(float(logits[at].log_softmax(-1)[one.token]), abs=1e-5)


def test_a_search_beside_them_keeps_its_candidates() -> None:
    search = msgspec.structs.replace(row(record(beams=BeamParams(width=2))), candidates=4)
    candidates, drawn = sample(logits_of(2), [search, row(record(sampling=GREEDY, logprobs=1))])
    assert isinstance(candidates, tuple) and len(candidates) == 4 and isinstance(drawn, TokenLogprobs)


def test_what_the_model_rules_out_is_a_number_that_json_has() -> None:
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 9] = 1.0
    (drawn,) = sample(logits, [row(record(sampling=GREEDY, logprobs=3))])
    assert isinstance(drawn, TokenLogprobs)
    assert (drawn.token, drawn.logprob, drawn.top[0]) == (9, 0.0, (9, 0.0))
    assert [value for _, value in drawn.top[1:]] == [-9999.0] * 2


def test_logits_are_changed_in_the_order_that_the_page_says() -> None:
    """Guards docs/http.md: allowed tokens, biases, penalties, bans. A repetition penalty divides what is above zero and
    multiplies what is not, so that it tells whether the bias came before it."""
    logits = torch.zeros(VOCAB)
    logits[1], logits[4], logits[5] = -1.0, 2.0, 3.0
    one = record(
        sampling=SamplingParams(repetition_penalty=2.0),
        allowed_token_ids=(1, 4, 6),
        logit_bias=((1, 5.0), (5, 100.0), (6, 1.0)),
    )
    got = adjusted(logits, row(one, banned=(6,)))
    assert float(got[1]) == 2.0, "-1 + 5, then halved"
    assert float(got[4]) == 2.0
    assert got.isneginf().sum() == VOCAB - 2, "a bias does not allow what is not, and a ban holds for what is"
    assert float(logits[1]) == -1.0, "the step's logits are others' too"


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.5)])
def test_nothing_but_allowed_tokens_is_drawn(params: SamplingParams) -> None:
    rows = [row(record(sampling=params, seed=seed, allowed_token_ids=(3, 8, 41))) for seed in range(64)]
    assert {*sample(logits_of(64), rows)} <= {3, 8, 41}


@pytest.mark.parametrize(("amount", "is_drawn"), [(100.0, True), (-100.0, False)])
def test_a_bias_forces_and_forbids(amount: float, is_drawn: bool) -> None:
    logits = logits_of(1).repeat(64, 1)
    token = int(logits[0].argmin() if is_drawn else logits[0].argmax())
    rows = [row(record(seed=seed, logit_bias=((token, amount),))) for seed in range(64)]
    assert ({*sample(logits, rows)} == {token}) if is_drawn else (token not in sample(logits, rows))


BAD: list[tuple[str, dict[str, object]]] = [
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("logit_bias", {"logit_bias": ((VOCAB, 1.0),)}),
    ("logit_bias", {"logit_bias": ((1, 100.5),)}),
    ("logit_bias", {"logit_bias": ((1, float("nan")),)}),
    ("allowed_token_ids", {"allowed_token_ids": (1, VOCAB)}),
    ("logit_bias", {"logit_bias": ((1, 1.0),), "beams": BeamParams(width=2)}),
    ("allowed_token_ids", {"allowed_token_ids": (1,), "beams": BeamParams(width=2)}),
    ("logprobs", {"logprobs": 0, "beams": BeamParams(width=2)}),
]


@pytest.mark.parametrize(("field", "changes"), BAD)
def test_a_worker_refuses_what_would_upset_a_step(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(FieldError) as caught:
        check_record(record(**changes), VOCAB, 100)
    assert caught.value.field == field


def test_a_prompt_has_so_many_values_and_no_more() -> None:
    tokens = [1] * (MAX_PROMPT_VALUES // 21)
    long = record(tokens=tokens, prompt_tokens=len(tokens), prompt_logprobs=20)
    check_record(long, VOCAB, 100_000)
    with pytest.raises(FieldError):
        check_record(msgspec.structs.replace(long, tokens=[*tokens, 1], prompt_tokens=len(tokens) + 1), VOCAB, 100_000)


def test_an_answer_has_so_many_values_and_no_more() -> None:
    long = record(max_tokens=MAX_OUTPUT_VALUES // 21, logprobs=20)
    check_record(long, VOCAB, 100_000)
    with pytest.raises(FieldError):
        check_record(msgspec.structs.replace(long, max_tokens=long.max_tokens + 1), VOCAB, 100_000)
