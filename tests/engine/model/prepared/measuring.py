"""What preparing a model, and loading a part of it, take of a process's own memory, in a process of their own."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[4]

_PROGRAM = """
import re, sys, threading
from pathlib import Path
import torch
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.model.split import Share

def own():
    return 1024 * int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

class Alone:
    def __init__(self, share):
        self.share = share

torch.set_num_threads(1)
torch.ones(64, 64) @ torch.ones(64, 64)
most, over = own(), threading.Event()
def watch():
    global most
    while not over.wait(0.002):
        most = max(most, own())
before = own()
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
folder = prepare(sys.argv[1], Path(sys.argv[2]))
prepared, most = most - before, own()
share = Share(int(sys.argv[3]), int(sys.argv[4]))
model = load_model(folder, panels=True, ranks=Alone(share) if share.ranks > 1 else None)
over.set()
watcher.join()
print(prepared, most - before, model.weights_bytes, folder)
"""


class Measured(NamedTuple):
    """`preparing`, `loading`: the most bytes that were added while that was done; `weights`: of what was loaded;
    `folder`: the prepared model."""

    preparing: int
    loading: int
    weights: int
    folder: Path


def measured(source: Path | str, cache: Path, rank: int = 0, ranks: int = 1) -> Measured:
    told = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(source), str(cache), str(rank), str(ranks)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    *numbers, folder = told.stdout.split()
    return Measured(*(int(number) for number in numbers), Path(folder))
