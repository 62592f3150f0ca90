"""The programs about KV memory, small: they run, and what they claim holds on a small scale."""

import lzma
import sys
from contextlib import ExitStack
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch

from benchmarks import (
    ablation,
    block_size,
    cache_overhead,
    eviction,
    kv_attention,
    kv_bits,
    memory_waste,
    preemption,
    prefix_reuse,
    queue_order,
    radix,
    sharing,
    traces,
)
from benchmarks.compressed_tree import CompressedTree
from benchmarks.shapes_of_work import SHAPES
from cluster.bench.traces import TraceRow, read
from engine.backends.attention import TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.device import EngineDevice
from engine.kv.layout import KVLayout
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.types import BlockId
from kernels.native import native
from tests.engine.model.test_families import reference, save_hf
from tests.integration.fake_device import fake_device

ROWS = traces.make(traces.TraceShape(rows=400), seed=3)


def test_a_trace_is_made_from_its_seed() -> None:
    assert traces.make(traces.TraceShape(rows=200), 3) == ROWS[:200] != traces.make(traces.TraceShape(rows=200), 4)
    assert [row.timestamp for row in ROWS] == sorted(row.timestamp for row in ROWS)
    assert all(len(row.hash_ids) == -(-row.input_length // 512) for row in ROWS)
    parents: dict[int, int] = {}
    for row in ROWS:
        for parent, block in zip([-1, *row.hash_ids], row.hash_ids, strict=False):
            assert parents.setdefault(block, parent) == parent, "an id after different content"


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    lines = b"\n".join(map(msgspec.json.encode, ROWS)) + b"\n"
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines))
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "a.jsonl.xz") == ROWS


def test_ideal_reuse_counts_prefixes_only() -> None:
    """The last block of a prompt counts with the tokens it has."""
    rows = [TraceRow(0, 1024, 1, [1, 2]), TraceRow(1, 600, 1, [1, 2]), TraceRow(2, 600, 1, [9, 3])]
    assert traces.ideal(rows) == (2 / 6, 600 / 2224)


@pytest.mark.parametrize("capacity", [200, 800])
def test_the_simulator_s_lru_is_the_engine_s_and_the_optimum_is_above_it(capacity: int) -> None:
    """Guards a comparison of two different caches: the same order must find the same blocks."""
    least = eviction.lru(ROWS, capacity)
    assert eviction.simulate(ROWS, capacity, lambda use: use.tick) == least
    most = eviction.belady(ROWS, capacity)
    for policy in eviction.POLICIES.values():
        assert eviction.simulate(ROWS, capacity, policy) <= most
    assert 0 < least < most


def _best(asked: list[int], cached: frozenset[int], capacity: int) -> int:
    """Every choice of what to evict, tried."""
    if not asked:
        return 0
    block, rest = asked[0], asked[1:]
    if block in cached:
        return 1 + _best(rest, cached, capacity)
    if len(cached) < capacity:
        return _best(rest, cached | {block}, capacity)
    return max(_best(rest, cached - {gone} | {block}, capacity) for gone in cached)


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_the_best_of_all_choices(seed: int) -> None:
    asked = [Random(seed * 100 + at).randrange(5) for at in range(14)]
    rows = [TraceRow(at, 512, 1, [block]) for at, block in enumerate(asked)]
    assert eviction.belady(rows, 3) == _best(asked, frozenset(), 3)


def test_waste() -> None:
    mix = memory_waste.Mix()
    live = {row["slots"]: row["live %"] for row in memory_waste.measure(mix, 16_384, 200, 1)}
    assert live["blocks of 1"] == 100.0
    assert float(live["blocks of 16"]) > 96 > float(live["blocks of 128"])
    assert 10 < float(live["contiguous, context"]) < 40
    assert round(100 * memory_waste.wasted(8192, [600, 1250, 4000, 128]), 1) == 81.8


def test_longest_prefix_first_is_between_first_come_and_the_best() -> None:
    for row in queue_order.measure(0, cases=2, small=5, large=24):
        assert row["FCFS %"] <= row["LPF %"] <= 100  # type: ignore[operator]
        if row["best %"] != "-":
            assert row["LPF %"] <= row["best %"] <= row["all known %"]  # type: ignore[operator]


def test_the_compressed_tree_finds_what_ours_finds() -> None:
    """The peer is only worth comparing with if it is right, splits included."""
    tree = CompressedTree(2)
    sequences = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 9, 9], [5, 6]]
    for at, sequence in enumerate(sequences):
        tree.insert(sequence, [BlockId(10 * at + n) for n in range(len(sequence) // 2)])
    for sequence in sequences:
        assert tree.match(sequence)[1] == len(sequence) // 2
    node, blocks = tree.match([1, 2, 3, 4, 7, 9])
    assert blocks == 2 and node.blocks == [1] and node.parent is not None and node.parent.blocks == [0]


def test_radix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Costs per block hardly depend on how many there are. The bound is wide: this machine is busy with other tests."""
    monkeypatch.setattr(radix, "SIZES", (1000, 4000))
    monkeypatch.setattr(sys, "argv", ["radix", "--largest", "4000", "--json", str(tmp_path / "radix.json")])
    radix.main()
    small, large = msgspec.json.decode((tmp_path / "radix.json").read_bytes())["rows"]["ns per block"]
    for work in ("insert", "match", "evict"):
        assert large[work] < 4 * small[work]


def test_overhead_is_measured_around_the_real_schedulers() -> None:
    layout = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
    row = cache_overhead.measure(lambda: fake_device(layout, 64), (1, 9), 4, batches=1)
    assert row["calls"] > 8 * 6 and row["steps"] >= 4  # type: ignore[operator]
    assert 0 < row["us in calls a step"] < 1e5  # type: ignore[operator]


def test_sharing_saves_whole_blocks_of_the_prompt() -> None:
    """The tokens are compared by the program itself; five of the prompt's six blocks are whole. Not shared, they are
    there three times until they have landed."""
    layout = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
    make = lambda: fake_device(layout, 64)  # noqa: E731
    (row,) = sharing.measure(sharing.samples, make, list(range(22)), 5, [3], repeats=1)
    assert 5 + 3 <= row["blocks"] <= 5 + 3 * 2 and row["not shared"] == 3 * 6  # type: ignore[operator]
    assert (row["migrated"], row["migrated, not shared"]) == (6, 18)


def test_hypotheses_share_what_they_have_in_common() -> None:
    """The answers are compared by the program itself; copied whole, each of three has seven blocks at its end."""
    layout = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
    make = lambda: fake_device(layout, 64)  # noqa: E731
    (row,) = sharing.measure(sharing.search, make, list(range(22)), 5, [3], repeats=1)
    assert 5 + 3 <= row["blocks"] <= 5 + 3 * 2 and 3 * 7 <= row["not shared"] <= 3 * 7 + 3  # type: ignore[operator]
    assert (row["migrated"], row["migrated, not shared"]) == (6, 6)


def _fake(size: int = 4, blocks: int = 200) -> EngineDevice:
    return fake_device(KVLayout(kv_heads=2, layers=2, block_size=size, head_dim=4), blocks)


def test_prefix_reuse_finds_what_is_shared_and_nothing_when_the_cache_is_off() -> None:
    rows = prefix_reuse.measure(_fake, 40, [2], requests=3, at_once=2, repeats=1)
    assert [row["cached %"] for row in rows] == [0, 0, 25, 50, 75, 97.5]
    assert all(row["tokens/s"] > 0 and row["TTFT ms"] > 0 for row in rows)  # type: ignore[operator]


def test_block_sizes_serve_the_same_and_waste_more_the_larger_they_are() -> None:
    asked = block_size.prompts(4, 60)
    sizes = (4, 16, 32)
    rows = block_size.measure(lambda size: _fake(size, 1600 // size), sizes, asked, 3, at_once=2, repeats=1)
    assert [row["block size"] for row in rows] == list(sizes) and rows[1]["of 16's"] == 1.0
    empty = [float(row["empty slots %"]) for row in rows]
    assert empty == sorted(empty) and empty[0] < empty[-1]


def test_a_preempted_request_comes_back_by_the_way_that_is_measured() -> None:
    """Guards a comparison of a way with itself: the program fails where a request has come back by another one."""
    sizes, lengths = (4, 8), (20, 41)
    rows = preemption.measure(lambda size: _fake(size, 400 // size), sizes, lengths, repeats=2)
    assert [(row["block size"], row["tokens"]) for row in rows] == [(s, n) for s in sizes for n in lengths]
    for row in rows:
        assert row["swap out ms"] > 0 and row["swap in ms"] > 0 and row["least"] <= row["most"]  # type: ignore[operator]


def test_what_is_switched_off_is_off() -> None:
    """Guards an ablation that compares a thing with itself."""
    small = {name: make(Random(name)) for name, make in SHAPES.items()}
    rows = ablation.measure(lambda: _fake(blocks=400), small, 800, at_once=6, repeats=1)
    found = {(row["work"], row["off"]): row for row in rows}
    assert len(found) == 6 * 6
    assert found["few-shot", "nothing"]["cached %"] > 50 > found["few-shot", "prefix cache"]["cached %"] == 0  # type: ignore[operator]
    for work in ("agent", "few-shot", "long document"):
        moved = found[work, "delta"]["moved blocks"]
        assert moved > found[work, "nothing"]["moved blocks"], work  # type: ignore[operator]
    shared = found["self-consistency", "nothing"]["moved blocks"]
    assert 3 * shared < found["self-consistency", "prefix cache"]["moved blocks"]  # type: ignore[operator]


def test_contiguous_memory_and_static_batches_run_fewer_at_once() -> None:
    asked = SHAPES["unique"](Random(1))
    most = {}
    for off in ("nothing", "paging", "batching"):
        with ExitStack() as stack:
            engine = ablation.build(lambda: _fake(blocks=400), off, 800, stack)
            running = []
            turn = engine.turn

            def watched(turn=turn, engine=engine, running=running):  # type: ignore[no-untyped-def]
                running.append(engine.decode.running_requests)
                return turn()

            engine.turn = watched  # type: ignore[method-assign]
            ablation.run(engine, off, "t", asked, 4)
            most[off] = (max(running), sum(running) / len(running))
    assert most["paging"][0] <= 2 < most["nothing"][0]
    assert most["batching"][1] < most["nothing"][1]


def test_attention_is_timed_by_kernels_and_kv(tmp_path: Path) -> None:
    """Guards a side that is timed under another's name: every kind of kernels and KV does each kind of work."""
    kernels = native()
    if kernels is None:
        pytest.skip("the native kernels were not built here: they need a C++ compiler at installation")
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = load_model(prepare(save_hf(reference(**shape), tmp_path / "model"), tmp_path / "cache"), panels=True)
    sides = kv_attention.sides_of(model, kernels, requests=3, context=40)
    lines = kv_attention.measure(sides, rounds=2)
    told = [(str(line["work"]), str(line["kernels, KV"])) for line in lines]
    assert len(set(told)) == 3 * len(kv_attention.SIDES) == len(told)
    assert all(float(line["least ms"]) > 0 for line in lines)
    assert {line["ratio of medians"] for line in lines if line["kernels, KV"] == "native, float32"} == {1.0}
    kinds = {name: (type(side._attention), side.kv.layout.dtype) for name, side in sides.items()}
    assert kinds["native, int8"] == (NativeAttention, "int8") and kinds["torch, int8"] == (TorchAttention, "int8")
    for side in sides.values():
        side.kv.close()


def test_fewer_bits_of_kv_are_compared_with_more(tmp_path: Path) -> None:
    """Guards roundings that round nothing, and ways that are measured against themselves."""
    rows = torch.randn(3, 64)
    assert all(len(torch.unique(row)) <= 15 for row in kv_bits.scaled(rows))
    by_32 = kv_bits.in_groups(rows)
    assert all(len(torch.unique(group)) <= 16 for group in by_32.view(-1, 32))
    assert float((by_32 - rows).abs().max()) < float((rows.amax() - rows.amin()) / 29)
    keys = torch.randn(16, 2, 32) * torch.logspace(-3, 3, 32)  # channels of different sizes
    assert float(((kv_bits.by_channel(keys) - keys) / torch.logspace(-3, 3, 32)).abs().max()) < 0.3
    model = load_model(prepare(save_hf(reference(head_dim=32), tmp_path / "model"), tmp_path / "cache"))
    lines = kv_bits.measure(model, torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(1)).tolist())
    off = {str(line["kv"]): float(line["error of logits %"]) for line in lines}
    assert off["float32"] == 0.0 < off["int8"] < off["int4-32"] < off["int4"]
    assert {line["same best %"] for line in lines if line["kv"] == "float32"} == {100.0}
