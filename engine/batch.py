"""The tensors of one step: what the runner makes of a plan, and all that a forward pass may look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.step import Row
from engine.types import BlockId

ROW_MULTIPLE = 4
"""Libraries' products over a multiple of four rows give a row the same bits whatever the others are (CPU, 32-bit)."""


class Followed(NamedTuple):
    """Tokens that rows compute and that are drawn by the step before, which may be under way."""

    tokens: Tensor
    """int64 `[draws]`, on the device."""
    places: list[int]
    """For each row of one token, which come first in a step, which of them is its token; -1: the row has its own."""


class GroupTables(NamedTuple):
    """Where the KV of a step's sequences is in the layers of one group (`engine.kv.groups`)."""

    slots: Tensor
    """int64 `[rows]`: block * block_size + offset of each new token."""
    block_tables: list[Tensor]
    """Per sequence: int64 `[blocks]`. What a window does not show, and is not held, is block 0: it is masked."""

    @staticmethod
    def of(rows: Sequence[Row], tables: Sequence[Sequence[BlockId]], block_size: int) -> "GroupTables":
        """`tables`: of each row, in this group. Raises ValueError for a row without a block for a token of its own."""
        # One tensor of all rows: one for each takes as long as a step's smallest kernels do.
        flat, slots, sizes = list[int](), list[int](), list[int]()
        for row, blocks in zip(rows, tables, strict=True):
            sizes.append(-(-row.end // block_size))
            flat.extend(blocks[: sizes[-1]])
            for at in range(row.start // block_size, sizes[-1]):
                if blocks[at] < 0:
                    raise ValueError(f"{row.request} has no block for a token that it computes")
                ahead = (blocks[at] - at) * block_size
                first, last = max(row.start, at * block_size), min(row.end, (at + 1) * block_size)
                slots.extend(range(ahead + first, ahead + last))
        found = torch.tensor(flat, dtype=torch.int64).clamp_(min=0)
        return GroupTables(torch.tensor(slots, dtype=torch.int64), list(found.split(sizes)))


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Flat tensors of one step. Rows are padded to a multiple with token 0 at position 0, whose K/V is not written and
    whose attention output is zero; logit rows are padded by repeating the last."""

    tokens: Tensor  # int64 [padded rows]
    positions: Tensor  # int64 [padded rows]
    logit_rows: Tensor  # int64 [padded logit rows]: which rows' logits are wanted
    slots: Tensor  # int64 [rows]: block * block_size + offset of each new token
    query_counts: list[int]  # per sequence: new rows
    context_lens: list[int]  # per sequence: tokens after this step
    block_tables: list[Tensor]  # per sequence: int64 [blocks]
    rows: int
    logits: int
    windows: tuple[GroupTables, ...] = ()  # of the layer groups but the first, whose are above

    @property
    def groups(self) -> tuple[GroupTables, ...]:
        """The tables of every layer group."""
        return (GroupTables(self.slots, self.block_tables), *self.windows)

    @staticmethod
    def build(
        sequences: Sequence[Row],
        block_size: int,
        device: torch.device | str = "cpu",
        row_multiple: int = ROW_MULTIPLE,
        followed: Followed | None = None,
    ) -> "ForwardBatch":
        """Lay the sequences' parts out one after the other; block tables stay with the CPU, which plans with them. At
        least one sequence, each with at least one token. Waits for nothing that the device does."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for part in sequences:
            tokens += part.tokens[part.start : part.end] if not part.follows else (0,)
            positions += range(part.start, part.end)
            if part.draw:
                wanted += range(len(tokens) - 1 - part.drafts, len(tokens))
        rows = len(tokens)
        padding = -rows % row_multiple
        logit_rows = wanted + wanted[-1:] * (-len(wanted) % row_multiple)
        own = GroupTables.of(sequences, [part.blocks for part in sequences], block_size)
        windows = [
            GroupTables.of(sequences, [part.windows[group] for part in sequences], block_size)
            for group in range(len(sequences[0].windows))
        ]
        ids = upload(torch.tensor(tokens + [0] * padding, dtype=torch.int64), device)
        if followed is not None:
            ones = len(followed.places)
            ids[:ones] = take(ids[:ones], followed.tokens, upload(torch.tensor(followed.places), device))
        return ForwardBatch(
            tokens=ids,
            positions=upload(torch.tensor(positions + [0] * padding, dtype=torch.int64), device),
            logit_rows=upload(torch.tensor(logit_rows, dtype=torch.int64), device),
            slots=upload(own.slots, device),
            query_counts=[part.end - part.start for part in sequences],
            context_lens=[part.end for part in sequences],
            block_tables=own.block_tables,
            rows=rows,
            logits=len(wanted),
            windows=tuple(GroupTables(upload(one.slots, device), one.block_tables) for one in windows),
        )


def upload(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Return them on the device, before the next work of its current stream. Does not wait for that stream, as a copy
    from memory that is not pinned may."""
    if torch.device(device).type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def take(own: Tensor, drawn: Tensor, places: Tensor) -> Tensor:
    """Return `own` with `drawn[place]` wherever a place is not negative; all int64, `own` and `places` as long."""
    if not len(drawn):
        return own
    return torch.where(places >= 0, drawn[places.clamp(min=0)], own)
