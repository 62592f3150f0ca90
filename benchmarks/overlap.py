"""How busy the engine keeps a device whose step takes a given time, planning one step at a time and planning ahead.

    python -m benchmarks.overlap --rows 64 --context 1500 --step-ms 10 --steps 200

The device is a timeline: a step begins when it is launched or, if later, when the one before it ends, and lasts as long
as it is told to. Scheduler, KV manager, the frames of tokens for the router, and the work list, tables and parameters
of drawing that a GPU's decode step is given (of 32 heads on 8, as on a card of 132 SMs) are the real ones, with
requests that decode for as long as is measured. What is idle between two steps is what the device waited for Python.
Left out: the calls that queue the step there, a worker's streams, and what its other threads take of the interpreter.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

from cluster.processes.collector import spare_collector
from decode_worker.scheduler.events import FromRouter, Tell
from decode_worker.scheduler.scheduler import DecodeScheduler
from engine.backends.gpu.sampling import parameters
from engine.kv.manager import KVCacheManager
from engine.loop import Engine
from engine.messages import PeerAddress, Place, Record, encode
from engine.step import Drawn, StepPlan
from engine.types import Incarnation, RequestId, RequestRecord, SamplingParams, TokenLogprobs
from kernels.decode_buffers import DecodeBuffers
from kernels.decode_plan import DecodePlan, SharedPrefix, geometry_for, plan_decode
from kernels.shared_prefixes import shared_prefixes
from transfer.handoff.receiver import KVReceiver
from worker.config import DecodeConfig

LINK = 1
BLOCK = 64
WARM = 10
VOCAB = 32_000


class TimedStep:
    """A step from `began_s` to `ended_s`, both of `time.perf_counter`."""

    def __init__(self, plan: StepPlan, began_s: float, ended_s: float) -> None:
        self._draws = sum(row.draw for row in plan.rows)
        self._number = plan.number
        self.began_s, self.ended_s = began_s, ended_s

    def wait(self) -> Sequence[Drawn]:
        if (left_s := self.ended_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return [(self._number * 7919 + at) % VOCAB for at in range(self._draws)]

    def scores(self) -> Sequence[Sequence[TokenLogprobs]]:
        return []

    def idle_s(self, before: "TimedStep") -> float:
        return self.began_s - before.ended_s


class DeviceTimeline:
    """Fulfils `engine.runner.Runner`; computes nothing, for as long as it is told to. Loads what a GPU's decode step of
    so many rows and tokens reads, as `engine.backends.gpu.attention.TritonAttention` does."""

    def __init__(self, step_s: float, rows: int, tokens: int) -> None:
        self.step_s = step_s
        self.kv: Any = SimpleNamespace(advance=lambda blocks: None)
        self._free_at = 0.0
        shape = geometry_for(batch=rows, kv_heads=8, group=4, programs=396, tile=64, packed_rows=16)
        self._buffers = DecodeBuffers(shape, batch=rows, heads=32, head_dim=128, table_blocks=-(-tokens // BLOCK))
        self._ahead: tuple[object, DecodePlan] | None = None

    def launch(self, plan: StepPlan) -> TimedStep:
        rows = plan.rows
        is_decode = all(row.end - row.start == 1 for row in rows)
        lengths, shared = [row.end for row in rows], list[SharedPrefix]()
        if is_decode:
            tables = [row.blocks[: -(-row.end // BLOCK)] for row in rows]
            shared = shared_prefixes(tables, lengths, BLOCK, 256)
            known = self._ahead is not None and self._ahead[0] == (lengths, shared)
            work = self._ahead[1] if self._ahead and known else plan_decode(lengths, self._buffers.geometry, shared)
            self._buffers.load(work, lengths, tables)
            parameters(rows)
        began_s = max(time.perf_counter(), self._free_at)
        self._free_at = began_s + self.step_s
        if is_decode:
            following = [length + 1 for length in lengths]
            self._ahead = (following, shared), plan_decode(following, self._buffers.geometry, shared)
        return TimedStep(plan, began_s, self._free_at)


class Kept(NamedTuple):
    busy: float
    """The share of the time in which the device computed."""
    idle_ms: float
    """Between two steps, in the median."""
    step_ms: float
    """From the end of one step to the end of the next, in the median."""


def measure(rows: int, context: int, step_s: float, steps: int, ahead: bool) -> Kept:
    """Decode `rows` requests of `context` prompt tokens for so many steps."""
    answer = steps + WARM + 64
    device = DeviceTimeline(0.0, rows, context + answer)
    blocks = rows * (-(-(context + answer) // BLOCK) + 1)
    scheduler = DecodeScheduler(
        config=DecodeConfig(max_batch=rows, local_chunk_tokens=1 << 20, max_handoffs=rows, preemption="off"),
        kv=KVCacheManager(blocks, BLOCK, "timed"),
        receiver=KVReceiver(),
        name="decode-0",
        incarnation=Incarnation(1),
        fingerprint="timed",
        vocab=VOCAB,
        context_tokens=context + answer,
        stop_ids=frozenset(),
        block_bytes=1,
    )
    engine: Engine[Any, Any] = Engine(scheduler, device, time.perf_counter, _publish, ahead=ahead)
    for number in range(rows):
        engine.receive([FromRouter(LINK, _place(number, context, answer))])
    while scheduler.running_requests < rows or scheduler.waiting_requests:
        engine.step()
    device.step_s = step_s
    for _ in range(WARM):
        engine.step()
    idle, lasted = list[float](), list[float]()
    while len(idle) < steps:
        ran = engine.step()
        if ran is None or ran.idle_s is None:
            raise RuntimeError(f"nothing was left to compute: {scheduler!r}")
        idle.append(ran.idle_s)
        lasted.append(step_s + ran.idle_s)
    return Kept(
        steps * step_s / sum(lasted), statistics.median(idle) * 1e3, statistics.median(lasted) * 1e3
    )


def _place(number: int, context: int, answer: int) -> Place:
    draw = Random(number)
    record = RequestRecord(
        request=RequestId(str(number)),
        tokens=[draw.randrange(VOCAB) for _ in range(context)],
        prompt_tokens=context,
        max_tokens=answer,
        seed=number,
        sampling=SamplingParams(temperature=0.7),
        ignore_eos=True,
    )
    return Place(record=record, placement=1, prefill=PeerAddress("", ""))


def _publish(commands: Sequence[object]) -> None:
    """Make the frame that the router would be sent."""
    told: list[Record] = [command.record for command in commands if isinstance(command, Tell)]
    if told:
        encode(told)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1500)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    spare_collector()
    print(f"{args.rows} rows of {args.context} tokens, a step of {args.step_ms:g} ms, {args.steps} steps a round")
    for number in range(args.rounds):
        for ahead in (False, True):
            kept = measure(args.rows, args.context, args.step_ms / 1e3, args.steps, ahead)
            how = "planned ahead" if ahead else "one at a time"
            print(f"{number + 1}  {how}: busy {kept.busy:6.1%}, idle {kept.idle_ms:.2f} ms, step {kept.step_ms:.2f} ms")


if __name__ == "__main__":
    main()
