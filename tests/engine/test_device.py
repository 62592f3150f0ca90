"""What opening an engine does to its process."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, json, sys
import torch
from engine.config import EngineConfig
from engine.device import open_device

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "heap a b pieces mapped c d e f g".split()]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Info

def kept():
    before = library.mallinfo2()
    some = torch.empty(30 << 20, dtype=torch.uint8)
    during = library.mallinfo2()
    del some
    return [during.mapped - before.mapped, library.mallinfo2().heap - during.heap]

if sys.argv[1:]:
    open_device(EngineConfig(model_dir=sys.argv[1], threads=1, pool_bytes=8 << 20, lend_cores=False))
print(json.dumps(kept()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have settings of their own")
def test_memory_of_a_step_stays_with_the_process(demo_model: Path) -> None:
    """Guards a page fault for each 4 KiB of what a step computes, in each layer anew: 5 % of a prompt's time."""
    before, after = kept_by(), kept_by(str(demo_model))
    assert before[0] >= 30 << 20, "large pieces are not mapped one by one here: nothing is shown"
    assert after == [0, 0]


def kept_by(*arguments: str) -> list[int]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    told = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert told.returncode == 0, told.stderr
    found: list[int] = json.loads(told.stdout)
    return found
