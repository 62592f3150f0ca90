"""The native CPU kernels against their references, and against themselves: their bits may depend on nothing but a row's
own values."""

import os
import random
import runpy
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from torch import Tensor

from kernels import reference, reference_rows
from kernels.native import SHARED_ROWS, SOURCES, Native, PoolShape, Sequences, native, source_digest
from kernels.panels import FACTORS, Kind, Panels, pack_codes, pack_plain, unpack
from tests.kernels.native.digest import bits_of_everything

NATIVE = native()
pytestmark = pytest.mark.skipif(
    NATIVE is None, reason="the native kernels were not built here: they need a C++ compiler at installation"
)
KINDS: list[Kind] = ["f32", "bf16", "q8", "q4", "a8", "h8", "x8", "f8"]


@pytest.fixture
def kernels() -> Native:
    assert NATIVE is not None
    return NATIVE


def weight_of(kind: Kind, rows: int, columns: int) -> Panels:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    plain = torch.randn(rows, columns, generator=generator)
    if kind in ("f32", "bf16"):
        return pack_plain(plain if kind == "f32" else plain.bfloat16().float())
    parts, factors = FACTORS[kind]
    scales = torch.rand(rows, columns // 32 * parts, generator=generator).half().float()
    offsets = torch.randn(scales.shape, generator=generator) if factors == 2 else None
    if kind == "q4":
        nibbles = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
        return pack_codes(nibbles, scales, offsets, kind)
    codes = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
    if kind == "f8":
        numbers = torch.where((codes & 127) == 127, 0, codes)  # without the two that are none
        return pack_codes(numbers.view(torch.uint8), scales, None, kind)
    return pack_codes(codes, scales / 64, offsets, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (64, 64), (100, 96), (200, 576)])
def test_products(kernels: Native, kind: Kind, rows: int, columns: int) -> None:
    """Every height of tile and its rest, panels that are not full, a bias; against 64 bits, and bit for bit against the
    same weight in float32."""
    weight = weight_of(kind, rows, columns)
    assert weight.kind == kind
    wide = unpack(weight)
    bias = torch.randn(rows)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 13, 50):
        x = torch.randn(n, columns)
        got = kernels.linear(x, weight, bias)
        want = x.double() @ wide.double().T + bias
        scale = float((x.double().abs() @ wide.double().abs().T).max())
        assert float((got - want).abs().max()) <= 4e-6 * scale
        assert torch.equal(got, kernels.linear(x, pack_plain(wide), bias))
        alone = torch.cat([kernels.linear(x[at : at + 1], weight, bias) for at in range(n)])
        assert torch.equal(got, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_at_all(kernels: Native, kind: Kind) -> None:
    """Guards a chunk of a prompt that nobody wants logits of."""
    weight = weight_of(kind, 100, 96)
    assert kernels.linear(torch.empty(0, 96), weight, torch.randn(100)).shape == (0, 100)


def test_columns_that_fill_no_group(kernels: Native) -> None:
    x, plain = torch.randn(7, 45), torch.randn(70, 45)
    torch.testing.assert_close(kernels.linear(x, pack_plain(plain)), x @ plain.T, atol=2e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused(kernels: Native) -> None:
    weight = pack_plain(torch.randn(8, 32))
    for x in (torch.randn(1, 31), torch.randn(1, 32).double(), torch.randn(32)):
        with pytest.raises(ValueError, match="32 columns"):
            kernels.linear(x, weight)


def test_only_contiguous_floats_are_read(kernels: Native) -> None:
    """Guards memory behind a tensor: a kernel sees an address, not strides or a dtype."""
    x, weight = torch.randn(4, 16), torch.randn(16)
    for spoiled in (torch.randn(4, 32)[:, ::2], torch.randn(16, 4).T, x.double(), x.half()):
        with pytest.raises(ValueError, match="contiguous"):
            kernels.norm(spoiled, None, weight, 1e-5)
        with pytest.raises(ValueError, match="contiguous"):
            kernels.gate(spoiled)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.norm(x, x.clone().T, weight, 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.linear(x, pack_plain(torch.randn(8, 16)), torch.randn(8).double())
    qkv, pool, tables = attention_case(2, 1, 16, 4, [(1, 1)], torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        attend(kernels, qkv, 2, pool, 0, [(1, 1)], [tables[0].int()])
    with pytest.raises(ValueError, match="contiguous"):
        attend(kernels, qkv, 2, pool, 0, [(1, 1)], tables, sinks=torch.zeros(2).bfloat16())
    with pytest.raises(ValueError, match="3 sinks for 2 heads"):
        attend(kernels, qkv, 2, pool, 0, [(1, 1)], tables, sinks=torch.zeros(3))


@pytest.mark.parametrize("width", [16, 17, 576, 45])
def test_rows(kernels: Native, width: int) -> None:
    """Norm of a sum, and the gate: also past the last whole vector, and at the ends of the exponential's range."""
    x, delta, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    total, eps = x + delta, 1e-5
    got = kernels.norm(x, delta, weight, eps)
    assert torch.equal(x, total), "the sum stays in place"
    torch.testing.assert_close(got.double(), reference_rows.rms_norm(total, weight, eps), atol=1e-6, rtol=2e-6)
    alone = kernels.norm(total[3:4].clone(), None, weight, eps)
    assert torch.equal(alone, got[3:4])
    gate_up = torch.randn(5, 2 * width) * 20
    gate_up[0, 0], gate_up[1, 0] = -300.0, 300.0
    torch.testing.assert_close(
        kernels.gate(gate_up).double(), reference_rows.silu_mul(gate_up), atol=1e-30, rtol=2e-6
    )
    gelu = kernels.gate(gate_up, gelu=True)
    # Where the gate is far below zero, 1 + tanh is less than its own rounding: the answer is 0 but for that.
    torch.testing.assert_close(gelu.double(), reference_rows.gelu_mul(gate_up), atol=2e-5, rtol=4e-6)
    assert torch.equal(kernels.gate(gate_up[3:4].clone(), gelu=True), gelu[3:4])


def attention_case(
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    spans: list[tuple[int, int]],
    dtype: torch.dtype,
    window: int = 0,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Rows of qkv and a pool whose unused rows are NaN, those before a window included, with `spans` of (new rows,
    context) on shuffled blocks."""
    torch.manual_seed(heads * 100 + kv_heads * 10 + block_size)
    need = [-(-context // block_size) for _, context in spans]
    order = torch.randperm(sum(need) + 3)
    pool = torch.full((len(order), kv_heads, 2, 2, block_size, dim), float("nan"), dtype=dtype)
    tables = list(order[: sum(need)].split(need))
    for (count, context), table in zip(spans, tables, strict=True):
        for t in range(max(0, context - count + 1 - window) if window else 0, context):
            pool[table[t // block_size], :, :, :, t % block_size] = torch.randn(kv_heads, 2, 2, dim).to(dtype)
    rows = sum(count for count, _ in spans)
    return torch.randn(rows, heads + 2 * kv_heads, dim), pool, tables


def attend(
    kernels: Native,
    qkv: Tensor,
    heads: int,
    pool: Tensor,
    layer: int,
    spans: list[tuple[int, int]],
    tables: list[Tensor],
    **options: Any,
) -> Tensor:
    _, kv_heads, layers, _, block_size, dim = pool.shape
    out = torch.zeros(len(qkv) + 2, heads * dim)
    sequences = Sequences.of([c for c, _ in spans], [n for _, n in spans], tables)
    kernels.attend(qkv, heads, sequences, pool, PoolShape(kv_heads, layers, block_size, dim), layer, out, **options)
    assert not out[len(qkv) :].any(), "rows of no sequence were written"
    return out[: len(qkv)].view(len(qkv), heads, dim)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (3, 1), (9, 3), (8, 2), (32, 1), (6, 1)])
@pytest.mark.parametrize(("dim", "block_size"), [(16, 1), (64, 16), (80, 4), (96, 64), (128, 16), (256, 32)])
def test_attention(kernels: Native, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    """Head grouping, block order, the causal diagonal, contexts that end anywhere in a tile of sixteen."""
    spans = [(1, 1), (1, 17), (5, 5), (3, 22), (9, 41)]
    qkv, pool, tables = attention_case(heads, kv_heads, dim, block_size, spans, torch.float32)
    got = attend(kernels, qkv, heads, pool, 1, spans, tables)
    counts, contexts = [c for c, _ in spans], [n for _, n in spans]
    want = reference.paged_attention(qkv[:, :heads], pool, 1, counts, contexts, tables)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


OPTIONS: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 16, "scale": 0.1},
    {"window": 23, "softcap": 0.7, "sinks": 1.0},
    {"softcap": 1.5},
    {"sinks": 30.0},
]
"""`sinks`: by how much the heads' differ; they are larger and smaller than any score."""


def scoring(heads: int, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "sinks": options["sinks"] * torch.linspace(-2, 3, heads)} if "sinks" in options else options


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"), [(9, 3, 64, 16), (32, 1, 16, 1), (8, 2, 256, 32), (3, 3, 80, 5)]
)
def test_windows_scales_caps_and_sinks(
    kernels: Native, heads: int, kv_heads: int, dim: int, block_size: int, options: dict[str, Any]
) -> None:
    """Guards the window's edge anywhere in a tile of sixteen, the order of scale, cap and mask, and the sink that
    counts once; what no row of a sequence sees is NaN. And each row has the bits that it has alone."""
    spans = [(1, 1), (1, 17), (5, 5), (3, 22), (1, 40), (30, 75)]
    window = options.get("window", 0)
    qkv, pool, tables = attention_case(heads, kv_heads, dim, block_size, spans, torch.float32, window)
    given = scoring(heads, options)
    got = attend(kernels, qkv, heads, pool, 1, spans, tables, **given)
    counts, contexts = [c for c, _ in spans], [n for _, n in spans]
    want = reference.paged_attention(qkv[:, :heads], pool, 1, counts, contexts, tables, **given)
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-5)
    for row in range(30):
        context = 75 - 30 + row + 1
        alone = attend(kernels, qkv[11 + row : 12 + row].clone(), heads, pool, 1, [(1, context)], [tables[5]], **given)
        assert torch.equal(alone[0], got[11 + row])


def test_a_window_costs_what_it_shows(kernels: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the blocks before a window, which need not be walked: processor time, the least of several."""
    monkeypatch.setattr(kernels, "threads", lambda: 1)
    qkv, pool = torch.randn(1, 15, 64), torch.randn(1000, 3, 1, 2, 16, 64)
    sequences, out = Sequences.of([1], [16000], [torch.arange(1000)]), torch.zeros(1, 9 * 64)

    def spent_s(window: int) -> float:
        times = []
        for _ in range(10):
            began_s = time.thread_time()
            kernels.attend(qkv, 9, sequences, pool, PoolShape(3, 1, 16, 64), 0, out, window=window)
            times.append(time.thread_time() - began_s)
        return min(times)

    assert spent_s(128) * 10 < spent_s(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_over_sixteen_bits(kernels: Native, dtype: torch.dtype) -> None:
    spans = [(1, 33), (4, 20)]
    qkv, pool, tables = attention_case(9, 3, 64, 16, spans, dtype)
    got = attend(kernels, qkv, 9, pool, 0, spans, tables)
    want = reference.paged_attention(qkv[:, :9], pool, 0, [1, 4], [33, 20], tables)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


def test_attention_looks_at_nobody_else(kernels: Native) -> None:
    """A row's bits are the same alone, in company, and in whichever chunk of its prompt."""
    spans = [(1, 33), (40, 53), (1, 7)]
    qkv, pool, tables = attention_case(9, 3, 64, 16, spans, torch.float32)
    together = attend(kernels, qkv, 9, pool, 1, spans, tables)
    for row in range(40):
        context = 53 - 40 + row + 1
        alone = attend(kernels, qkv[1 + row : 2 + row].clone(), 9, pool, 1, [(1, context)], [tables[1]])
        assert torch.equal(alone[0], together[1 + row])
    for at, row in ((0, 0), (2, 41)):
        alone = attend(kernels, qkv[row : row + 1].clone(), 9, pool, 1, [spans[at]], [tables[at]])
        assert torch.equal(alone[0], together[row])


def test_what_is_no_number_stays_none(kernels: Native) -> None:
    """Guards a spoiled KV row that would pass unnoticed: the exponential's range once made a number of it."""
    spans = [(1, 20), (1, 20)]
    qkv, pool, tables = attention_case(3, 1, 32, 16, spans, torch.float32)
    clean = attend(kernels, qkv, 3, pool, 0, spans, tables)
    pool[tables[1][0], 0, 0, 0, 3, 7] = float("nan")
    got = attend(kernels, qkv, 3, pool, 0, spans, tables)
    assert torch.equal(got[0], clean[0])
    assert got[1].isnan().all()
    assert kernels.gate(torch.tensor([[float("nan"), 1.0, 1.0, 1.0]])).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("dtype", "normed", "turned"),
    [
        (torch.float32, True, 32),
        (torch.float32, False, 32),
        (torch.bfloat16, False, 32),
        (torch.float16, True, 32),
        (torch.float32, True, 24),
        (torch.bfloat16, False, 2),
        (torch.float32, False, 0),
        (torch.float16, True, 0),
    ],
)
def test_rotation_and_write(kernels: Native, dtype: torch.dtype, normed: bool, turned: int) -> None:
    """`turned`: how many of a head's 32 columns rotate, in halves of that; the rest must pass."""
    heads, kv_heads, dim, block_size = 6, 2, 32, 4
    qkv, pool, _ = attention_case(heads, kv_heads, dim, block_size, [(5, 5), (1, 9)], dtype)
    qkv[:, heads + kv_heads :] *= torch.logspace(-9, 6, dim)  # 16 bits reach neither end
    before, untouched = qkv.clone(), pool.clone()
    angles = torch.randn(40, turned // 2)
    cos, sin = angles.cos(), angles.sin()
    positions, slots = torch.tensor([0, 39, 5, 6, 7, 0]), torch.tensor([3, 9, 10, 17, 0])
    norms = (torch.randn(dim), torch.randn(dim), 1e-6) if normed else None
    kernels.rotate_and_write(
        qkv,
        heads,
        (cos, sin) if turned else None,
        positions,
        norms,
        pool,
        PoolShape(kv_heads, 2, block_size, dim),
        1,
        slots,
    )
    q, k, v = before.double().split([heads, kv_heads, kv_heads], 1)
    assert (pool.isinf().any() and (pool.abs() < 6e-5).any()) or dtype != torch.float16
    if norms is not None:
        q, k = reference_rows.rms_norm(q, norms[0], 1e-6), reference_rows.rms_norm(k, norms[1], 1e-6)
    q, k = (reference_rows.rotate(part, cos[positions], sin[positions]) for part in (q, k))
    torch.testing.assert_close(qkv.double(), torch.cat([q, k, v], 1), atol=3e-6, rtol=3e-6)
    for row, slot in enumerate(slots.tolist()):
        block, offset = slot // block_size, slot % block_size
        assert torch.equal(pool[block, :, 1, 0, offset], qkv[row, heads : heads + kv_heads].to(dtype))
        assert torch.equal(pool[block, :, 1, 1, offset], before[row, heads + kv_heads :].to(dtype))
        untouched[block, :, 1, :, offset] = pool[block, :, 1, :, offset]
    assert torch.equal(pool.nan_to_num(7.0), untouched.nan_to_num(7.0)), "other rows were written"


def test_threads_make_no_difference(kernels: Native) -> None:
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(bits_of_everything(kernels))
    finally:
        torch.set_num_threads(before)
    assert len(set(found)) == 1


def test_lent_threads_are_asked_for_each_time(kernels: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards bits that depend on cores that happen to be idle."""
    asked = []
    weight, x = weight_of("q4", 200, 96), torch.randn(40, 96)
    spans = [(40, 60)]
    qkv, pool, tables = attention_case(4, 2, 64, 16, spans, torch.float32)
    rows = torch.randn(40, 90)
    want = kernels.linear(x, weight), attend(kernels, qkv, 4, pool, 0, spans, tables), kernels.gate(rows)
    monkeypatch.setattr(kernels, "threads", lambda: asked.append(3) or 3)
    assert torch.equal(kernels.linear(x, weight), want[0])
    assert torch.equal(kernels.linear(x[:1], weight), want[0][:1])
    assert torch.equal(attend(kernels, qkv, 4, pool, 0, spans, tables), want[1])
    assert torch.equal(kernels.gate(rows), want[2])
    assert len(asked) == 4
    kernels.gate(rows[: SHARED_ROWS - 1])
    assert len(asked) == 4, "so few rows are over before anybody could help"


def test_calls_from_several_threads(kernels: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines in one process: helpers serve one call at a time, and the other goes on without them."""
    monkeypatch.setattr(kernels, "threads", lambda: 4)
    weight = weight_of("q4", 640, 96)
    inputs = [torch.randn(n, 96, generator=torch.Generator().manual_seed(n)) for n in range(1, 13)]
    want = [kernels.linear(x, weight) for x in inputs]

    def calls(seed: int) -> int:
        order = random.Random(seed)
        wrong = 0
        for _ in range(500):
            at = order.randrange(len(inputs))
            wrong += not torch.equal(kernels.linear(inputs[at], weight), want[at])
        return wrong

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(calls, range(3))) == [0, 0, 0]


def test_instruction_sets_make_no_difference(kernels: Native, tmp_path: Path) -> None:
    """The narrower library of this processor, and the sources compiled for no vectors at all (as on another kind of
    processor), give the bits of the one in use."""
    want = bits_of_everything(kernels)
    compared = []
    if kernels.variant == "AVX512":
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
        for options in ([], ["--by-words"]):  # as a processor without an instruction for products of bytes multiplies
            command = [sys.executable, "-m", "tests.kernels.native.digest", *options]
            told = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert told.stdout.split() == ["AVX2", want], told.stderr
        compared.append("AVX2")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is not None:
        plain = tmp_path / "plain.so"
        # Level 1 takes half as long to compile as level 2, and the sums are in the order of the source on both.
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
        flags.append(f'-DHEADRACE_SOURCES="{source_digest()}"')
        sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
        subprocess.run([compiler, *flags, *sources, "-o", str(plain)], check=True, capture_output=True)
        told = subprocess.run(
            [sys.executable, "-m", "tests.kernels.native.digest", str(plain)], capture_output=True, text=True
        )
        assert told.stdout.split() == ["PLAIN", want], told.stderr
        compared.append("PLAIN")
    if not compared:
        pytest.skip("one instruction set and no compiler: nothing to compare with")


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a checkout whose kernels changed after it was installed."""
    from kernels import native as module

    (tmp_path / "cpu").mkdir()
    for path in SOURCES.glob("*.[ch]*"):
        shutil.copy(path, tmp_path / "cpu")
    for path in SOURCES.parent.glob("_native_*.so"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(module, "SOURCES", tmp_path / "cpu")
    assert module.native.__wrapped__() is not None
    (tmp_path / "cpu" / "linear.cpp").write_text("// another\n")
    monkeypatch.setattr(module, "source_digest", lambda: source_digest(tmp_path / "cpu"))
    assert module.native.__wrapped__() is None


def test_libraries_are_built_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `build_ext -j`: all compile the same sources into one folder, and a library for AVX2 made of objects for
    AVX-512 ends the process on a processor without it."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", told.update)
    runpy.run_path(str(SOURCES.parent.parent / "setup.py"))
    command = told["cmdclass"]["build_ext"](setuptools.Distribution({"ext_modules": told["ext_modules"]}))
    command.parallel = "2"
    command.finalize_options()
    assert not command.parallel
