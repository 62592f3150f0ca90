"""Measures what KV bookkeeping costs when nothing is shared: `python -m benchmarks.cache_overhead`.

Batches of requests without a common prefix run on the demo model through the real schedulers, prefill and decode in one
thread, and every call into the KV cache manager is timed. The share is time inside those calls over time of the steps
that the runner computed, both as processor time of the one thread that does both.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import output
from cluster.processes.spec import model_cache
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.tiers import Tiers
from engine.model.prepared.cache import prepare
from engine.runner import Launched, Runner
from engine.step import StepPlan
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated

TIMED = ("acquire", "extend", "copied", "landed", "commit", "quarantine", "release", "matched_tokens")
AT_ONCE = 8


class TimedManager(KVCacheManager):
    """A manager with a stopwatch; `spent_ns` is the time inside calls from outside, `calls` their number."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spent_ns = 0
        self.calls = 0
        self._inside = False


def _timed(name: str) -> Callable[..., Any]:
    plain = getattr(KVCacheManager, name)

    def call(self: TimedManager, *args: Any, **more: Any) -> Any:
        if self._inside:
            return plain(self, *args, **more)
        self._inside = True
        begin_ns = time.thread_time_ns()
        try:
            return plain(self, *args, **more)
        finally:
            self.spent_ns += time.thread_time_ns() - begin_ns
            self.calls += 1
            self._inside = False

    return call


for _name in TIMED:
    setattr(TimedManager, _name, _timed(_name))


class TimedRunner:
    """A runner with a stopwatch; `spent_ns` is the time of its steps."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.kv = runner.kv
        self.spent_ns = 0
        self.steps = 0

    def launch(self, plan: StepPlan) -> Launched:
        begin_ns = time.thread_time_ns()
        launched = self._runner.launch(plan)
        self.spent_ns += time.thread_time_ns() - begin_ns
        self.steps += 1
        return launched


@dataclass(frozen=True, slots=True)
class TimedDevice(EngineDevice):
    def manager(self, tiers: Tiers | None = None, step_tokens: int = 1) -> TimedManager:
        return TimedManager(self.blocks, self.layout.block_size, self.fingerprint, tiers)


def measure(
    open_one: Callable[[], EngineDevice],
    prompt_tokens: tuple[int, int],
    answer_tokens: int,
    batches: int,
    seed: int = 0,
) -> dict[str, str | int | float]:
    """Run `batches` batches of eight requests; prompt lengths are drawn from `prompt_tokens`, both ends included."""
    devices, runners = [], []
    for _ in range(2):
        device = open_one()
        values = {field.name: getattr(device, field.name) for field in fields(device)}
        runners.append(TimedRunner(device.runner))
        devices.append(TimedDevice(**values | {"runner": runners[-1]}))
    cluster = Colocated(devices[0], devices[1])
    random = Random(seed)
    try:
        for batch in range(batches):
            names = [f"{batch}-{n}" for n in range(AT_ONCE)]
            cluster.run([_record(random, n, prompt_tokens, answer_tokens, devices[0]) for n in names])
    finally:
        cluster.close()
        for device in devices:
            device.kv.close()
    managers = (cluster.prefill.kv, cluster.decode.kv)
    spent_ns = steps_ns = steps = calls = 0
    for manager, runner in zip(managers, runners, strict=True):
        assert isinstance(manager, TimedManager)
        spent_ns += manager.spent_ns
        calls += manager.calls
        steps_ns += runner.spent_ns
        steps += runner.steps
    return {
        "prompt tokens": "{}-{}".format(*prompt_tokens),
        "answer tokens": answer_tokens,
        "steps": steps,
        "step ms": steps_ns / steps / 1e6,
        "calls": calls,
        "us in calls a step": spent_ns / steps / 1e3,
        "share %": 100 * spent_ns / steps_ns,
    }


def _record(
    random: Random, name: str, lengths: tuple[int, int], answer_tokens: int, device: EngineDevice
) -> RequestRecord:
    prompt = [random.randrange(device.vocab) for _ in range(random.randint(*lengths))]
    return RequestRecord(
        request=RequestId(name),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=answer_tokens,
        seed=1,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument("--model", help="as for `headrace up`; default: the demo model")
    parser.add_argument("--cache-dir", type=Path, default=model_cache(), help="where prepared models lie")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--batches", type=int, default=2)
    options = parser.parse_args()
    config = EngineConfig(model_dir=str(prepare(options.model, options.cache_dir)))
    table = [
        measure(lambda: open_device(config), lengths, options.answer_tokens, options.batches)
        for lengths in ((1, 15), (128, 256))
    ]
    title = f"KV bookkeeping, {AT_ONCE} requests at once, nothing shared"
    output.tell(options, "cache_overhead", {title: table})


if __name__ == "__main__":
    main()
