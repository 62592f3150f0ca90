"""What `engine.deterministic` costs: `python -m benchmarks.deterministic`.

One process, one model, three runners: deterministic on, off, and off with the weights as they are (not packed). They
take turns within every round, so that other work on the machine strikes all alike, and their ratio is taken per round.
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
from engine.attention import TorchAttention
from engine.determinism import deviations
from engine.kv.layout import KVLayout
from engine.kv.paged import PagedKV
from engine.model.cache import prepare
from engine.model.llama import Llama, load_model
from engine.runner import ModelRunner
from engine.step import Row, StepPlan
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams

BLOCK_TOKENS = 16
SETTINGS = ("on", "off", "off, plain weights")


class Line(msgspec.Struct, frozen=True):
    """One kind of work: tokens per second by setting, and `on` relative to the others (above 1: `on` is faster)."""

    work: str
    tokens_per_s: dict[str, Middle]
    relative: dict[str, Middle]


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    folder = prepare(options.model, options.cache_dir, options.dtype)
    models = {"on": load_model(folder), "off, plain weights": load_model(folder, packed=False)}
    models["off"] = models["on"]
    found = deviations(models["on"], BLOCK_TOKENS)
    lines = measure(models, options.context_tokens, options.batches, options.rounds, options.steps)
    show(_table(lines, options.dtype, options.threads))
    print("the promise holds here" if not found else f"the promise does not hold here: {', '.join(found)}")
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, "deterministic", settings, {"deviations": found, "lines": lines})
    return 1 if found else 0


def measure(
    models: dict[str, Llama], context: int, batches: list[int], rounds: int, steps: int
) -> list[Line]:
    """A prompt of `context` tokens, then batches of `steps` decode steps behind such prompts."""
    runners = {name: _Work(models[name], name == "on", context, max(batches), steps) for name in SETTINGS}
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


def _line(work: str, rounds: int, measured: dict[str, Callable[[], float]]) -> Line:
    speeds: dict[str, list[float]] = {name: [] for name in measured}
    for number in range(rounds + 1):
        for name in list(measured)[:: 1 if number % 2 else -1]:
            speed = measured[name]()
            if number:  # the first round warms caches
                speeds[name].append(speed)
    relative = {
        name: middle([on / other for on, other in zip(speeds["on"], speeds[name], strict=True)])
        for name in speeds
        if name != "on"
    }
    return Line(work, {name: middle(values) for name, values in speeds.items()}, relative)


class _Work:
    """One runner and sequences of random tokens whose prompts are in its pool."""

    def __init__(self, model: Llama, stable: bool, context: int, sequences: int, steps: int) -> None:
        shape = model.config
        layout = KVLayout(
            kv_heads=shape.kv_heads,
            layers=shape.layers,
            block_size=BLOCK_TOKENS,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
        )
        each = layout.blocks_for(context + steps)
        self.kv = PagedKV(layout, each * sequences)
        self._runner = ModelRunner(model, self.kv, TorchAttention(shape.heads, stable))
        self._context, self._steps = context, steps
        random = Random(1)
        self._tokens = [
            [random.randrange(shape.vocab) for _ in range(context + steps)] for _ in range(sequences)
        ]
        self._blocks = [[BlockId(at * each + n) for n in range(each)] for at in range(sequences)]
        for sequence in range(sequences):
            self.prefill(sequence)

    def prefill(self, sequence: int = 0) -> float:
        """Tokens per second."""
        began_s = time.perf_counter()
        for start in range(0, self._context, 128):
            end = min(start + 128, self._context)
            self._runner.run(StepPlan((self._row(sequence, start, end, end == self._context),)))
        return self._context / (time.perf_counter() - began_s)

    def decode(self, batch: int) -> float:
        """Tokens per second over all sequences of the batch."""
        began_s = time.perf_counter()
        for at in range(self._context, self._context + self._steps):
            self._runner.run(StepPlan(tuple(self._row(s, at, at + 1, True) for s in range(batch))))
        return batch * self._steps / (time.perf_counter() - began_s)

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


def _table(lines: list[Line], dtype: str, threads: int) -> Table:
    title = f"engine.deterministic, {dtype}, threads: {threads}; tokens/s, median (middle half)"
    table = Table(title=title, title_justify="left")
    for name in ("", *SETTINGS, "on / off", "on / plain"):
        table.add_column(name, justify="right" if name else "left")
    for line in lines:
        speeds = [line.tokens_per_s[name].cell() for name in SETTINGS]
        ratios = [line.relative[name].cell(digits=2) for name in SETTINGS[1:]]
        table.add_row(line.work, *speeds, *ratios)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", help="a GGUF file or a directory; default: the demo's")
    add("--cache-dir", type=Path, help="of prepared models")
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
