"""Which tile, warps and stages a kernel runs with: a table, looked up once, instead of tuning at run time.

Run-time tuning would measure on a busy server, differ from process to process, and could not be compiled ahead or
tested without a GPU. `origin` says what an entry rests on: "contract" was chosen by what the compiler reports
(registers, spills, tiles in flight; `tests/kernels/contract`), "measured" on the hardware named in `docs/kernels.md`.
"""

from dataclasses import dataclass
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
