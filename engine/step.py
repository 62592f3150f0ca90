"""The order of a scheduler to a runner: one step over a mixed batch. Plain data, no torch."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.types import BlockId, DrawnToken, RequestId, RequestRecord, TokenLogprobs, id_of


class Row(msgspec.Struct, frozen=True):
    """One sequence's part of a step: compute the KV of `tokens[start:end]` (one token: decode; more: a chunk of a
    prompt). With `draw`, also the token that follows `tokens[:end]`, then all of the sequence; `banned` may not be it.

    `blocks` is the sequence's block table; it covers `end` tokens. `tokens` and `blocks` are the scheduler's own lists:
    to be read while the step is launched, never kept. One that `follows` computes a token that is not in `tokens` yet,
    since the step before draws it: `start` is their number, and `end` one more."""

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
    return [
        msgspec.structs.replace(
            row,
            tokens=row.tokens[: known + at],
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
        return msgspec.structs.replace(row, tokens=[*row.tokens, id_of(run[0])], follows=False, allowed=allowed)


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
