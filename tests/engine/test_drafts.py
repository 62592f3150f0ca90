"""What drafters propose: a function of the tokens, whatever was asked before."""

import random

import msgspec
import pytest

from engine.drafts import DRAFTERS, LONGEST_NGRAM, DraftWanted, NgramDrafter, SuffixDrafter
from engine.types import RequestId, RequestRecord

RECORD = RequestRecord(request=RequestId("r"), tokens=[1], prompt_tokens=1, max_tokens=1, seed=0)


def _plainly(tokens: list[int], most: int) -> list[int]:
    """n-grams without an index: the specification."""
    for length in range(LONGEST_NGRAM, 1, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == tokens[-length:]:
                whole = list(tokens)
                for at in range(begin + length, begin + length + most):
                    whole.append(whole[at])
                return whole[len(tokens) :]
    return []


def test_the_latest_place_of_the_longest_run_counts() -> None:
    assert NgramDrafter().propose([1, 2, 3, 9, 2, 3, 7, 2, 3], 2) == [7, 2]
    assert NgramDrafter().propose([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 3) == [9, 2, 3]
    assert NgramDrafter().propose([5, 6, 5, 7, 5], 3) == [], "one token is no match"
    assert NgramDrafter().propose([4, 4, 4], 3) == [4, 4, 4], "what repeats itself goes on"


@pytest.mark.parametrize("vocab", [2, 5, 300, 70_000, 1 << 30])
def test_an_index_that_grows_proposes_what_a_search_does(vocab: int) -> None:
    """Guards a match that begins in the middle of a token's bytes, and an index that lags behind."""
    for seed in range(40):
        chosen = random.Random(seed * 1009 + vocab)
        some = [chosen.randrange(vocab) for _ in range(6)] + [0, 1, 256 % vocab, 257 % vocab]
        tokens = [chosen.choice(some) for _ in range(chosen.randrange(1, 60))]
        drafter = NgramDrafter()
        while len(tokens) < 80:
            assert drafter.propose(tokens, 3) == NgramDrafter().propose(tokens, 3) == _plainly(tokens, 3)
            tokens = tokens + [chosen.choice(some) for _ in range(chosen.randrange(1, 5))]


def test_a_suffix_goes_on_as_most_of_its_places_do() -> None:
    often, once = [1, 2, 3, 4], [1, 2, 9, 9]
    assert SuffixDrafter().propose([*often, 5, *often, 6, *once, 7, 1, 2], 2) == [3, 4]
    assert NgramDrafter().propose([*often, 5, *often, 6, *once, 7, 1, 2], 2) == [9, 9]
    assert SuffixDrafter().propose([*often, 5, *once, 6, 1, 2], 3) == [], "one of two is not most"
    assert SuffixDrafter().propose([8, *often, 0, 7, *once, 0, 8, 1, 2], 2) == [3, 4], "the longest run decides"
    assert SuffixDrafter().propose([4, 4, 4], 3) == [4, 4, 4]


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_was_asked_before_changes_nothing(name: str) -> None:
    """Guards recovery: another worker has seen the tokens all at once."""
    chosen = random.Random(3)
    tokens = [chosen.randrange(4) for _ in range(200)]
    grown, other = DRAFTERS[name](), msgspec.structs.replace(RECORD, request=RequestId("s"))
    proposed = 0
    for end in range(1, len(tokens)):
        both = [DraftWanted(RECORD, tokens[:end], 3), DraftWanted(other, tokens[-end:], 2)]
        told = grown.propose(both).drafts
        assert told == [DRAFTERS[name]().propose([one]).drafts[0] for one in both]
        assert len(told[0]) <= 3 and len(told[1]) <= 2
        other = msgspec.structs.replace(other, request=RequestId(f"s{end}"))
        proposed += len(told[0])
    assert proposed > 100
