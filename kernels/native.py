"""The CPU kernels of `kernels/cpu`, built when this package is installed on a machine with a C++ compiler.

One library per instruction set, all of the same sources and all giving the same bits; which of them loads is PyTorch's
choice for this processor (`ATEN_CPU_CAPABILITY=avx2` narrows it). Everything is float32 and contiguous but for the KV
pool. Callers have checked shapes: pointers are all that crosses over, and ValueError is raised only for tensors of
another dtype or order. The interpreter runs on during a call.
"""

import ctypes
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.experts import ExpertWeights, RoutedRows, Routing
from kernels.panels import IntegerBits, Panels, PanelStack

log = logging.getLogger(__name__)

VARIANTS = ("AVX512", "AVX2", "PLAIN")
"""Instruction sets as PyTorch names them, `PLAIN` for processors that are not x86; setup.py has their flags."""

SOURCES = Path(__file__).parent / "cpu"
STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
"""The dtypes of a pool, each with its number in the C++ sources."""
SHARED_ROWS = 32
"""The fewest rows for which work on each row alone is shared: with fewer it is done sooner than another thread could
take a part."""
_KINDS = {"f32": 0, "bf16": 1, "q8": 2, "q4": 3, "a8": 4, "h8": 5, "x8": 6, "f8": 7}
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def source_digest(folder: Path = SOURCES) -> str:
    """Return the hex digest of the C++ sources; a library built from other ones is not used."""
    digest = blake2b(digest_size=8)
    for path in sorted(folder.glob("*.[ch]*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The sizes of a pool `[blocks, kv_heads, layers, 2, block_size, head_dim]`; head_dim is a multiple of 16. One of
    8 bits is the payload of `kernels.pool.eight_bit_views`, whose scales lie behind it in each head's slice."""

    kv_heads: int
    layers: int
    block_size: int
    head_dim: int

    def at(self, pool: Tensor) -> int:
        """Return the address of a pool's first block. Raises ValueError where its rows lie elsewhere."""
        sizes = (self.kv_heads, self.layers, 2, self.block_size, self.head_dim)
        scale_bytes = 4 if pool.element_size() == 1 else 0
        token, kv, layer = self.head_dim, self.block_size * self.head_dim, 2 * self.block_size * self.head_dim
        head = self.layers * 2 * self.block_size * (self.head_dim + scale_bytes)
        if pool.shape[1:] != sizes or pool.stride() != (self.kv_heads * head, head, layer, kv, token, 1):
            raise ValueError(f"no pool of {self}: {tuple(pool.shape)} by strides {pool.stride()}")
        return pool.data_ptr()


class Native:
    """The library's functions. `threads` is called before every call and returns how many threads may take part."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self.variant = variant
        self.threads: Callable[[], int] = torch.get_num_threads
        self.by_words = False
        """Multiply integers without the processor's instruction for products of bytes: slower, and the same bits."""
        library.headrace_sources.restype = ctypes.c_char_p
        self.sources: str = library.headrace_sources().decode()
        self._linear = _typed(
            library.headrace_linear, [_POINTER, _SIZE, _SIZE, _POINTER, _INT, _SIZE, _POINTER, _INT, _POINTER, _INT]
        )
        self._linear_of_experts = _typed(
            library.headrace_linear_of_experts,
            [_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _INT, _SIZE, _POINTER, _INT, _POINTER, _INT],
        )
        self._route = _typed(
            library.headrace_route, [_POINTER, _SIZE, _SIZE, _SIZE, _INT, _INT, _POINTER, _POINTER, _INT]
        )
        self._by_expert = _typed(library.headrace_by_expert, [_POINTER, _SIZE, _SIZE, _SIZE, *[_POINTER] * 3])
        self._clamped_gate = _typed(
            library.headrace_clamped_gate, [_POINTER, _SIZE, _SIZE, _FLOAT, _FLOAT, _POINTER, _INT]
        )
        self._combine = _typed(
            library.headrace_combine, [_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _INT]
        )
        self._norm = _typed(
            library.headrace_norm, [_POINTER, _POINTER, _POINTER, _FLOAT, _SIZE, _SIZE, _POINTER, _INT]
        )
        self._gate = _typed(library.headrace_gate, [_POINTER, _SIZE, _SIZE, _INT, _POINTER, _INT])
        self._rotate_and_write = _typed(
            library.headrace_rotate_and_write,
            [
                *(_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, *[_POINTER] * 3, _FLOAT),
                *(_POINTER, _INT, *[_SIZE] * 5, _POINTER, _SIZE, _INT),
            ],
        )
        self._attend = _typed(
            library.headrace_attend,
            [
                *(_POINTER, _SIZE, _SIZE, *[_POINTER] * 5, _INT),
                *(*[_SIZE] * 6, _FLOAT, _FLOAT, _POINTER, _POINTER, _INT),
            ],
        )

    def linear(self, x: Tensor, weight: Panels, bias: Tensor | None = None) -> Tensor:
        """Multiply `x` `[n, columns]` -> `[n, rows]`. A row's bits depend on nothing but that row."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != weight.columns:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} does not fit {weight.columns} columns")
        x = x.contiguous()
        out = torch.empty(x.shape[0], weight.rows)
        self._linear(
            x.data_ptr(),
            x.shape[0],
            weight.columns,
            weight.raw.data_ptr(),
            _KINDS[weight.kind],
            weight.rows,
            _at(bias),
            self._arithmetic(weight.integer),
            out.data_ptr(),
            self.threads(),
        )
        return out

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `x` `[rows, width]` in place; return the RMS norm of the sum, times `weight`."""
        out = torch.empty_like(x)
        self._norm(_at(x), _at(delta), _at(weight), eps, *x.shape, out.data_ptr(), self._for_rows(len(x)))
        return out

    def gate(self, gate_up: Tensor, gelu: bool = False) -> Tensor:
        """Compute `[rows, 2 * width]`, the gate first -> silu(gate) * up `[rows, width]`; with `gelu`, GELU by its tanh
        in place of silu."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        self._gate(_at(gate_up), rows, width, int(gelu), out.data_ptr(), self._for_rows(rows))
        return out

    def route(self, logits: Tensor, routing: Routing) -> RoutedRows:
        """Choose each row's experts by `logits` `[rows, experts]`; see `kernels.experts`."""
        rows, experts = logits.shape
        if not 1 <= routing.chosen <= experts:
            raise ValueError(f"{routing.chosen} of {experts} experts cannot be chosen")
        numbers = torch.empty(rows, routing.chosen, dtype=torch.int64)
        weights = torch.empty(rows, routing.chosen)
        self._route(
            _at(logits),
            rows,
            experts,
            routing.chosen,
            routing.over_chosen,
            routing.normalise,
            numbers.data_ptr(),
            weights.data_ptr(),
            self._for_rows(rows),
        )
        return RoutedRows(numbers, weights)

    def mix(self, x: Tensor, choice: RoutedRows, experts: ExpertWeights) -> Tensor:
        """Send `x` `[rows, hidden]` through the chosen experts, as `kernels.experts.mix` does; theirs are in panels. A
        row's bits depend on nothing but that row."""
        gate_up, down = experts.gate_up, experts.down
        if not isinstance(gate_up, PanelStack) or not isinstance(down, PanelStack):
            raise ValueError("native kernels take experts in panels")
        if x.dim() != 2 or x.shape[1] != gate_up.columns or down.columns * 2 != gate_up.rows:
            raise ValueError(f"{tuple(x.shape)} does not fit {gate_up.columns} columns")
        rows, chosen = choice.experts.shape
        starts = torch.empty(gate_up.count + 1, dtype=torch.int64)
        sources, places = torch.empty(2, rows * chosen, dtype=torch.int64)
        numbers = _at(choice.experts, torch.int64)
        self._by_expert(
            numbers, rows, chosen, gate_up.count, starts.data_ptr(), sources.data_ptr(), places.data_ptr()
        )
        inner = self._of_experts(x[sources], starts, gate_up, experts.gate_up_bias)
        inner = self.gate(inner) if experts.clamp is None else self.clamped_gate(inner, *experts.clamp)
        answers = self._of_experts(inner, starts, down, experts.down_bias)
        out = torch.empty(rows, down.rows)
        threads = self._for_rows(rows)
        self._combine(
            _at(answers),
            places.data_ptr(),
            _at(choice.weights),
            rows,
            chosen,
            down.rows,
            out.data_ptr(),
            threads,
        )
        return out

    def clamped_gate(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """Compute `[rows, 2 * width]`, the gate first -> `[rows, width]`; see `kernels.experts.ClampedGate`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        self._clamped_gate(_at(gate_up), rows, width, alpha, limit, out.data_ptr(), self._for_rows(rows))
        return out

    def _of_experts(self, x: Tensor, starts: Tensor, stack: PanelStack, bias: Tensor | None) -> Tensor:
        out = torch.empty(len(x), stack.rows)
        self._linear_of_experts(
            _at(x),
            starts.data_ptr(),
            stack.count,
            stack.columns,
            stack.raw.data_ptr(),
            _KINDS[stack.kind],
            stack.rows,
            _at(bias),
            self._arithmetic(stack.integer),
            out.data_ptr(),
            self.threads(),
        )
        return out

    def rotate_and_write(
        self,
        qkv: Tensor,
        heads: int,
        tables: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        pool: Tensor,
        shape: PoolShape,
        layer: int,
        slots: Tensor,
    ) -> None:
        """Norm and rotate queries and keys of `qkv` `[rows, heads + 2 * kv_heads, head_dim]` in place, and write keys
        and values of the first `len(slots)` rows. `tables`: cos and sin `[context, rotary_dim / 2]`, whose first
        `rotary_dim` columns of a head turn; None: nothing turns. `slots` and `positions` are int64."""
        cos, sin = (None, None) if tables is None else tables
        half = 0 if cos is None else cos.shape[1]
        if 2 * half > shape.head_dim:
            raise ValueError(f"tables for {2 * half} columns of heads of {shape.head_dim}")
        q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
        self._rotate_and_write(
            _at(qkv),
            qkv.shape[0],
            heads,
            _at(cos),
            _at(sin),
            half,
            _at(positions, torch.int64),
            _at(q_norm),
            _at(k_norm),
            eps,
            shape.at(pool),
            STORAGE[pool.dtype],
            shape.kv_heads,
            shape.layers,
            shape.block_size,
            shape.head_dim,
            layer,
            _at(slots, torch.int64),
            len(slots),
            self._for_rows(len(qkv)),
        )

    def attend(
        self,
        qkv: Tensor,
        heads: int,
        sequences: "Sequences",
        pool: Tensor,
        shape: PoolShape,
        layer: int,
        out: Tensor,
        *,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend with rotated `qkv`, as above -> `out` `[rows, heads * head_dim]`, written for the sequences' rows
        only. A row sees the last `window` keys, itself included (0: all); `scale` of scores is 1 / sqrt(head_dim) by
        default, `softcap` 0 is none, `sinks` `[heads]` are a further score each, without a value."""
        if sinks is not None and len(sinks) != heads:
            raise ValueError(f"{len(sinks)} sinks for {heads} heads")
        self._attend(
            _at(qkv),
            heads,
            len(sequences.counts),
            sequences.counts.data_ptr(),
            sequences.contexts.data_ptr(),
            sequences.starts.data_ptr(),
            sequences.tables.data_ptr(),
            shape.at(pool),
            STORAGE[pool.dtype],
            shape.kv_heads,
            shape.layers,
            shape.block_size,
            shape.head_dim,
            layer,
            window,
            shape.head_dim**-0.5 if scale is None else scale,
            softcap,
            _at(sinks),
            _at(out),
            self.threads(),
        )

    def _arithmetic(self, integer: IntegerBits) -> int:
        """The number that the C++ sources have for it."""
        number = {0: 0, 16: 1, 23: 2}[integer]
        return number + 2 if number and self.by_words else number

    def _for_rows(self, rows: int) -> int:
        return self.threads() if rows >= SHARED_ROWS else 1


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one step, in order, as int64: new rows, tokens with them, and where a sequence's blocks begin in
    `tables`, which holds all block tables end to end."""

    counts: Tensor
    contexts: Tensor
    starts: Tensor
    tables: Tensor

    def __post_init__(self) -> None:
        for tensor in (self.counts, self.contexts, self.starts, self.tables):
            _at(tensor, torch.int64)

    @staticmethod
    def of(counts: list[int], contexts: list[int], tables: list[Tensor]) -> "Sequences":
        starts, at = [], 0
        for table in tables:
            starts.append(at)
            at += len(table)
        return Sequences(
            torch.tensor(counts, dtype=torch.int64),
            torch.tensor(contexts, dtype=torch.int64),
            torch.tensor(starts, dtype=torch.int64),
            torch.cat(tables),
        )


@cache
def native() -> Native | None:
    """Return the kernels for this processor, or None where they were not built, or from other sources than lie here."""
    variant = torch.backends.cpu.get_cpu_capability()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        variant = "PLAIN"
    if variant not in VARIANTS:
        log.info("no native kernels for processors with %s", variant)
        return None
    name = f"_native_{variant.lower()}"
    found = [path for end in EXTENSION_SUFFIXES if (path := SOURCES.parent / (name + end)).exists()]
    if not found:
        log.info("the native kernels were not built: install a C++ compiler, then Headrace again")
        return None
    try:
        kernels = Native(ctypes.CDLL(str(found[0])), variant)
    except (OSError, AttributeError) as error:
        log.warning("the native kernels cannot be loaded: %s", error)
        return None
    if SOURCES.exists() and kernels.sources != source_digest():
        log.warning("the native kernels are older than their sources: install Headrace again (`make setup`)")
        return None
    return kernels


def _at(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Return the address of a tensor's elements, for a kernel that takes them to lie one after the other."""
    if tensor is None:
        return None
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(f"native kernels read contiguous {dtype}, not {tensor.dtype} by strides {tensor.stride()}")
    return tensor.data_ptr()


def _typed(function: Any, arguments: list[Any]) -> Any:
    function.argtypes, function.restype = arguments, None
    return function
