"""Checks that the kernels are right on this card: their error against 64 bits, beside that of a plain 16-bit
computation.

The rule is FlashAttention's: a kernel may be wrong by twice what the plain one is. Each case stands by itself: one that
is refused, fails or breaks its process costs its own line. The whole suite, with its odd sizes and poisoned memory, is
`python -m pytest tests/kernels tests/engine/backends/gpu/test_step.py tests/engine/backends/gpu/test_graphs.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu import isolated
from benchmarks.gpu.card import Card, Line
from kernels import reference_attention
from kernels.configs import ConfigKey, config_for
from kernels.decode_attention import decode_attention
from kernels.decode_buffers import DecodeBuffers
from kernels.decode_plan import geometry_for, plan_decode
from kernels.kv_write import quantize
from kernels.pool import KVPool, eight_bit_pool
from kernels.prefill_attention import plan_prefill, prefill_attention, rows_per_tile
from kernels.prefill_hopper import ROWS, prefill_hopper, runs_on

ALLOWED = 2.0
SLACK = 1e-3
LAYERS, LAYER = 4, 1
"""The pool's layers, and the one that is read. With a single layer some 8-bit rows would be less aligned than in a
model."""
CASE_S = 40.0
"""How long a case may take, compilation included."""


class Case(NamedTuple):
    """One case to check. `kind`: "decode", "prefill" or "hopper", which is the
    prefill kernel for sm_90. `dtype`: of the pool, "native" for that of the queries."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    dtype: str

    def key(self, card: Card) -> ConfigKey:
        dtype = str(card.dtype).removeprefix("torch.") if self.dtype == "native" else self.dtype
        kind = "prefill" if self.kind == "hopper" else self.kind
        return ConfigKey(kind, self.head_dim, self.heads // self.kv_heads, self.block, dtype, card.arch)

    def name(self, card: Card) -> str:
        shape = f"{self.heads}/{self.kv_heads}/{self.head_dim}"
        return f"{self.kind} {shape}, block {self.block}, {self.key(card).dtype}"


CASES = [
    Case(kind, heads, kv_heads, head_dim, block, dtype)
    for heads, kv_heads, head_dim, block in (
        (32, 8, 128, 64),
        (9, 3, 64, 16),
        (8, 8, 80, 32),
        (16, 1, 96, 1),
        (8, 1, 256, 128),
    )
    for dtype in ("native", "int8", "float8_e4m3fn")
    for kind in ("decode", "prefill")
]
IN_DRY_RUN = slice(8, 10)
ON_HOPPER = [
    Case("hopper", heads, kv_heads, head_dim, block, "native")
    for heads, kv_heads, head_dim, block in ((32, 8, 128, 64), (9, 3, 64, 16), (16, 1, 128, 8), (8, 8, 64, 256))
]
"""Those of `prefill_hopper`, on the GPUs that it is for."""


@dataclass(frozen=True, slots=True)
class CaseRows:
    """The rows of one case. `q` `[rows, heads, head_dim]`: the last `counts[i]` rows of context i, whose blocks are in
    `tables[i]`."""

    q: Tensor
    pool: KVPool
    counts: list[int]
    contexts: list[int]
    tables: list[list[int]]


def correct(card: Card) -> Iterator[Line]:
    """Check every case. Raises nothing: a line whose `right` is 0 is a wrong kernel, or one that gave no answer, and
    why."""
    cases = CASES if card.sizes.unit == 1 else CASES[IN_DRY_RUN]
    if runs_on(card.device):
        cases = cases + ON_HOPPER
    for case, told in isolated.each(cases, check, card, CASE_S):
        if isinstance(told, isolated.Failure):
            yield {"what": case.name(card), "failure": str(told), "right": 0}
        else:
            yield told


def check(card: Card, case: Case) -> Line:
    """Launch one case and compare it with 64 bits. Raises what the launch raises."""
    rows = random_rows(card, case)
    got = launched(card, case, rows)
    place = rows.q, rows.pool, LAYER
    if case.kind == "decode":
        want, _ = reference_attention.decode(*place, rows.contexts, rows.tables)
    else:
        want, _ = reference_attention.prefill(*place, rows.counts, rows.contexts, rows.tables)
    error = float((got.double() - want).abs().max())
    plain = float((_plain(rows).double() - want).abs().max())
    return {
        "what": case.name(card),
        "error": error,
        "plain_error": plain,
        "right": int(error <= ALLOWED * plain + SLACK),
    }


def random_rows(card: Card, case: Case) -> CaseRows:
    """Make contexts of several lengths, in shuffled blocks; the last half of each for prefill."""
    contexts = [max(1, card.sizes.tokens(n)) for n in (1, 37, 700, 2049)]
    counts = [1] * len(contexts) if case.kind == "decode" else [max(1, n // 2) for n in contexts]
    need = [-(-n // case.block) for n in contexts]
    order = list(range(sum(need)))
    Random(0).shuffle(order)
    tables = [order[sum(need[:at]) : sum(need[: at + 1])] for at in range(len(need))]
    pool = _pool(card, len(order), case.kv_heads, case.block, case.head_dim, case.dtype)
    return CaseRows(card.random(sum(counts), case.heads, case.head_dim), pool, counts, contexts, tables)


def launched(card: Card, case: Case, rows: CaseRows) -> Tensor:
    """Return what the kernels make of `rows`, with the table's configuration."""
    key = case.key(card)
    config = config_for(key)
    width = max(map(len, rows.tables))
    if case.kind == "decode":
        geometry = geometry_for(
            batch=len(rows.contexts), kv_heads=case.kv_heads, group=key.group, programs=card.sms,
            tile=config.tile, packed_rows=config.rows,
        )  # fmt: skip
        buffers = DecodeBuffers(
            geometry, batch=len(rows.contexts), heads=case.heads, head_dim=case.head_dim,
            table_blocks=width, device=card.device,
        )  # fmt: skip
        buffers.load(plan_decode(rows.contexts, geometry), rows.contexts, rows.tables)
        return decode_attention(rows.q, rows.pool, LAYER, buffers, config)[0]
    hopper = case.kind == "hopper"
    fitting = ROWS // key.group if hopper else rows_per_tile(config, key.group)
    planned = plan_prefill(rows.counts, rows.contexts, fitting)
    tiles = torch.tensor(planned, dtype=torch.int32).to(card.device)
    padded = [table + [0] * (width - len(table)) for table in rows.tables]
    tables = torch.tensor(padded, dtype=torch.int32).to(card.device)
    if hopper:
        return prefill_hopper(rows.q, rows.pool, LAYER, tiles, tables)
    return prefill_attention(rows.q, rows.pool, LAYER, tiles, tables, config)


def _pool(
    card: Card, blocks: int, kv_heads: int, block: int, head_dim: int, dtype: str
) -> KVPool:
    payload = card.random(blocks, kv_heads, LAYERS, 2, block, head_dim)
    if dtype == "native":
        return KVPool(payload)
    kind: torch.dtype = getattr(torch, dtype)
    _, pool = eight_bit_pool(
        blocks, kv_heads, LAYERS, block, head_dim, dtype=kind, device=card.device
    )
    assert pool.scales is not None
    codes, scales = quantize(payload.float(), kind)
    pool.payload.copy_(codes)
    pool.scales.copy_(scales)
    return pool


def _plain(rows: CaseRows) -> Tensor:
    """Compute attention with each step rounded to the queries' 16 bits."""
    q, pool = rows.q, rows.pool
    out, row = torch.empty_like(q), 0
    group = q.shape[1] // pool.kv_heads
    for count, context, table in zip(rows.counts, rows.contexts, rows.tables, strict=True):
        k, v = (
            side.to(q.dtype).repeat_interleave(group, 0)
            for side in reference_attention.gather_rows(pool, LAYER, table, context)
        )
        mine = q[row : row + count].transpose(0, 1)
        scores = mine @ k.transpose(1, 2) * q.shape[2] ** -0.5
        hidden = torch.ones(count, context, dtype=torch.bool, device=q.device).triu(
            context - count + 1
        )
        probs = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        out[row : row + count] = (probs @ v).transpose(0, 1)
        row += count
    return out
