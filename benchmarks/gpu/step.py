"""One step of attention as other people's kernels take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from random import Random

import torch
from torch import Tensor

BLOCK = 64


@dataclass(frozen=True, slots=True)
class Step:
    """One step's inputs. `q` `[batch * count, heads, head_dim]`: the last `count` rows of each context, causal. Context
    i is the first `lengths[i]` tokens that `tables[i]` names blocks of, `k`, `v` `[blocks, kv_heads, BLOCK, head_dim]`.
    The first `prefix_tokens` of all contexts, whole blocks, are the same."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Sequence[int]
    tables: Sequence[Sequence[int]]
    count: int = 1
    prefix_tokens: int = 0

    @property
    def scale(self) -> float:
        return float(self.q.shape[2]) ** -0.5

    def ints(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self.q.device)

    def query_starts(self) -> Tensor:
        """Return int32 `[batch + 1]`: where each context's rows of `q` begin."""
        return self.ints(range(0, len(self.q) + 1, self.count))

    def pages(self, tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return where each table starts, int32 `[n + 1]`, all their blocks, and how many tokens the last of each
        holds."""
        used = [table[: -(-length // BLOCK)] for table, length in zip(tables, lengths, strict=True)]
        last = [(length - 1) % BLOCK + 1 for length in lengths]
        starts = accumulate(map(len, used), initial=0)
        return self.ints(list(starts)), self.ints(list(chain.from_iterable(used))), self.ints(last)

    def paged(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values `[blocks, block, kv_heads, head_dim]` in shuffled order, and tables int32 `[batch,
        widest]`. `block` is a multiple of BLOCK."""
        together = block // BLOCK
        padded = [[*table, *[table[0]] * (-len(table) % together)] for table in self.tables]
        order = torch.tensor(list(chain.from_iterable(padded)), device=self.q.device)
        count = len(order) // together

        def merged(side: Tensor) -> Tensor:
            rows = side[order].transpose(1, 2)
            return rows.reshape(count, block, *rows.shape[2:]).contiguous()

        places = list(range(count))
        Random(1).shuffle(places)
        at = torch.tensor(places, device=self.q.device)
        k, v = (torch.empty_like(rows := merged(side)).index_copy_(0, at, rows) for side in (self.k, self.v))
        need = [len(table) // together for table in padded]
        starts = accumulate(need, initial=0)
        tables = [
            places[start : start + n] + [0] * (max(need) - n)
            for start, n in zip(starts, need, strict=False)
        ]
        return k, v, torch.tensor(tables, dtype=torch.int32).to(self.q.device)
