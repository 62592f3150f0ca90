"""Times products with codes by each arithmetic of the native kernels: `python -m benchmarks.products`.

One matrix, one thread, the arithmetics in turns; of each the least of many times, since other work on the machine only
adds to them. `float32` is the product with widened codes, and a ratio above 1 says how much sooner the same product is
there in integers. Errors are of one product beside float64, relative to the spread of its values. `--by-words`: as
processors without an instruction for products of bytes multiply; with `ATEN_CPU_CAPABILITY=avx2`: as those without
AVX-512.
"""

import argparse
import sys
import time
from math import inf
from pathlib import Path

import msgspec
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.figures import show, write_json
from kernels.native import Native, native
from kernels.panels import IntegerBits, Panels, in_integers, pack_codes, unpack

ARITHMETICS: dict[str, IntegerBits] = {"float32": 0, "integer": 23, "integer16": 16}


class ProductLine(msgspec.Struct, frozen=True):
    """Products of so many rows: the least seconds of each arithmetic, and its relative error."""

    rows: int
    seconds: dict[str, float]
    errors: dict[str, float]


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    kernels = native()
    if kernels is None:
        print("the native kernels were not built: `headrace doctor` says why")
        return 1
    torch.set_num_threads(1)
    kernels.by_words = options.by_words
    weight = _weight(options.width, options.columns, options.bits)
    lines = measure(kernels, weight, options.rows, options.turns)
    title = f"{options.width} x {options.columns}, codes of {options.bits} bits, {kernels.variant}, one thread"
    show(_table(title, lines, options.width * options.columns))
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, "products", settings, lines)
    return 0


def measure(kernels: Native, weight: Panels, rows: list[int], turns: int) -> list[ProductLine]:
    wide = unpack(weight).double()
    forms = {name: in_integers(weight, bits) for name, bits in ARITHMETICS.items()}
    lines = []
    for count in rows:
        x = torch.randn(count, weight.columns, generator=torch.Generator().manual_seed(count))
        exact, least, made = x.double() @ wide.T, dict.fromkeys(forms, inf), dict[str, Tensor]()
        for _ in range(turns):
            for name, form in forms.items():
                assert isinstance(form, Panels)
                began_s = time.perf_counter()
                made[name] = kernels.linear(x, form)
                least[name] = min(least[name], time.perf_counter() - began_s)
        errors = {name: float((found - exact).square().mean().sqrt() / exact.std()) for name, found in made.items()}
        lines.append(ProductLine(count, least, errors))
    return lines


def _weight(width: int, columns: int, bits: int) -> Panels:
    generator = torch.Generator().manual_seed(1)
    scales = 0.01 * torch.rand(width, columns // 32, generator=generator)
    if bits == 4:
        codes = torch.randint(0, 16, (width, columns), generator=generator, dtype=torch.uint8)
        return pack_codes(codes, scales, -8 * scales, "q4")
    codes = torch.randint(-128, 128, (width, columns), generator=generator, dtype=torch.int8)
    return pack_codes(codes, scales, None, "q8")


def _table(title: str, lines: list[ProductLine], products: int) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("rows", "float32, G multiply-adds/s", *(f"{name} / float32" for name in list(ARITHMETICS)[1:])):
        table.add_column(heading, justify="right")
    table.add_column("error of " + ", ".join(ARITHMETICS), justify="right")
    for line in lines:
        plain = line.seconds["float32"]
        ratios = [f"{plain / line.seconds[name]:.2f}" for name in list(ARITHMETICS)[1:]]
        errors = ", ".join(f"{line.errors[name]:.1e}" for name in ARITHMETICS)
        table.add_row(str(line.rows), f"{line.rows * products / plain / 1e9:.0f}", *ratios, errors)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--width", type=int, default=3072, help="rows of the matrix")
    add("--columns", type=int, default=576, help="a multiple of 32")
    add("--bits", type=int, default=4, choices=(4, 8), help="of a code")
    add("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8, 16, 128])
    add("--turns", type=int, default=40)
    add("--by-words", action="store_true")
    add("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
