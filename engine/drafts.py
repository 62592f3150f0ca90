"""Guesses at what sequences go on with. Pure.

A drafter is asked for all sequences of a step at once. Its proposals are made of each one's own tokens and of nothing
else: nothing of it migrates, and whoever goes on with a request after a loss begins with its tokens. What is proposed
changes no answer, whatever it is: a step draws the model's own token in each place, and keeps a draft where it is that
token (`engine.step.accepted`).

    ngram     what followed the latest earlier place of the longest run of 2 to 4 tokens that the sequence ends with
    suffix    what followed most often behind the longest run of 2 to 16, one token after the other, as long as most
              of the places that agree so far go on alike
    model     what a smaller model draws (`engine.draft_model`, which has a model to run and so is not here)

Sources: prompt look-up decoding (Saxena 2023); suffix decoding (Oliaro et al. 2411.04975), here over one sequence
alone: what others have written is never proposed, since who is offered it could tell.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.types import RequestId, RequestRecord

SHORTEST = 2
"""Tokens of a match: single ones are met everywhere."""
LONGEST_NGRAM = 4
LONGEST_SUFFIX = 16
MOST_PLACES = 64
"""Places that a suffix is looked up in, the latest first."""
_ITEM = array("i").itemsize


class DraftWanted(NamedTuple):
    """A sequence that up to `most` drafts are wanted of. `tokens` begin with those of its last time."""

    record: RequestRecord
    tokens: Sequence[int]
    most: int


class Proposed(NamedTuple):
    """Drafts of each sequence, in the order in which they were asked for; and how long that took, where it takes time.
    """

    drafts: list[list[int]]
    read_tokens: int = 0
    read_s: float = 0.0
    """Tokens read without a draft, of sequences that were new or had not been asked for, and for how long."""
    forwards: tuple[tuple[int, float], ...] = ()
    """For the first, the second, ... draft: of how many sequences at once, and for how long."""

    @property
    def seconds(self) -> float:
        return self.read_s + sum([seconds for _, seconds in self.forwards])


class Drafter(Protocol):
    """Mutable state: what it keeps of each request."""

    takes_time: bool
    """False where nobody needs to ask whether proposing is worth its time."""

    def unread(self, asked: DraftWanted) -> int | None:
        """Return how many of the tokens it has not read, all of which it reads before it proposes; None: it can propose
        nothing."""

    def propose(self, asked: Sequence[DraftWanted]) -> Proposed:
        """Return up to as many tokens as wanted that may follow each of the sequences."""

    def forget(self, request: RequestId) -> None:
        """Keep nothing of a request; one that was never asked for does no harm."""


class SequenceDrafter(Protocol):
    """Drafts for one sequence."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow `tokens`, which begin with those of the call before."""


NewDrafter = Callable[[RequestRecord], SequenceDrafter]
"""Makes the drafter of a request."""


class EachAlone:
    """Drafters that look at one sequence each, at no cost to speak of. Mutable state: those of the requests."""

    takes_time = False

    def __init__(self, new: NewDrafter) -> None:
        self._new = new
        self._of: dict[RequestId, SequenceDrafter] = {}

    def unread(self, asked: DraftWanted) -> int | None:
        return 0

    def propose(self, asked: Sequence[DraftWanted]) -> Proposed:
        return Proposed([self._drafter(record).propose(tokens, most) for record, tokens, most in asked])

    def forget(self, request: RequestId) -> None:
        self._of.pop(request, None)

    def _drafter(self, record: RequestRecord) -> SequenceDrafter:
        if record.request not in self._of:
            self._of[record.request] = self._new(record)
        return self._of[record.request]


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


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: EachAlone(lambda _: NgramDrafter()),
    "suffix": lambda: EachAlone(lambda _: SuffixDrafter()),
}
"""The kinds that `engine.speculation` names and that need nothing but tokens."""
