"""Which tokens a request has, counted as it goes on, against the same counted anew."""

import random
from collections import Counter

import pytest
import torch
from msgspec.structs import replace

from engine.backends.token_counts import CountedTokens
from engine.sampling import adjusted, sample
from engine.step import Row, TokenView, draws_of
from engine.types import RequestId, RequestRecord, SamplingParams
from tests.engine.watched import WatchedList

PENALTIES = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
PROMPT = 4


def _row(tokens: list[int] | TokenView, drafts: int = 0) -> Row:
    record = RequestRecord(
        request=RequestId("r"), tokens=[1], prompt_tokens=PROMPT, max_tokens=9999, seed=1, sampling=PENALTIES
    )
    return Row(record.request, record, tokens, 0, len(tokens), [], draw=True, drafts=drafts)


def _agree(counted: CountedTokens, row: Row) -> None:
    found, tokens = counted.of(row), [*row.tokens]
    output = Counter(tokens[PROMPT:])
    assert len({*found.ids.tolist()}) == len(found.ids)
    assert dict(zip(found.ids.tolist(), found.counts.tolist(), strict=True)) == {
        token: output[token] for token in tokens
    }


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_those_of_the_tokens_whatever_became_of_the_guesses(seed: int) -> None:
    """Guards drafts that were refused, a token that was followed and came to be another, a request that comes back
    with another answer, and one whose answer was cut: each leaves a count, or a token that never was, behind."""
    chosen, counted = random.Random(seed), CountedTokens()
    own = [chosen.randrange(8) for _ in range(PROMPT)]
    for _ in range(150):
        guesses = [chosen.randrange(12) for _ in range(chosen.randrange(4))]
        for row in draws_of(_row(TokenView.of(own, *guesses), len(guesses))):
            _agree(counted, row)
        if chosen.random() < 0.3:
            _agree(counted, _row(TokenView.of(own, chosen.randrange(12))))  # as one that follows
        match chosen.randrange(8):
            case 0:
                own = [*own[:PROMPT], *(chosen.randrange(12) for _ in range(len(own) - PROMPT))]
            case 1:
                del own[max(PROMPT, len(own) - 3) :]
            case _:
                own += [*guesses[: chosen.randrange(4)], chosen.randrange(12)]


def test_a_step_reads_only_the_tokens_that_are_new() -> None:
    """Guards the time of a step of penalized rows, on the CPU and on a GPU: it grew with all that was said before."""
    own, counted = WatchedList(n % 50 for n in range(3000)), CountedTokens()
    sample(torch.zeros(1, 64), [_row(own)], counted)
    for step in range(20):
        own.read = 0
        rows = draws_of(_row(TokenView.of(own, 60, step, 61), 3))
        sample(torch.zeros(4, 64), rows, counted)
        counted.penalties([*enumerate(rows)], 64)
        own.append(step)
        assert own.read < 300, "two dozen for each draw"


def test_what_goes_on_changes_no_draw() -> None:
    generator, counted, own = torch.Generator().manual_seed(5), CountedTokens(), [1, 2, 3, 4]
    for _ in range(40):
        logits = torch.randn(1, 16, generator=generator)
        row = replace(_row(own), banned=(3,))
        assert torch.equal(adjusted(logits[0], row, counted), adjusted(logits[0], row))
        (token,) = sample(logits, [row], counted)
        assert [token] == sample(logits, [row])
        own.append(token)  # type: ignore[arg-type]


def test_counts_of_requests_that_are_over_are_forgotten() -> None:
    counted = CountedTokens()
    sample(torch.zeros(1, 64), [_row([1, 2, 3, 4, 5])], counted)
    assert list(counted._known) == ["r"]
    sample(torch.zeros(1, 64), [replace(_row([1, 2, 3, 4, 5]), request=RequestId("other"))], counted)
    assert list(counted._known) == ["other"]
