"""Measures the CPU's kernels, and what `engine.deterministic` costs: `python -m benchmarks.deterministic`.

One process, one model, several runners: the native kernels, which are always deterministic, in integers of 23 and 16
bits and in float32; PyTorch's with the mode on and off; and off with the weights as they are (not packed). They take
turns within every round, so that other work on the machine strikes all alike, and the first one's ratio to each of the
others is taken per round. With one thread, times are its processor time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import torch
from rich.table import Table

from benchmarks.figures import Middle, middle, show, write_json
from cluster.processes.spec import model_cache
from engine.backends.attention import TorchAttention
from engine.backends.determinism import deviations
from engine.backends.native_attention import NativeAttention
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.runner import ModelRunner
from engine.step import Row, StepPlan
from engine.storage.paged import PagedKV
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams
from kernels.native import native
from kernels.panels import IntegerBits

BLOCK_TOKENS = 16
Side = tuple[Llama, TorchAttention]


class DeterminismLine(msgspec.Struct, frozen=True):
    """One kind of work: tokens per second by side, and the first relative to the others (above 1: it is faster)."""

    work: str
    tokens_per_s: dict[str, Middle]
    relative: dict[str, Middle]


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    folder = prepare(options.model, options.cache_dir, options.dtype)
    sides = sides_of(folder)
    found = {
        name: deviations(model, BLOCK_TOKENS, attention)
        for name, (model, attention) in sides.items()
        if "off" not in name
    }
    lines = measure(sides, options.context_tokens, options.batches, options.rounds, options.steps)
    show(_table(lines, options.dtype, options.threads))
    for name, ways in found.items():
        print(f"{name}: the promise " + (f"does not hold here: {', '.join(ways)}" if ways else "holds here"))
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, "deterministic", settings, {"deviations": found, "lines": lines})
    return 1 if any(found.values()) else 0


def sides_of(folder: Path) -> dict[str, Side]:
    """Return a model and its attention by name; the native ones first, where they can be had."""
    packed = load_model(folder)
    heads, kernels = packed.config.heads, native()
    sides: dict[str, Side] = {}
    if kernels is not None and packed.config.dtype == "float32":
        widths: dict[str, IntegerBits] = {"native, integers": 23, "native, 16 bits": 16}
        for name, bits in widths.items():
            whole = load_model(folder, panels=True, integer=bits)
            if whole.integer:
                sides[name] = (whole, NativeAttention(heads, kernels))
        sides["native"] = (load_model(folder, panels=True), NativeAttention(heads, kernels))
    return sides | {
        "torch, on": (packed, TorchAttention(heads)),
        "torch, off": (packed, TorchAttention(heads, stable=False)),
        "torch, off, plain weights": (load_model(folder, packed=False), TorchAttention(heads, stable=False)),
    }


def measure(
    sides: dict[str, Side], context: int, batches: list[int], rounds: int, steps: int
) -> list[DeterminismLine]:
    """Measure a prompt of `context` tokens, then batches of `steps` decode steps behind such prompts."""
    runners = {name: _Work(*side, context, max(batches), steps) for name, side in sides.items()}
    lines = [_line("prefill, chunks of 128", rounds, {n: r.prefill for n, r in runners.items()})]
    for batch in batches:
        work: dict[str, Callable[[], float]] = {
            name: lambda runner=runner, batch=batch: runner.decode(batch)  # type: ignore[misc]
            for name, runner in runners.items()
        }
        lines.append(_line(f"decode, {batch} at once", rounds, work))
    for runner in runners.values():
        runner.kv.close()
    return lines


def _line(work: str, rounds: int, measured: dict[str, Callable[[], float]]) -> DeterminismLine:
    speeds: dict[str, list[float]] = {name: [] for name in measured}
    for number in range(rounds + 1):
        for name in list(measured)[:: 1 if number % 2 else -1]:
            speed = measured[name]()
            if number:  # the first round warms caches
                speeds[name].append(speed)
    first, *others = speeds
    relative = {
        name: middle([one / other for one, other in zip(speeds[first], speeds[name], strict=True)])
        for name in others
    }
    return DeterminismLine(work, {name: middle(values) for name, values in speeds.items()}, relative)


class _Work:
    """One runner, and sequences of random tokens whose prompts are in its pool."""

    def __init__(self, model: Llama, attention: TorchAttention, context: int, sequences: int, steps: int) -> None:
        shape = model.config
        layout = shape.kv_layout(BLOCK_TOKENS)
        each = layout.blocks_for(context + steps)
        self.kv = PagedKV(layout, each * sequences)
        self._runner = ModelRunner(model, self.kv, attention)
        self._context, self._steps = context, steps
        random = Random(1)
        self._tokens = [
            [random.randrange(shape.vocab) for _ in range(context + steps)] for _ in range(sequences)
        ]
        self._blocks = [[BlockId(at * each + n) for n in range(each)] for at in range(sequences)]
        for sequence in range(sequences):
            self.prefill(sequence)

    def prefill(self, sequence: int = 0) -> float:
        """Return tokens per second."""
        began_s = _now_s()
        for start in range(0, self._context, 128):
            end = min(start + 128, self._context)
            self._runner.run(StepPlan((self._row(sequence, start, end, end == self._context),)))
        return self._context / (_now_s() - began_s)

    def decode(self, batch: int) -> float:
        """Return tokens per second over all sequences of the batch."""
        began_s = _now_s()
        for at in range(self._context, self._context + self._steps):
            self._runner.run(StepPlan(tuple(self._row(s, at, at + 1, True) for s in range(batch))))
        return batch * self._steps / (_now_s() - began_s)

    def _row(self, sequence: int, start: int, end: int, draw: bool) -> Row:
        tokens = self._tokens[sequence]
        record = RequestRecord(
            request=RequestId(str(sequence)),
            tokens=tokens,
            prompt_tokens=self._context,
            max_tokens=self._steps,
            seed=0,
            sampling=SamplingParams(temperature=0.0),
        )
        return Row(record.request, record, tokens, start, end, self._blocks[sequence], draw)


def _now_s() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _table(lines: list[DeterminismLine], dtype: str, threads: int) -> Table:
    sides, others = list(lines[0].tokens_per_s), list(lines[0].relative)
    title = f"CPU kernels, {dtype}, threads: {threads}; tokens/s, median (middle half)"
    table = Table(title=title, title_justify="left")
    for name in ("", *sides, *(f"{sides[0]} / {other}" for other in others)):
        table.add_column(name, justify="right" if name else "left")
    for line in lines:
        speeds = [line.tokens_per_s[name].cell() for name in sides]
        ratios = [line.relative[name].cell(digits=2) for name in others]
        table.add_row(line.work, *speeds, *ratios)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", help="a GGUF file or a directory; default: the demo's")
    add("--cache-dir", type=Path, default=model_cache(), help="of prepared models")
    add("--dtype", default="float32")
    add("--threads", type=int, default=1)
    add("--context-tokens", type=int, default=300)
    add("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 8])
    add("--rounds", type=int, default=9)
    add("--steps", type=int, default=8, help="of decoding per round")
    add("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
