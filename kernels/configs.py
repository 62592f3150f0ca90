"""Which tile, warps and stages a kernel runs with: a table, looked up once, instead of tuning at run time.

Run-time tuning would measure on a busy server, differ from process to process, and could not be compiled ahead or
tested without a GPU. `origin` says what an entry rests on: "contract" was chosen by what the compiler reports
(registers, spills, tiles in flight; `tests/kernels/contract`), "measured" comes from `measured.json` beside this file,
which names the card and is written by `python3 -m benchmarks.gpu.tune`.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

Origin = Literal["contract", "measured"]


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """How a kernel is launched. `tile`: tokens (or rows, or bytes) per inner step; `rows`: query rows per tile where a
    kernel chooses them."""

    tile: int
    warps: int
    stages: int
    rows: int = 0
    origin: Origin = "contract"


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """What an entry of the table is for. `dtype`: the type of the stored KV, as in torch; for attention of 32-bit
    queries "float32", whatever is stored. `arch`: `table_arch`, 80 or 90."""

    kernel: str
    head_dim: int
    group: int
    block_size: int
    dtype: str
    arch: int


MEASURED = Path(__file__).with_name("measured.json")
DRY_RUN = "none: a dry run, whose figures mean nothing"
"""The card's name in a file of a dry run, which is refused."""

SHARED_BYTES = {80: 99 << 10, 90: 227 << 10}
"""Shared memory that a program may take by each architecture's entries: as much as the least of the GPUs has that they
are for. sm_80 itself has 163 KiB; sm_86, sm_89 and sm_120 have 99."""

_DECODE = KernelConfig(tile=64, warps=4, stages=3, rows=16)
_SHARED = KernelConfig(tile=64, warps=4, stages=3, rows=64)
_PREFILL = KernelConfig(tile=64, warps=8, stages=3, rows=128)

DEFAULTS = {
    "decode": _DECODE,
    "decode_shared": _SHARED,
    "merge": KernelConfig(tile=8, warps=4, stages=1),
    "prefill": _PREFILL,
    "rope_kv_write": KernelConfig(tile=0, warps=1, stages=1, rows=4),
    "rms_norm": KernelConfig(tile=0, warps=8, stages=1),
    "silu_mul": KernelConfig(tile=1024, warps=4, stages=1),
    "copy_blocks": KernelConfig(tile=1024, warps=4, stages=4),
    "convert_blocks": KernelConfig(tile=0, warps=4, stages=1, rows=32),
    "sample": KernelConfig(tile=1024, warps=8, stages=1, rows=16),
    "choose": KernelConfig(tile=512, warps=16, stages=1),
    "mask_logits": KernelConfig(tile=2048, warps=8, stages=1),
    "coded_linear": KernelConfig(tile=64, warps=4, stages=3, rows=64),
    "coded_linear_many": KernelConfig(tile=64, warps=4, stages=3, rows=128),
    "float8_linear": KernelConfig(tile=128, warps=4, stages=4, rows=64),
    "float8_linear_many": KernelConfig(tile=64, warps=4, stages=4, rows=64),
    "route_experts": KernelConfig(tile=0, warps=1, stages=1),
    # One pair a thread: with more, what is known of a pair crosses threads by the byte.
    "plan_experts": KernelConfig(tile=512, warps=16, stages=1),
    "gate_up_experts": KernelConfig(tile=64, warps=4, stages=3, rows=64),
    "down_experts": KernelConfig(tile=128, warps=4, stages=3, rows=64),
    "coded_gate_up_experts": KernelConfig(tile=64, warps=4, stages=3, rows=32),
    "coded_down_experts": KernelConfig(tile=64, warps=4, stages=3, rows=32),
    "combine_experts": KernelConfig(tile=1024, warps=4, stages=1),
    # Its tile is a part of so many bytes, whatever the type: two vectors of 16 a thread.
    "rank_sum": KernelConfig(tile=0, warps=4, stages=1),
}
"""The configurations of shapes without an entry; for attention, 16-bit heads of up to 128. There, `rows` are packed
rows: queries times group."""

# By the next power of two of the head size, where keys and values have 16 bits, 8, and 32. What is limited is shared
# memory, which holds stages of tiles and often the queries; and registers, which hold rows x head size of results.
_BY_HEAD = {
    "decode": {128: _DECODE, 256: replace(_DECODE, tile=32), 512: replace(_DECODE, tile=16)},
    "decode_shared": {128: _SHARED, 256: KernelConfig(32, 8, 2, 64), 512: KernelConfig(16, 8, 2, 32)},
    "prefill": {128: _PREFILL, 256: KernelConfig(32, 8, 2, 64), 512: KernelConfig(16, 8, 2, 32)},
}
_NARROW = {
    "decode": {**_BY_HEAD["decode"], 128: replace(_DECODE, stages=4)},
    "decode_shared": {
        128: replace(_SHARED, warps=8), 256: KernelConfig(32, 8, 2, 32), 512: KernelConfig(16, 8, 2, 32)
    },
    "prefill": _BY_HEAD["prefill"],
}  # fmt: skip
_FLOAT32 = KernelConfig(16, 8, 2, 32)
_WIDE = {
    "decode": {128: KernelConfig(16, 4, 3, 16), 256: KernelConfig(16, 4, 3, 16), 512: replace(_FLOAT32, rows=16)},
    "decode_shared": dict.fromkeys((128, 256, 512), _FLOAT32),
    "prefill": dict.fromkeys((128, 256, 512), _FLOAT32),
}
_EIGHT_BITS = ("int8", "float8_e4m3fn")
_OF_OTHER_BYTES = {"float32": _WIDE, **dict.fromkeys(_EIGHT_BITS, _NARROW)}
_QUERY_BYTES = 64 << 10
"""The most bytes of packed queries in one program: with more there is no room for keys and values."""

_CODES = ("q4", "q8", "f8")

_WARPS = KernelConfig(tile=64, warps=8, stages=3, rows=16)
_HIGH = KernelConfig(tile=64, warps=8, stages=3, rows=256)

# (kernel, head_dim, group, block_size, dtype, entry for sm_80, entry for sm_90); None: the default.
_ENTRIES: list[tuple[str, int, int, int, str, KernelConfig | None, KernelConfig | None]] = [
    ("decode", 64, 3, 16, "bfloat16", None, None),
    ("decode", 64, 8, 64, "bfloat16", None, _WARPS),
    ("decode", 80, 1, 64, "bfloat16", None, None),
    ("decode", 96, 1, 64, "bfloat16", None, None),
    ("decode", 128, 1, 64, "bfloat16", None, None),
    ("decode", 128, 4, 1, "bfloat16", None, None),
    ("decode", 128, 4, 16, "bfloat16", None, None),
    ("decode", 128, 4, 64, "bfloat16", None, None),
    ("decode", 128, 4, 128, "bfloat16", None, None),
    ("decode", 128, 32, 64, "bfloat16", None, None),
    ("decode", 256, 8, 64, "bfloat16", None, None),
    ("decode", 128, 4, 64, "int8", None, None),
    ("decode", 128, 4, 64, "float8_e4m3fn", None, None),
    ("decode_shared", 128, 4, 64, "bfloat16", None, None),
    ("merge", 128, 4, 64, "bfloat16", None, None),
    ("prefill", 64, 3, 16, "bfloat16", None, None),
    ("prefill", 128, 4, 16, "bfloat16", None, None),
    ("prefill", 128, 4, 64, "bfloat16", None, None),
    ("prefill", 128, 4, 64, "int8", None, None),
    ("prefill", 256, 8, 64, "bfloat16", None, None),
    ("rope_kv_write", 128, 4, 64, "bfloat16", None, None),
    ("rope_kv_write", 128, 4, 64, "float8_e4m3fn", None, None),
    ("rms_norm", 0, 0, 0, "bfloat16", None, None),
    ("silu_mul", 0, 0, 0, "bfloat16", None, None),
    ("copy_blocks", 128, 0, 64, "bfloat16", None, None),
    ("convert_blocks", 128, 0, 64, "int8", None, None),
    ("convert_blocks", 128, 0, 64, "float8_e4m3fn", None, None),
    ("sample", 0, 0, 0, "float32", None, None),
    ("choose", 0, 0, 0, "float32", None, None),
    ("mask_logits", 0, 0, 0, "float32", None, None),
    ("coded_linear", 0, 0, 0, "q4", None, None),
    ("coded_linear", 0, 0, 0, "q8", None, None),
    ("coded_linear", 0, 0, 0, "f8", None, None),
    ("coded_linear_many", 0, 0, 0, "q4", None, None),
    ("coded_linear_many", 0, 0, 0, "q8", None, _HIGH),
    ("coded_linear_many", 0, 0, 0, "f8", None, _HIGH),
    ("float8_linear", 0, 0, 0, "float8_e4m3fn", None, None),
    ("float8_linear_many", 0, 0, 0, "float8_e4m3fn", None, None),
    ("route_experts", 0, 0, 0, "float32", None, None),
    ("plan_experts", 0, 0, 0, "int32", None, None),
    ("gate_up_experts", 0, 0, 0, "bfloat16", None, None),
    ("down_experts", 0, 0, 0, "bfloat16", None, None),
    *((f"coded_{product}_experts", 0, 0, 0, kind, None, None) for product in ("gate_up", "down") for kind in _CODES),
    ("combine_experts", 0, 0, 0, "bfloat16", None, None),
    ("rank_sum", 0, 0, 0, "bfloat16", None, None),
    ("rank_sum", 0, 0, 0, "float32", None, None),
]


def read_measured(path: Path) -> dict[ConfigKey, KernelConfig]:
    """Read the entries of a `measured.json`; none if there is no such file. Raises ValueError for one of a dry run, and
    for a kernel that there is not."""
    if not path.exists():
        return {}
    told = json.loads(path.read_text(encoding="utf-8"))
    if told["gpu"] == DRY_RUN:
        raise ValueError(f"{path}: the figures of a dry run, which mean nothing")
    found = {}
    for entry in told["entries"]:
        key = ConfigKey(**{field.name: entry[field.name] for field in fields(ConfigKey)})
        if key.kernel not in DEFAULTS:
            raise ValueError(f"{path}: no kernel {key.kernel!r}")
        shape = (entry["tile"], entry["warps"], entry["stages"], entry["rows"])
        found[key] = KernelConfig(*shape, origin="measured")
    return found


def table_arch(major: int) -> int:
    """Return the table's name for GPUs of compute capability `major`.x: 90 for data-centre GPUs from Hopper on, 80 for
    those before, and for those of 12.x, which have as little shared memory as sm_89 and the same matrix instructions.
    """
    return 90 if 9 <= major < 12 else 80


def default_config(key: ConfigKey) -> KernelConfig:
    """Return the configuration of a shape without an entry: by head size and stored type, with room for the group.
    Raises KeyError for an unknown kernel, ValueError where no program could hold one query of a whole group."""
    if key.kernel not in _BY_HEAD:
        config = DEFAULTS[key.kernel]
        # Without wgmma, higher tiles of x spill registers: of 128 rows up to 296 times, of 64 four (Triton 3.7.1).
        return replace(config, rows=32) if key.arch == 80 and key.kernel.startswith("coded_linear") else config
    padded, group = (1 << (size - 1).bit_length() for size in (max(64, key.head_dim), key.group))
    row_bytes = padded * (4 if key.dtype == "float32" else 2)
    if padded > 512 or group * row_bytes > _QUERY_BYTES:
        raise ValueError(
            f"{key.kernel}: no program can hold a group of {key.group} heads of {key.head_dim}, {key.dtype}"
        )
    by_head = _OF_OTHER_BYTES.get(key.dtype, _BY_HEAD)
    width = max(128, padded)
    config = by_head[key.kernel][width]
    if group > config.rows:
        if key.kernel == "decode":
            config = by_head["decode_shared"][width]
        config = replace(config, rows=group, warps=8 if group >= 128 else config.warps)
    if key.arch == 80 and key.kernel == "prefill" and key.dtype in _EIGHT_BITS and padded >= 128:
        # Without wgmma, widened keys and values lie in registers beside the results.
        config = replace(config, tile=min(config.tile, 32))
    if config.rows * row_bytes == _QUERY_BYTES:
        config = replace(config, tile=16, warps=8, stages=1 if key.dtype == "float32" else 2)
    return config


TABLE = {
    key: entry or default_config(key)
    for kernel, head_dim, group, block_size, dtype, *entries in _ENTRIES
    for arch, entry in zip(SHARED_BYTES, entries, strict=True)
    for key in (ConfigKey(kernel, head_dim, group, block_size, dtype, arch),)
} | read_measured(MEASURED)


def config_for(key: ConfigKey) -> KernelConfig:
    """Return the table's entry, or the default. Raises as `default_config` does."""
    return TABLE.get(key) or default_config(key)
