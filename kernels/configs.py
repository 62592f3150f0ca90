"""Which tile, warps and stages a kernel runs with: a table, looked up once, instead of tuning at run time.

Run-time tuning would measure on a busy server, differ from process to process, and could not be compiled ahead or
tested without a GPU. `origin` says what an entry rests on: "contract" was chosen by what the compiler reports
(registers, spills, tiles in flight; `tests/kernels/contract`), "measured" comes from `measured.json` beside this file,
which names the card and is written by `python -m benchmarks.gpu.tune`.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

Origin = Literal["contract", "measured"]


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """`tile`: tokens (or rows, or bytes) per inner step; `rows`: query rows per tile where a kernel chooses them."""

    tile: int
    warps: int
    stages: int
    rows: int = 0
    origin: Origin = "contract"


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """`dtype`: of the stored KV, as in torch. `arch`: compute capability, 80 or 90."""

    kernel: str
    head_dim: int
    group: int
    block_size: int
    dtype: str
    arch: int


MEASURED = Path(__file__).with_name("measured.json")
DRY_RUN = "none: a dry run, whose figures mean nothing"
"""The card of a file that is not to be taken."""

DEFAULTS = {
    "decode": KernelConfig(tile=64, warps=4, stages=3, rows=16),
    "decode_shared": KernelConfig(tile=64, warps=4, stages=3, rows=64),
    "merge": KernelConfig(tile=8, warps=4, stages=1),
    "prefill": KernelConfig(tile=64, warps=8, stages=3, rows=128),
    "rope_kv_write": KernelConfig(tile=0, warps=1, stages=1, rows=4),
    "rms_norm": KernelConfig(tile=0, warps=8, stages=1),
    "silu_mul": KernelConfig(tile=1024, warps=4, stages=1),
    "copy_blocks": KernelConfig(tile=1024, warps=4, stages=4),
    "convert_blocks": KernelConfig(tile=0, warps=4, stages=1, rows=32),
    "sample": KernelConfig(tile=1024, warps=16, stages=1),
}
"""What a shape without an entry runs with. For attention, `rows` are packed rows: queries times group."""

_DEEP = KernelConfig(tile=64, warps=4, stages=4, rows=16)
_TALL = KernelConfig(tile=32, warps=4, stages=3, rows=16)
_WARPS = KernelConfig(tile=64, warps=8, stages=3, rows=16)

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
    ("decode", 256, 8, 64, "bfloat16", _TALL, _TALL),
    ("decode", 128, 4, 64, "int8", _DEEP, _DEEP),
    ("decode", 128, 4, 64, "float8_e4m3fn", _DEEP, _DEEP),
    ("decode_shared", 128, 4, 64, "bfloat16", None, None),
    ("merge", 128, 4, 64, "bfloat16", None, None),
    ("prefill", 64, 3, 16, "bfloat16", None, None),
    ("prefill", 128, 4, 16, "bfloat16", None, None),
    ("prefill", 128, 4, 64, "bfloat16", None, None),
    ("prefill", 128, 4, 64, "int8", KernelConfig(32, 8, 3, 128), None),
    ("prefill", 256, 8, 64, "bfloat16", KernelConfig(32, 8, 2, 64), KernelConfig(32, 8, 2, 64)),
    ("rope_kv_write", 128, 4, 64, "bfloat16", None, None),
    ("rope_kv_write", 128, 4, 64, "float8_e4m3fn", None, None),
    ("rms_norm", 0, 0, 0, "bfloat16", None, None),
    ("silu_mul", 0, 0, 0, "bfloat16", None, None),
    ("copy_blocks", 128, 0, 64, "bfloat16", None, None),
    ("convert_blocks", 128, 0, 64, "int8", None, None),
    ("convert_blocks", 128, 0, 64, "float8_e4m3fn", None, None),
    ("sample", 0, 0, 0, "float32", None, None),
]



def read_measured(path: Path) -> dict[ConfigKey, KernelConfig]:
    """The entries of a `measured.json`; none if there is no such file. Raises ValueError for one of a dry run, and for
    a kernel that there is not."""
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


TABLE = {
    ConfigKey(kernel, head_dim, group, block_size, dtype, arch): entry or DEFAULTS[kernel]
    for kernel, head_dim, group, block_size, dtype, *entries in _ENTRIES
    for arch, entry in zip((80, 90), entries, strict=True)
} | read_measured(MEASURED)


def config_for(key: ConfigKey) -> KernelConfig:
    """The table's entry, or the kernel's default with room for the group. Raises KeyError for an unknown kernel."""
    config = TABLE.get(key)
    if config is not None:
        return config
    config = DEFAULTS[key.kernel]
    if key.kernel in ("decode", "decode_shared", "prefill") and key.group > config.rows:
        return replace(config, rows=1 << (key.group - 1).bit_length())
    return config
