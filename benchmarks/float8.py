"""Measures what FP8 costs in quality: `python -m benchmarks.float8`.

The demo model's layers, rounded to E4M3 with a scale for each row, as FP8 checkpoints are made. Beside the model's own
weights in float32: what the rounded ones change, and what rounding activations too (`engine.arithmetic = "fp8"`) adds.
`benchmarks.arithmetic` says how sides are compared.
"""

import argparse
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.arithmetic import PAGES, Side, WindowReader, compare, windows_of
from benchmarks.figures import show, write_json
from cluster.processes.spec import model_cache
from engine.model.config import ModelConfig
from engine.model.llama import Llama
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import PreparedWeights
from kernels.linear import Weight
from kernels.native import native
from kernels.scaled_linear import MOST, Float8Weight


def in_float8(weight: Tensor) -> Float8Weight:
    """Round float32 `[rows, columns]` with a scale for each row."""
    scales = weight.abs().amax(1, keepdim=True) / MOST
    return Float8Weight((weight / scales).to(torch.float8_e4m3fn), scales.T.contiguous())


def models(folder: Path) -> dict[str, Llama]:
    """Return the model with the weights that it has, with those rounded, and with activations rounded too."""
    mapped = PreparedWeights(folder)
    plain: dict[str, Weight] = {name: mapped[key] for name, key in mapped.matrices().items()}
    others = {name: weight for name, weight in mapped.others().items() if isinstance(weight, Tensor)}
    others["embedding"] = mapped["embedding"]
    rounded = {name: in_float8(mapped[key]) for name, key in mapped.matrices().items() if name.startswith("layers.")}
    wide = {name: weight.codes.float() * weight.scales.T for name, weight in rounded.items()}
    config = ModelConfig.load(folder)
    each: dict[str, dict[str, Weight]] = {
        "its own weights": plain,
        "FP8 weights": {**plain, **wide},
        "FP8 activations too": {**plain, **rounded},
    }
    return {name: Llama(config, {**others, **weights}) for name, weights in each.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-dir", type=Path, default=model_cache())
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    kernels = native()
    if kernels is None:
        print("the native kernels were not built: `headrace doctor` says why")
        return 1
    torch.set_num_threads(options.threads)
    folder = prepare(None, options.cache_dir)
    windows = windows_of(folder, sorted(PAGES.glob("*.md")), options.tokens, options.window)
    with ExitStack() as stack:
        sides: dict[str, Side] = {
            name: stack.enter_context(closing(WindowReader(model, kernels, options.window)))
            for name, model in models(folder).items()
        }
        lines = compare(windows, sides["its own weights"], sides, {})
        rounded = {name: sides[name] for name in ("FP8 weights", "FP8 activations too")}
        dequantized = compare(windows, sides["FP8 weights"], rounded, {})
    for title, found in (("beside its own weights", lines), ("beside the rounded weights", dequantized)):
        table = Table(title=f"{found[0].positions} positions of text, {title}", title_justify="left")
        for column in ("", "same best token", "error of logits, rms", "worst", "perplexity"):
            table.add_column(column)
        for line in found:
            share = f"{100 * line.same / line.positions:.2f} %"
            table.add_row(
                line.side, share, f"{line.error_rms:.2g}", f"{line.error_worst:.2g}", f"{line.perplexity:.4f}"
            )
        show(table)
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, "float8", settings, lines + dequantized)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
