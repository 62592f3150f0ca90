"""What rank 0 tells ranks that have a device, a pool and a runner of their own: to open a pool, to say how large one
could be, to move blocks of it, and the steps, as plans whose rows draw nothing. Which kernels and recordings a step
runs on each rank finds out as rank 0 does, from the same numbers."""

from collections.abc import Iterator, Sequence
from typing import Literal, overload

import msgspec

from engine.batch import Followed
from engine.step import Row, StepPlan
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams

_NOBODY = RequestRecord(
    request=RequestId(""), tokens=[], prompt_tokens=0, max_tokens=0, seed=0, sampling=SamplingParams()
)


class RankRow(msgspec.Struct, frozen=True, array_like=True):
    """What `Row` says of what is computed. `tokens`: its own, and the next one, where there are any."""

    tokens: list[int]
    start: int
    end: int
    blocks: list[BlockId]
    draw: bool
    follows: bool
    scored: int
    drafts: int
    windows: list[list[BlockId]]

    @staticmethod
    def of(row: Row) -> "RankRow":
        tokens = list(row.tokens[row.start : row.end + 1])
        windows = [list(table) for table in row.windows]
        own = row.start, row.end, list(row.blocks), row.draw, row.follows, row.scored, row.drafts
        return RankRow(tokens, *own, windows)

    def row(self) -> Row:
        return Row(
            _NOBODY.request,
            _NOBODY,
            _TokensFrom(self.start, self.tokens),
            *(self.start, self.end, self.blocks, self.draw),
            follows=self.follows,
            scored=self.scored,
            drafts=self.drafts,
            windows=tuple(self.windows),
        )


class _TokensFrom(Sequence[int]):
    """A sequence's tokens from `first` on; those before are nobody's business, and take no room."""

    def __init__(self, first: int, tokens: list[int]) -> None:
        self._first, self._tokens = first, tokens

    def __len__(self) -> int:
        return self._first + len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, int):
            return self._tokens[self._place(at)]
        return self._tokens[self._place(at.start) : self._place(at.stop)]

    def _place(self, at: int) -> int:
        if at < self._first:
            raise IndexError(f"token {at} of a row that begins at {self._first}")
        return at - self._first

    def __iter__(self) -> Iterator[int]:
        raise TypeError("a rank has only the tokens that it computes")


class DeviceOrder(msgspec.Struct, frozen=True, array_like=True):
    """`open`: make a pool of `blocks`, in place of what there was, and all that runs over it. `room`: throw it away,
    and say of how many blocks one could be. `move`: this pool is the last; say where its generations are, and move its
    blocks as another channel tells. `step`: carry one out; `places` and `drawn` are of `Followed`, whose tokens
    come from rank 0's device."""

    kind: Literal["open", "room", "move", "step"]
    blocks: int = 0
    rows: list[RankRow] = []
    copies: list[tuple[BlockId, BlockId]] = []
    is_scored: bool = False
    places: list[int] | None = None
    drawn: int = 0

    @staticmethod
    def of_step(plan: StepPlan, followed: Followed | None) -> "DeviceOrder":
        rows, copies = [RankRow.of(row) for row in plan.rows], list(plan.copies)
        if followed is None:
            return DeviceOrder("step", 0, rows, copies, plan.is_scored)
        return DeviceOrder("step", 0, rows, copies, plan.is_scored, followed.places, len(followed.tokens))

    def plan(self) -> StepPlan:
        return StepPlan(tuple(row.row() for row in self.rows), tuple(self.copies), is_scored=self.is_scored)
