"""Helpers of the offline benchmarks: where a figure was made, and how a set of repeats is told in one cell."""

import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from cluster.bench.environment import describe


class Middle(msgspec.Struct, frozen=True):
    """The median of repeats, and the quarters below and above which a quarter of them lie."""

    median: float
    low: float
    high: float
    worst: float
    repeats: int

    def cell(self, scale: float = 1.0, digits: int = 1) -> str:
        """Write `median (low–high)`, each times `scale`."""
        low, high = (f"{value * scale:.{digits}f}" for value in (self.low, self.high))
        return f"{self.median * scale:.{digits}f} ({low}–{high})"


def middle(values: Sequence[float]) -> Middle:
    """Return the median and quarters of the values. Raises ValueError for no values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("the middle of nothing")
    last = len(ordered) - 1
    return Middle(
        median=median(ordered),
        low=ordered[round(last * 0.25)],
        high=ordered[round(last * 0.75)],
        worst=ordered[-1],
        repeats=len(ordered),
    )


def numbers(text: str) -> list[int]:
    """Parse `1,256,1500` on a command line. Raises ValueError."""
    return [int(part) for part in text.split(",")]


def show(table: Table) -> None:
    """Print a table, wide where the output is no terminal, and the processor under it."""
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table)
    facts = describe()
    console.print(f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}", markup=False)


def write_json(path: Path, benchmark: str, settings: Mapping[str, object], rows: object) -> None:
    """Write `rows` with the date, the command's settings, the machine and the versions they were made with."""
    told = {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "host": platform.node(),
        "environment": describe(),
        "settings": settings,
        "rows": rows,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
