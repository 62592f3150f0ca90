"""Products in integers: against the float64 product of the very codes, at the ends of what 16 and 32 bits hold, and
with bits that depend on nothing but a row's own values."""

import pytest
import torch
from torch import Tensor

from kernels.native import Native, native
from kernels.panels import GROUP, WHOLE, Kind, Panels, in_integers, pack_codes, stacked, unpack
from tests.kernels.native.digest import bits_of_everything
from tests.kernels.native.test_native import weight_of

NATIVE = native()
pytestmark = pytest.mark.skipif(
    NATIVE is None, reason="the native kernels were not built here: they need a C++ compiler at installation"
)
KINDS: list[Kind] = ["q4", "q8", "a8", "h8", "x8"]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Native:
    assert NATIVE is not None
    monkeypatch.setattr(NATIVE, "by_pairs", False)
    return NATIVE


def integer(weight: Panels) -> Panels:
    found = in_integers(weight)
    assert isinstance(found, Panels) and found.integer
    return found


def rounded(x: Tensor) -> Tensor:
    """The specification of how activations are rounded: float64 values of 16-bit integers with one scale for 32."""
    groups = x.unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 32767.0) / largest
    values = torch.round(groups * inverse).double() * (largest / 32767).double()
    return torch.where(largest < 2.0**-100, 0, values).flatten(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (64, 64), (100, 96), (200, 576)])
def test_products(kernels: Native, kind: Kind, rows: int, columns: int) -> None:
    """Every height of tile and its rest, panels that are not full, a bias; values of a row that differ a million times
    in size."""
    weight = weight_of(kind, rows, columns)
    wide, bias = unpack(weight).double(), torch.randn(rows)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 13, 50):
        x = torch.randn(n, columns) * torch.logspace(-3, 3, columns)[torch.randperm(columns)]
        got = kernels.linear(x, integer(weight), bias)
        size = float((x.double().abs() @ wide.abs().T).max())
        want = rounded(x) @ wide.T + bias
        assert float((got - want).abs().max()) <= 4e-6 * size, "it multiplies what it has rounded"
        # Half of a unit of the 16 bits, and float32's rounding.
        lost = x.unflatten(1, (-1, GROUP)).abs().amax(-1, keepdim=True).double() / 65534 * 1.001
        bound = lost.expand(-1, -1, GROUP).flatten(1) @ wide.abs().T + 4e-6 * size
        assert bool(((got - (x.double() @ wide.T + bias)).abs() <= bound).all())
        alone = torch.cat([kernels.linear(x[at : at + 1], integer(weight), bias) for at in range(n)])
        assert torch.equal(got, alone)
        kernels.by_pairs = True
        assert torch.equal(got, kernels.linear(x, integer(weight), bias))
        kernels.by_pairs = False


def test_the_bits_of_everything_without_dot_products(kernels: Native) -> None:
    """Guards an AVX-512 processor without VNNI beside one that has it."""
    want = bits_of_everything(kernels)
    kernels.by_pairs = True
    assert bits_of_everything(kernels) == want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_fit(kernels: Native, kind: Kind, sign: int) -> None:
    """Every code and every activation at its end: no sum of 32 products may overflow."""
    rows, columns = 65, 96
    parts = 2 if kind in ("h8", "x8") else 1
    scales = torch.ones(rows, columns // GROUP * parts)
    offsets = -scales if kind in ("q4", "a8", "x8") else None
    least = torch.full((rows, columns), 15, dtype=torch.uint8) if kind == "q4" else torch.full((rows, columns), -128)
    weight = pack_codes(least.to(torch.uint8 if kind == "q4" else torch.int8), scales, offsets, kind)
    for n in (1, 7):
        got = kernels.linear(torch.full((n, columns), sign * 3.0), integer(weight))
        want = sign * 3.0 * unpack(weight).double().sum(1)
        torch.testing.assert_close(got.double(), want.expand(n, -1), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_what_is_no_number_stays_none(kernels: Native, rows: int) -> None:
    """Guards a spoiled row that would be answered as if it were zeros, and its neighbours."""
    weight = integer(weight_of("q4", 100, 96))
    x = torch.randn(rows, 96)
    want = kernels.linear(x, weight)
    for spoiled in (float("nan"), float("inf"), float("-inf")):
        broken = x.clone()
        broken[-1, 40] = spoiled
        got = kernels.linear(broken, weight)
        assert got[-1].isnan().all()
        assert torch.equal(got[:-1], want[:-1])


def test_zeros_and_the_ends_of_the_exponent(kernels: Native) -> None:
    weight, bias = weight_of("q8", 100, 32), torch.randn(100)
    assert torch.equal(kernels.linear(torch.zeros(3, 32), integer(weight), bias), bias.expand(3, -1))
    assert torch.equal(kernels.linear(torch.full((1, 32), 1e-35), integer(weight)), torch.zeros(1, 100))
    for size in (1e-28, 1e30):
        x = torch.randn(3, 32) * size
        got = kernels.linear(x, integer(weight)).double()
        want = rounded(x) @ unpack(weight).double().T
        assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())


def test_floats_are_multiplied_as_floats(kernels: Native) -> None:
    """Codes of 8-bit floats are no whole numbers: asked for in integers, they keep their product."""
    assert set(KINDS) == WHOLE
    x = torch.randn(5, 96)
    for kind in ("f32", "bf16", "f8"):
        weight = weight_of(kind, 70, 96)
        assert in_integers(weight) is weight
        asked = Panels(70, 96, weight.kind, weight.raw, integer=True)
        assert torch.equal(kernels.linear(x, asked), kernels.linear(x, weight))


def test_experts(kernels: Native) -> None:
    """Rows of each expert are found where all rows of a step were rounded together."""
    weights = [weight_of("q4", 70, 96), weight_of("q4", 71, 96), weight_of("q4", 70, 96)]
    stack = in_integers(stacked([weights[0], weights[2], weights[0]]))
    x, starts = torch.randn(23, 96), torch.tensor([0, 3, 3, 23])
    got = kernels._of_experts(x, starts, stack, None)
    for expert, (first, end) in enumerate([(0, 3), (3, 3), (3, 23)]):
        assert torch.equal(got[first:end], kernels.linear(x[first:end], stack[expert]))
