"""Idle cores are lent, and given back at once."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine import cores
from engine.cores import Cores


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(cores.time, "monotonic", lambda: now[0])
    return now


@contextmanager
def workers(path: Path, *threads: int, most: int = 16) -> Iterator[list[Cores]]:
    found = [Cores(path, n, most) for n in threads]
    try:
        yield found
    finally:
        for one in found:
            one.close()


def looked_twice(one: Cores, clock: list[float]) -> int:
    with one.at_work():
        for _ in range(2):
            clock[0] += cores.LOOK_S
            told = one.threads()
    return told


def test_an_idle_workers_threads_are_lent_and_given_back(tmp_path: Path, clock: list[float]) -> None:
    with workers(tmp_path / "cores", 1, 2) as (first, second):
        with first.at_work():
            clock[0] += cores.LOOK_S
            assert first.threads() == 1, "free at one look may be a breath between two steps"
            assert looked_twice(first, clock) == 3
            with second.at_work():
                assert first.threads() == 3, "nobody looks more often than once a millisecond"
                clock[0] += cores.LOOK_S
                assert first.threads() == 1, "given back at the next look"
            assert looked_twice(first, clock) == 3
        assert looked_twice(second, clock) == 3


def test_those_at_work_share_what_is_idle(tmp_path: Path, clock: list[float]) -> None:
    with (
        workers(tmp_path / "cores", 2, 2, 3, 2) as (first, second, *_idle),
        first.at_work(),
        second.at_work(),
    ):
        assert [looked_twice(one, clock) for one in (first, second)] == [4, 4]


def test_never_more_than_the_cores_there_are(tmp_path: Path, clock: list[float]) -> None:
    with workers(tmp_path / "cores", 2, 2, 2, most=3) as (first, *_idle), first.at_work():
        assert looked_twice(first, clock) == 3


def test_steps_that_overlap_in_one_process(tmp_path: Path, clock: list[float]) -> None:
    """Guards a process that counts as idle while one of its steps still runs."""
    with workers(tmp_path / "cores", 1, 1) as (first, second):
        with first.at_work():
            with first.at_work():
                pass
            assert looked_twice(second, clock) == 1
        assert looked_twice(second, clock) == 2


def _work(path: Path, ready: "multiprocessing.synchronize.Event") -> None:
    with Cores(path, 1, 16).at_work():
        ready.set()
        signal.pause()


def test_a_killed_workers_slot_is_used_again(tmp_path: Path, clock: list[float]) -> None:
    """Guards cores lost for good: killed in the middle of a step, it is replaced by another."""
    path = tmp_path / "cores"
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=_work, args=(path, ready))
    child.start()
    assert ready.wait(60)
    with workers(path, 1) as (first,):
        assert first._slot == 1, "the child's slot is taken"
        assert looked_twice(first, clock) == 1
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(60)
        assert looked_twice(first, clock) == 1, "it was at work when it died"
        with workers(path, 1) as (heir,):
            assert heir._slot == 0
            assert looked_twice(first, clock) == 2


def test_what_ended_workers_left_is_shared_out_anew(tmp_path: Path, clock: list[float]) -> None:
    """Guards cores lent twice: a cluster of two workers after one of six, whose slots nobody had taken over."""
    path = tmp_path / "cores"
    code = "import sys; from pathlib import Path; from engine.cores import Cores; c = [Cores(Path(sys.argv[1]), 1)"
    subprocess.run([sys.executable, "-c", f"{code} for _ in range(6)]", path], check=True, timeout=60)
    assert path.read_bytes()[:12] == bytes((1, 0)) * 6, "nobody clears up behind them"
    with workers(path, 4, 4) as (first, second):
        assert looked_twice(first, clock) == 8
        with second.at_work():
            assert looked_twice(first, clock) == 4


def test_a_host_without_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker's start in a container without a folder for temporary files, and one ended by its first write to
    a mapped hole that a full disk could not fill."""

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(cores.tempfile, "gettempdir", nowhere)
    assert cores.process_cores.__wrapped__(1) is None

    def full(file: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cores.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cores.os, "posix_fallocate", full)
    assert cores.process_cores.__wrapped__(1) is None


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        Cores(tmp_path / "link", 1)
    own = os.getuid()
    monkeypatch.setattr(cores.os, "getuid", lambda: own + 1)
    with pytest.raises(PermissionError, match="not a file of this user's"):
        Cores(tmp_path / "cores", 1)


def test_more_workers_than_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "SLOTS", 2)
    with workers(tmp_path / "cores", 1, 1), pytest.raises(OSError, match="more than 2 workers"):
        Cores(tmp_path / "cores", 1)
