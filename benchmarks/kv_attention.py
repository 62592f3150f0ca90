"""Times attention over KV of 32 and 8 bits on the CPU: `python -m benchmarks.kv_attention`.

Eight requests with contexts of 1,100 tokens, in blocks that lie anywhere in a pool of their own, which is filled with
noise. `attention`: all layers' alone, for requests that share nothing and for requests that begin alike. `decode step`:
the whole model's. Sides take turns, one thread, its processor time; the least and the median of all rounds, and ratios
of the first side's to each.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks import output
from cluster.processes.spec import model_cache
from engine.backends.attention import AttentionOptions, LayerInput, TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.storage.paged import PagedKV
from engine.types import BlockId
from kernels.native import Native, native

BLOCK = 16
SIDES = (("native", "float32"), ("native", "int8"), ("native", "fp8"), ("torch", "float32"), ("torch", "int8"))


class Side:
    """One kind of attention over one kind of KV."""

    def __init__(self, model: Llama, attention: TorchAttention, kv_dtype: str, requests: int, context: int) -> None:
        self._model, self._attention = model, attention
        layout = model.config.kv_layout(BLOCK, kv_dtype)
        each = layout.blocks_for(context)
        generator = torch.Generator().manual_seed(1)
        self.kv = PagedKV(layout, each * requests)
        if self.kv.scales is None:
            self.kv.tensor.normal_(generator=generator)
        else:
            codes = self.kv.tensor.view(torch.uint8)
            codes.copy_(torch.randint(0, 126, codes.shape, dtype=torch.uint8, generator=generator))  # no E4M3 is none
            self.kv.scales.fill_(0.01)
        order = [BlockId(block) for block in torch.randperm(self.kv.blocks, generator=generator).tolist()]
        tables = [order[at * each : (at + 1) * each] for at in range(requests)]
        self._apart, self._alike = (self._batch(found, context) for found in (tables, tables[:1] * requests))
        rows, heads = len(self._apart.positions), model.config.heads + 2 * model.config.kv_heads
        self._qkv = torch.randn(rows, heads, model.config.head_dim, generator=generator)

    def _batch(self, tables: list[list[BlockId]], context: int) -> ForwardBatch:
        rows = [trial_row([1] * context, context - 1, table) for table in tables]
        return ForwardBatch.build(rows, BLOCK, row_multiple=self._attention.row_multiple)

    def attend(self, batch: ForwardBatch) -> float:
        """Return seconds."""
        began_s = time.thread_time()
        self._attention.begin(batch, self.kv)
        for layer in range(self._model.config.layers):
            given = LayerInput(layer, self._qkv, None, batch, self.kv, None, AttentionOptions(), 0)
            self._attention.attend(given)
        return time.thread_time() - began_s

    def apart(self) -> float:
        return self.attend(self._apart)

    def alike(self) -> float:
        return self.attend(self._alike)

    def step(self) -> float:
        began_s = time.thread_time()
        self._attention.begin(self._apart, self.kv)
        self._model.forward(self._apart, self.kv, self._attention)
        return time.thread_time() - began_s


@torch.inference_mode()
def measure(sides: dict[str, Side], rounds: int) -> list[output.Line]:
    works: dict[str, Callable[[Side], float]] = {
        "attention, nothing shared": Side.apart,
        "attention, all begin alike": Side.alike,
        "decode step": Side.step,
    }
    lines: list[output.Line] = []
    for work, once in works.items():
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            for name, side in sides.items():
                seconds = once(side)
                if number:  # the first round warms caches
                    taken[name].append(seconds)
        first = taken[next(iter(taken))]
        for name, found in taken.items():
            lines.append(
                {
                    "work": work,
                    "kernels, KV": name,
                    "least ms": 1000 * min(found),
                    "median ms": 1000 * median(found),
                    "ratio of medians": median(first) / median(found),
                }
            )
    return lines


def sides_of(model: Llama, kernels: Native, requests: int, context: int) -> dict[str, Side]:
    heads = model.config.heads
    return {
        f"{name}, {kv_dtype}": Side(
            model,
            NativeAttention(heads, kernels) if name == "native" else TorchAttention(heads, dtype=torch.float32),
            kv_dtype,
            requests,
            context,
        )
        for name, kv_dtype in SIDES
    }


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    kernels = native()
    if kernels is None:
        print("the native kernels were not built: `headrace doctor` says why")
        return 1
    torch.set_num_threads(1)
    model = load_model(prepare(options.model, model_cache()), panels=True, integer=23)
    sides = sides_of(model, kernels, options.requests, options.context_tokens)
    title = f"{model.config.name}: {options.requests} requests at {options.context_tokens} tokens, {kernels.variant}"
    output.tell(options, "kv_attention", {title: measure(sides, options.rounds)})
    for side in sides.values():
        side.kv.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = output.parser(__doc__)
    parser.add_argument("--model", default=None, help="a GGUF file or a directory (default: the demo model)")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context-tokens", type=int, default=1100)
    parser.add_argument("--rounds", type=int, default=9)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
