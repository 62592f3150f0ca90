"""What the offline benchmarks have in common: their command line, a table, and the JSON beside it."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.environment import describe

Row = Mapping[str, str | int | float]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With `--json FILE`, described by a module's first paragraph."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write figures and environment here")
    return made


def show(title: str, rows: Sequence[Row]) -> None:
    """Columns are the first row's keys."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in rows[0]))
    Console(width=None).print(table)


def write(path: Path | None, results: Mapping[str, Sequence[Row]]) -> None:
    if path is not None:
        path.write_text(json.dumps({"environment": describe(), "results": results}, indent=2) + "\n")


def _cell(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else value
