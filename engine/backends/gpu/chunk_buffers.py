"""The device memory in which recorded mixed steps find their chunks: tiles of prefill attention, and block tables."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.prefill_attention import TILE_FIELDS

Tile = tuple[int, int, int, int]
"""As `kernels.prefill_attention.plan_prefill` makes them."""


class ChunkBuffers:
    """Memory for chunks of up to `prompts` sequences with `tokens` new tokens together. `rows_per_tile`: queries that a
    tile holds. `tables` is int32 `[groups, prompts, blocks]`. No tensor here ever changes its address. Two host copies
    take turns, as those of `DecodeBuffers` do."""

    def __init__(
        self,
        tokens: int,
        prompts: int,
        rows_per_tile: int,
        table_blocks: int,
        device: torch.device,
        groups: int = 1,
    ) -> None:
        self._prompts, self._rows_per_tile = prompts, rows_per_tile
        shapes = (self.tiles_of(tokens), TILE_FIELDS), (groups, prompts, table_width(table_blocks, groups))
        # The tables begin at a multiple of 16 bytes: a tile has that many.
        sizes = [torch.Size(shape).numel() for shape in shapes]

        def views(flat: Tensor) -> tuple[Tensor, Tensor]:
            return flat[: sizes[0]].view(shapes[0]), flat[sizes[0] :].view(shapes[1])

        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=self._device.is_cuda) for _ in range(2)]
        self._host_views = [views(host) for host in self._hosts]
        self.tiles, self.tables = views(self._device)

    def tiles_of(self, tokens: int) -> int:
        """Return how many tiles so many tokens may need, however they are divided among prompts."""
        return -(-tokens // self._rows_per_tile) + self._prompts

    def load(self, tiles: Sequence[Tile], groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """Bring in a step's chunks, on the current stream: `groups` has the tables of each layer group. Tiles beyond
        them have no queries."""
        self._hosts.reverse()
        self._host_views.reverse()
        own_tiles, own_tables = self._host_views[0]
        own_tiles.zero_()
        own_tiles[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
        for own_group, tables in zip(own_tables, groups, strict=True):
            for own, table in zip(own_group, tables, strict=False):
                own[: len(table)] = torch.tensor(table, dtype=torch.int32)
        self._device.copy_(self._hosts[0], non_blocking=True)


def table_width(blocks: int, groups: int) -> int:
    """Return how far tables of so many blocks are apart: those of each of several groups begin at a multiple of 16
    bytes, as the kernel was compiled for the first ones."""
    return blocks if groups == 1 else -(-blocks // 4) * 4
