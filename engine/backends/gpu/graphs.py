"""Decode steps that are recorded once per batch size and then replayed: one launch instead of hundreds.

A recording holds addresses and sizes, never values: whatever varies from step to step is brought into the same memory
before each replay. Tokens, positions, slots (of each layer group), which tokens the step before draws, and the
parameters of drawing lie in one tensor here, work list and block tables in the attention's buffers; logits and drawn
tokens of every size are left in one tensor each, which no recording owns. Each row is drawn from its logits as they
are, within the recording; a step in which some row's are to be adjusted first (penalties, biases, bans, masks) is drawn
again behind it. A step of n rows runs in the smallest recorded size that holds it; the rows beyond have no context,
write no KV, and their logits are not looked at. Mixed steps are recorded apart (`engine.backends.gpu.mixed_graphs`),
and larger steps than were recorded run as they are. Every size and kind is recorded before the first step.

What is recorded is left to a `Recorder`: CUDA graphs on a device, a fake one in tests.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.backends.attention import AttentionBackend
from engine.backends.gpu.sampling import PARAMETERS, parameters, sampling_rows
from engine.batch import Followed, ForwardBatch, take, upload
from engine.logprobs import QueuedDraws
from engine.model.llama import Llama
from engine.sampling import is_adjusted
from engine.step import Drawn, Row
from engine.storage.paged import KVTensors
from engine.types import BlockId
from kernels.sample import SamplingRows


class GraphAttention(AttentionBackend, Protocol):
    """Attention that can be recorded: `engine.backends.gpu.attention.TritonAttention`."""

    max_batch: int

    def kinds(self, rows: int) -> Sequence[str]:
        """The kinds that the work list of so many decoding rows may be of."""

    def load(self, lengths: list[int], groups: Sequence[Sequence[Sequence[int]]]) -> str: ...

    def fix(self, kind: str, rows: int, slots: Sequence[Tensor]) -> None: ...

    def draw(self, logits: Tensor, params: SamplingRows, out: Tensor) -> Tensor: ...

    def drawn(self, tokens: Tensor, logits: Tensor, draws: list[Row]) -> Tensor | QueuedDraws: ...


class Recording(NamedTuple):
    """`replay` queues the work again, over the same memory; `result` is where its answer then lies, as the work said.
    What the work itself allocated belongs to the recording, and to the ones after it."""

    replay: Callable[[], None]
    result: Tensor


class LoadedStep(NamedTuple):
    """Which recording replays a step, and which rows of its logits are wanted, on the device; None: the first ones."""

    kind: str
    size: int
    wanted: Tensor | None


class Recorder(Protocol):
    def record(self, work: Callable[[], Tensor]) -> Recording:
        """Run `work` at least once and record it. It reads and writes device memory alone."""


class CudaRecorder:
    """CUDA graphs of one device, which share the memory of what is given back while they are recorded. `stream`: the
    one to record on, else a new one; libraries keep workspaces for each that they have seen."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._stream: torch.cuda.Stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def record(self, work: Callable[[], Tensor]) -> Recording:
        # Once outside of the capture: kernels are compiled and libraries set up, which must not be recorded.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of the device meanwhile is their affair: the transfer thread looks at its events, and
        # by default each such look would fail, and the recording with it.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            result = work()
        self._pool = graph.pool()
        return Recording(graph.replay, result)


class DecodeGraphs:
    """The recordings of one model over one pool. `sizes`: batch sizes to record, at most the attention's `max_batch`.

    `replays` counts by (kind, size). Owner: the runner.
    """

    def __init__(
        self, model: Llama, kv: KVTensors, attention: GraphAttention, recorder: Recorder, sizes: Sequence[int]
    ) -> None:
        if not sizes or max(sizes) > attention.max_batch:
            raise ValueError(f"batches of {list(sizes)} where {attention.max_batch} is the largest")
        self.replays: Counter[tuple[str, int]] = Counter()
        self._model = model
        self._kv = kv
        self._attention = attention
        self._recorder = recorder
        self._sizes = sorted(sizes)
        self._recordings: dict[tuple[str, int], Recording] = {}
        # Rows of an even number of 64-bit words begin at multiples of 16 bytes, as what is computed unrecorded does:
        # kernels are not compiled again for them.
        self._follow = 2 + kv.layout.group_count  # behind tokens, positions, and slots
        shape = (self._follow + 1 + PARAMETERS, self._sizes[-1] + self._sizes[-1] % 2)
        on_device = model.device.type == "cuda"
        # Two, in turns: the copy of the step before may still be reading the other one.
        self._hosts = [torch.zeros(shape, dtype=torch.int64, pin_memory=on_device) for _ in range(2)]
        self._inputs = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self._inputs[2 : self._follow + 1] = -1
        # One for all recordings: each would keep as many rows as it has, together several times the largest.
        self._logits = torch.empty(self._sizes[-1], model.config.vocab, device=model.device)
        self._tokens = torch.zeros(self._sizes[-1], dtype=torch.int64, device=model.device)
        self._every_row = torch.arange(self._sizes[-1], device=model.device)

    def prepare(self) -> None:
        """Record every size of every kind, largest first, so that no step waits for it."""
        for size in reversed(self._sizes):
            for kind in self._attention.kinds(size):
                self._record(kind, size)

    def takes(self, rows: Sequence[Row]) -> bool:
        """True for a pure decode step of a size that is recorded."""
        return len(rows) <= self._sizes[-1] and all(row.end - row.start == 1 for row in rows)

    def load(self, rows: Sequence[Row], followed: Followed | None = None) -> "LoadedStep":
        """Bring a step that `takes` accepts to the device, to be replayed next. Waits for nothing that the device does;
        the step before the latest one must have ended."""
        layout, follow = self._kv.layout, self._follow
        size = next(size for size in self._sizes if size >= len(rows))
        host = self._hosts[0]
        self._hosts.reverse()
        host[:, :size] = 0
        host[2 : follow + 1, :size] = -1
        tokens = [0 if row.follows else row.tokens[row.start] for row in rows]
        groups = [[row.blocks for row in rows]]
        groups += [[row.windows[at] for row in rows] for at in range(layout.group_count - 1)]
        slots = [slots_of(rows, tables, layout.block_size) for tables in groups]
        places = [-1] * len(rows) if followed is None else followed.places
        host[: follow + 1, : len(rows)] = torch.tensor([tokens, [row.start for row in rows], *slots, places])
        host[follow + 1 :, : len(rows)] = parameters(rows)
        self._inputs.copy_(host, non_blocking=True)
        if followed is not None:
            self._inputs[0, :size] = take(self._inputs[0, :size], followed.tokens, self._inputs[follow, :size])
        ends = [layout.blocks_for(row.end) for row in rows]
        cut = [[table[:end] for table, end in zip(tables, ends, strict=True)] for tables in groups]
        kind = self._attention.load([row.end for row in rows], cut)
        wanted = None
        if not all(row.draw for row in rows):
            draws = torch.tensor([at for at, row in enumerate(rows) if row.draw], dtype=torch.int64)
            wanted = upload(draws, self._inputs.device)
        return LoadedStep(kind, size, wanted)

    def replay(self, step: "LoadedStep") -> Tensor:
        """Queue the step loaded last. Return logits float32 `[>= wanted rows, vocab]`, those of rows that draw, in
        order; valid until the next step."""
        recording = self._recordings[step.kind, step.size]
        recording.replay()
        self.replays[step.kind, step.size] += 1
        return recording.result if step.wanted is None else recording.result[step.wanted]

    def sample(self, step: "LoadedStep", logits: Tensor, draws: list[Row]) -> Tensor | QueuedDraws | Sequence[Drawn]:
        """Return what `AttentionBackend.sample` would of the step replayed last, of whose logits these are: drawn
        already, unless a row is not drawn from them as they are. Valid until the next step is replayed."""
        tokens = self._tokens[: len(draws)] if step.wanted is None else self._tokens[step.wanted]
        return drawn_of(self._attention, tokens, logits, draws)

    def _record(self, kind: str, size: int) -> None:
        tokens, positions, *slots = self._inputs[: self._follow, :size]
        # All of it stays here: a recording keeps addresses alive no more than values.
        rows = self._every_row[:size]
        batch = ForwardBatch(tokens, positions, rows, slots[0], [], [], [], size, size)
        logits, drawn = self._logits[:size], self._tokens[:size]
        params = sampling_rows(self._inputs[self._follow + 1 :, :size])

        def work() -> Tensor:
            made = self._model.forward(batch, self._kv, self._attention, logits)
            # Of several ranks, the first has whole rows, and draws.
            if made.shape == logits.shape:
                self._attention.draw(made, params, drawn)
            return made

        # Outside of what is recorded: it may allocate buffers, which a replay would clear.
        self._attention.fix(kind, size, slots)
        self._recordings[kind, size] = self._recorder.record(work)


def slots_of(rows: Sequence[Row], tables: Sequence[Sequence[BlockId]], block_size: int) -> list[int]:
    """Return the slot of the one token that each row computes. Raises ValueError for a row without a block for it."""
    blocks = [table[row.start // block_size] for row, table in zip(rows, tables, strict=True)]
    if min(blocks) < 0:
        raise ValueError(f"{rows[blocks.index(min(blocks))].request} has no block for a token that it computes")
    return [block * block_size + row.start % block_size for row, block in zip(rows, blocks, strict=True)]


def drawn_of(
    attention: GraphAttention, tokens: Tensor, logits: Tensor, draws: list[Row]
) -> Tensor | QueuedDraws | Sequence[Drawn]:
    """Return what `AttentionBackend.sample` would, where `tokens` were drawn from `logits` as they are: these, unless
    some row is not drawn so."""
    if not draws or any(want.candidates or is_adjusted(want) for want in draws):
        return attention.sample(logits, draws)
    return attention.drawn(tokens, logits, draws)


def recorded_sizes(most: int) -> list[int]:
    """Batch sizes up to `most`: powers of two to 8, then by eights to 64, then by 32; the last is `most`."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, most + 32, 32)]
    return [*(size for size in steps if size < most), most]
