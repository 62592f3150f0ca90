"""The count of compilations: what Triton tells when it compiles, here for a device that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.compilations import Compilations

SCRIPT = """
import json, logging, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Absent:
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

driver.set_active(Absent())
from kernels.launch import count_compilations
from kernels.silu_mul import silu_mul_kernel

logging.basicConfig(stream=sys.stderr, format="%(message)s")
counted, seen = count_compilations(), []
rows = torch.zeros(64, dtype=torch.float32)

def gate(x, width):
    silu_mul_kernel.warmup(x, rows, WIDTH=width, TILE=16, num_warps=1, grid=(1,))
    seen.append(counted.counts)

gate(rows, 16)
gate(rows[16:], 16)
counted.serve()
gate(rows[32:], 16)
gate(rows[1:], 16)
print(json.dumps(seen))
"""


def test_triton_tells_of_every_compilation(tmp_path: Path) -> None:
    """Guards the hook: a launch like one before costs nothing, one with an address that is no multiple of 16 bytes is
    another kernel, and while requests wait it is named in the log."""
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == [
        {"start": 1, "serving": 0},
        {"start": 1, "serving": 0},
        {"start": 1, "serving": 0},
        {"start": 1, "serving": 1},
    ]
    assert told.stderr.count("silu_mul_kernel was compiled while requests waited") == 1


def test_a_warning_names_the_kernel_only_while_serving(caplog: pytest.LogCaptureFixture) -> None:
    counted = Compilations()
    counted.compiled("decode_kernel")
    assert not caplog.records and counted.counts == {"start": 1, "serving": 0}
    counted.serve()
    counted.compiled("merge_kernel")
    assert "merge_kernel was compiled" in caplog.text
    assert counted.counts == {"start": 1, "serving": 1} and counted.total == 2
