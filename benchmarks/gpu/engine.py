"""Decode steps of the whole engine (scheduler, runner, model, kernels), recorded and not, for several batch sizes.

A model of an 8B's shape with random weights, greedy. The prompts are prefilled here, in chunks, as a decode worker does
that has no prefill worker left; then the same requests go on, some steps with recorded graphs and some without. Each is
planned and queued while the one before it runs, as a worker on a GPU does. Last, a step with a small chunk of a prompt,
recorded and not: how long the CPU takes to launch it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import msgspec
import torch

from benchmarks.gpu.card import Card, Line, copy_rate
from benchmarks.gpu.random_model import random_llama, read_bytes
from decode_worker.scheduler.events import Command, Event, FromRouter, Tell
from decode_worker.scheduler.scheduler import DecodeScheduler
from engine.backends.gpu.attention import TritonAttention
from engine.backends.gpu.graphs import CudaRecorder, DecodeGraphs, Recorder
from engine.backends.gpu.mixed_graphs import MixedGraphs
from engine.backends.gpu.pool import DeviceKV
from engine.backends.workspace import blank_row
from engine.kv.manager import KVCacheManager
from engine.loop import Engine
from engine.messages import Ended, PeerAddress, Place, Refused
from engine.runner import ModelRunner
from engine.step import Row, StepPlan
from engine.types import Incarnation, RequestId, RequestRecord, SamplingParams
from transfer.handoff.receiver import KVReceiver
from worker.config import DecodeConfig

BLOCK = 64
PROMPT, ANSWER = 1408, 640
"""When 64 are decoding, the first of them have some hundreds of tokens more: about 1.5k each."""
CHUNK = 2048
STEPS, WARM, PROFILED = 32, 4, 8
BATCHES = (1, 8, 32, 64)
MIXED = 128
"""Tokens of a step with a chunk."""
HERE = PeerAddress("", "")
"""Stands in place of a prefill worker: the prompt is computed by the engine itself."""
LINK = 1

Opener = Callable[[torch.device], Recorder]


def on_card(card: Card) -> Iterator[Line]:
    """Run as a part of `benchmarks.gpu`."""
    return engine(card, CudaRecorder if card.device.type == "cuda" else None)


def engine(card: Card, recorder: Opener | None) -> Iterator[Line]:
    """Return a line for each batch size, recorded and not; without a GPU nothing is recorded.

    `ms` is the median step; `idle_ms` is how much of it no kernel runs, where the profiler sees kernels. `bound_ms` is
    the time to read the weights and the KV of the batch once, at the rate at which this card was seen to read.
    """
    batches = sorted({min(batch, 2 * card.sizes.batch) for batch in BATCHES})
    read = next(float(line["tb_per_s"]) for line in copy_rate(card) if line["what"] == "read")
    bench = EngineBench(card, batches, recorder)
    for batch in batches:
        bench.fill(batch)
        for how in bench.ways:
            yield bench.line(how, read * 1e12)
    for how in bench.ways:
        yield bench.chunk_line(how)


class EngineBench:
    """One engine, with requests that go on for as long as steps are asked for."""

    def __init__(self, card: Card, batches: Sequence[int], recorder: Opener | None) -> None:
        size, most = card.sizes, batches[-1]
        model = random_llama(card)
        shape = model.config
        layout = shape.kv_layout(BLOCK)
        self._card, self._shape, self._layout = card, shape, layout
        self._prompt = size.tokens(PROMPT)
        self._answer = min(ANSWER, shape.context_tokens - self._prompt)
        blocks = most * layout.blocks_for(self._prompt + self._answer)
        kv = DeviceKV(layout, blocks, card.device, card.arch)
        self._attention = TritonAttention(
            shape, layout, card.device, max_batch=most, programs=size.programs_per_sm * card.sms
        )
        self._attention.fit(kv)
        tokens = max(2, size.tokens(MIXED))
        self._chunk = _greedy(blank_row(tokens, tokens, BLOCK))
        self._chunked = {"not recorded": ModelRunner(model, kv, self._attention)}
        self._graphs: _SwitchedGraphs | None = None
        if recorder is not None:
            recording = recorder(card.device)
            self._graphs = _SwitchedGraphs(model, kv, self._attention, recording, batches)
            self._attention.keep_chunks(self._chunk.end, 1)
            mixed = MixedGraphs(model, kv, self._attention, recording, [self._chunk.end], 0, 1)
            with torch.inference_mode():
                self._graphs.prepare()
                mixed.prepare()
            self._chunked["recorded"] = ModelRunner(model, kv, self._attention, mixed=mixed)
        self.ways = list(self._chunked)
        self._scheduler = DecodeScheduler(
            config=DecodeConfig(max_batch=most, local_chunk_tokens=CHUNK, preemption="off"),
            kv=KVCacheManager(blocks, BLOCK, "random"),
            receiver=KVReceiver(),
            name="decode-0",
            incarnation=Incarnation(1),
            fingerprint="random",
            vocab=shape.vocab,
            context_tokens=shape.context_tokens,
            stop_ids=frozenset(),
            block_bytes=layout.block_bytes,
        )
        self._engine: Engine[Event, Command] = Engine(
            self._scheduler,
            ModelRunner(model, kv, self._attention, self._graphs),
            time.monotonic,
            _see,
            ahead=True,
        )
        self._placed = 0

    def fill(self, batch: int) -> None:
        """Take requests until `batch` are decoding, one after the other: a worker refuses prompts while it has several
        to compute itself."""
        for at in range(self._placed, batch):
            self._engine.receive([FromRouter(LINK, self._place(at))])
            while self._scheduler.waiting_requests:
                self._step()
        self._placed = batch
        while len(self._step().rows) < batch:
            pass

    def line(self, how: str, bytes_per_s: float) -> Line:
        """Measure a step of the present batch, in one of `ways`."""
        few = self._card.sizes.unit > 1
        if self._graphs is not None:
            self._graphs.on = how == "recorded"
        for _ in range(1 if few else WARM):
            self._step()
        planning, replayed = replace(self._attention.planning), self._replayed()
        taken: list[float] = []
        for _ in range(3 if few else STEPS):
            began_s = time.perf_counter()
            self._step()
            taken.append(time.perf_counter() - began_s)
        planned = self._attention.planning
        replays = self._replayed() - replayed
        profiled = 1 if few else PROFILED
        busy_s = self._card.timer.busy_seconds(lambda: [self._step() for _ in range(profiled)])
        wall_s, busy_s = statistics.median(taken), busy_s / profiled
        rows = self._step().rows
        context = sum(row.end for row in rows)
        read = read_bytes(self._shape) + context * self._layout.block_bytes // BLOCK
        bound_s = read / bytes_per_s
        return {
            "what": f"batch {len(rows)}, {how}",
            "context": context // len(rows),
            "ms": wall_s * 1e3,
            "tokens_per_s": len(rows) / wall_s,
            **(_idle(wall_s, busy_s) if busy_s else {}),
            "bound_ms": bound_s * 1e3,
            "of_bound": bound_s / wall_s,
            "planned_ahead": planned.ahead - planning.ahead,
            "planned_at_once": planned.at_once - planning.at_once,
            "replayed": replays,
        }

    def chunk_line(self, how: str) -> Line:
        """Measure a step with one small chunk. It overwrites KV of a request: nothing else comes behind it."""
        runner, launching, taken = self._chunked[how], list[float](), list[float]()
        for _ in range(2 if self._card.sizes.unit > 1 else WARM + STEPS):
            began_s = time.perf_counter()
            launched = runner.launch(StepPlan((self._chunk,)))
            launching.append(time.perf_counter() - began_s)
            launched.wait()
            taken.append(time.perf_counter() - began_s)
        return {
            "what": f"a chunk of {self._chunk.end} tokens, {how}",
            "launch_ms": statistics.median(launching) * 1e3,
            "ms": statistics.median(taken) * 1e3,
        }

    def _step(self) -> StepPlan:
        # The first turn only launches, and so does one behind which everybody had to wait.
        ran = self._engine.step() or self._engine.step()
        if ran is None:
            raise RuntimeError(f"there is nothing left to compute: {self._scheduler!r}")
        return ran.plan

    def _replayed(self) -> int:
        return sum(self._graphs.replays.values()) if self._graphs else 0

    def _place(self, number: int) -> Place:
        """Hand in a prompt that shares no prefix with another."""
        draw = Random(number)
        record = RequestRecord(
            request=RequestId(str(number)),
            tokens=[draw.randrange(self._shape.vocab) for _ in range(self._prompt)],
            prompt_tokens=self._prompt,
            max_tokens=self._answer,
            seed=0,
            sampling=SamplingParams(temperature=0.0),
            ignore_eos=True,
        )
        return Place(record=record, placement=1, prefill=HERE)


def _greedy(row: Row) -> Row:
    """Draw as the requests of this benchmark do: a trial's row asks for every option, of logits that are all alike."""
    plain = msgspec.structs.replace(row.record, sampling=SamplingParams(temperature=0.0))
    return msgspec.structs.replace(row, record=plain)


def _idle(wall_s: float, busy_s: float) -> Line:
    return {"idle_ms": (wall_s - busy_s) * 1e3, "idle": 1.0 - busy_s / wall_s}


class _SwitchedGraphs(DecodeGraphs):
    """Recordings that take steps only while `on`: a row goes on with the step before, whichever way that was run."""

    on = False

    def takes(self, rows: Sequence[Row]) -> bool:
        return self.on and super().takes(rows)


def _see(commands: Sequence[Command]) -> None:
    """Read what a router would hear. Raises RuntimeError for a request that has ended, or never begins."""
    for command in commands:
        if isinstance(command, Tell) and isinstance(command.record, Ended | Refused):
            raise RuntimeError(f"a request has ended before the benchmark did: {command.record}")
