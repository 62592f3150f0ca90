"""What the parts about kernels launch on an H100 compiles for one, and fits it: their own code, at the sizes of a card,
on tensors without memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import correct
from benchmarks.gpu.parts import PARTS
from kernels.configs import SHARED_BYTES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")
SOURCE = Path(__file__).parents[2]
KERNEL_PARTS = ("orders", "decode", "eight_bits", "shared", "blocks", "prefill", "copies")


def compile_parts() -> None:
    """Compile what the parts launch; to be called in a process that does not run Triton's interpreter. Raises what a
    launch raises."""
    from kernels.compile_only import compile_only
    from tests.kernels.contract.launched import without_memory

    card = without_memory(90)
    with compile_only(90, SHARED_BYTES[90]) as compiled:
        for name in KERNEL_PARTS:
            print(name, len(list(PARTS[name].lines(card))))
        for case in correct.CASES:
            correct.launched(card, case, correct.random_rows(card, case))
        print("kernels", len(compiled))


@pytest.mark.slow
def test_every_part_about_kernels_compiles_and_fits() -> None:
    """Guards the first minutes on a card against a launch that is refused there: so one case took the others along."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = "from tests.benchmarks.test_gpu_launches import compile_parts; compile_parts()"
    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, env=environment, cwd=SOURCE, timeout=600
    )
    assert done.returncode == 0, done.stderr
    counted = dict(line.split() for line in done.stdout.splitlines())
    assert list(counted) == [*KERNEL_PARTS, "kernels"]
    assert all(int(count) for count in counted.values()) and int(counted["kernels"]) > 60
