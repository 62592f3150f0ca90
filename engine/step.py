"""The order of a scheduler to a runner: one step over a mixed batch. Plain data, no torch."""

from collections.abc import Iterator, Sequence
from typing import Protocol, overload

import msgspec

from engine.types import BlockId, DrawnToken, RequestId, RequestRecord, TokenLogprobs, id_of


class TokenView(Sequence[int]):
    """The first `sure` tokens of `own`, a scheduler's list, which may only grow, and `more` that are not in it yet:
    drafts, or one that a step has drawn. Neither is copied."""

    __slots__ = ("more", "own", "sure")

    def __init__(self, own: Sequence[int], sure: int, more: Sequence[int] = ()) -> None:
        self.own, self.sure, self.more = own, sure, more

    @staticmethod
    def of(tokens: Sequence[int], *more: int) -> "TokenView":
        """Return `tokens` as they are now, with `more` behind them."""
        if isinstance(tokens, TokenView):
            return TokenView(tokens.own, tokens.sure, (*tokens.more, *more))
        return TokenView(tokens, len(tokens), more)

    def __len__(self) -> int:
        return self.sure + len(self.more)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        sure = self.sure
        if isinstance(at, slice):
            first, end, _ = at.indices(len(self))
            return [*self.own[first : min(end, sure)], *self.more[max(0, first - sure) : max(0, end - sure)]]
        place = at if at >= 0 else at + len(self)
        if place < 0:
            raise IndexError(at)
        return self.own[place] if place < sure else self.more[place - sure]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])


class History:
    """What was seen of one sequence, by which it is known to go on as it was without reading it again.

    A request has one list of tokens, from its placement to its end, which its scheduler appends to and changes in no
    other way; preempted and recomputed, it keeps it. Another placement, a fork, and each hypothesis of a search have
    lists of their own. So where the very same list comes, and is no shorter, it begins with what was in it. Not so what
    was behind it, drafts and what a step has drawn: another token may have come in that place, or none. Whoever has
    read these compares them. The latest tokens of the list are compared too, in case somebody does rewrite it.

    Mutable state: the list, held so that no other can be taken for it, and how many of its tokens were seen."""

    __slots__ = ("_latest", "_own", "sure")

    def __init__(self) -> None:
        self.sure = 0
        self._own: Sequence[int] | None = None
        self._latest: Sequence[int] = ()

    def known(self, tokens: Sequence[int]) -> int:
        """Return how many of the first of `tokens` are the first that were seen: all that were sure, or none."""
        now = TokenView.of(tokens)
        is_same = now.own is self._own and now.sure >= self.sure
        return self.sure if is_same and now.own[max(0, self.sure - COMPARED) : self.sure] == self._latest else 0

    def see(self, tokens: Sequence[int]) -> None:
        now = TokenView.of(tokens)
        self._own, self.sure = now.own, now.sure
        self._latest = now.own[max(0, now.sure - COMPARED) : now.sure]


COMPARED = 8
"""Tokens of a sequence that goes on which are compared all the same."""


class Row(msgspec.Struct, frozen=True):
    """One sequence's part of a step: compute the KV of `tokens[start:end]` (one token: decode; more: a chunk of a
    prompt). With `draw`, also the token that follows `tokens[:end]`, then all of the sequence; `banned` may not be it.

    `blocks` is the sequence's block table; it covers `end` tokens. `tokens` and `blocks` are the scheduler's own lists:
    to be read while the step is launched, never kept, but for what a `TokenView` shows. One that `follows` computes a
    token that is not in `tokens` yet, since the step before draws it: `start` is their number, and `end` one more."""

    request: RequestId
    record: RequestRecord
    tokens: Sequence[int]
    start: int
    end: int
    blocks: Sequence[BlockId]
    draw: bool
    banned: tuple[int, ...] = ()
    """Where its constraint allows nothing but banned tokens, they are not banned."""
    candidates: int = 0
    """The number of likeliest next tokens wanted with their log probabilities, in place of a draw; 0: none."""
    follows: bool = False
    scored: int = 0
    """So many of its tokens, from `start` on, have a next one in the prompt whose log probability is wanted."""
    allowed: bytes = b""
    """A bit for each token, in 32-bit words, set where the record's constraint allows it; empty: all are allowed. The
    runner fills it in, while the device computes. Bits beyond the end are not set."""
    windows: tuple[Sequence[BlockId], ...] = ()
    """The tables of the other layer groups (`engine.kv.groups`), as `blocks` is the first one's; what a row does not
    need in them is GONE."""
    drafts: int = 0
    """The last of `tokens` are guesses: so many. It draws in the place of each of them, and behind the last one: its
    result is what was drawn up to the first place that was guessed wrong (`draws_of`, `accepted`)."""

    @property
    def draw_key(self) -> tuple[int, int, int]:
        """(seed, sample index, position): all that the random number of this row's draw depends on, so that whoever
        draws a position, on whichever worker, after whatever loss, draws the same token."""
        return self.record.seed, self.record.sample_index, len(self.tokens) + self.follows


Candidates = tuple[tuple[int, float], ...]
"""Tokens with their log probabilities, likeliest first."""


class DrawnRun(msgspec.Struct, frozen=True):
    """Several tokens that follow a row, in order: those of its drafts that were drawn, the next one that was drawn, and
    those that could only come behind it. The KV of the first kind is computed, of the others it is not."""

    tokens: tuple[DrawnToken, ...]


class DeadEnd(msgspec.Struct, frozen=True):
    """Nothing can be drawn: what the record asks of the answer could not be compiled, or has become too costly."""

    message: str
    code: str = "INVALID_ARGUMENT"


Drawn = DrawnToken | DrawnRun | Candidates | DeadEnd
"""The result of a row with `draw`."""


def run_of(drawn: DrawnToken | DrawnRun) -> tuple[DrawnToken, ...]:
    """Return the tokens that follow, one or more."""
    return drawn.tokens if isinstance(drawn, DrawnRun) else (drawn,)


def draws_of(row: Row) -> list[Row]:
    """Return a row for each draw of a row that draws: as it would be if its drafts before that were its own tokens."""
    if not row.drafts:
        return [row]
    known, least = len(row.tokens) - row.drafts, row.record.prompt_tokens + row.record.min_tokens
    view = TokenView.of(row.tokens)
    sure = min(view.sure, known)
    return [
        msgspec.structs.replace(
            row,
            tokens=TokenView(view.own, sure, view[sure : known + at]),
            end=row.end - row.drafts + at,
            banned=row.banned if known + at < least else (),
            drafts=0,
        )
        for at in range(row.drafts + 1)
    ]


def accepted(row: Row, drawn: Sequence[Drawn]) -> int:
    """Return how many of the row's drafts were drawn: `drawn` are its draws, or its result."""
    drafts = row.tokens[len(row.tokens) - row.drafts :]
    for at, (draft, one) in enumerate(zip(drafts, drawn, strict=False)):
        if isinstance(one, DeadEnd | DrawnRun | tuple) or id_of(one) != draft:
            return at
    return min(len(drafts), len(drawn) - 1)


def result_of(before: Sequence[Drawn], last: Drawn) -> Drawn:
    """Return the result of a row of which the drafts `before` were drawn, and then `last`."""
    run = tuple([one for one in before if isinstance(one, int | TokenLogprobs)])
    if not run or isinstance(last, tuple):
        return last
    # Behind a dead end nothing is known; the next step finds it again.
    return DrawnRun(run if isinstance(last, DeadEnd) else (*run, *run_of(last)))


def only(token: int) -> bytes:
    """Return the mask that allows one token."""
    return (1 << token % 32).to_bytes(4, "little").rjust(4 * (token // 32) + 4, b"\0")


def is_single(mask: bytes) -> bool:
    """Return True for a mask that allows one token."""
    return int.from_bytes(mask, "little").bit_count() == 1


def forced_token(token: int, record: RequestRecord) -> DrawnToken:
    """Return a token in whose place the record's constraint allows no other. Where log probabilities are asked for, it
    is certain, without alternatives, whatever the model thinks of it: nobody may have asked the model."""
    return token if record.logprobs is None else TokenLogprobs(token, 0.0)


def certain(row: Row, drawn: Drawn) -> Drawn:
    """Return what was drawn for a row with a mask: as a forced token, where that allows no other."""
    if not is_single(row.allowed) or not isinstance(drawn, int | TokenLogprobs):
        return drawn
    return forced_token(id_of(drawn), row.record)


class Waitable(Protocol):
    def wait(self) -> Sequence[Drawn]: ...


class LatestDraws:
    """What rows that follow need of the step before. `step`: that step; None before the first."""

    def __init__(self, rows: Sequence[Row] = (), step: Waitable | None = None) -> None:
        self.step = step
        drawing = [row.request for row in rows if row.draw]
        self._numbers = {request: number for number, request in enumerate(drawing)}

    def number(self, row: Row) -> int:
        """Return the number of the draw that `row` follows, in the order of the step's rows."""
        return self._numbers[row.request]

    def resolved(self, row: Row) -> Row:
        """Return the row with the token that it follows, if it does; waits for the step before. Where that one has told
        more tokens, the row's own draw is among them: it may draw nothing else, and its scheduler drops it."""
        if not row.follows:
            return row
        assert self.step is not None
        drawn = self.step.wait()[self.number(row)]
        assert not isinstance(drawn, tuple), "nothing follows a search"
        # Behind a dead end the request has ended: what is computed is dropped.
        run = (0,) if isinstance(drawn, DeadEnd) else run_of(drawn)
        allowed = only(id_of(run[1])) if len(run) > 1 else row.allowed
        tokens = TokenView.of(row.tokens, id_of(run[0]))
        return msgspec.structs.replace(row, tokens=tokens, follows=False, allowed=allowed)


class StepPlan(msgspec.Struct, frozen=True):
    """`copies` (source, target) of whole blocks are made first, in order; then `rows` run as one batch."""

    rows: tuple[Row, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    number: int = 0
    is_scored: bool = False
    """True where some row is `scored`."""

    @property
    def computed_tokens(self) -> int:
        return sum([row.end - row.start for row in self.rows])

    @property
    def recomputed_tokens(self) -> int:
        """Tokens of this step that are recomputed: another worker computed them once, and was lost."""
        return sum(row.end - row.start for row in self.rows if len(row.record.tokens) > row.record.prompt_tokens)
