"""Processor time of process trees, and of those parts of a cluster that compute nothing."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.processor import CHILD, TICKS_PER_S, ProcessorTime, processor_time

BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"


def _stat(path: Path, name: str, parent: int, ticks: tuple[int, int]) -> None:
    path.mkdir(parents=True)
    (path / "stat").write_text(f"1 ({name}) S {parent} 0 0 0 0 0 0 0 0 0 {ticks[0]} {ticks[1]} 0 0\n")


def _process(proc: Path, pid: int, parent: int, words: list[str], ticks: tuple[int, int]) -> Path:
    folder = proc / str(pid)
    _stat(folder, "py (thon) x", parent, ticks)
    (folder / "cmdline").write_bytes("\0".join(["python", *words, ""]).encode())
    return folder / "task"


def test_routers_and_copying_threads_are_told_apart(tmp_path: Path) -> None:
    """Guards a router that is counted as a worker, and threads of other names or processes that are counted at all."""
    _process(tmp_path, 10, 1, ["headrace", "up"], (5, 5))
    _process(tmp_path, 11, 10, ["-m", CHILD, "router-0"], (20, 10))
    workers = _process(tmp_path, 12, 10, ["-m", CHILD, "decode-0"], (300, 100))
    _stat(workers / "13", "transfer", 10, (6, 1))
    _stat(workers / "14", "python", 10, (200, 0))
    (workers / "15").mkdir()  # a thread that ended between listing and reading
    _process(tmp_path, 99, 1, ["-m", CHILD, "router"], (1000, 1000))
    found = processor_time(10, tmp_path)
    assert found == ProcessorTime(all_s=440 / TICKS_PER_S, router_s=30 / TICKS_PER_S, transfer_s=7 / TICKS_PER_S)


def test_time_of_a_child_counts() -> None:
    before = processor_time(os.getpid())
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BURN], **pipes) as child:  # type: ignore[call-overload]
        child.stdout.readline()
        spent = processor_time(os.getpid()).since(before)
        child.stdin.close()
    assert spent.all_s >= 0.25 and spent.router_s == spent.transfer_s == 0
