"""Writes dashboards, rules and the page of metrics: `python -m telemetry.dashboards [--check]`, from the root.

With `--check` nothing is written; the exit status is 1 if a committed file is not what would be written. For a cluster
of your own, `--docs URL --to FOLDER` writes all of them below FOLDER, with links to the pages at URL.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from telemetry.dashboards import grafana, reference, rules
from telemetry.dashboards.pages import DASHBOARDS

DASHBOARD_FOLDER = Path("deploy/grafana/dashboards")
RULES_FILE = Path("deploy/prometheus/rules/headrace.yml")
METRICS_PAGE = Path("docs/metrics.md")


def files(docs: str = "") -> dict[Path, str]:
    """Return what is generated, by path below the repository root. `docs`: where the pages are served, for links."""
    found = {
        DASHBOARD_FOLDER / f"{dashboard.name}.json": json.dumps(
            grafana.build(dashboard, DASHBOARDS, docs), indent=1, ensure_ascii=False
        )
        + "\n"
        for dashboard in DASHBOARDS
    }
    return found | {RULES_FILE: rules.render(docs=docs), METRICS_PAGE: reference.render()}


def drifted(root: Path, wanted: Mapping[Path, str]) -> list[str]:
    """Return the committed files that differ from `wanted`, are missing, or are dashboards that nobody makes any more.
    """
    wrong = [
        str(path)
        for path, text in wanted.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]
    there = {path.relative_to(root) for path in (root / DASHBOARD_FOLDER).glob("*.json")}
    return wrong + [str(path) for path in sorted(there - set(wanted))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m telemetry.dashboards", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file would change")
    parser.add_argument("--docs", metavar="URL", default="", help="where the pages of docs/ are served")
    parser.add_argument("--to", metavar="FOLDER", type=Path, default=Path.cwd(), help="write below this (default: .)")
    told = parser.parse_args(arguments)
    if told.docs and told.to == Path.cwd():
        parser.error("--docs: needs --to FOLDER, since what is committed links to where Compose serves the pages")
    root, wanted = told.to, files(told.docs.rstrip("/"))
    if told.check:
        wrong = drifted(root, wanted)
        for name in wrong:
            print(f"{name}: not what python -m telemetry.dashboards writes")
        return 1 if wrong else 0
    for path, text in wanted.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
