"""The device memory of a captured decode step: what a plan is loaded into, and the partial results of split rows.

Everything that varies from step to step lies in one int32 tensor, filled on the host and brought over by one copy. Two
host copies take turns, so that the plan of step n + 1 can be written while step n, and its copy, may still be running;
whoever loads step n + 2 must have seen step n end.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from kernels.decode_plan import DecodeGeometry, DecodePlan, WorkItem


class DecodeBuffers:
    """Device memory for `batch` rows, `stacks` tables of `table_blocks` blocks for each, and the geometry's items and
    slots. Layers that keep their blocks apart read by the same plan, each by its stack of tables.

    No tensor here ever changes its address. Read by the kernels: `items` int32 `[max_items, fields of WorkItem]`,
    `ranges` `[programs + 1]`, `rows` `[max_items]`, `slots` `[batch, 2]` (splits, first slot), `lengths` `[batch]`,
    `tables` `[batch, stacks * width]` (see `stack`). Written by them: `partial` float32 `[max_slots, heads, head_dim]`,
    `partial_lse` `[max_slots, heads]`, `lse` `[batch, heads]`. `loaded`: rows of the plan that is in them.
    """

    def __init__(
        self,
        geometry: DecodeGeometry,
        *,
        batch: int,
        heads: int,
        head_dim: int,
        table_blocks: int,
        stacks: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.geometry = geometry
        self._stacks = stacks
        # Of several, each begins at a multiple of 16 bytes, as all else.
        self._width = table_blocks if stacks == 1 else -(-table_blocks // 4) * 4
        self.batch = batch
        self.loaded = 0
        shapes = (
            (geometry.max_items, len(WorkItem._fields)),
            (geometry.programs + 1,),
            (geometry.max_items,),
            (batch, 2),
            (batch,),
            (batch, stacks * self._width),
        )
        # Each begins at a multiple of 16 bytes, which is what the kernels are compiled for.
        sizes = [-(-torch.Size(shape).numel() // 4) * 4 for shape in shapes]
        self._table_offset = sum(sizes[:-1])
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        pinned = self._device.is_cuda
        self._hosts = [
            torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]

        def views(flat: Tensor) -> list[Tensor]:
            pieces = flat.split(sizes)
            return [
                piece[: torch.Size(shape).numel()].view(shape)
                for piece, shape in zip(pieces, shapes, strict=True)
            ]

        self._host_views = [views(host) for host in self._hosts]
        self.items, self.ranges, self.rows, self.slots, self.lengths, self.tables = views(
            self._device
        )
        self.ranges.fill_(geometry.programs)  # nobody has anything to do, until there is a plan
        floats = self._device.new_empty(0, dtype=torch.float32)
        self.partial = floats.new_empty(geometry.max_slots, heads, head_dim)
        self.partial_lse = floats.new_empty(geometry.max_slots, heads)
        self.lse = floats.new_empty(batch, heads)

    def stack(self, number: int) -> Tensor:
        """The tables of one stack, `[batch, width]`, as far apart as rows of `tables` are."""
        return self.tables[:, number * self._width : (number + 1) * self._width]

    def load(
        self, plan: DecodePlan, lengths: Sequence[int], *stacks: Sequence[Sequence[int]]
    ) -> None:
        """Bring in a step's plan, on the current stream. `stacks`: of each, the blocks of every row, which cover its
        length; what no window shows may be any number, and is not read.

        Raises ValueError where the step does not fit the buffers.
        """
        batch, width = len(self.tables), self._width
        counts = {len(lengths), len(plan.splits), *map(len, stacks)}
        if len(lengths) > batch or len(counts) > 1 or len(stacks) != self._stacks:
            raise ValueError(
                f"{len(lengths)} rows, {[*map(len, stacks)]} tables in buffers of {batch} rows, {self._stacks} stacks"
            )
        longest = max((len(table) for tables in stacks for table in tables), default=0)
        if longest > width or len(plan.rows) > self.rows.numel():
            raise ValueError(f"a table is longer than {width} blocks, or too many rows share")
        self._hosts.reverse()
        self._host_views.reverse()
        items, ranges, rows, slots, own_lengths, own_tables = self._host_views[0]
        _fill(items.view(-1), chain.from_iterable(plan.items))
        _fill(ranges, plan.ranges)
        _fill(rows, plan.rows)
        slots.zero_()
        _fill(slots[:, 0], plan.splits)
        _fill(slots[:, 1], plan.first_slots)
        _fill(own_lengths, lengths)
        for number, tables in enumerate(stacks):
            for row, table in enumerate(tables):
                _fill(own_tables[row, number * width :], table)
        # Block tables come last, and only those in use.
        used = self._table_offset + len(lengths) * self._stacks * width
        self._device[:used].copy_(self._hosts[0][:used], non_blocking=True)
        self.loaded = len(lengths)


def _fill(target: Tensor, values: Iterable[int]) -> None:
    numbers = array("i", values)  # several times faster to make than a tensor of a list
    if numbers:
        target[: len(numbers)].copy_(torch.frombuffer(numbers, dtype=torch.int32))
