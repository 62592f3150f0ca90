"""What constraints cost a step: decoding rows with and without one, by turns, of one model on one device.

    python -m benchmarks.constraints [--model FILE] [--rows 1 8 32] [--steps 100] [--threads 2] [--device cpu]

Each row writes a list of records after a schema, from a prompt of its own; the free rows continue the same prompts at
the same lengths. The steps alternate, so that both meet the same machine. `mask` is the time of a step's masks computed
alone, which the forward pass hides as far as there is a core for it; `cost` is what is left to see, in the step. Every
row of a step computes one token: tokens that the schema forces are drawn here, too, and not told without a step. What a
worker's first constraint takes beside all this, to load the vocabulary, comes first.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from cluster.processes.spec import model_cache
from engine.config import EngineConfig, StepLimits
from engine.device import EngineDevice, open_device
from engine.model.prepared.cache import prepare
from engine.plan import row_of
from engine.step import DeadEnd, Row, StepPlan, run_of
from engine.text.bundle import TextModel
from engine.types import BlockId, Constraint, ConstraintKind, RequestId, RequestRecord, SamplingParams, id_of

WARM = 5
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 40},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "kind", "age", "tags"],
        "additionalProperties": False,
    },
}
CONSTRAINT = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))


class ConstraintCost(NamedTuple):
    """Medians, in milliseconds: a step without constraints, one with, and the masks of one, computed alone."""

    rows: int
    free_ms: float
    constrained_ms: float
    mask_ms: float


class Decoded:
    """One sequence that is decoded. `blocks` are its own."""

    def __init__(self, number: int, prompt: list[int], most: int, blocks: list[BlockId], is_free: bool) -> None:
        self.record = RequestRecord(
            request=RequestId(f"{number} {is_free}"),
            tokens=prompt,
            prompt_tokens=len(prompt),
            max_tokens=most,
            seed=number,
            sampling=SamplingParams(temperature=0.8),
            constraint=None if is_free else CONSTRAINT,
            ignore_eos=is_free,
        )
        self.tokens = list(prompt)
        self.known = 0
        self.blocks = blocks

    def row(self, stop_ids: frozenset[int]) -> Row:
        return row_of(self.record, self.tokens, self.known, len(self.tokens), self.blocks, stop_ids)


def step(device: EngineDevice, lanes: list[Decoded]) -> float:
    """Run one step of all lanes; return the seconds it took."""
    plan = StepPlan(tuple(lane.row(device.stop_ids) for lane in lanes))
    began_s = time.perf_counter()
    drawn = device.runner.launch(plan).wait()
    took_s = time.perf_counter() - began_s
    for lane, token in zip(lanes, drawn, strict=True):
        if isinstance(token, DeadEnd | tuple):
            raise RuntimeError(f"nothing to go on with: {token}")
        lane.known = len(lane.tokens)
        lane.tokens += [id_of(one) for one in run_of(token)]
    return took_s


def masked(device: EngineDevice, lanes: list[Decoded]) -> float:
    """Return the seconds in which the masks of the lanes' next step are computed, when nothing else is."""
    assert device.matchers is not None
    # Under other names: the step that follows is to find its matchers as it left them.
    rows = [msgspec.structs.replace(row, request=RequestId(f"{row.request} again")) for row in
            (lane.row(device.stop_ids) for lane in lanes)]  # fmt: skip
    began_s = time.perf_counter()
    device.matchers.masks(rows)
    return time.perf_counter() - began_s


def measure(device: EngineDevice, prompt: list[int], rows: int, steps: int) -> ConstraintCost:
    """Decode so many rows for so many steps, with a constraint and without."""
    most = 2 * (steps + WARM) + 2
    each = device.layout.blocks_for(len(prompt) + most)
    if 2 * rows * each > device.blocks:
        raise SystemExit(f"{rows} rows need {2 * rows * each} blocks, the pool has {device.blocks}: give it more")
    lanes = [
        Decoded(number, prompt, most, [BlockId(number * each + at) for at in range(each)], is_free=number >= rows)
        for number in range(2 * rows)
    ]
    constrained, free = lanes[:rows], lanes[rows:]
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for turn in range(steps + WARM):
        took = (step(device, free), step(device, constrained), masked(device, constrained))
        if turn >= WARM:
            for kept, seconds in zip(times, took, strict=True):
                kept.append(1e3 * seconds)
    return ConstraintCost(rows, *(statistics.median(one) for one in times))


def main() -> None:
    parser = argparse.ArgumentParser(description="what constraints cost a step")
    parser.add_argument("--model", help="a model's file or directory; the demo's unless given")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pool-gib", type=float, default=2.0)
    options = parser.parse_args()
    folder: Path = prepare(options.model, model_cache())
    config = EngineConfig(
        model_dir=str(folder), device=options.device, threads=options.threads,
        pool_bytes=int(options.pool_gib * (1 << 30)), jump_forward=False,
    )  # fmt: skip
    device = open_device(config, StepLimits(batch=max(options.rows), chunk_tokens=512))
    text = TextModel.load(folder)
    prompt = text.encode("A list of pets, as JSON:\n", add_special=True)
    assert device.matchers is not None
    began_s = time.perf_counter()
    device.matchers.masks([Decoded(0, prompt, 2, [], is_free=False).row(device.stop_ids)])
    print(f"the first constraint, and the vocabulary with it: {time.perf_counter() - began_s:.2f} s\n")
    print("| rows | step, free (ms) | step, constrained (ms) | cost | mask alone (ms) |\n|---|---|---|---|---|")
    for rows in options.rows:
        cost = measure(device, prompt, rows, options.steps)
        share = cost.constrained_ms / cost.free_ms - 1.0
        steps_ms = f"{cost.free_ms:.2f} | {cost.constrained_ms:.2f}"
        print(f"| {rows} | {steps_ms} | {share:+.1%} | {cost.mask_ms:.2f} |", flush=True)
    device.matchers.close()


if __name__ == "__main__":
    main()
