"""Measures what each part is worth: `python -m benchmarks.ablation`, on the demo model.

One part at a time is switched off, under six shapes of work (`benchmarks.shapes_of_work`):

    paging        every request holds room for `--context` tokens from the start, as contiguous memory would
    batching      static batches: nobody joins before all have ended
    prefix cache  every request in a namespace of its own; samples do not share
    queue order   first come first served
    delta         the decode worker takes nothing from its own cache: every block is moved
    overlap       blocks are offered when the whole prompt is computed (`benchmarks.ablation_overlap`)

Both workers in one process and thread, with pools of `--blocks` blocks; times are its processor time. `tokens/s` is
output over time, `TTFT` from handing a request in; both as a ratio to the same turn with everything on: the median of
`--repeats` turns, the least and the most.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks import output
from benchmarks.offline import Served, record, serve
from benchmarks.shapes_of_work import SHAPES, AskedPrompt
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.tiers import Tiers
from engine.model.prepared.cache import prepare
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated
from worker.config import PrefillConfig

ALL_ON = "nothing"
OFF = ("paging", "batching", "prefix cache", "queue order", "delta")
FIRST_COME = 1e12
"""λ in tokens per second of waiting: so large that nothing cached outweighs it."""
Make = Callable[[], EngineDevice]


class Contiguous(KVCacheManager):
    """A manager whose every lease has the promise of a whole context."""

    context_tokens = 0

    def acquire(self, namespace: bytes, tokens: Sequence[int], **how: Any) -> Lease | None:
        return super().acquire(namespace, tokens, **how | {"grow_tokens": self.context_tokens})


class Whole(KVCacheManager):
    """A manager whose prompts are migrated whole, whatever the receiver has."""

    def acquire(self, namespace: bytes, tokens: Sequence[int], **how: Any) -> Lease | None:
        if how.get("migrating"):
            how["match_limit"] = 0
        return super().acquire(namespace, tokens, **how)


@dataclass(frozen=True, slots=True)
class Ablated(EngineDevice):
    """A device with another manager."""

    managed_by: type[KVCacheManager] = KVCacheManager

    def manager(self, tiers: Tiers | None = None, step_tokens: int = 1) -> KVCacheManager:
        return self.managed_by(self.blocks, self.layout.block_size, self.fingerprint, tiers)


def build(make: Make, off: str, context_tokens: int, stack: ExitStack) -> Colocated:
    """Build an engine with one part switched off; closed with `stack`."""
    by: type[KVCacheManager] = {"paging": Contiguous, "delta": Whole}.get(off, KVCacheManager)
    if by is Contiguous:
        by = type("Contiguous", (Contiguous,), {"context_tokens": context_tokens})
    devices = []
    for _ in range(2):
        device = make()
        stack.callback(device.kv.close)
        values = {field.name: getattr(device, field.name) for field in fields(device)}
        devices.append(Ablated(**values, managed_by=by))
    fairness: Any = FIRST_COME if off == "queue order" else "auto"
    engine = Colocated(*devices, prefill_config=PrefillConfig(fairness_tokens_per_s=fairness))
    stack.callback(engine.close)
    return engine


def run(engine: Colocated, off: str, turn: str, asked: Sequence[AskedPrompt], at_once: int) -> Served:
    """Run one shape of work on an engine with an empty cache."""
    records: list[RequestRecord] = []
    forks: dict[RequestId, RequestId] = {}
    for at, one in enumerate(asked):
        space = f"{turn} {at}" if off == "prefix cache" else turn
        made = record(f"{turn} {at}", one.prompt, one.answer, space.encode())
        if one.sample_of >= 0:
            sampling = SamplingParams(temperature=1.0)
            made = msgspec.structs.replace(made, sample_index=at, sampling=sampling)
            if off != "prefix cache":
                forks[made.request] = RequestId(f"{turn} {one.sample_of}")
        records.append(made)
    return serve(engine, records, at_once, forks=forks, static=off == "batching")


def measure(
    make: Make, shapes: Mapping[str, Sequence[AskedPrompt]], context_tokens: int, at_once: int, repeats: int
) -> list[dict[str, str | int | float]]:
    """Return one line for each shape and part; the first of a shape is with everything on."""
    table: list[dict[str, str | int | float]] = []
    with ExitStack() as stack:
        engines = {off: build(make, off, context_tokens, stack) for off in (ALL_ON, *OFF)}
        for off, engine in engines.items():
            run(engine, off, "warm", [AskedPrompt([1, 2, 3], 2)], 1)  # what a first run pays for
        for shape, asked in shapes.items():
            turns = [
                {off: run(engine, off, f"{shape} {turn}", asked, at_once) for off, engine in engines.items()}
                for turn in range(repeats)
            ]
            table += [_line(shape, off, turns) for off in engines]
    return table


def _line(shape: str, off: str, turns: Sequence[Mapping[str, Served]]) -> dict[str, str | int | float]:
    rates = [turn[off].tokens_per_s / turn[ALL_ON].tokens_per_s for turn in turns]
    firsts = [median(turn[off].ttft_s) / median(turn[ALL_ON].ttft_s) for turn in turns]
    mine = [turn[off] for turn in turns]
    return {
        "work": shape,
        "off": off,
        "tokens/s": median(one.tokens_per_s for one in mine),
        "ratio": median(rates),
        "least": min(rates),
        "most": max(rates),
        "TTFT ratio": median(firsts),
        "TTFT least": min(firsts),
        "TTFT most": max(firsts),
        "cached %": 100 * mine[0].cached_tokens / mine[0].prompt_tokens,
        "moved blocks": mine[0].moved_blocks,
    }


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--work", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--blocks", type=int, default=192, help="of 16 tokens, in each pool")
    parser.add_argument("--context", type=int, default=1024, help="tokens that contiguous memory holds for each")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    options = _options(output.parser(__doc__))
    shapes = {name: SHAPES[name](Random(name)) for name in options.work}
    with TemporaryDirectory() as folder:
        config = EngineConfig(model_dir=str(prepare(None, Path(folder))), threads=1)
        block_bytes = open_device(config).layout.block_bytes
        config = msgspec.structs.replace(config, pool_bytes=options.blocks * block_bytes)
        make = partial(open_device, config)
        table = measure(make, shapes, options.context, options.at_once, options.repeats)
    output.tell(options, "ablation", {f"{options.at_once} requests at once, demo model": table})


if __name__ == "__main__":
    main()
