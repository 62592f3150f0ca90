"""The quantized product of the GPU against its specification, in every form of codes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.coded_linear import (
    LEAST_COLUMNS,
    SPLIT_ROWS,
    STEP,
    RowConfigs,
    coded_linear,
    launch_configs,
    parts_of,
    reference,
)
from kernels.coded_weight import CodedWeight
from kernels.configs import KernelConfig
from kernels.panels import FACTORS, Kind
from tests.kernels.cases import DEVICE

KINDS: list[Kind] = ["q4", "q8", "a8", "h8", "x8", "f8"]
LOW = KernelConfig(tile=32, warps=4, stages=2, rows=32)
CONFIGS = RowConfigs(LOW, LOW)


def weight_of(kind: Kind, rows: int, columns: int) -> CodedWeight:
    noise = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 256, (rows, columns // 2 if kind == "q4" else columns), generator=noise).to(torch.uint8)
    if kind == "f8":
        codes = torch.where((codes & 127) > 80, codes & 191, codes)  # values of about one
    parts, factors = FACTORS[kind]
    scales = torch.rand(rows, columns // 32 * parts, generator=noise).half().float() / 64
    offsets = torch.randn(scales.shape, generator=noise).half().float() / 8 if factors == 2 else None
    codes = codes if kind in ("q4", "f8") else codes.view(torch.int8)
    return CodedWeight(kind, codes.to(DEVICE), scales.to(DEVICE), None if offsets is None else offsets.to(DEVICE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(40, 32), (70, 160), (32, 256), (24, 1056)])
def test_products(kind: Kind, rows: int, columns: int) -> None:
    """Guards half bytes, groups, tiles that are not full in any of three directions, and the bias."""
    weight = weight_of(kind, rows, columns)
    noise = torch.Generator().manual_seed(1)
    bias = torch.randn(rows, generator=noise).to(DEVICE)
    for count, dtype, of in ((1, torch.float32, bias), (17, torch.float16, None), (50, torch.float32, None)):
        x = torch.randn(count, columns, generator=noise).to(DEVICE, dtype)
        got, want = coded_linear(x, weight, of, CONFIGS), reference(x, weight, of)
        error = 1e-5 if dtype == torch.float32 else 2e-3
        scale = float((x.double().abs() @ weight.widen(dtype).double().abs().T).max())
        assert got.dtype == dtype and float((got.double() - want).abs().max()) <= error * scale


@pytest.mark.parametrize("kind", ["q4", "f8"])
@pytest.mark.parametrize("columns", [96, 1056])
def test_a_rows_bits_are_its_own(kind: Kind, columns: int) -> None:
    """Guards an order of sums that would follow the size of the batch, in tiles of one height: of few rows each part of
    the columns has a program of its own. Rows keep their place in a tile, since the interpreter's library computes them
    by that."""
    weight, low = weight_of(kind, 40, columns), replace(LOW, rows=16)
    configs = RowConfigs(low, low)
    assert parts_of(*weight.shape)[0] == (1 if columns == 96 else 2)
    x = torch.randn(SPLIT_ROWS + 8, columns, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    whole = coded_linear(x, weight, bias, configs)
    for first, end in ((0, 1), (0, 11), (16, 30), (16, 40), (32, 40), (0, SPLIT_ROWS)):
        assert torch.equal(coded_linear(x[first:end].contiguous(), weight, bias, configs), whole[first:end])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's library sums by a tile's height")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(96, 1056), (4096, 512), (320, 96)])
def test_a_rows_bits_are_its_own_in_tiles_of_any_height(kind: Kind, rows: int, columns: int) -> None:
    """Guards heights of tiles that would take other matrix instructions, with the configuration that is served with."""
    weight, configs = weight_of(kind, rows, columns), launch_configs(torch.device(DEVICE), kind)
    x = torch.randn(300, columns, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)  # on a GPU
    whole = coded_linear(x, weight, None, configs)
    for first, end in ((0, 1), (3, 14), (5, 40), (7, 71), (9, 109), (40, 300)):
        assert torch.equal(coded_linear(x[first:end].contiguous(), weight, None, configs), whole[first:end])


@pytest.mark.parametrize(("dtype", "heights"), [(torch.float32, [16] * 3), (torch.float16, [16, 64, 128])])
def test_tiles_of_32_bits_stay_low(dtype: torch.dtype, heights: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a model in 32 bits against tiles that only the largest GPUs have shared memory for: 128 rows take 172 KiB
    of sm_80's 163."""
    seen = []

    class Kernel:
        def __getitem__(self, _: object) -> Callable[..., None]:
            return lambda *_, **constants: seen.append(constants["ROWS"])

    monkeypatch.setattr("kernels.coded_linear.coded_linear_kernel", Kernel())
    weight, configs = weight_of("f8", 40, 96), RowConfigs(replace(LOW, rows=64), replace(LOW, rows=128))
    for rows in (1, 64, 300):
        coded_linear(torch.zeros(rows, 96, dtype=dtype, device=DEVICE), weight, None, configs)
    assert seen == heights


@pytest.mark.parametrize("width", [8, 64, 1000, 4096, 14336, 128256])
@pytest.mark.parametrize("columns", [32, 512, 1024, 1056, 4096, 11008, 14336])
def test_parts_cover_all_columns(width: int, columns: int) -> None:
    """Guards parts that overlap, are empty, or would be cut within a step."""
    parts, length = parts_of(width, columns)
    assert (parts - 1) * length < columns <= parts * length
    assert parts == 1 or (length % STEP == 0 and length >= LEAST_COLUMNS)


def test_nothing_beside_the_matrix_is_read() -> None:
    """Guards masks: what lies behind the last row and column is NaN."""
    weight = weight_of("q8", 33, 32)
    padded = torch.full((64, 32), float("nan"), device=DEVICE)
    padded[:5] = 1.0
    scales = torch.full((40, 1), float("nan"), device=DEVICE)
    scales[:33] = weight.scales
    inner = CodedWeight("q8", weight.codes, scales[:33])
    got = coded_linear(padded[:5], inner, None, CONFIGS)
    assert torch.isfinite(got).all() and got.shape == (5, 33)


def test_no_rows_at_all() -> None:
    assert coded_linear(torch.empty(0, 32, device=DEVICE), weight_of("q4", 40, 32), None, CONFIGS).shape == (0, 40)


def test_what_does_not_fit_is_refused() -> None:
    weight = weight_of("q4", 40, 64)
    for x in (torch.zeros(3, 32), torch.zeros(64, 3).T, torch.zeros(64)):
        with pytest.raises(ValueError, match="does not fit 64 columns"):
            coded_linear(x.to(DEVICE), weight, None, CONFIGS)
    with pytest.raises(ValueError, match="does not fit 40 rows"):
        coded_linear(torch.zeros(3, 64, device=DEVICE), weight, torch.zeros(41, device=DEVICE), CONFIGS)
    with pytest.raises(ValueError, match="are no q8 codes"):
        CodedWeight("q8", weight.codes, weight.scales)
    with pytest.raises(ValueError, match=r"want float32 factors \(40, 4\)"):
        CodedWeight("h8", torch.zeros(40, 64, dtype=torch.int8), weight.scales)
