"""Summed PSS: the tree is found, shared pages count once, odd process names do no harm."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.bench.memory import pss_bytes, tree, tree_pss_bytes

MIB = 1024 * 1024


def fake(proc: Path, pid: int, parent: int, command: str, pss_kib: int) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} ({command}) S {parent} 1 1 0 -1\n")
    (folder / "smaps_rollup").write_text(f"00-ff ---p [rollup]\nRss: 999 kB\nPss: {pss_kib} kB\n")


def test_tree_of_odd_names(tmp_path: Path) -> None:
    """Guards against parsing `stat` by spaces: a command may hold spaces and parentheses."""
    fake(tmp_path, 10, 1, "a) S 99 (b", 1)
    fake(tmp_path, 11, 10, "ray::IDLE", 2)
    fake(tmp_path, 12, 11, "x y", 4)
    fake(tmp_path, 13, 1, "other", 8)
    (tmp_path / "meminfo").write_text("")
    (tmp_path / "14").mkdir()  # a process that ended between listing and reading
    assert tree(10, tmp_path) == [10, 11, 12]
    assert tree_pss_bytes(10, tmp_path) == 7 * 1024
    assert pss_bytes(14, tmp_path) == 0


def test_a_missing_process_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessLookupError):
        tree_pss_bytes(10, tmp_path)


def test_pages_shared_by_two_processes_count_once() -> None:
    """Guards the figure in the docs: with RSS the shared pool would count twice."""
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, 64 * MIB)
    program = (
        "import mmap,sys; m=mmap.mmap(int(sys.argv[1]),0); "
        "sum(m[::4096]); print(flush=True); sys.stdin.read()"
    )
    with mmap.mmap(descriptor, 0) as pool:
        pool[::4096] = b"x" * (64 * MIB // 4096)
        before = tree_pss_bytes(os.getpid())
        command = [sys.executable, "-S", "-c", program, str(descriptor)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            assert child.pid in tree(os.getpid())
            assert pss_bytes(child.pid) > 24 * MIB
            assert tree_pss_bytes(os.getpid()) - before < 32 * MIB
    os.close(descriptor)
