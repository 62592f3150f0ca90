"""The GPU kernels behind the engine's seam: everything in a step but the products of matrices.

A step's decoding sequences come first, one row each, and go through `decode_attention` by a work list; chunks of
prompts go through `prefill_attention`, into the same output. Rows that read the same leading blocks read them once.
Layers of one window have one work list, made once per step: that of a window begins where the window does. Where they
are kept in groups (`engine.kv.groups`), each group's read it by block tables of their own: what rows share is found in
the first group's, and read by the table of the row that sees the most of it.
While the device runs a step, the work list of the next one is made: the same rows, each one token longer. A step that
turns out otherwise is planned when it comes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from engine.backends.attention import LayerInput, Mixture
from engine.backends.gpu.chunk_buffers import ChunkBuffers, table_width
from engine.backends.gpu.sampling import Drawing, draw_tokens
from engine.batch import ROW_MULTIPLE, ForwardBatch, upload
from engine.kv.layout import KVLayout
from engine.logprobs import QueuedDraws, step_logprobs
from engine.model.config import Activation, ModelConfig
from engine.sampling import sample
from engine.step import Drawn, Row
from engine.storage.paged import TORCH_DTYPES, KVTensors
from kernels.configs import ConfigKey, KernelConfig, config_for
from kernels.decode_attention import decode_attention, decode_residency
from kernels.decode_buffers import DecodeBuffers
from kernels.decode_plan import DecodePlan, SharedPrefix, geometry_for, plan_decode
from kernels.grouped_experts import expert_configs, mix, route
from kernels.launch import arch_of, interpreted
from kernels.prefill_attention import plan_prefill, prefill_attention, rows_per_tile
from kernels.prefill_hopper import ROWS, prefill_hopper, runs_on, unfit
from kernels.residency import UNKNOWN
from kernels.rms_norm import rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.sample import SamplingRows
from kernels.shared_prefixes import shared_prefixes
from kernels.silu_mul import silu_mul

log = logging.getLogger(__name__)

INTERPRETED_PROGRAMS = 4

_Rows = tuple[list[int], list[SharedPrefix]]

CHUNKS = "chunks"
"""The kind of a mixed step without decoding rows."""

PLAIN, SHARED = "decode", "decode_shared"
"""The two kinds of decode launch, by the names of their configurations: the second has tiles for rows of many
sequences."""


@dataclass(frozen=True, slots=True)
class _DecodeLaunch:
    """One kind of decode launch, with its buffers."""

    kind: str
    config: KernelConfig
    buffers: DecodeBuffers


@dataclass(frozen=True, slots=True)
class _Step:
    """`decoding` rows by the plans in the buffers of `launches`, by window; then, if there are any, the tiles of
    chunks."""

    launches: dict[int, _DecodeLaunch]
    decoding: int
    tiles: Tensor | None
    tables: Tensor | None  # of each layer group, the chunks' tables
    slots: Sequence[Tensor]  # of each layer group, int64 [padded rows], -1 for padding


PrefillKernel = Literal["portable", "hopper"]


@dataclass(slots=True)
class Planning:
    """Counts how decode steps came by their work lists, since the start: figures for benchmarks and tests."""

    ahead: int = 0
    at_once: int = 0


class TritonAttention:
    """Fulfils `AttentionBackend`, and what `engine.backends.gpu.graphs` asks for, on CUDA or in Triton's interpreter.

    `max_batch`: decoding sequences of a step; more of them cost new buffers. `programs`: the decode grid's size; 0: by
    the device, and by the kernels as they are compiled once `fit` was called. `share_tokens`: what rows must have in
    common for it to be read once. `prefill_kernel`: what attends with chunks. Raises ValueError where there is neither
    a GPU nor the interpreter, and for the kernel for sm_90 where that cannot do it.
    """

    row_multiple = ROW_MULTIPLE

    def __init__(
        self,
        shape: ModelConfig,
        layout: KVLayout,
        device: torch.device | str,
        *,
        max_batch: int = 64,
        programs: int = 0,
        share_tokens: int = 256,
        prefill_kernel: PrefillKernel = "portable",
    ) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda" and not interpreted():
            raise ValueError(f"Triton kernels need a CUDA device, not {device} (or TRITON_INTERPRET=1, for tests)")
        self.planning = Planning()
        self._heads, self._kv_heads = shape.heads, layout.kv_heads
        self._head_dim, self._block_size = layout.head_dim, layout.block_size
        self._dtype = TORCH_DTYPES[shape.dtype]
        self._table_blocks = layout.blocks_for(shape.context_tokens)
        self.max_batch = max_batch
        self.share_tokens = share_tokens
        self._windows = shape.windows
        self._stacks = {window: [0] for window in shape.windows}
        if layout.groups:
            by_group = [shape.layer(group.layers[0]).window for group in layout.groups]
            self._stacks = {at: [g for g, window in enumerate(by_group) if window == at] for at in shape.windows}
        self._groups = layout.group_count
        self._shares = any(self._kind(SHARED, window) == SHARED for window in self._windows)
        self._softcap, self._sinks = shape.attention_softcap, shape.sinks
        self._programs = {(kind, window): programs for kind in (PLAIN, SHARED) for window in self._windows}
        group, arch = shape.heads // layout.kv_heads, arch_of(self.device)
        stored = "float32" if shape.dtype == "float32" else layout.dtype
        dtype = str(TORCH_DTYPES[stored]).removeprefix("torch.")
        self._configs = {
            name: config_for(ConfigKey(name, layout.head_dim, group, layout.block_size, dtype, arch))
            for name in (PLAIN, SHARED, "prefill", "rope_kv_write")
        } | {name: config_for(ConfigKey(name, 0, 0, 0, shape.dtype, arch)) for name in ("rms_norm", "silu_mul")}
        drawn_by = (config_for(ConfigKey(name, 0, 0, 0, "float32", arch)) for name in ("sample", "mask_logits"))
        self._drawing = Drawing.of(max_batch, shape.vocab, self.device, *drawn_by)
        self._experts = expert_configs(shape.dtype, arch)
        self._rows_per_tile = rows_per_tile(self._configs["prefill"], group)
        self._on_hopper = prefill_kernel == "hopper"
        if self._on_hopper:
            reason = unfit(
                *(TORCH_DTYPES[layout.dtype], self._dtype, layout.head_dim, layout.block_size, group),
                window=max(self._windows),
            )
            if not runs_on(self.device) or reason:
                where = f"{self.device}, which is no GPU of compute capability 9.0"
                raise ValueError(f"engine.prefill_kernel: hopper cannot do {reason or where}")
            self._rows_per_tile = ROWS // group
        # Mutable: buffers by kind, window and size, the step under way, its decoding rows, and the plans for their
        # successors by window.
        self._launches: dict[tuple[str, int, int], _DecodeLaunch] = {}
        self._chunks: ChunkBuffers | None = None
        self._step: _Step | None = None
        self._latest: _Rows | None = None
        self._ahead: tuple[_Rows, dict[int, DecodePlan]] | None = None

    def fit(self, kv: KVTensors) -> None:
        """Make each kind's grid as large as its compiled kernel lets it run at once on this device, where its size was
        not given. Before the first step: buffers and recordings are made for one grid."""
        for (kind, window), given in self._programs.items():
            if not given and not self._launches:
                each = decode_residency(
                    *(self._heads, self._dtype, kv.pool, self._config(kind, window), self._table_blocks),
                    window=window,
                    softcap=self._softcap,
                    with_sinks=self._sinks,
                    stacks=len(self._stacks[window]),
                )
                self._programs[kind, window] = _programs(self.device, each)
                log.info("%s, window %d: %s programs on an SM", kind, window, each)

    def begin(self, batch: ForwardBatch, kv: KVTensors) -> None:
        counts = batch.query_counts
        decoding = next((at for at, count in enumerate(counts) if count > 1), len(counts))
        groups = _tables(batch)
        launches = dict[int, _DecodeLaunch]()
        self._latest = None
        if decoding:
            kind = self.load(batch.context_lens[:decoding], [tables[:decoding] for tables in groups])
            launches = self._of_step(kind, decoding)
        tiles = chunk_tables = None
        if decoding < len(counts):
            planned = plan_prefill(counts[decoding:], batch.context_lens[decoding:], self._rows_per_tile)
            tiles = self._int32([(s, row + decoding, n, at) for s, row, n, at in planned])
            width = table_width(max(map(len, groups[0][decoding:])), len(groups))
            chunk_tables = self._int32(
                [[table + [0] * (width - len(table)) for table in tables[decoding:]] for tables in groups]
            )
        padding = 0, len(batch.tokens) - batch.rows
        slots = [torch.nn.functional.pad(tables.slots, padding, value=-1) for tables in batch.groups]
        self._step = _Step(launches, decoding, tiles, chunk_tables, slots)

    def kinds(self, rows: int) -> Sequence[str]:
        """The kinds that the work list of so many rows may be of: one row shares with nobody."""
        return (PLAIN, SHARED) if rows > 1 and self._shares else (PLAIN,)

    def _kind(self, kind: str, window: int) -> str:
        """The kind of launch of such layers in a step of this kind: a window that shows no more of a prefix than is
        worth sharing has launches of the plain one, always."""
        return kind if window == 0 or window > self.share_tokens else PLAIN

    def _config(self, kind: str, window: int) -> KernelConfig:
        """The launch's configuration. Under a window, items of rows that share nothing hold one row: it is masked as a
        whole."""
        config = self._configs[kind]
        return replace(config, rows=self._heads // self._kv_heads) if window and kind == PLAIN else config

    def load(self, lengths: list[int], groups: Sequence[Sequence[Sequence[int]]]) -> str:
        """Bring the work lists of these decoding rows to the device, and say of which kind they are. `lengths` with the
        new tokens; `groups`: of each layer group, the rows' tables, which cover them."""
        own = groups[0]
        rows = lengths, shared_prefixes(own, lengths, self._block_size, self.share_tokens) if self._shares else []
        if self._ahead is not None and self._ahead[0] == rows:
            plans = self._ahead[1]
            self.planning.ahead += 1
        else:
            plans = self._plans(rows)
            self.planning.at_once += 1
        self._ahead, self._latest = None, rows
        kind = SHARED if rows[1] else PLAIN
        for window, launch in self._of_step(kind, len(lengths)).items():
            launch.buffers.load(plans[window], lengths, *(groups[group] for group in self._stacks[window]))
        return kind

    def fix(self, kind: str, rows: int, slots: Sequence[Tensor]) -> None:
        """The step to come is a pure decode step of `rows` rows that reads the plan of `kind`, and each layer group's
        `slots`, where they lie: what is recorded in a graph."""
        self._step = _Step(self._of_step(kind, rows), rows, None, None, slots)

    def keep_chunks(self, tokens: int, prompts: int) -> None:
        """Make the memory in which recorded mixed steps of up to so many tokens and prompts find their chunks."""
        sizes = tokens, prompts, self._rows_per_tile, self._table_blocks
        self._chunks = ChunkBuffers(*sizes, self.device, self._groups)

    def mixed_kinds(self, rows: int) -> Sequence[str]:
        return (CHUNKS, *self.kinds(rows)) if rows else (CHUNKS,)

    def load_mixed(self, batch: ForwardBatch) -> str:
        assert self._chunks is not None, "there is no memory for the chunks of recorded steps"
        counts, lengths = batch.query_counts, batch.context_lens
        decoding = next(at for at, count in enumerate(counts) if count > 1)
        groups = _tables(batch)
        planned = plan_prefill(counts[decoding:], lengths[decoding:], self._rows_per_tile)
        tiles = [(s, row + decoding, n, at) for s, row, n, at in planned]
        self._chunks.load(tiles, [tables[decoding:] for tables in groups])
        if decoding:
            return self.load(lengths[:decoding], [tables[:decoding] for tables in groups])
        self._latest = None
        return CHUNKS

    def fix_mixed(self, kind: str, tokens: int, slots: Sequence[Tensor]) -> None:
        chunks = self._chunks
        assert chunks is not None, "there is no memory for the chunks of recorded steps"
        decoding = min(tokens, self.max_batch)
        launches = {} if kind == CHUNKS else self._of_step(kind, decoding)
        self._step = _Step(launches, decoding, chunks.tiles[: chunks.tiles_of(tokens)], chunks.tables, slots)

    def attend(self, given: LayerInput) -> Tensor:
        layer, qkv, rotation, batch, kv, norms, options, group = given
        step = self._step
        if step is None:
            raise RuntimeError("attend before begin")
        pool, configs = kv.pool, self._configs
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        cos, sin = (None, None) if rotation is None else (rotation.cos, rotation.sin)
        rope = batch.positions, cos, sin, configs["rope_kv_write"]
        q = rope_kv_write(qkv, pool, layer, step.slots[group], *rope, q_norm=q_norm, k_norm=k_norm, eps=eps)
        out = torch.empty_like(q)
        out[batch.rows :] = 0
        window, scale, softcap, sinks = options
        if step.launches:
            rows, launch = slice(step.decoding), step.launches[window]
            decode_attention(
                *(q[rows], pool, layer, launch.buffers, launch.config),
                out=out[rows],
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                stack=self._stacks[window].index(group),
            )
        if step.tiles is not None and step.tables is not None:
            chunks = q, pool, layer, step.tiles, step.tables[group]
            if self._on_hopper:
                prefill_hopper(*chunks, out=out, scale=scale, softcap=softcap, sinks=sinks)
            else:
                prefill_attention(
                    *(*chunks, configs["prefill"]),
                    window=window,
                    out=out,
                    scale=scale,
                    softcap=softcap,
                    sinks=sinks,
                )
        return out.view(len(q), -1)

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        config = self._configs["rms_norm"]
        if delta is None:
            return rms_norm(x, weight, eps, config)
        return rms_norm(delta, weight, eps, config, residual=x)

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        return silu_mul(gate_up, self._configs["silu_mul"], activation == "gelu_tanh")

    def mix(self, x: Tensor, mixture: Mixture) -> Tensor:
        routed = route(mixture.logits(x), mixture.routing, self._experts.route)
        return mix(x, routed, mixture.experts, self._experts)

    def sample(self, logits: Tensor, draws: list[Row]) -> Tensor | QueuedDraws | Sequence[Drawn]:
        if any(draw.candidates for draw in draws):
            # A beam search is among them: the kernel draws tokens only.
            self._plan_ahead()
            return sample(logits.cpu(), draws, self._drawing.counted)
        if not draws:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return self.drawn(draw_tokens(logits, draws, self._drawing), logits, draws)

    def draw(self, logits: Tensor, params: SamplingRows, out: Tensor) -> Tensor:
        """Draw a token for each row of `logits`, as it is, into `out`: within a recording."""
        return self._drawing.draw(logits, params, out)

    def drawn(self, tokens: Tensor, logits: Tensor, draws: list[Row]) -> Tensor | QueuedDraws:
        """Say what is drawn: `tokens`, with the log probabilities that are asked for. The next step's list is made
        meanwhile."""
        logprobs = step_logprobs(logits, draws, tokens)
        self._plan_ahead()
        return tokens if logprobs is None else QueuedDraws(tokens, logprobs)

    def _plan_ahead(self) -> None:
        """The device is at work; the CPU is not."""
        if self._latest is None:
            return
        lengths, shared = self._latest
        rows = ([length + 1 for length in lengths], shared)
        self._ahead = rows, self._plans(rows)

    def _plans(self, rows: _Rows) -> dict[int, DecodePlan]:
        """The work lists of these rows, one for each window."""
        lengths, shared = rows
        return {
            window: plan_decode(lengths, launch.buffers.geometry, shared if launch.kind == SHARED else ())
            for window, launch in self._of_step(SHARED if shared else PLAIN, len(lengths)).items()
        }

    def _of_step(self, kind: str, rows: int) -> dict[int, _DecodeLaunch]:
        """The launches of a step of this kind, by window."""
        return {window: self._launch(self._kind(kind, window), window, rows) for window in self._windows}

    def _launch(self, kind: str, window: int, rows: int) -> _DecodeLaunch:
        """The launch with buffers for at least so many rows. Those for `max_batch` are made once and never move."""
        size = max(self.max_batch, 1 << max(0, rows - 1).bit_length())
        if (kind, window, size) not in self._launches:
            config = self._config(kind, window)
            geometry = geometry_for(
                batch=size,
                kv_heads=self._kv_heads,
                group=self._heads // self._kv_heads,
                programs=self._programs[kind, window] or _programs(self.device),
                tile=config.tile,
                packed_rows=config.rows,
                window=window,
            )
            buffers = DecodeBuffers(
                geometry,
                batch=size,
                heads=self._heads,
                head_dim=self._head_dim,
                table_blocks=self._table_blocks,
                stacks=len(self._stacks[window]),
                device=self.device,
            )
            self._launches[kind, window, size] = _DecodeLaunch(kind, config, buffers)
        return self._launches[kind, window, size]

    def _int32(self, numbers: Sequence[Sequence[object]]) -> Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int32), self.device)


def _tables(batch: ForwardBatch) -> list[list[list[int]]]:
    """Return the tables of every sequence, by layer group."""
    return [[table.tolist() for table in tables.block_tables] for tables in batch.groups]


def _programs(device: torch.device, per_sm: int = UNKNOWN) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return per_sm * sms
