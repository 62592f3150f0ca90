"""Mixed steps that are recorded once per number of tokens and then replayed: decoding rows beside chunks of prompts.

A step of some hundred tokens takes the device less time than the CPU takes to launch it. So it is recorded as decode
steps are (`engine.backends.gpu.graphs`), for some numbers of tokens, attention included: where chunks begin and end
is in the tiles that prefill attention reads, and a tile without queries writes nothing. Tokens beyond the step's own
are at position 0 and write no KV. Larger steps, whose launches the device does not wait for, run as they are.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.backends.gpu.graphs import GraphAttention, Recorder, Recording, drawn_of
from engine.backends.gpu.sampling import PARAMETERS, parameters, sampling_rows
from engine.batch import Followed, ForwardBatch, take
from engine.logprobs import QueuedDraws
from engine.model.llama import Llama
from engine.step import Drawn, Row
from engine.storage.paged import KVTensors

MOST_TOKENS = 512
"""Steps of more tokens take a device longer than their launches take the CPU."""


class MixedAttention(GraphAttention, Protocol):
    """Attention whose chunks can be recorded too: `engine.backends.gpu.attention.TritonAttention`."""

    def mixed_kinds(self, rows: int) -> Sequence[str]:
        """The kinds that a mixed step of up to so many decoding rows may be of."""

    def load_mixed(self, batch: ForwardBatch) -> str:
        """Bring the work lists and chunks of this step to the device, and say of which kind it is."""

    def fix_mixed(self, kind: str, tokens: int, slots: Sequence[Tensor]) -> None:
        """The step to come is one of at most so many tokens that reads what `load_mixed` brings, and each layer group's
        `slots`."""


class LoadedMixed(NamedTuple):
    """Which recording replays a step."""

    kind: str
    size: int


class MixedGraphs:
    """The recordings of one model over one pool. `sizes`: numbers of tokens to record. `rows`, `prompts`: decoding rows
    and chunks that a step may have; each of them may be drawn.

    `replays` counts by (kind, size). Owner: the runner.
    """

    def __init__(
        self,
        model: Llama,
        kv: KVTensors,
        attention: MixedAttention,
        recorder: Recorder,
        sizes: Sequence[int],
        rows: int,
        prompts: int,
    ) -> None:
        self.replays: Counter[tuple[str, int]] = Counter()
        self._model, self._kv, self._attention, self._recorder = model, kv, attention, recorder
        self._sizes, self._rows, self._prompts = sorted(sizes), rows, prompts
        self._recordings: dict[tuple[str, int], Recording] = {}
        # Rows of an even number of 64-bit words, as in `DecodeGraphs`.
        tokens, draws = self._sizes[-1] + self._sizes[-1] % 2, rows + prompts + (rows + prompts) % 2
        self._follow = 2 + kv.layout.group_count  # behind tokens, positions, and slots
        self._shapes = (self._follow + 1, tokens), (1 + PARAMETERS, draws)
        on_device = model.device.type == "cuda"
        words = sum(torch.Size(shape).numel() for shape in self._shapes)
        self._hosts = [torch.zeros(words, dtype=torch.int64, pin_memory=on_device) for _ in range(2)]
        self._flat = torch.zeros(words, dtype=torch.int64, device=model.device)
        self._inputs, self._drawing = self._views(self._flat)
        self._inputs[2:] = -1
        self._logits = torch.empty(rows + prompts, model.config.vocab, device=model.device)
        self._tokens = torch.zeros(rows + prompts, dtype=torch.int64, device=model.device)

    def _views(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, positions, slots of each layer group, and which tokens the step before draws; then, of each draw, its
        row and how it is drawn."""
        first = torch.Size(self._shapes[0]).numel()
        return flat[:first].view(self._shapes[0]), flat[first:].view(self._shapes[1])

    def prepare(self) -> None:
        """Record every size of every kind, largest first, so that no step waits for it."""
        for size in reversed(self._sizes):
            for kind in self._attention.mixed_kinds(self._rows):
                self._record(kind, size)

    def takes(self, rows: Sequence[Row]) -> bool:
        """True for a mixed step of a size that is recorded."""
        chunks = sum([row.end - row.start > 1 for row in rows])
        return (
            0 < chunks <= self._prompts
            and len(rows) - chunks <= self._rows
            and not any(row.drafts for row in rows)
            and sum([row.end - row.start for row in rows]) <= self._sizes[-1]
        )

    def load(self, rows: Sequence[Row], followed: Followed | None = None) -> LoadedMixed:
        """Bring a step that `takes` accepts to the device, to be replayed next; rows of one token come first. Waits for
        nothing that the device does; the step before the latest one must have ended."""
        built = ForwardBatch.build(rows, self._kv.layout.block_size, "cpu", 1)
        size = next(size for size in self._sizes if size >= built.rows)
        host = self._hosts[0]
        self._hosts.reverse()
        inputs, drawing = self._views(host)
        host.zero_()
        inputs[2:] = -1
        slots = (tables.slots for tables in built.groups)
        for own, given in zip(inputs[: self._follow], (built.tokens, built.positions, *slots), strict=True):
            own[: built.rows] = given
        draws = [row for row in rows if row.draw]
        if draws:
            drawing[0, : len(draws)] = built.logit_rows
            drawing[1:, : len(draws)] = parameters(draws)
        if followed is not None:
            inputs[self._follow, : len(followed.places)] = torch.tensor(followed.places, dtype=torch.int64)
        self._flat.copy_(host, non_blocking=True)
        if followed is not None:
            self._inputs[0, :size] = take(self._inputs[0, :size], followed.tokens, self._inputs[self._follow, :size])
        return LoadedMixed(self._attention.load_mixed(built), size)

    def replay(self, step: LoadedMixed) -> Tensor:
        """Queue the step loaded last. Return logits float32 `[>= draws, vocab]`, those of rows that draw, in order;
        valid until the next step."""
        recording = self._recordings[step]
        recording.replay()
        self.replays[step] += 1
        return recording.result

    def sample(self, step: LoadedMixed, logits: Tensor, draws: list[Row]) -> Tensor | QueuedDraws | Sequence[Drawn]:
        """As `DecodeGraphs.sample`."""
        return drawn_of(self._attention, self._tokens[: len(draws)], logits, draws)

    def _record(self, kind: str, size: int) -> None:
        tokens, positions, *slots = self._inputs[: self._follow, :size]
        # No row is its own, as far as attention knows: all that it does not write is zero.
        drawing = self._drawing[:, : len(self._tokens)]
        batch = ForwardBatch(tokens, positions, drawing[0], slots[0], [], [], [], 0, len(self._tokens))
        params = sampling_rows(drawing[1:])

        def work() -> Tensor:
            made = self._model.forward(batch, self._kv, self._attention, self._logits)
            if made.shape == self._logits.shape:  # as for decode steps: the first rank draws
                self._attention.draw(made, params, self._tokens)
            return made

        self._attention.fix_mixed(kind, size, slots)
        self._recordings[kind, size] = self._recorder.record(work)


def mixed_sizes(most: int) -> list[int]:
    """Numbers of tokens to record, for steps of up to `most`: by doubling, up to MOST_TOKENS."""
    most = min(most, MOST_TOKENS)
    return [*(size for size in (64, 128, 256) if size < most), most]
