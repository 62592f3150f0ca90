"""Attention beside other people's kernels, where their packages are installed: K1 to K3 (decode), K5 (a shared prefix)
and K7 (prefill).

Each is given the same queries, keys, values and contexts, in blocks of 64 tokens in shuffled order (of 256 where it
takes no smaller ones), laid out as it likes them best, and planned before the clock starts. A line tells its time, its
time over ours, and how far the two are apart; a package that is not there gets a line that says so, one that fails a
line with its error. None of these packages is needed for anything else.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from random import Random
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.decode import attention_step
from benchmarks.gpu.others import prefill_step
from benchmarks.gpu.step import BLOCK, Step
from kernels.decode_plan import SharedPrefix
from kernels.pool import KVPool

WORKSPACE_BYTES = 256 << 20

Run = Callable[[], Tensor]
"""One call of a kernel: `[rows, heads, head_dim]`. It may return the same memory each time."""


def flash_attention(package: str, block: int, table_argument: str, step: Step) -> Run:
    """Attend with FlashAttention. Versions 2 and 3 differ in their package, the blocks that they take, and the name of
    an argument."""
    attend = import_module(package).flash_attn_with_kvcache
    k, v, table = step.paged(block)
    q = step.q.unflatten(0, (len(step.lengths), step.count))
    options = {table_argument: table, "cache_seqlens": step.ints(step.lengths)}
    return lambda: _first(
        attend(q, k, v, softmax_scale=step.scale, causal=True, **options)
    ).flatten(0, 1)


def flashinfer(step: Step) -> Run:
    package = import_module("flashinfer")
    pool, sizes = _own_order(step)
    starts, pages, last = step.pages(step.tables, step.lengths)
    types = {"q_data_type": step.q.dtype, "kv_data_type": step.k.dtype}
    if step.count == 1:
        planned = package.BatchDecodeWithPagedKVCacheWrapper(_room(step), "HND", use_tensor_cores=True)
        planned.plan(starts, pages, last, *sizes, **types)
    else:
        planned = package.BatchPrefillWithPagedKVCacheWrapper(_room(step), "HND")
        planned.plan(step.query_starts(), starts, pages, last, *sizes, causal=True, **types)
    return lambda: _first(planned.run(step.q, pool))


def flashinfer_cascade(step: Step) -> Run:
    """Attend with the shared prefix as one level, what follows it as another."""
    package = import_module("flashinfer")
    pool, sizes = _own_order(step)
    shared = step.prefix_tokens // BLOCK
    levels = [
        step.pages([step.tables[0][:shared]], [step.prefix_tokens]),
        step.pages(
            [table[shared:] for table in step.tables],
            [length - step.prefix_tokens for length in step.lengths],
        ),
    ]
    starts, pages, last = (list(kind) for kind in zip(*levels, strict=True))
    planned = package.MultiLevelCascadeAttentionWrapper(len(levels), _room(step), "HND")
    queries = [step.ints([0, len(step.q)]), step.query_starts()]
    planned.plan(queries, starts, pages, last, *sizes, q_data_type=step.q.dtype)
    return lambda: _first(planned.run(step.q, pool))


def vllm_triton(step: Step) -> Run:
    package = _one_of(
        "vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention"
    )
    k, v, table = step.paged(BLOCK)
    _, heads, head_dim = step.q.shape
    device, out = step.q.device, torch.empty_like(step.q)
    options: dict[str, Any] = {
        "cu_seqlens_q": step.query_starts(),
        "max_seqlen_q": step.count,
        "seqused_k": step.ints(step.lengths),
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


Peers = Mapping[str, Callable[[Step], Run]]

PEERS: Peers = {
    "flash-attn 2, blocks of 256": partial(flash_attention, "flash_attn", 256, "block_table"),
    "flash-attn 3": partial(flash_attention, "flash_attn_interface", BLOCK, "page_table"),
    "flashinfer": flashinfer,
    "vllm, triton": vllm_triton,
}
CASCADES: Peers = {"flashinfer, cascade": flashinfer_cascade}
"""Peers that read a shared prefix once."""


def peers(card: Card) -> Iterator[Line]:
    """Measure each of them at each of the steps it is for."""
    size = card.sizes
    long = size.tokens(64 * 1024)
    for name, lengths in (
        ("K1", [size.tokens(4096)] * size.batch),
        ("K2", [size.tokens(1024)]),
        ("K3", [long, *[size.tokens(512)] * (2 * size.batch - 1)]),
    ):
        pool, step = _step(card, lengths)
        yield from _lines(card, name, step, attention_step(card, step.q, pool, lengths, step.tables), PEERS)
    prefix = size.tokens(8192) // BLOCK * BLOCK or BLOCK
    lengths = [prefix + 32] * (2 * size.batch)
    pool, step = _step(card, lengths, prefix_tokens=prefix)
    common = SharedPrefix(tuple(range(len(lengths))), prefix)
    ours = attention_step(card, step.q, pool, lengths, step.tables, shared=[common])
    yield from _lines(card, "K5", step, ours, CASCADES)
    for length in (size.tokens(4096), size.tokens(16384)):
        pool, step = _step(card, [length], count=length)
        yield from _lines(card, "K7", step, prefill_step(card, step.q, pool, length, step.tables[0]), PEERS)


def _step(
    card: Card, lengths: list[int], *, count: int = 1, prefix_tokens: int = 0
) -> tuple[KVPool, Step]:
    """Make a pool, and a step over it."""
    size, shared = card.sizes, prefix_tokens // BLOCK
    need = [-(-length // BLOCK) - shared for length in lengths]
    order = list(range(sum(need) + shared))
    Random(0).shuffle(order)
    starts = [shared + sum(need[:at]) for at in range(len(need))]
    tables = [
        order[:shared] + order[start : start + n] for start, n in zip(starts, need, strict=True)
    ]
    pool = KVPool(card.random(len(order), size.kv_heads, 1, 2, BLOCK, size.head_dim))
    q = card.random(len(lengths) * count, size.heads, size.head_dim)
    k, v = pool.payload[:, :, 0, 0], pool.payload[:, :, 0, 1]
    return pool, Step(q, k, v, lengths, tables, count, prefix_tokens)


def _lines(card: Card, name: str, step: Step, ours: Run, others: Peers) -> Iterator[Line]:
    ours_s = card.timer.seconds(ours)
    want = ours().clone()
    shape = f"{len(step.lengths)} x {step.count} of {max(step.lengths)}"
    yield {"id": name, "what": "headrace", "shape": shape, "us": ours_s * 1e6}
    for what, make in others.items():
        line: Line = {"id": name, "what": what, "shape": shape}
        try:
            run = make(step)
            error = float((run().float() - want.float()).abs().max())
            taken_s = card.timer.seconds(run)
        except ImportError as missing:
            line["absent"] = str(missing)
        except Exception as failure:  # whatever another's package does must not cost our figures
            line["failed"] = f"{type(failure).__name__}: {failure}"
        else:
            line |= {"us": taken_s * 1e6, "times_its_speed": taken_s / ours_s, "apart": error}
        yield line


def _own_order(step: Step) -> tuple[tuple[Tensor, Tensor], tuple[int, int, int, int]]:
    """Return our blocks, keys and values apart; heads, KV heads, size of a head and of a block."""
    k, v = step.k.contiguous(), step.v.contiguous()
    return (k, v), (step.q.shape[1], k.shape[1], step.q.shape[2], BLOCK)


def _room(step: Step) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=step.q.device)


def _one_of(*names: str) -> Any:
    """Import the first of these modules that there is. Raises ImportError."""
    for name in names[:-1]:
        try:
            return import_module(name)
        except ImportError:
            continue
    return import_module(names[-1])


def _first(answer: Any) -> Tensor:
    """Return the answer alone: some versions return log-sum-exps beside it."""
    found: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return found
