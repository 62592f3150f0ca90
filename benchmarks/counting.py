"""Workers that count: the real ones, with a stopwatch around every digest and a count of the tokens they compute.

Each process keeps its numbers in `$WORKER_COUNTS/<name>`; see `CopyCounts`. A replaced worker starts again at zero.
"""

import mmap
import os
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

import transfer.route
import worker.opening
from decode_worker.role import open_decode_worker
from engine.runner import Launched, Runner
from engine.step import StepPlan
from prefill_worker.role import open_prefill_worker
from worker.worker import Worker

FOLDER = "WORKER_COUNTS"
FACTORIES = {
    "prefill": "benchmarks.counting:counting_prefill_worker",
    "decode": "benchmarks.counting:counting_decode_worker",
    "router": "router.server:RouterServer",
}
TRANSFER_THREAD = "transfer"
_FORMAT = struct.Struct("<dQQQ")


class CopyCounts(msgspec.Struct):
    """The counts of one process since it started, or between two looks at it."""

    digest_cpu_s: float = 0.0
    """CPU time of the threads that made digests, while they did."""
    digests: int = 0
    digests_elsewhere: int = 0
    """Digests made by any thread but the transfer thread."""
    computed_tokens: int = 0

    def since(self, before: "CopyCounts") -> "CopyCounts":
        return CopyCounts(
            self.digest_cpu_s - before.digest_cpu_s,
            self.digests - before.digests,
            self.digests_elsewhere - before.digests_elsewhere,
            self.computed_tokens - before.computed_tokens,
        )


def read_counts(folder: Path, name: str) -> CopyCounts:
    """Return what the worker `name` has counted so far; all zero before it has started."""
    path = folder / name
    raw = path.read_bytes() if path.exists() else b""
    return CopyCounts(*_FORMAT.unpack(raw)) if len(raw) == _FORMAT.size else CopyCounts()


class _Ledger:
    """The numbers of this process. Each is written by one thread."""

    def __init__(self, name: str) -> None:
        path = Path(os.environ[FOLDER]) / name
        path.write_bytes(_FORMAT.pack(0.0, 0, 0, 0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self.counts = CopyCounts()

    def write(self) -> None:
        counts = self.counts
        self._memory[:] = _FORMAT.pack(
            counts.digest_cpu_s, counts.digests, counts.digests_elsewhere, counts.computed_tokens
        )


class _CountingRunner:
    def __init__(self, inner: Runner, ledger: _Ledger) -> None:
        self.kv = inner.kv
        self._inner, self._ledger = inner, ledger

    def launch(self, plan: StepPlan) -> Launched:
        launched = self._inner.launch(plan)
        self._ledger.counts.computed_tokens += plan.computed_tokens
        self._ledger.write()
        return launched


def _count(name: str) -> None:
    """Replace what is to be counted. Runs in a process of its own, where the names it replaces have no other reader."""
    ledger = _Ledger(name)
    route: Any = transfer.route
    opening: Any = worker.opening
    digest, open_device = route.block_digest, opening.open_device

    def timed(*arguments: Any, **named: Any) -> int:
        began_s = time.thread_time()
        found: int = digest(*arguments, **named)
        ledger.counts.digest_cpu_s += time.thread_time() - began_s
        ledger.counts.digests += 1
        ledger.counts.digests_elsewhere += threading.current_thread().name != TRANSFER_THREAD
        ledger.write()
        return found

    def opened(*arguments: Any, **named: Any) -> Any:
        device = open_device(*arguments, **named)
        return replace(device, runner=_CountingRunner(device.runner, ledger))

    route.block_digest = timed
    opening.open_device = opened


def counting_prefill_worker(name: str, *rest: Any) -> Worker[Any]:
    _count(name)
    return open_prefill_worker(name, *rest)


def counting_decode_worker(name: str, *rest: Any) -> Worker[Any]:
    _count(name)
    return open_decode_worker(name, *rest)
