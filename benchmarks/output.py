"""The command line and the output that the programs about KV memory share: a table, and JSON."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks import figures

Line = Mapping[str, str | int | float]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with `--json FILE`, described by a module's first paragraph."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write figures and environment here")
    return made


def tell(options: argparse.Namespace, benchmark: str, results: Mapping[str, Sequence[Line]]) -> None:
    """Print each result as a table, whose columns are its first line's keys; write all of it as JSON, if asked for."""
    for title, lines in results.items():
        table = Table(title=title, title_justify="left")
        for name, value in lines[0].items():
            table.add_column(name, justify="left" if isinstance(value, str) else "right")
        for line in lines:
            table.add_row(*(_cell(line[name], [other[name] for other in lines]) for name in lines[0]))
        figures.show(table)
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        figures.write_json(options.json, benchmark, settings, results)


def _cell(value: str | int | float, column: Sequence[str | int | float]) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    coarse = any(isinstance(other, float) and abs(other) >= 10 for other in column)
    return f"{value:,.1f}" if coarse else f"{value:.3f}"
