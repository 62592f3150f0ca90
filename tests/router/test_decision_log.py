"""The log of decisions: whole lines, exact numbers, a bounded size, and a disk that may do what it likes."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.types import RequestId
from router.core.decisions import VERSION, Decision
from router.decision_log import BrokenLineError, DecisionLog, decision_of, line_of
from tests.router.core.made_decisions import made

LARGE = 1 << 30
WRITTEN = f'"version":{VERSION}'.encode()  # as every line has it


class Lines:
    """How many lines a log has written and dropped."""

    def __init__(self) -> None:
        self.written = self.dropped = 0

    def __call__(self, written: int, dropped: int) -> None:
        self.written += written
        self.dropped += dropped


def eventually(is_so: Callable[[], bool], limit_s: float = 10.0) -> bool:
    end_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.01)
    return is_so()


def wrote(path: Path, decisions: list[Decision], most_bytes: int = LARGE) -> Lines:
    """Log all of it and end."""
    lines = Lines()
    log = DecisionLog(str(path), most_bytes, 0.0, lines)
    for decision in decisions:
        log.put(decision)
    log.close(10.0)
    return lines


def test_what_is_read_is_what_was_written() -> None:
    """Guards every number to its last bit, also where it is none."""
    for decision in made(times=50):
        assert repr(decision_of(line_of(decision))) == repr(decision)
    (decision,) = made(times=1)
    for number in (math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1 + 0.2, 1.7976931348623157e308, 1 / 3):
        views = [msgspec.structs.replace(view, s_per_token=number) for view in decision.prefills]
        changed = msgspec.structs.replace(decision, prefills=views, request=RequestId("null and NaN"))
        assert repr(decision_of(line_of(changed))) == repr(changed)
    nothing = msgspec.structs.replace(decision, choice=None)
    assert repr(decision_of(line_of(nothing))) == repr(nothing)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ((b'"queue_tokens":0', b'"queue_tokens":1'), "checksum"),
        ((WRITTEN, b'"version":3'), f"version 3; this program reads version {VERSION}"),
        ((WRITTEN, b'"version":"x"'), "no decision"),
        ((b'"demand"', b'"demand'), "no decision"),
        ((b',"crc32"', b',"crc"'), "checksum"),
    ],
)
def test_a_line_that_is_not_as_it_was_written_is_refused(change: tuple[bytes, bytes], told: str) -> None:
    line = next(line for line in map(line_of, made(times=20)) if b'"queue_tokens":0' in line)
    changed = line.replace(*change)
    assert changed != line
    with pytest.raises(BrokenLineError, match=told):
        decision_of(changed)


def test_the_file_begins_anew_at_its_size_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Guards the disk, and the lines around a rotation: all but those of files that were replaced."""
    path, decisions = tmp_path / "log", made(times=60)
    size = sum(map(len, map(line_of, decisions))) // 4
    first, second = decisions[:20], decisions[20:]
    assert (wrote(path, first, size).written, wrote(path, second, size).written) == (20, 40)
    before = (tmp_path / "log.1").read_bytes().splitlines()
    found = [decision_of(line).number for line in [*before, *path.read_bytes().splitlines()]]
    assert found == list(range(found[0], 61)) and before
    assert {entry.name for entry in tmp_path.iterdir()} == {"log", "log.1"}
    assert all(entry.stat().st_size <= size and entry.stat().st_mode & 0o077 == 0 for entry in tmp_path.iterdir())


def test_the_times_are_those_of_the_day(tmp_path: Path) -> None:
    log = DecisionLog(str(tmp_path / "log"), LARGE, 1000.0, Lines())
    log.put(made(times=4)[3])
    log.close(10.0)
    assert decision_of((tmp_path / "log").read_bytes()).at_s == 1001.0


def test_a_torn_line_is_cut_off_by_the_next_router(tmp_path: Path) -> None:
    """Guards against two lines that become one, and are both lost."""
    path, decisions = tmp_path / "log", made(times=4)
    wrote(path, decisions[:2])
    whole = path.read_bytes()
    for piece in (line_of(decisions[2])[:-1], b"{", b"x" * 200_000):
        path.write_bytes(whole + piece)
        wrote(path, decisions[3:])
        assert [decision_of(line).number for line in path.read_bytes().splitlines()] == [1, 2, 4]


WRITER = """
import itertools, sys
from router.decision_log import DecisionLog
from tests.router.core.made_decisions import made
log, decisions = DecisionLog(sys.argv[1], 1 << 30, 0.0, lambda written, dropped: None), made(times=100)
for number in itertools.count():
    log._take(decisions[number % 100])
    if number % 100 == 99:
        log._flush()
"""


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    """Guards lines that are there in part, with more behind them: killed while it writes, at no moment of its own."""
    path = tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        assert eventually(lambda: path.exists() and path.stat().st_size > 2_000_000, 30.0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    *lines, rest = path.read_bytes().split(b"\n")
    assert len(lines) > 500 and [decision_of(line) for line in lines]
    if rest:
        with pytest.raises(BrokenLineError):
            decision_of(rest)


@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/log"])
def test_a_disk_that_takes_nothing_costs_lines(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the router against its log: nothing is raised or waits, and it is told once."""
    lines = wrote(Path(path), made(times=30))
    assert (lines.written, lines.dropped) == (0, 30)
    assert len([record for record in caplog.records if "not written" in record.message]) == 1


def test_a_host_without_threads_costs_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the request that is the first to be logged."""
    start, refused = threading.Thread.start, [True]

    def refuse(thread: threading.Thread) -> None:
        if refused.pop():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    refused.insert(0, False)
    lines = wrote(tmp_path / "log", made(times=5))
    assert (lines.dropped, lines.written) == (1, 4)


def test_a_disk_with_room_again_is_written_to_again(tmp_path: Path) -> None:
    path, lines, decisions = tmp_path / "folder" / "log", Lines(), made(times=2)
    log = DecisionLog(str(path), LARGE, 0.0, lines)
    log.put(decisions[0])
    assert eventually(lambda: lines.dropped == 1)
    path.parent.mkdir()
    log.put(decisions[1])
    log.close(10.0)
    assert [decision_of(line).number for line in path.read_bytes().splitlines()] == [2]


def test_a_full_disk_leaves_no_piece_of_a_line(tmp_path: Path) -> None:
    """Guards the first line after a write that ended in the middle: as on a disk with room for a part."""
    path, decisions = tmp_path / "log", made(times=3)
    wrote(path, decisions[:1])
    script = "import resource, sys; from pathlib import Path; from tests.router.test_decision_log import limited; " \
        "limited(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=60)
    wrote(path, decisions[2:])
    assert [decision_of(line).number for line in path.read_bytes().splitlines()] == [1, 3]


def limited(path: Path) -> None:
    """Write a line to a file that may only grow by a half of it: in a process of its own."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    decision, size = made(times=2)[1], path.stat().st_size
    limit = size + len(line_of(decision)) // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    lines = wrote(path, [decision])
    assert (lines.written, lines.dropped) == (0, 1) and path.stat().st_size == size


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """Guards the event loop and the end of the router: a pipe that nobody reads takes 64 KB and then nothing."""
    path, lines, decisions = tmp_path / "pipe", Lines(), made(times=100)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = DecisionLog(str(path), LARGE, 0.0, lines)
    worst_s, puts = 0.0, 0
    while not lines.dropped and puts < 100_000:
        for decision in decisions:
            begin_s = time.thread_time()
            log.put(decision)
            worst_s = max(worst_s, time.thread_time() - begin_s)
        puts += len(decisions)
        time.sleep(0.02)
    assert lines.dropped and lines.written == 0 and worst_s < 0.05
    begin_s = time.monotonic()
    log.close(0.2)
    assert time.monotonic() - begin_s < 5.0
    os.close(reader)  # lets the thread go
