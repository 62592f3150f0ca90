"""The ledger of runs: one line of JSON each, so that schedules over disjoint seeds add up, and over which source.

A run goes on behind the seeds that its SEED has used so far, so no schedule is counted twice.
"""

import datetime
import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.sim.batch import Report

ROOT = Path(__file__).parent.parent.parent
LEDGER = Path(__file__).parent / "ledger.jsonl"
CORES = (
    "decode_worker/**/*.py",
    "prefill_worker/**/*.py",
    "worker/*.py",
    "transfer/*.py",
    "transfer/handoff/*.py",
    "transfer/host/*.py",
    "transfer/ranks/*.py",
    "router/core/**/*.py",
    "router/status/*.py",
    "router/config.py",
    "router/dispatch.py",
    "router/hub.py",
    "router/roster.py",
    "engine/*.py",
    "engine/kv/**/*.py",
    "engine/constraints/text.py",
)
"""What schedules run, but for what only tells of it (`telemetry`) and for who may speak (`access`)."""
SIMULATOR = ("tests/sim/**/*.py",)


def sources(patterns: Iterable[str] = CORES) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def source_hash(patterns: Iterable[str] = CORES) -> str:
    """One digest over the source of everything that is simulated."""
    sums = hashlib.sha256()
    for path in sources(patterns):
        sums.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return sums.hexdigest()[:16]


class Entry(msgspec.Struct, frozen=True):
    """One run: the source it ran, the seeds `first` .. `last`, and what came of them."""

    date: str
    cores: str
    simulator: str
    first: int
    last: int
    schedules: int
    counted: int
    failures: list[int]


def read(path: Path) -> list[Entry]:
    """All runs so far. Raises msgspec.ValidationError for a line that is none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Entry) for line in lines]


def unused(entries: list[Entry], seeds: range) -> range:
    """What is left of `seeds` behind those that were used."""
    last = max((entry.last for entry in entries if entry.last in seeds), default=seeds.start - 1)
    return range(last + 1, seeds.stop)


def write(path: Path, first: int, report: Report) -> Entry:
    """Append a run that began with seed `first`."""
    entry = Entry(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        cores=source_hash(),
        simulator=source_hash(SIMULATOR),
        first=first,
        last=report.last,
        schedules=report.ran,
        counted=report.counted,
        failures=[failed.seed for failed in report.failures],
    )
    with path.open("ab") as file:
        file.write(msgspec.json.encode(entry) + b"\n")
    return entry


def counted(entries: list[Entry]) -> int:
    """Return how many schedules count over the source of the cores as it is now. A run that found a failure does not.
    """
    cores = source_hash()
    return sum(entry.counted for entry in entries if entry.cores == cores and not entry.failures)


def total(entries: list[Entry]) -> str:
    """What all runs add up to, in one line. A run that found a failure does not count."""
    clean = [entry for entry in entries if not entry.failures]
    return (
        f"{sum(entry.counted for entry in clean):,} schedules that count in {len(clean)} clean runs, "
        f"{counted(entries):,} of them over these cores; "
        f"{len(entries) - len(clean)} runs found a failure"
    )
