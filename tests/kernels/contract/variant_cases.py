"""The attention kernels with the options of layers: windows, soft caps, sinks, rotation of some columns or of none.

The options cost nothing where they are off, as the cases without them show; these show what they cost where they are
on."""

from dataclasses import replace
from typing import Any

from kernels.configs import ConfigKey, config_for
from tests.kernels.contract.attention_cases import decode_case, merge_case, prefill_case
from tests.kernels.contract.measure import Case
from tests.kernels.contract.other_cases import rope_case

BUILD = {
    "decode": decode_case,
    "decode_shared": decode_case,
    "merge": merge_case,
    "prefill": prefill_case,
    "rope_kv_write": rope_case,
}

VARIANTS: list[tuple[str, int, int, str, dict[str, Any]]] = [
    ("decode", 128, 4, "bfloat16", {"WINDOW": 4096}),
    ("decode_shared", 128, 4, "bfloat16", {"WINDOW": 4096, "ROW_WINDOWS": True}),
    ("prefill", 128, 4, "bfloat16", {"WINDOW": 4096}),
    ("decode", 128, 4, "int8", {"WINDOW": 4096}),
    ("prefill", 128, 4, "int8", {"WINDOW": 4096}),
    ("decode", 256, 4, "bfloat16", {"WINDOW": 512}),
    ("prefill", 256, 4, "bfloat16", {"WINDOW": 512}),
    ("decode", 256, 2, "bfloat16", {"WINDOW": 4096, "SOFTCAP": 50.0}),
    ("decode", 256, 2, "bfloat16", {"SOFTCAP": 50.0}),
    ("decode_shared", 256, 2, "bfloat16", {"SOFTCAP": 50.0}),
    ("prefill", 256, 2, "bfloat16", {"SOFTCAP": 50.0}),
    ("prefill", 256, 2, "bfloat16", {"WINDOW": 4096, "SOFTCAP": 50.0}),
    ("decode", 64, 8, "bfloat16", {"SINKS": True}),
    ("decode", 64, 8, "bfloat16", {"WINDOW": 128, "SINKS": True}),
    ("decode_shared", 64, 8, "bfloat16", {"SINKS": True}),
    ("prefill", 64, 8, "bfloat16", {"SINKS": True}),
    ("prefill", 64, 8, "bfloat16", {"WINDOW": 128, "SINKS": True}),
    ("merge", 64, 8, "bfloat16", {"WINDOWED": True, "SINKS": True}),
    ("rope_kv_write", 128, 3, "bfloat16", {"TURNED": 48}),
    ("rope_kv_write", 128, 3, "bfloat16", {"TURNED": 48, "NORM": False}),
    ("rope_kv_write", 128, 4, "bfloat16", {"TURNED": 0, "NORM": False}),
    ("rope_kv_write", 128, 4, "float8_e4m3fn", {"TURNED": 0, "NORM": False}),
]
"""Kernel, head size, group, stored type, and the constants that differ."""


def variant_cases(arch: int) -> list[Case]:
    """In the configurations that the engine would choose, over blocks of 64 tokens."""
    found = []
    for kernel, head_dim, group, dtype, options in VARIANTS:
        key = ConfigKey(kernel, head_dim, group, 64, dtype, arch)
        plain = BUILD[kernel](key, config_for(key))
        shown = ", ".join(f"{name.lower()} {value}" for name, value in options.items())
        # A window is swept in one loop, without the one before the diagonal.
        loops = 1 if "WINDOW" in options else plain.loops
        constants = {**plain.constants, **options}
        found.append(replace(plain, name=f"variant: {plain.name}, {shown}", constants=constants, loops=loops))
    return found
