"""What is done to a step's logits before it is drawn: for all rows together as for each on the CPU."""

import random

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends import token_counts
from engine.backends.gpu import sampling
from engine.backends.gpu.sampling import ListedTokens, adjusted_rows
from engine.backends.token_counts import CountedTokens, TokenCounts
from engine.sampling import adjusted
from engine.step import Row, draws_of
from engine.types import RequestId, RequestRecord, SamplingParams

VOCAB = 61
PENALTIES = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25)


def row_of(name: str, tokens: list[int], prompt: int, params: SamplingParams = PENALTIES, **options: object) -> Row:
    record = RequestRecord(
        request=RequestId(name), tokens=tokens[:prompt], prompt_tokens=prompt, max_tokens=50, seed=1, sampling=params,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return Row(record.request, record, tokens, len(tokens) - 1, len(tokens), [], draw=True)


def both(
    logits: torch.Tensor, rows: list[Row], counted: CountedTokens, listed: ListedTokens | None = None
) -> None:
    before = logits.clone()
    listed = ListedTokens() if listed is None else listed
    one_by_one = torch.stack([adjusted(logit, row) for logit, row in zip(logits, rows, strict=True)])
    assert torch.equal(adjusted_rows(logits, rows, counted, listed), one_by_one)
    assert torch.equal(logits, before), "they are still asked for log probabilities"


def test_rows_of_every_kind_are_adjusted_as_one_by_one() -> None:
    """Guards the order of adjustments, and the place of each row among the others: all kinds, together and apart."""
    generator, draw = torch.Generator().manual_seed(2), random.Random(4)
    plain = SamplingParams()
    tokens = [draw.randrange(VOCAB) for _ in range(30)]
    bias = ((3, 2.5), (tokens[0], -100.0), (7, 1.0))
    rows = [
        row_of("plain", tokens, 10, plain),
        row_of("penalized", tokens, 12),
        row_of("biased", tokens, 10, plain, logit_bias=bias),
        row_of("allowed", tokens, 10, PENALTIES, allowed_token_ids=(1, tokens[0], 9), logit_bias=bias),
        replace(row_of("banned", tokens, 29), banned=(tokens[1], 5)),
        replace(row_of("prompt only", tokens[:10], 10), banned=(2,)),
        row_of("once", tokens, 3, SamplingParams(temperature=0.0, repetition_penalty=0.5)),
    ]
    counted, listed = CountedTokens(), ListedTokens()
    for some in ([*rows], rows[::-1], rows[:1] + rows[2:3], rows[1:2]):
        both(torch.randn(len(some), VOCAB, generator=generator), some, counted, listed)


def test_more_rows_launch_no_more() -> None:
    """Guards the time of a large batch: a loop over rows that launches for each costs more than the step it serves."""

    class Counting(TorchDispatchMode):
        launched = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.launched += 1
            return operator(*args, **(kwargs or {}))

    launched = []
    for rows in (1, 24):
        asking = [replace(row_of(str(n), [1, 2, n, 3], 2, logit_bias=((n, 1.0),)), banned=(4,)) for n in range(rows)]
        listed = ListedTokens()
        listed.of(asking, torch.zeros(rows, VOCAB))
        with Counting() as counting:
            adjusted_rows(torch.zeros(rows, VOCAB), asking, CountedTokens(), listed)
        launched.append(counting.launched)
    assert launched[0] == launched[1] < 30


def test_what_records_name_is_brought_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of a step: thousands of allowed tokens and biases of each row were listed anew in each. Rows may
    change their places; a request that comes back with another record has what that names."""
    brought = list[int]()
    monkeypatch.setattr(sampling, "upload", lambda numbers, device: (brought.append(numbers.numel()), numbers)[1])
    names = [{"allowed_token_ids": (*range(at, at + 40),)} for at in range(4)]
    names += [{"logit_bias": tuple((token, 0.5 * at) for token in range(at, at + 40))} for at in range(4)]
    rows = [row_of(str(at), [1, 2], 1, SamplingParams(), **more) for at, more in enumerate(names)]
    listed = ListedTokens()
    both(torch.randn(8, VOCAB), rows, CountedTokens(), listed)
    assert sum(brought) > 8 * 40
    for some in (rows[::-1], rows[2:], [*rows[2:], *rows[3:5]]):
        brought.clear()
        both(torch.randn(len(some), VOCAB), some, CountedTokens(), listed)
        assert sum(brought) <= 4 * len(some)
    other = row_of("2", [1, 2], 1, SamplingParams(), allowed_token_ids=(5, 7))
    both(torch.randn(1, VOCAB), [other], CountedTokens(), listed)
    assert list(listed._kept) == ["2"], "the others are over"


def test_counts_go_on_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what is counted once: a token that comes again, one of the prompt that is drawn, rows that change their
    places. In a step, only new tokens are counted."""
    draw, texts = random.Random(6), {name: [1, 2, 1, 3 + number] for number, name in enumerate("abc")}
    counted, made = CountedTokens(), list[int]()

    class Watched(TokenCounts):
        def __init__(self, prompt_tokens: int) -> None:
            made.append(prompt_tokens)
            super().__init__(prompt_tokens)

    monkeypatch.setattr(token_counts, "TokenCounts", Watched)
    for _ in range(12):
        names = draw.sample("abc", 3)
        for name in names:
            texts[name].append(draw.randrange(6))
        both(torch.randn(3, VOCAB), [row_of(name, texts[name], 4) for name in names], counted)
    assert len(made) == 3


def test_tokens_that_turned_out_otherwise_are_not_counted() -> None:
    """Guards drafts, of which a step has a row for each, and a request that comes back with another answer than it had
    here: neither leaves a count behind."""
    counted, text = CountedTokens(), [5, 6, 7]
    drafted = replace(row_of("r", [*text, 9, 9, 8], 3), start=2, end=6, drafts=3)
    rows = draws_of(drafted)
    both(torch.randn(len(rows), VOCAB), rows, counted)
    both(torch.randn(1, VOCAB), [row_of("r", [*text, 9, 4], 3)], counted)
    both(torch.randn(1, VOCAB), [row_of("r", [*text, 11, 4, 11], 3)], counted)


def test_only_rows_of_the_latest_step_are_kept() -> None:
    """Guards memory: what is counted of requests that are over goes with the next step."""
    counted = CountedTokens()
    for number in range(20):
        counted.penalties([(0, row_of(str(number), [1, 2, 3], 2))], VOCAB)
    assert list(counted._known) == [RequestId("19")]
