"""Products of 8-bit floats, by our kernels and by PyTorch, against their specification, which rounds activations as
they do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from kernels import scaled_linear as scaled
from kernels.coded_linear import RowConfigs
from kernels.coded_weight import CodedWeight
from kernels.float8_linear import float8_linear, launch_configs, round_rows
from kernels.linear import linear
from kernels.scaled_linear import Float8Error, Float8Weight, find_way, from_codes, reference, rounded
from tests.kernels.cases import DEVICE

CPU = torch.device("cpu")


def coded(rows: int, columns: int, each: int) -> CodedWeight:
    """Return a weight with a scale per row and `each` columns."""
    noise = torch.Generator().manual_seed(rows + columns)
    codes = torch.randn(rows, columns, generator=noise).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(rows, columns // each, generator=noise).repeat_interleave(each // 32, 1) + 0.1
    return CodedWeight("f8", codes, scales)


def made(weight: CodedWeight, way: scaled.Way = "unit") -> Float8Weight:
    if way == "tile":
        weight = CodedWeight("f8", weight.codes.to(DEVICE), weight.scales.to(DEVICE))
    found = from_codes(weight, way)
    assert found is not None
    return found


@pytest.mark.parametrize(("columns", "each"), [(96, 96), (256, 128), (128, 128), (384, 128), (1152, 128)])
@pytest.mark.parametrize(
    ("way", "dtype"),
    [("unit", torch.float32), ("unit", torch.bfloat16), ("tile", torch.float32), ("tile", torch.float16)],
)
def test_products(columns: int, each: int, way: scaled.Way, dtype: torch.dtype) -> None:
    """Guards scales of another row or block, the order of both scales, the bias, rows that are padded, and parts that
    have a program each."""
    coarse = made(coded(48, columns, each), way)
    assert coarse.part == each and coarse.way == way
    noise = torch.Generator().manual_seed(1)
    bias = torch.randn(48, generator=noise).to(coarse.codes.device)
    for rows in (1, 3, 8, 21):
        x = torch.randn(rows, columns, generator=noise) * torch.rand(rows, 1, generator=noise) * 30
        x = x.to(bias.device, dtype)
        for own in (None, bias):
            got, want = linear(x, coarse, own), reference(x, coarse, own)
            # A card's matrix units keep fewer bits of their sums of 128 products.
            exact = dtype == torch.float32 and not x.is_cuda
            allowed = (2e-6 if exact else 8e-3) * float(want.abs().max())
            assert got.dtype == dtype and got.shape == want.shape
            assert float((got.double() - want).abs().max()) <= allowed


def test_scales_of_rows_in_one_launch() -> None:
    """Guards the way that takes bfloat16: the same numbers, rounded once."""
    weight = made(coded(48, 96, 96), find_way(CPU, torch.bfloat16))
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = reference(x, weight, torch.ones(48))
    assert float((linear(x, weight, torch.ones(48)).double() - want).abs().max()) <= 8e-3 * float(want.abs().max())


def test_what_is_rounded() -> None:
    """Guards the specification itself: by hand, ties to even, and a row of zeros."""
    x = torch.tensor([[448.0, 17.0, -19.0, 0.0], [0.0] * 4, [0.0, 0.0, 0.0, 2.0]])
    codes, scales = rounded(x, 4)
    assert codes[0].float().tolist() == [448.0, 16.0, -20.0, 0.0] and scales[0] == 1.0
    assert codes[1].float().tolist() == [0.0] * 4 and scales.isfinite().all()
    codes, scales = rounded(torch.tensor([[1.0, 2.0, 448.0, 4.0]]), 2)
    assert (codes.float() * scales.repeat_interleave(2, 1)).tolist() == [[1.0, 2.0, 448.0, 4.0]]
    assert rounded(torch.tensor([[1.0, float("inf")]]), 2)[0].float().isnan().any()


def test_activations_are_rounded() -> None:
    """Guards a path that would widen the weights and leave activations alone: its error is smaller by far."""
    weight = coded(48, 96, 96)
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ weight.widen(torch.float32).double().T
    error = (linear(x, made(weight)).double() - exact).abs().max() / exact.abs().max()
    assert 0.001 < float(error) < 0.1


def test_a_rows_bits_are_its_own() -> None:
    """Guards a scale that would be taken of several rows, and kernels that are chosen by their number."""
    for each in (256, 128):
        weight = made(coded(48, 256, each))
        x = torch.randn(40, 256, generator=torch.Generator().manual_seed(2))
        whole = linear(x, weight)
        for first, end in ((0, 1), (3, 4), (5, 11), (7, 40), (39, 40)):
            assert torch.equal(linear(x[first:end], weight), whole[first:end])


@pytest.mark.parametrize(("columns", "each"), [(96, 96), (1152, 1152), (1152, 128)])
def test_a_rows_bits_are_its_own_in_tiles(columns: int, each: int) -> None:
    """Guards parts of the columns that many rows would add up in another order. In the interpreter's library rows must
    keep their place in tiles of one height."""
    few = made(coded(48, columns, each), "tile")
    x = torch.randn(80, columns, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    own = round_rows(x, few.part, scaled._LEAST, scaled.MOST)
    low = replace(launch_configs(x.device).few, rows=16)
    configs = RowConfigs(low, low)
    whole = float8_linear(own, few.codes, few.scales, None, x.dtype, configs)
    for first, end in ((0, 1), (16, 30), (0, 64), (32, 80)):
        some = own[0][first:end], own[1][first:end]
        assert torch.equal(float8_linear(some, few.codes, few.scales, None, x.dtype, configs), whole[first:end])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's library sums by a tile's height")
@pytest.mark.parametrize(("columns", "each"), [(1152, 1152), (1152, 128), (4096, 128)])
def test_a_rows_bits_are_its_own_in_tiles_of_any_height(columns: int, each: int) -> None:
    """Guards heights of tiles that would take other matrix instructions, with the configuration that is served with."""
    weight = made(coded(96, columns, each), "tile")
    x = torch.randn(300, columns, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)  # on a GPU
    whole = linear(x, weight)
    for first, end in ((0, 1), (3, 14), (5, 40), (7, 71), (9, 109), (40, 300)):
        assert torch.equal(linear(x[first:end].contiguous(), weight), whole[first:end])


def test_tiles_want_scales_of_whole_steps() -> None:
    """Guards a step of 128 columns that would take the first scale of several."""
    weight = Float8Weight(coded(48, 192, 64).codes.view(torch.float8_e4m3fn).to(DEVICE), torch.ones(3, 48), "tile")
    with pytest.raises(ValueError, match="scales of 64 columns"):
        linear(torch.ones(2, 192, device=DEVICE), weight)


@pytest.mark.parametrize("part", [96, 32])
def test_rows_are_rounded_alike(part: int) -> None:
    """Guards the kernel that rounds: its codes and scales are those of the specification, to the bit."""
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(4)) * torch.logspace(-30, 30, 9)[:, None]
    x[3], x[4, 5:9] = 0.0, torch.tensor([448.0, 17.0, -19.0, -0.0])
    codes, scales = round_rows(x.to(DEVICE), part, scaled._LEAST, scaled.MOST)
    want, want_scales = rounded(x, part)
    assert torch.equal(codes.cpu().view(torch.uint8), want.view(torch.uint8)) and torch.equal(scales.cpu(), want_scales)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("way", ["unit", "tile"])
def test_a_row_that_is_no_number_spoils_no_other(way: scaled.Way) -> None:
    weight = made(coded(48, 96, 96), way)
    x = torch.ones(4, 96, device=weight.codes.device)
    x[1, 3], x[3, 95] = float("nan"), float("-inf")
    got = linear(x, weight)
    assert got[[1, 3]].isnan().all() and got[[0, 2]].isfinite().all()


def test_weights_that_stay_as_they_are() -> None:
    """Guards scales that are finer than a row or 128 columns, and sizes that PyTorch refuses."""
    fine = coded(48, 128, 32)
    assert from_codes(fine, "unit") is None
    assert from_codes(coded(48, 192, 64), "unit") is None
    assert from_codes(coded(40, 96, 96), "unit") is None
    assert from_codes(CodedWeight("q8", fine.codes.view(torch.int8), fine.scales), "unit") is None
    with pytest.raises(ValueError, match="does not fit 96 columns"):
        linear(torch.zeros(3, 32), made(coded(48, 96, 96)))
    for way in ("unit", "tile"):
        coarse = made(coded(48, 96, 96), way)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"a bias of \(47,\) does not fit 48 rows"):
            linear(torch.zeros(3, 96, device=coarse.codes.device), coarse, torch.zeros(47))
    with pytest.raises(ValueError, match="with scales"):
        Float8Weight(fine.codes, fine.scales)
    assert linear(torch.zeros(0, 96), made(coded(48, 96, 96))).shape == (0, 48)


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (lambda *_, **__: (_ for _ in ()).throw(RuntimeError("needs compute capability 8.9\nand more")), "8.9$"),
        (lambda x, codes, **said: torch.zeros(len(x), codes.shape[1], dtype=said["out_dtype"]), "is off by"),
    ],
)
def test_a_device_without_such_a_product(
    product: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a start that would go on with a product that is refused at the first step, or multiplies otherwise."""
    monkeypatch.setattr(torch, "_scaled_mm", product)
    with pytest.raises(Float8Error, match=message):
        find_way(CPU, torch.float32)


def test_tiles_that_triton_refuses_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker that would not start where PyTorch has a product and Triton has none: its errors are no
    RuntimeErrors."""
    refused = OutOfResources(116736, 101376, "shared memory")
    monkeypatch.setattr("kernels.float8_linear.float8_linear", lambda *_: (_ for _ in ()).throw(refused))
    weight = made(coded(48, 96, 96), "tile")
    x = torch.ones(3, 96, device=weight.codes.device)
    assert "Triton: out of resource: shared memory" in scaled._problem(x, weight, x.new_zeros(48))


@pytest.mark.skipif(DEVICE == "cuda", reason="for Triton's interpreter")
def test_tiles_of_bfloat16_are_refused_by_the_interpreter() -> None:
    with pytest.raises(TypeError, match="interpreter computes garbage"):
        linear(torch.ones(3, 96, dtype=torch.bfloat16), made(coded(48, 96, 96), "tile"))
