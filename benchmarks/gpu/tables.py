"""Writes the measured figures into docs/gpu.md: python3 -m benchmarks.gpu.tables [--check]

They come from `benchmarks/results/gpu.json`, which `python3 -m benchmarks.gpu` writes on a card and somebody takes
there. Where there is no such file, the page says that nothing was measured, and leaves the figures empty.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.absent import stand_in

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
BEGIN = "<!-- what follows is written by python -m benchmarks.gpu.tables -->"
END = "<!-- what follows is written by people -->"
NOTHING = """\
**Nothing of this has been measured: no GPU could be had.** The figures are left empty until a card has run the command;
none is an estimate."""
VERSIONS = ("python", "torch", "triton", "msgspec")


def main() -> int:
    """Write the page. With `--check` nothing is written, and the status is 1 where the page is not up to date."""
    parser = argparse.ArgumentParser(description="Writes measured figures into docs/gpu.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args()
    stand_in()
    told = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None
    old = PAGE.read_text(encoding="utf-8")
    new = written(old, told)
    if options.check:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def written(page: str, told: Mapping[str, Any] | None) -> str:
    """Return the page with the figures of a `gpu.json`, or with none. Raises ValueError for those of a dry run, and for
    a page without a place for them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{_empty() if told is None else _told(told)}\n\n{END}{after}"


def _empty() -> str:
    from benchmarks.gpu.parts import PARTS

    return f"{NOTHING}\n\n{_table(['part', 'figures'], [[f'`{name}`', ''] for name in PARTS])}"


def _told(told: Mapping[str, Any]) -> str:
    from kernels.configs import DRY_RUN

    card, host = told["card"], told["environment"]
    if card["gpu"] == DRY_RUN:
        raise ValueError("these are the figures of a dry run, which mean nothing")
    versions = ", ".join(f"{name} {host[name]}" for name in VERSIONS if name in host)
    revision = told.get("revision", "unknown")
    facts = (
        f"{card['gpu']} ({card['memory_bytes'] / 2**30:.0f} GiB, {card['multiprocessors']} multiprocessors), "
        f"CUDA {card['cuda']}, {host['cpu']} ({host['cores']} cores), {versions}; revision {revision}, "
        f"{told['date']}."
    )
    parts = [facts]
    if told.get("goals"):
        parts += ["**Goals**", _lines(told["goals"])]
    for name, lines in told["results"].items():
        part = told["parts"][name]
        # Of a run that was made again for a few parts, with what had changed.
        other = f", revision {part['revision']}" if "revision" in part else ""
        parts.append(f"**`{name}`** ({part['took_s']:.0f} s{other})")
        if name in told["failures"]:
            parts.append(f"Failed: {_cell(told['failures'][name])}")
        if lines:
            parts.append(_lines(lines))
    return "\n\n".join(parts)


def _lines(lines: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for line in lines for key in line))
    return _table(columns, [[_cell(line.get(key, "")) for key in columns] for line in lines])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    sys.exit(main())
