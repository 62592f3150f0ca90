"""What opening an engine does to its process."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, resource, sys, threading
import torch
from engine.config import EngineConfig
from engine.device import open_device

found = []

def step():
    kept = [torch.empty(400_000).fill_(1.0) for _ in range(8)]
    del kept

def count():
    step()  # the first faults its memory in
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

def in_a_thread():
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()

count()
open_device(EngineConfig(model_dir=sys.argv[1], threads=1, pool_bytes=8 << 20, lend_cores=False))
count()
in_a_thread()
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have settings of their own")
def test_memory_of_a_step_stays_with_the_process(demo_model: Path) -> None:
    """Guards a page fault for each 4 KiB of what a step computes, in each layer anew: a twentieth of a prompt's time. An
    engine's steps run in a thread, which has memory of its own."""
    command = [sys.executable, "-c", PROGRAM, str(demo_model)]
    told = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert told.returncode == 0, told.stderr
    before, after, in_a_thread = json.loads(told.stdout)
    assert before > 1_000, "memory costs no faults here: nothing is shown"
    assert after < 100 and in_a_thread < 100
