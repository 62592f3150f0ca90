"""Other people's kernels beside ours: modules of their names that compute with torch, from the shapes they document."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import peers
from benchmarks.gpu.dry import dry_card

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`q` `[count, heads, dim]`, the last rows of `k`, `v` `[tokens, kv_heads, dim]`."""
    count, group = len(q), q.shape[1] // k.shape[1]
    k, v = (side.float().repeat_interleave(group, 1) for side in (k, v))
    hidden = torch.ones(count, len(k), dtype=torch.bool).triu(len(k) - count + 1)
    scores = torch.einsum("qhd,thd->hqt", q.float(), k) * scale
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return torch.einsum("hqt,thd->qhd", weights, v).to(q.dtype)


def over_pages(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, scale: float) -> Tensor:
    """`q` `[batch, count, heads, dim]`, `k`, `v` `[pages, page, kv_heads, dim]`, `table` `[batch, pages of a row]`."""
    page = k.shape[1]
    rows = []
    for at, length in enumerate(lengths.tolist()):
        mine = table[at, : -(-length // page)].long()
        rows.append(attended(q[at], k[mine].flatten(0, 1)[:length], v[mine].flatten(0, 1)[:length], scale))
    return torch.stack(rows)


def flash_attn(name: str, table_name: str, least_page: int) -> ModuleType:
    module = ModuleType(name)

    def flash_attn_with_kvcache(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert k.shape[1] % least_page == 0 and k.is_contiguous() and options["causal"] is True
        table = options[table_name]
        assert table.dtype == options["cache_seqlens"].dtype == torch.int32
        return over_pages(q, k, v, options["cache_seqlens"], table, options["softmax_scale"])

    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


class Paged:
    """Sequences over pages `[pages, kv_heads, page, dim]`, planned as FlashInfer documents."""

    def __init__(self, room: Tensor, layout: str) -> None:
        assert room.dtype == torch.uint8 and layout == "HND"
        self.causal = False

    def plan(
        self, queries: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, heads: int, kv_heads: int, dim: int,
        page: int, *, causal: bool = False, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert indptr.dtype == indices.dtype == last.dtype == queries.dtype == torch.int32
        assert q_data_type == kv_data_type == torch.float16 and heads % kv_heads == 0
        assert len(indices) == indptr[-1] and int(last.max()) <= page
        self.queries, self.starts, self.pages, self.last = queries.tolist(), indptr.tolist(), indices, last
        self.page, self.causal = page, causal

    def sequences(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for at in range(len(self.starts) - 1):
            mine = self.pages[self.starts[at] : self.starts[at + 1]].long()
            length = (len(mine) - 1) * self.page + int(self.last[at])
            k, v = (side[mine].transpose(1, 2).flatten(0, 1)[:length] for side in kv)
            found.append((q[self.queries[at] : self.queries[at + 1]], k, v))
        return found

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        assert self.causal
        return torch.cat([attended(*one, q.shape[2] ** -0.5) for one in self.sequences(q, kv)])


class Decode(Paged):
    def __init__(self, room: Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert use_tensor_cores
        super().__init__(room, layout)

    def plan(self, indptr: Tensor, *rest: Any, **options: Any) -> None:  # type: ignore[override]
        each = torch.arange(len(indptr), dtype=torch.int32)
        super().plan(each, indptr, *rest, causal=True, **options)


class Cascade:
    """Each query sees all of the first level, and its own of the second."""

    def __init__(self, levels: int, room: Tensor, layout: str) -> None:
        self.levels = [Paged(room, layout) for _ in range(levels)]

    def plan(self, queries: Any, starts: Any, pages: Any, last: Any, *sizes: int, q_data_type: torch.dtype) -> None:
        for at, level in enumerate(self.levels):
            level.plan(
                queries[at], starts[at], pages[at], last[at], *sizes,
                q_data_type=q_data_type, kv_data_type=q_data_type,
            )  # fmt: skip

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        ((everyone, *shared),) = self.levels[0].sequences(q, kv)
        assert len(everyone) == len(q)
        rows = [
            attended(row, *(torch.cat(pair) for pair in zip(shared, own, strict=True)), q.shape[2] ** -0.5)
            for row, *own in self.levels[1].sequences(q, kv)
        ]
        return torch.cat(rows)


def flashinfer() -> ModuleType:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Paged  # type: ignore[attr-defined]
    module.MultiLevelCascadeAttentionWrapper = Cascade  # type: ignore[attr-defined]
    return module


def vllm(with_segments: bool) -> ModuleType:
    module = ModuleType("triton_unified_attention")

    def old(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
        block_table, softcap, q_descale, k_descale, v_descale, alibi_slopes=None, sinks=None,
    ) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
        assert causal and window_size == (-1, -1) and max_seqlen_k == int(seqused_k.max())
        assert cu_seqlens_q.tolist() == list(range(0, len(q) + 1, max_seqlen_q))
        by_sequence = q.unflatten(0, (-1, max_seqlen_q))
        out.copy_(over_pages(by_sequence, k, v, seqused_k, block_table, softmax_scale).flatten(0, 1))

    def new(
        q, k, v, out, *, seq_threshold_3D, num_par_softmax_segments, softmax_segm_output, softmax_segm_max,
        softmax_segm_expsum, **options,
    ) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
        assert softmax_segm_output.shape[:3] == (seq_threshold_3D, q.shape[1], num_par_softmax_segments)
        assert softmax_segm_max.shape == softmax_segm_expsum.shape == softmax_segm_output.shape[:3]
        old(q, k, v, out, **options)

    module.unified_attention = new if with_segments else old  # type: ignore[attr-defined]
    return module


STANDINS: dict[str, tuple[str, Callable[[], ModuleType]]] = {
    "flash-attn 2, blocks of 256": ("flash_attn", lambda: flash_attn("flash_attn", "block_table", 256)),
    "flash-attn 3": ("flash_attn_interface", lambda: flash_attn("flash_attn_interface", "page_table", 1)),
    "flashinfer": ("flashinfer", flashinfer),
    "vllm, triton": ("vllm.v1.attention.ops.triton_unified_attention", lambda: vllm(True)),
    "vllm, triton, as it was": ("vllm.attention.ops.triton_unified_attention", lambda: vllm(False)),
}


def installed(monkeypatch: pytest.MonkeyPatch, path: str, module: ModuleType) -> None:
    parents = path.split(".")
    for at in range(1, len(parents)):
        name = ".".join(parents[:at])
        parent = ModuleType(name)
        parent.__path__ = []
        monkeypatch.setitem(sys.modules, name, parent)
    monkeypatch.setitem(sys.modules, path, module)


@pytest.mark.parametrize("peer", STANDINS)
def test_a_peer_gets_the_step_in_its_own_layout(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a comparison of two different computations: pages in the wrong order, a layout of somebody else's."""
    installed(monkeypatch, STANDINS[peer][0], STANDINS[peer][1]())
    lines = [line for line in peers.peers(dry_card()) if peer.startswith(str(line["what"]))]
    assert {line["id"] for line in lines} == {"K1", "K2", "K3", "K7"}
    assert all(float(line["apart"]) < 2e-3 and float(line["us"]) > 0 for line in lines), lines


def test_a_cascade_gets_the_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a comparison of a shared prefix with one that was copied for everybody, or that some do not see."""
    installed(monkeypatch, "flashinfer", flashinfer())
    (line,) = [line for line in peers.peers(dry_card()) if line["what"] == "flashinfer, cascade"]
    assert line["id"] == "K5" and float(line["apart"]) < 2e-3, line


def test_a_peer_that_fails_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards our own figures against another package's errors, and a failure that looks like an absence."""
    broken = ModuleType("flashinfer")
    installed(monkeypatch, "flashinfer", broken)
    lines = list(peers.peers(dry_card()))
    failed = [line for line in lines if "failed" in line]
    assert {str(line["what"]) for line in failed} == {"flashinfer", "flashinfer, cascade"}
    assert all("AttributeError" in str(line["failed"]) for line in failed)
    assert sum(line["what"] == "headrace" for line in lines) == 6
