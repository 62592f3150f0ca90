"""How many programs an SM holds, and a grid that is made for it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import decode_attention as subject
from kernels.configs import ConfigKey, config_for
from kernels.decode_attention import decode_residency
from kernels.pool import KVPool
from kernels.residency import UNKNOWN, Multiprocessor, residency, resident_programs

HOPPER = Multiprocessor(shared_bytes=228 << 10)
CONTRACT = json.loads((Path(__file__).parent / "contract" / "contract.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "programs"),
    [
        (141, 48 << 10, 4, 3),  # three by registers: a part of the SM holds three warps of 144
        (255, 48 << 10, 4, 2),
        (168, 112 << 10, 4, 2),  # two by shared memory: a third would need 3 x 113 KiB
        (64, 114 << 10, 4, 1),  # one: 2 x 115 KiB is more than there is
        (32, 0, 8, 8),
        (16, 0, 16, 4),  # by threads
        (255, 0, 16, 0),  # more than a program may have
    ],
)
def test_an_sm_holds_what_it_has_room_for(registers: int, shared_bytes: int, warps: int, programs: int) -> None:
    """Guards the grid's size against each of the three limits, and against the units that they are given in."""
    assert resident_programs(registers, shared_bytes, warps, HOPPER) == programs


def test_kernels_differ_in_how_many_fit() -> None:
    """Guards the reason for asking: a step that is planned for three programs of an SM, of which two fit, takes
    another wave."""
    seen = {}
    for kind, block, dtype in (("decode", 64, "bfloat16"), ("decode_shared", 64, "bfloat16")):
        counts = next(
            counts
            for name, counts in CONTRACT["3.7.1"]["sm_90"].items()
            if name.startswith(f"{kind} d128 ") and f"b{block} " in name and dtype in name
        )
        warps = config_for(ConfigKey(kind, 128, 4, block, dtype, 90)).warps
        seen[kind] = resident_programs(counts["registers"], counts["shared_bytes"], warps, HOPPER)
    assert seen == {"decode": 3, "decode_shared": 2}


class _Compiled:
    """What Triton says of a kernel, once it was loaded."""

    def __init__(self, registers: int) -> None:
        self._registers = registers
        self.n_regs = None
        self.metadata = SimpleNamespace(shared=48 << 10, num_warps=4)

    def _init_handles(self) -> None:
        self.n_regs = self._registers


def test_registers_are_told_when_the_kernel_is_loaded() -> None:
    """Guards against reading them before, and against a driver that loads nothing and says 0."""
    assert residency(_Compiled(141), HOPPER) == 3
    assert residency(_Compiled(0), HOPPER) is None


def test_off_a_gpu_nobody_can_say() -> None:
    config = config_for(ConfigKey("decode", 64, 2, 16, "float32", 90))
    pool = KVPool(torch.zeros(2, 1, 1, 2, 16, 64), None)
    assert decode_residency(2, torch.float32, pool, config, 4) == UNKNOWN


def test_the_kernel_is_asked_as_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the residency of another kernel than the one that will run: constants that differ would compile a
    second one."""
    asked = {}
    pool = KVPool(torch.zeros(2, 1, 1, 2, 16, 64), None)
    config = config_for(ConfigKey("decode", 64, 2, 16, "float32", 90))

    def warmup(*given: object, grid: tuple[int, ...], **constants: object) -> _Compiled:
        asked.update(constants)
        return _Compiled(255)

    monkeypatch.setattr(subject, "decode_kernel", SimpleNamespace(warmup=warmup))
    scores = subject._Scores(None, 30.0, torch.zeros(2))
    assert residency(subject._compiled(2, torch.float32, pool, config, 4, 40, scores), HOPPER) == 2
    assert (asked["WINDOW"], asked["SOFTCAP"], asked["SINKS"]) == (40, 30.0, True)
    assert (asked["HEADS"], asked["GROUP"], asked["TABLE_BLOCKS"], asked["TILE"]) == (2, 2, 4, config.tile)
    assert (asked["num_warps"], asked["num_stages"]) == (config.warps, config.stages)
