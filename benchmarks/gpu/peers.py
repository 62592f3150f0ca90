"""Decode attention beside other people's kernels, where their packages are installed (K1 to K3).

Each is given the same queries, keys, values and contexts, in blocks of 64 tokens in shuffled order (of 256 where it
takes no smaller ones), laid out as it likes them best, and planned before the clock starts. A line tells its time, its
time over ours, and how far the two are apart; a package that is not there gets a line that says so, one that fails a
line with its error. None of these packages is needed for anything else.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from random import Random
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.decode import attention_step
from kernels.pool import KVPool

BLOCK = 64
WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step: `q` `[batch, heads, head_dim]`; row i attends to the first `lengths[i]` tokens that `tables[i]`
    names blocks of, `k`, `v` `[blocks, kv_heads, BLOCK, head_dim]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Sequence[int]
    tables: Sequence[Sequence[int]]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2]) ** -0.5

    def lengths_tensor(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32).to(self.q.device)

    def paged(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `[blocks, block, kv_heads, head_dim]`, and tables int32 `[batch, widest]`. `block` is a
        multiple of BLOCK."""
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
        starts = [sum(need[:n]) for n in range(len(need))]
        tables = [
            places[start : start + n] + [0] * (max(need) - n)
            for start, n in zip(starts, need, strict=True)
        ]
        return k, v, torch.tensor(tables, dtype=torch.int32).to(self.q.device)


Run = Callable[[], Tensor]
"""One call of a kernel: `[batch, heads, head_dim]`. It may return the same memory each time."""


def flash_attention_2(step: Step) -> Run:
    package = import_module("flash_attn")
    k, v, table = step.paged(256)
    q, lengths = step.q.unsqueeze(1), step.lengths_tensor()
    return lambda: _first(
        package.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, softmax_scale=step.scale, causal=True
        )
    ).squeeze(1)


def flash_attention_3(step: Step) -> Run:
    package = import_module("flash_attn_interface")
    k, v, table = step.paged(BLOCK)
    q, lengths = step.q.unsqueeze(1), step.lengths_tensor()
    return lambda: _first(
        package.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=table, softmax_scale=step.scale, causal=True
        )
    ).squeeze(1)


def flashinfer(step: Step) -> Run:
    package = import_module("flashinfer")
    k, v, table = step.paged(BLOCK)
    k, v = (side.transpose(1, 2).contiguous() for side in (k, v))
    need = [-(-length // BLOCK) for length in step.lengths]
    starts = torch.tensor([sum(need[:at]) for at in range(len(need) + 1)], dtype=torch.int32)
    pages = torch.cat([table[at, :count] for at, count in enumerate(need)])
    last = torch.tensor([(length - 1) % BLOCK + 1 for length in step.lengths], dtype=torch.int32)
    device = step.q.device
    room = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    planned = package.BatchDecodeWithPagedKVCacheWrapper(room, "HND", use_tensor_cores=True)
    planned.plan(
        starts.to(device), pages, last.to(device), step.q.shape[1], k.shape[1], step.q.shape[2], BLOCK,
        q_data_type=step.q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    return lambda: _first(planned.run(step.q, (k, v)))


def vllm_triton(step: Step) -> Run:
    package = _one_of(
        "vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention"
    )
    k, v, table = step.paged(BLOCK)
    batch, heads, head_dim = step.q.shape
    device, out = step.q.device, torch.empty_like(step.q)
    options: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=device),
        "max_seqlen_q": 1,
        "seqused_k": step.lengths_tensor(),
        "max_seqlen_k": max(step.lengths),
        "softmax_scale": step.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
    }
    if "seq_threshold_3D" in inspect.signature(package.unified_attention).parameters:
        # As its backend does: contexts are cut into 16 while there are fewer than 128 programs.
        rows, segments = max(1, 128 // k.shape[2]), 16
        padded = 1 << (head_dim - 1).bit_length()
        room: dict[str, Any] = {"dtype": torch.float32, "device": device}
        options |= {
            "seq_threshold_3D": rows,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": torch.empty(rows, heads, segments, padded, **room),
            "softmax_segm_max": torch.empty(rows, heads, segments, **room),
            "softmax_segm_expsum": torch.empty(rows, heads, segments, **room),
        }

    def run() -> Tensor:
        package.unified_attention(q=step.q, k=k, v=v, out=out, **options)
        return out

    return run


PEERS: dict[str, Callable[[Step], Run]] = {
    "flash-attn 2, blocks of 256": flash_attention_2,
    "flash-attn 3": flash_attention_3,
    "flashinfer": flashinfer,
    "vllm, triton": vllm_triton,
}


def peers(card: Card) -> list[Line]:
    """K1, K2 and K3's contexts through each."""
    size = card.sizes
    long = size.tokens(64 * 1024)
    lines: list[Line] = []
    for name, lengths in (
        ("K1", [size.tokens(4096)] * size.batch),
        ("K2", [size.tokens(1024)]),
        ("K3", [long, *[size.tokens(512)] * (2 * size.batch - 1)]),
    ):
        lines += _lines(card, name, lengths)
    return lines


def _lines(card: Card, name: str, lengths: list[int]) -> list[Line]:
    size = card.sizes
    need = [-(-length // BLOCK) for length in lengths]
    order = list(range(sum(need)))
    Random(0).shuffle(order)
    tables = [order[sum(need[:at]) : sum(need[: at + 1])] for at in range(len(need))]
    pool = KVPool(card.random(len(order), size.kv_heads, 1, 2, BLOCK, size.head_dim))
    q = card.random(len(lengths), size.heads, size.head_dim)
    ours = attention_step(card, q, pool, lengths, tables)
    ours_s = card.timer.seconds(ours)
    want = ours().clone()
    step = Step(q, pool.payload[:, :, 0, 0], pool.payload[:, :, 0, 1], lengths, tables)
    lines: list[Line] = [{"id": name, "what": "headrace", "us": ours_s * 1e6}]
    for what, make in PEERS.items():
        try:
            run = make(step)
            error = float((run().float() - want.float()).abs().max())
            taken_s = card.timer.seconds(run)
        except ImportError as missing:
            lines.append({"id": name, "what": what, "absent": str(missing)})
        except Exception as failure:  # whatever another's package does must not cost our figures
            lines.append({"id": name, "what": what, "failed": f"{type(failure).__name__}: {failure}"})
        else:
            lines.append(
                {"id": name, "what": what, "us": taken_s * 1e6, "times_its_speed": taken_s / ours_s, "apart": error}
            )
    return lines


def _one_of(*names: str) -> Any:
    """The first of these modules that there is. Raises ImportError."""
    for name in names[:-1]:
        try:
            return import_module(name)
        except ImportError:
            continue
    return import_module(names[-1])


def _first(answer: Any) -> Tensor:
    """Some versions return log-sum-exps beside the answer."""
    found: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return found
