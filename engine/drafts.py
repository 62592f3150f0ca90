"""Guesses at what a sequence goes on with, made of its own tokens. Pure.

A drafter looks for what stands at the end of a sequence earlier in it, and proposes what followed there. Its proposals
are a function of the tokens and of nothing else: nothing of it migrates, and whoever goes on with a request after a
loss proposes the same. What is proposed changes no answer, whatever it is: a step draws the model's own token in each
place, and keeps a draft where it is that token (`engine.step.accepted`).

    ngram     what followed the latest earlier place of the longest run of 2 to 4 tokens that the sequence ends with
    suffix    what followed most often behind the longest run of 2 to 16, one token after the other, as long as most
              of the places that agree so far go on alike

Sources: prompt look-up decoding (Saxena 2023); suffix decoding (Oliaro et al. 2411.04975), here over one sequence
alone: what others have written is never proposed, since who is offered it could tell.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.types import RequestRecord

SHORTEST = 2
"""Tokens of a match: single ones are met everywhere."""
LONGEST_NGRAM = 4
LONGEST_SUFFIX = 16
MOST_PLACES = 64
"""Places that a suffix is looked up in, the latest first."""
_ITEM = array("i").itemsize


class Drafter(Protocol):
    """Drafts for one sequence; another model with the same tokenizer would stand here too."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow `tokens`, which begin with those of the call before."""


NewDrafter = Callable[[RequestRecord], Drafter]
"""Makes the drafter of a request."""


class _Text:
    """A sequence as bytes, in which a run of tokens is found at the speed of memory. Mutable state: what it has."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = bytearray()

    def grow(self, tokens: Sequence[int]) -> None:
        self.data += array("i", tokens[len(self.data) // _ITEM :]).tobytes()

    def before(self, length: int, end: int) -> int:
        """Return the token behind the latest place of the last `length` tokens that begins before token `end`, as the
        number of that token; 0 if there is none."""
        wanted, end = self.data[-length * _ITEM :], (end + length - 1) * _ITEM
        while (found := self.data.rfind(wanted, 0, end)) >= 0:
            if found % _ITEM == 0:
                return found // _ITEM + length
            end = found + len(wanted) - 1  # it begins inside of a token
        return 0


class NgramDrafter:
    """Mutable state: the sequence so far."""

    def __init__(self) -> None:
        self._text = _Text()

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        self._text.grow(tokens)
        for length in range(min(LONGEST_NGRAM, len(tokens) - 1), SHORTEST - 1, -1):
            place = self._text.before(length, len(tokens) - length)
            if place:
                return _copied(tokens, place, most)
        return []


class SuffixDrafter:
    """Mutable state: the sequence so far."""

    def __init__(self) -> None:
        self._text = _Text()

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        self._text.grow(tokens)
        places = self._places(SHORTEST, len(tokens))
        if not places:
            return []
        agree = {place: self._agreeing(tokens, place) for place in places}
        longest = max(agree.values())
        places = [place for place in places if agree[place] == longest]
        proposed: list[int] = []
        for at in range(most):
            # What stands behind a place near the end is what is proposed itself.
            votes = Counter(_token(tokens, proposed, place + at) for place in places)
            token, count = votes.most_common(1)[0]
            if 2 * count <= len(places):
                break
            proposed.append(token)
            places = [place for place in places if _token(tokens, proposed, place + at) == token]
        return proposed

    def _places(self, length: int, total: int) -> list[int]:
        """Return the numbers of the tokens behind earlier places of the last `length` tokens, the latest first."""
        places: list[int] = []
        end = total - length
        while len(places) < MOST_PLACES and total > length and (place := self._text.before(length, end)):
            places.append(place)
            end = place - length
        return places

    def _agreeing(self, tokens: Sequence[int], place: int) -> int:
        """Return how many tokens before `place` are those at the end, up to the longest that is looked at."""
        length = SHORTEST
        while length < min(LONGEST_SUFFIX, place) and tokens[place - length - 1] == tokens[-length - 1]:
            length += 1
        return length


def _copied(tokens: Sequence[int], place: int, most: int) -> list[int]:
    """Return `most` tokens from `place` on; a run that reaches the end goes on with itself."""
    proposed: list[int] = []
    for at in range(place, place + most):
        proposed.append(_token(tokens, proposed, at))
    return proposed


def _token(tokens: Sequence[int], proposed: Sequence[int], at: int) -> int:
    return tokens[at] if at < len(tokens) else proposed[at - len(tokens)]


DRAFTERS: dict[str, NewDrafter] = {"ngram": lambda _: NgramDrafter(), "suffix": lambda _: SuffixDrafter()}
"""The kinds that `engine.speculation` names."""
