"""The launches of `benchmarks.gpu.correct`, as they are on a card: its own code runs on tensors without memory, and
what it launches is compiled. So a case that it gets is one here, with the very constants that it is launched with."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import correct
from benchmarks.gpu.card import Card, Sizes
from benchmarks.gpu.dry import Clock
from kernels import decode_attention, prefill_attention, prefill_hopper
from kernels.compile_only import compile_only
from kernels.configs import config_for
from tests.kernels.contract.shapes import tile_bytes

SMS = 132
ANY_BYTES = 1 << 30
"""More shared memory than any GPU has: a launch that needs too much shall be counted here, and not refused."""
KERNELS = {
    "decode": (decode_attention.decode_kernel, decode_attention.merge_kernel),
    "prefill": (prefill_attention.prefill_kernel,),
    "hopper": (prefill_hopper.prefill_hopper_kernel,),
}


@dataclass(frozen=True, slots=True)
class LaunchedCase:
    """The launch of `kernel` by one case of `correct`. The rest as in `Case`."""

    name: str
    case: correct.Case
    kernel: Any
    warps: int
    stages: int
    tile_bytes: int = 0
    loops: int = 1

    def compile(self, arch: int) -> Any:
        """Raises ValueError where the case launches something else than `KERNELS` says."""
        card = without_memory(arch)
        with compile_only(arch, ANY_BYTES) as compiled:
            correct.launched(card, self.case, correct.random_rows(card, self.case))
        found = {kernel.metadata.name: kernel for kernel in compiled}
        known = {kernel.__name__ for kernel in KERNELS[self.case.kind]}
        if set(found) != known:
            raise ValueError(f"{self.name}: launches {sorted(found)}, not {sorted(known)}")
        return found[self.kernel.__name__]


def without_memory(arch: int) -> Card:
    return Card(torch.device("meta"), Clock(), torch.bfloat16, arch, SMS, Sizes())


def launched_cases(arch: int) -> list[LaunchedCase]:
    """All of `correct`'s on such a GPU: a case for attention of each, and one for each shape that is merged."""
    card = without_memory(arch)
    found: dict[str, LaunchedCase] = {}
    for case in correct.CASES + (correct.ON_HOPPER if arch == 90 else []):
        key = case.key(card)
        config = config_for(key)
        main, *merging = KERNELS[case.kind]
        loops = 2 if case.kind == "prefill" else 1
        name = f"correct: {case.name(card)}"
        if case.kind == "hopper":
            warps, stages = prefill_hopper.WARPS, prefill_hopper.STAGES
            found[name] = LaunchedCase(name, case, main, warps, stages)
            continue
        found[name] = LaunchedCase(
            name, case, main, config.warps, config.stages, tile_bytes(key, config), loops
        )
        merge = decode_attention.MERGE
        for kernel in merging:
            name = f"correct: merge {case.heads}/{case.head_dim}"
            found.setdefault(name, LaunchedCase(name, case, kernel, merge.warps, merge.stages))
    return list(found.values())
