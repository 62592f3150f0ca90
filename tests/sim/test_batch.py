"""Runs in several processes, and the ledger they are noted in."""

import sys
from pathlib import Path
from types import FrameType

import pytest

from tests.sim import __main__ as command
from tests.sim import batch, ledger
from tests.sim.batch import run, run_batch
from tests.sim.bugs import planted

SEEDS = range(79_000_000, 79_000_024)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several make up a run, which is over with the batch in which it has enough."""
    monkeypatch.setattr(batch, "BATCH", 5)


def test_two_processes_find_what_one_finds() -> None:
    """Guards against batches that are lost, run twice, or depend on what ran before in the same process."""
    alone, shared = (run(SEEDS, True, None, None, processes) for processes in (1, 2))
    assert shared.ran == alone.ran == len(SEEDS) and shared.last == alone.last == SEEDS[-1]
    assert (shared.counted, shared.events) == (alone.counted, alone.events)
    assert (shared.notes, shared.struck) == (alone.notes, alone.struck)
    assert alone.counted > 12 and not alone.failures


def test_a_run_that_fails_is_in_the_ledger_and_counts_for_nothing(tmp_path: Path) -> None:
    """Guards the cumulative count: against failures that are forgotten and against seeds that are used twice."""
    path, seeds = tmp_path / "ledger.jsonl", range(79_000_000, 80_000_000)
    good = run(ledger.unused(ledger.read(path), seeds), True, None, 10, 1)
    first = ledger.write(path, seeds.start, good)
    behind = ledger.unused(ledger.read(path), seeds)
    assert first.counted >= 10 and behind.start == first.last + 1
    with planted("double_free_on_retry"):
        bad = run(behind, True, None, None, 2)
    second = ledger.write(path, behind.start, bad)
    assert second.failures and all(behind.start <= seed <= second.last for seed in second.failures)
    entries = ledger.read(path)
    assert entries == [first, second] and ledger.unused(entries, seeds).start == second.last + 1
    assert ledger.unused(entries, range(80_000_000, 81_000_000)).start == 80_000_000
    total = ledger.total(entries)
    assert total.startswith(f"{first.counted} schedules that count in 1 clean runs")
    assert total.endswith("1 runs found a failure")


def test_a_long_run_is_noted_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a run of hours against what ends it early: all but its last piece counts, and the next goes on behind."""
    path, seeds = tmp_path / "ledger.jsonl", range(79_000_000, 79_000_040)
    monkeypatch.setattr(command, "NOTED", 8)
    report = command._noted(path, seeds, True, None, 14, 1)
    entries = ledger.read(path)
    assert len(entries) == 2 and sum(entry.counted for entry in entries) == report.counted >= 14
    assert entries[0].last + 1 == entries[1].first and entries[1].last == report.last
    command._noted(path, ledger.unused(entries, seeds), True, None, None, 1)
    assert ledger.unused(ledger.read(path), seeds) == range(79_000_040, 79_000_040), "seeds are left over"
    assert sum(entry.schedules for entry in ledger.read(path)) == len(seeds)


def test_counting_goes_on_until_the_number_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a count over one source that takes several runs: against what other sources have, what failed, and seeds
    that are used again; and against a piece that is noted for a source that it did not run."""
    path = tmp_path / "ledger.jsonl"

    def until(number: int) -> list[ledger.Entry]:
        arguments = ["tests.sim", "--until", str(number), "--seed", "79", "--ledger", str(path)]
        monkeypatch.setattr("sys.argv", arguments)
        assert command.main() == 0
        return ledger.read(path)

    other = ledger.write(path, 79_000_000, run(SEEDS[:5], True, None, None, 1))
    path.write_text(path.read_text().replace(other.cores, "0" * 16))
    assert ledger.counted(ledger.read(path)) == 0 and other.counted > 0
    _, first = until(4)
    assert first.counted >= 4 and first.first == 79_000_005
    _, _, second = until(first.counted + 8)
    assert second.counted >= 8 and second.first == first.last + 1
    assert len(until(first.counted + second.counted)) == 3, "nothing was left to do"
    monkeypatch.setattr(ledger, "source_hash", iter(map(str, range(99))).__next__)
    with pytest.raises(SystemExit, match="changed during the run"):
        command._noted(path, SEEDS, True, None, 1, 1)
    assert len(path.read_text().splitlines()) == 3


def test_what_schedules_run_is_counted_as_their_source() -> None:
    """Guards a count over one source against a file of the cores that could change beside it."""
    ran = set[str]()

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    sys.setprofile(seen)
    try:
        run_batch(SEEDS[:10], strict=True)
    finally:
        sys.setprofile(None)
    counted = set(ledger.sources())
    packages = {path.relative_to(ledger.ROOT).parts[0] for path in counted}
    ours = {Path(file) for file in ran if Path(file).is_relative_to(ledger.ROOT)}
    missed = {path for path in ours - counted if path.relative_to(ledger.ROOT).parts[0] in packages}
    assert not missed and {"router", "engine", "decode_worker"} <= packages
    assert len(ours & counted) > 50, "hardly anything was seen"
