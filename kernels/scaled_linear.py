"""`x W^T + b` with `W` in 8-bit floats (E4M3) and `x` rounded to them, a product that GPUs from compute capability 8.9
on have units for: "W8A8".

    s = max |x| / 448              of a row, or of a row's 128 columns where W's scales are those of blocks
    q = E4M3(x / s)                to nearest, ties to even
    out = sum over parts of s * scale * (q codes^T)      in 32 bits, part after part, rounded once to the type of x

There are three ways, and `find_way` tries which of them a device has:

    tile    the kernels of `kernels.float8_linear`: two or three launches, and the same bits beside any other rows
    rows    PyTorch's product (`torch._scaled_mm`) with the scales of rows of x and of W, where W's are of whole rows
    unit    the same with scales of one, for sums in 32 bits that are multiplied with the scales afterwards

Specification: `reference`, in 64 bits, of the very numbers that x is rounded to. The scheme is that of
compressed-tensors' dynamic activations per token, and of DeepSeek-V3's 1 x 128 (arXiv 2412.19437, section 3.3.2).
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.coded_weight import CodedWeight
from kernels.panels import GROUP

BLOCK = 128
"""Columns of x that have one scale, where W has scales of blocks."""
MOST = 448.0
"""The largest number of E4M3."""
ROWS = 4
"""On the CPU rows are padded to a multiple: fewer take another kernel, with other bits."""
MULTIPLE = 16
"""What PyTorch wants rows and columns to be multiples of."""
_LEAST = 2.0**-100
"""The largest of a row is never taken for less: a row of zeros has a scale too."""

TILE_CAPABILITY = (8, 9)
"""The compute capability from which on Triton has products of 8-bit floats."""

Way = Literal["tile", "rows", "unit"]


class Float8Error(Exception):
    """This device, or this PyTorch, has no product of 8-bit floats; the message says what it answered."""


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """A weight `[rows, columns]`: `codes` of that shape, float8_e4m3fn; `scales` float32 `[parts, rows]`, each of
    columns / parts columns. `way`: how it is multiplied."""

    codes: Tensor
    scales: Tensor
    way: Way = "unit"

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        parts = len(self.scales)
        fits = self.scales.shape == (parts, rows) and self.scales.dtype == torch.float32 and parts
        if not fits or columns % parts or self.codes.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{self.codes.dtype} {rows} x {columns} with scales {tuple(self.scales.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def part(self) -> int:
        """The number of columns that share a scale."""
        return self.codes.shape[1] // len(self.scales)

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)


def from_codes(weight: CodedWeight, way: Way) -> Float8Weight | None:
    """Return a weight of 8-bit floats whose scales are those of rows, or of blocks of 128 columns; its codes are not
    copied. None for any other, and for sizes that PyTorch does not take."""
    rows, columns = weight.shape
    if weight.kind != "f8" or rows % MULTIPLE or columns % MULTIPLE:
        return None
    scales, codes = weight.scales, weight.codes.view(torch.float8_e4m3fn)
    if torch.equal(scales, scales[:, :1].expand_as(scales)):
        return Float8Weight(codes, scales[:, :1].T.contiguous(), way)
    each = BLOCK // GROUP
    if columns % BLOCK:
        return None
    by_block = scales.view(rows, -1, each)
    if not torch.equal(by_block, by_block[:, :, :1].expand_as(by_block)):
        return None
    return Float8Weight(codes, by_block[:, :, 0].T.contiguous(), "unit" if way == "rows" else way)


def rounded(x: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """Round rows `[n, columns]` to 8-bit floats: these, and their scales `[n, columns / part]`, float32. Where a row
    has a NaN or an infinity, its part is all NaN."""
    wide = x.float().unflatten(1, (-1, part))
    scales = wide.abs().amax(-1).clamp_min(_LEAST) / MOST
    return (wide / scales[..., None]).to(torch.float8_e4m3fn).flatten(1), scales


def reference(x: Tensor, weight: Float8Weight, bias: Tensor | None = None) -> Tensor:
    """Specify `scaled_linear`: float64 `[n, rows]`."""
    codes, scales = rounded(x, weight.part)
    total = torch.zeros(len(x), weight.shape[0], dtype=torch.float64, device=x.device)
    for at, own in enumerate(weight.scales):
        columns = slice(at * weight.part, (at + 1) * weight.part)
        sums = codes[:, columns].double() @ weight.codes[:, columns].double().T
        total += sums * scales[:, at, None].double() * own.double()
    return total if bias is None else total + bias.double()


def scaled_linear(x: Tensor, weight: Float8Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` `[n, columns]` -> `[n, rows]`, of its type. Raises ValueError where shapes do not fit, and
    RuntimeError where the device has no such product (`find_way`)."""
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{tuple(x.shape)} does not fit {weight.shape[1]} columns")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias of {tuple(bias.shape)} does not fit {weight.shape[0]} rows")
    count = len(x)
    if not count:
        return x.new_empty(0, weight.shape[0])
    if weight.way == "tile":
        from kernels.float8_linear import float8_linear, launch_configs, round_rows

        codes_of_x = round_rows(x.contiguous(), weight.part, _LEAST, MOST)
        return float8_linear(codes_of_x, weight.codes, weight.scales, bias, x.dtype, launch_configs(x.device))
    if x.device.type == "cpu":
        x = pad(x, (0, 0, 0, -count % ROWS))
    codes, scales = rounded(x, weight.part)
    if weight.way == "rows":
        own = weight.scales  # [1, rows], as PyTorch wants them
        product = _product(codes, weight.codes, scales, own, x.dtype, None if bias is None else bias.to(x.dtype))
        return product[:count]
    one = _one(x.device)
    total: Tensor | None = None
    for at, factors in enumerate(weight.scales):
        columns = slice(at * weight.part, (at + 1) * weight.part)
        sums = _product(codes[:, columns], weight.codes[:, columns], one, one, torch.float32)
        sums.mul_(scales[:, at, None]).mul_(factors)
        total = sums if total is None else total.add_(sums)
    assert total is not None  # there is at least one part
    return (total if bias is None else total.add_(bias)).to(x.dtype)[:count]


def _product(
    x: Tensor, codes: Tensor, row_scales: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    product: Tensor = torch._scaled_mm(
        x, codes.T, scale_a=row_scales, scale_b=scales, bias=bias, out_dtype=dtype, use_fast_accum=False
    )
    return product


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def find_way(device: torch.device, dtype: torch.dtype) -> Way:
    """Return how this device multiplies 8-bit floats for a model in `dtype`, tried on a product of each kind. Raises
    Float8Error where it does not, or by other numbers than `reference`."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3 * BLOCK, generator=noise).to(device, dtype)
    codes = torch.randn(2 * MULTIPLE, 3 * BLOCK, generator=noise).to(device).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2 * MULTIPLE, generator=noise).to(device) + 0.5
    bias = torch.randn(2 * MULTIPLE, generator=noise).to(device, dtype)
    # Triton's interpreter has this product too, and takes a thousand times as long as PyTorch.
    has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= TILE_CAPABILITY
    if has_units and not _problem(x, Float8Weight(codes, scales, "tile"), bias):
        return "tile"
    problem = _problem(x, Float8Weight(codes, scales), bias)
    if problem:
        raise Float8Error(f"{device}: {problem}")
    # PyTorch rounds what it scales by rows to bfloat16.
    if dtype == torch.bfloat16 and not _problem(x, Float8Weight(codes, scales[:1].contiguous(), "rows"), bias):
        return "rows"
    return "unit"


def _problem(x: Tensor, weight: Float8Weight, bias: Tensor) -> str:
    """Return why a product cannot be had, or differs from its specification by more than its type rounds; empty: it
    holds."""
    name = "torch._scaled_mm"
    refusals: tuple[type[Exception], ...] = (RuntimeError, NotImplementedError, AttributeError, TypeError)
    if weight.way == "tile":
        from kernels.launch import REFUSED

        name, refusals = "Triton", (*refusals, *REFUSED)
    try:
        got = scaled_linear(x, weight, bias)
    except refusals as error:
        return f"{name}: {str(error).splitlines()[0]}"
    want = reference(x, weight, bias)
    allowed = (1e-5 if x.dtype == torch.float32 else 2e-2) * float(want.abs().max())
    found = float((got.double() - want).abs().max())
    return "" if found <= allowed else f"{name} is off by {found:.3g}, where {allowed:.3g} is rounding"
