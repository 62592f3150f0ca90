"""The largest programs that attention's defaults come to: for each tile, stages, type and head size the most query
rows. What they take of shared memory is what no shape exceeds, whatever its group, block size and head size are."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import triton

from kernels.configs import ConfigKey, KernelConfig, default_config
from kernels.decode_attention import packed_rows
from tests.kernels.contract.attention_cases import decode_case, prefill_case
from tests.kernels.contract.measure import Case
from tests.kernels.contract.shapes import LARGEST

LEAST_HEAD = 64
"""Smaller heads take less, with the same configuration."""


class ProgramSize(NamedTuple):
    """What shared memory depends on, but for the rows."""

    kernel: str
    stored: str
    padded_head: int
    tile: int
    stages: int


def program_size(key: ConfigKey, config: KernelConfig) -> tuple[ProgramSize, int]:
    """Return what a program's shared memory depends on, with its packed rows."""
    is_prefill = key.kernel == "prefill"
    rows = config.rows if is_prefill else packed_rows(key.group, max(1, config.rows // key.group))
    stored = {"float16": "bfloat16", "float8_e4m3fn": "int8"}.get(key.dtype, key.dtype)
    padded = max(LEAST_HEAD, triton.next_power_of_2(key.head_dim))
    kind = "prefill" if is_prefill else "decode"
    return ProgramSize(kind, stored, padded, config.tile, config.stages), rows


def largest(arch: int) -> dict[ProgramSize, tuple[int, ConfigKey]]:
    """The most rows of each size, and a shape that has them."""
    found: dict[ProgramSize, tuple[int, ConfigKey]] = {}
    for key in _shapes(arch):
        try:
            size, rows = program_size(key, default_config(key))
        except ValueError:
            continue
        if rows > found.get(size, (0, key))[0]:
            found[size] = rows, key
    return found


def largest_cases(arch: int) -> list[Case]:
    """Named by what they are, so that none stands for another when defaults change."""
    cases = []
    for size, (rows, key) in largest(arch).items():
        build = prefill_case if key.kernel == "prefill" else decode_case
        name = f"{LARGEST}{size.kernel} d{size.padded_head} {size.stored}, {rows} x {size.tile} x {size.stages}"
        cases.append(replace(build(key, default_config(key)), name=name))
    return cases


def _shapes(arch: int) -> Iterator[ConfigKey]:
    for kernel in ("decode", "decode_shared", "prefill"):
        for dtype in ("bfloat16", "int8", "float32"):
            for head_dim in (LEAST_HEAD, 128, 256, 512):
                for doublings in range(9):
                    yield ConfigKey(kernel, head_dim, 1 << doublings, 64, dtype, arch)
