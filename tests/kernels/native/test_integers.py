"""Products in integers of 16 and 23 bits: against the float64 product of the very codes, at the ends of what a term and
32 bits hold, and with bits that depend on nothing but a row's own values."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.native import SOURCES, Native, native
from kernels.panels import GROUP, WHOLE, IntegerBits, Kind, Panels, in_integers, pack_codes, stacked, unpack
from tests.kernels.native.digest import bits_of_everything
from tests.kernels.native.test_native import weight_of

NATIVE = native()
pytestmark = pytest.mark.skipif(
    NATIVE is None, reason="the native kernels were not built here: they need a C++ compiler at installation"
)
KINDS: list[Kind] = ["q4", "q8", "a8", "h8", "x8"]
MOST: dict[IntegerBits, int] = {16: 32639, 23: 3686000}
"""The largest integer of so many bits."""


WRAPPING = """
#include "pairs.h"

using namespace headrace;

static const int8_t ENDS[3][4] = {{-112, 112, 0, 1}, {-64, 63, 0, 1}, {-128, 127, 0, 1}};

int main() {
  if (!has_pairs()) return 3;
  uint32_t state = 1;
  for (int turn = 0; turn < 10000; ++turn) {
    int32_t terms[3][GROUP], n[GROUP];
    for (int term = 0; term < 3; ++term)
      for (int32_t &of_column : terms[term]) of_column = ENDS[term][(state = state * 1664525 + 1013904223) >> 30];
    for (int i = 0; i < GROUP; ++i)
      n[i] = terms[0][i] * (1 << HIGH_BITS) + terms[1][i] * (1 << LOW_BITS) + terms[2][i];
    uint32_t want = 0;
    for (int i = 0; i < GROUP; i += i % 8 == 3 ? 5 : 1)
      want -= ((uint32_t)((terms[0][i] + 128) * terms[0][i + 4]) << HIGH_BITS) +
              ((uint32_t)((terms[1][i] + 128) * terms[1][i + 4]) << LOW_BITS) + (uint32_t)(128 * terms[2][i + 4]);
    const Ints whole[2] = {load_ints(n), load_ints(n + LANES)};
    const Ints high[2] = {load_ints(terms[0]), load_ints(terms[0] + LANES)};
    const Ints middle[2] = {load_ints(terms[1]), load_ints(terms[1] + LANES)};
    if ((uint32_t)start_of_pairs(whole, high, middle) != want) return 1;
  }
}
"""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Native:
    assert NATIVE is not None
    monkeypatch.setattr(NATIVE, "by_words", False)
    return NATIVE


@pytest.fixture(params=[16, 23])
def bits(request: pytest.FixtureRequest) -> IntegerBits:
    found: IntegerBits = request.param
    return found


def integer(weight: Panels, bits: IntegerBits) -> Panels:
    found = in_integers(weight, bits)
    assert isinstance(found, Panels) and found.integer == bits
    return found


def rounded(x: Tensor, bits: IntegerBits) -> Tensor:
    """The specification of how activations are rounded: float64 values of integers with one scale for 32."""
    groups = x.unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, float(MOST[bits])) / largest
    values = torch.round(groups * inverse).double() * (largest / float(MOST[bits])).double()
    return torch.where(largest < 2.0**-100, 0, values).flatten(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (64, 64), (100, 96), (200, 576)])
def test_products(kernels: Native, bits: IntegerBits, kind: Kind, rows: int, columns: int) -> None:
    """Every height of tile and its rest, parts of many rows, panels that are not full, a bias; values of a row that
    differ a million times in size."""
    weight = weight_of(kind, rows, columns)
    wide, bias = unpack(weight).double(), torch.randn(rows)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 13, 50, 129):
        x = torch.randn(n, columns) * torch.logspace(-3, 3, columns)[torch.randperm(columns)]
        got = kernels.linear(x, integer(weight, bits), bias)
        size = float((x.double().abs() @ wide.abs().T).max())
        want = rounded(x, bits) @ wide.T + bias
        assert float((got - want).abs().max()) <= 4e-6 * size, "it multiplies what it has rounded"
        # Half of a unit, and float32's rounding.
        largest = x.unflatten(1, (-1, GROUP)).abs().amax(-1, keepdim=True).double()
        lost = largest / (2 * MOST[bits]) * (1.001 if bits == 16 else 1.5)
        bound = lost.expand(-1, -1, GROUP).flatten(1) @ wide.abs().T + 4e-6 * size
        assert bool(((got - (x.double() @ wide.T + bias)).abs() <= bound).all())
        alone = torch.cat([kernels.linear(x[at : at + 1], integer(weight, bits), bias) for at in range(n)])
        assert torch.equal(got, alone)
        kernels.by_words = True
        assert torch.equal(got, kernels.linear(x, integer(weight, bits), bias))
        kernels.by_words = False


def test_the_bits_of_everything_without_dot_products(kernels: Native) -> None:
    """Guards a processor without VNNI beside one that has it."""
    want = bits_of_everything(kernels)
    kernels.by_words = True
    assert bits_of_everything(kernels) == want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_fit(kernels: Native, bits: IntegerBits, kind: Kind, sign: int) -> None:
    """Every code and every activation at its end: no sum of 32 products may overflow."""
    rows, columns = 65, 96
    parts = 2 if kind in ("h8", "x8") else 1
    scales = torch.ones(rows, columns // GROUP * parts)
    offsets = -scales if kind in ("q4", "a8", "x8") else None
    least = torch.full((rows, columns), 15, dtype=torch.uint8) if kind == "q4" else torch.full((rows, columns), -128)
    weight = pack_codes(least.to(torch.uint8 if kind == "q4" else torch.int8), scales, offsets, kind)
    for n in (1, 7):
        got = kernels.linear(torch.full((n, columns), sign * 3.0), integer(weight, bits))
        want = sign * 3.0 * unpack(weight).double().sum(1)
        torch.testing.assert_close(got.double(), want.expand(n, -1), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_every_term_at_its_ends(kernels: Native, bits: IntegerBits, kind: Kind) -> None:
    """Guards a term that leaves its byte: integers on both sides of where the next term takes one more."""
    weight = weight_of(kind, 70, GROUP)
    edges = [0, 127, 128, 255, 16383, 16384, 32511, 32512]
    edges += [63, 64, 16319, 16320, 16447, 16448, 32767, 32768, 49151, 49152, 3669951, 3680000] * (bits == 23)
    numbers = torch.tensor(sorted({sign * edge + step for edge in edges for sign in (1, -1) for step in (-1, 0, 1)}))
    for first in range(0, len(numbers), GROUP - 1):
        n = torch.zeros(1, GROUP)
        some = numbers[first : first + GROUP - 1]
        n[0, : len(some)] = some.float()
        n[0, -1] = MOST[bits]  # then the scale is 1, and nothing is rounded
        # Nine rows alike: few, and more than a tile.
        n = n.expand(9, -1).contiguous()
        got = kernels.linear(n, integer(weight, bits)).double()
        assert torch.equal(got[:1], kernels.linear(n[:1], integer(weight, bits)).double())
        want = n.double() @ unpack(weight).double().T
        size = float((n.double().abs() @ unpack(weight).double().abs().T).max())
        assert float((got - want).abs().max()) <= 1e-6 * size
        kernels.by_words = True
        assert torch.equal(got, kernels.linear(n, integer(weight, bits)).double())
        kernels.by_words = False


def test_what_a_row_decides_of_pairs_wraps(kernels: Native, tmp_path: Path) -> None:
    """Guards sums modulo 2^32 that a compiler may take for ones that never overflow: the program is made to end where
    a sum of ints does, and computes the same in unsigned integers."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if kernels.variant != "AVX512" or compiler is None:
        pytest.skip("columns are multiplied in pairs with AVX-512 alone, and this needs a compiler")
    (tmp_path / "wrapping.cpp").write_text(WRAPPING)
    flags = ["-std=c++17", "-O1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", f"-I{SOURCES}"]
    flags += ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
    program = tmp_path / "wrapping"
    subprocess.run([compiler, *flags, str(tmp_path / "wrapping.cpp"), "-o", str(program)], check=True)
    told = subprocess.run([str(program)]).returncode
    if told == 3:
        pytest.skip("this processor multiplies no columns in pairs")
    assert told == 0


def test_23_bits_lose_no_more_than_floats(kernels: Native) -> None:
    """Guards the promise of `engine.arithmetic = auto`: the error of products beside float64, and float32's own."""
    for kind in KINDS:
        weight = weight_of(kind, 128, 576)
        x = torch.randn(40, 576)
        want = x.double() @ unpack(weight).double().T
        lost = {one.integer: (kernels.linear(x, one) - want).square().mean() for one in (weight, integer(weight, 23))}
        assert lost[23] <= (2.5**2) * lost[0]


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_what_is_no_number_stays_none(kernels: Native, bits: IntegerBits, rows: int) -> None:
    """Guards a spoiled row that would be answered as if it were zeros, and its neighbours."""
    weight = integer(weight_of("q4", 100, 96), bits)
    x = torch.randn(rows, 96)
    want = kernels.linear(x, weight)
    for spoiled in (float("nan"), float("inf"), float("-inf")):
        broken = x.clone()
        broken[-1, 40] = spoiled
        got = kernels.linear(broken, weight)
        assert got[-1].isnan().all()
        assert torch.equal(got[:-1], want[:-1])


def test_zeros_and_the_ends_of_the_exponent(kernels: Native, bits: IntegerBits) -> None:
    weight, bias = weight_of("q8", 100, 32), torch.randn(100)
    assert torch.equal(kernels.linear(torch.zeros(3, 32), integer(weight, bits), bias), bias.expand(3, -1))
    assert torch.equal(kernels.linear(torch.full((1, 32), 1e-35), integer(weight, bits)), torch.zeros(1, 100))
    for size in (1e-28, 1e30):
        x = torch.randn(3, 32) * size
        got = kernels.linear(x, integer(weight, bits)).double()
        want = rounded(x, bits) @ unpack(weight).double().T
        assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())


def test_floats_are_multiplied_as_floats(kernels: Native) -> None:
    """Codes of 8-bit floats are no whole numbers: asked for in integers, they keep their product."""
    assert set(KINDS) == WHOLE
    x = torch.randn(5, 96)
    for kind in ("f32", "bf16", "f8"):
        weight = weight_of(kind, 70, 96)
        assert in_integers(weight, 23) is weight
        asked = Panels(70, 96, weight.kind, weight.raw, integer=23)
        assert torch.equal(kernels.linear(x, asked), kernels.linear(x, weight))


def test_experts(kernels: Native, bits: IntegerBits) -> None:
    """Rows of each expert are found where all rows of a step were rounded together."""
    weights = [weight_of("q4", 70, 96), weight_of("q4", 71, 96), weight_of("q4", 70, 96)]
    stack = in_integers(stacked([weights[0], weights[2], weights[0]]), bits)
    x, starts = torch.randn(23, 96), torch.tensor([0, 3, 3, 23])
    got = kernels._of_experts(x, starts, stack, None)
    for expert, (first, end) in enumerate([(0, 3), (3, 3), (3, 23)]):
        assert torch.equal(got[first:end], kernels.linear(x[first:end], stack[expert]))
