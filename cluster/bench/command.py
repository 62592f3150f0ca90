"""`headrace bench`: a load generator over gRPC or HTTP, with a closed loop, an open one, and a search for goodput.

Every answer has its exact length (`ignore_eos`), prompts come from a seed, and each level draws its own, so that
nothing is warm that the workload does not share. A second run against the same server with the same seed does meet its
own prompts in the cache: restart it or change the seed. docs/benchmarks.md defines what is measured.
"""

import asyncio
import os
import sys

import msgspec
from rich.console import Console

from cluster.bench.driver import Level, run
from cluster.bench.environment import describe
from cluster.bench.goodput import find
from cluster.bench.options import add_arguments, read_plan
from cluster.bench.report import LoadReport, print_probe, print_report, to_json
from cluster.cli.credentials import client_credentials
from cluster.cli.find import served_at
from cluster.cli.parser import CommandParser
from router.front.api import ApiError


def main(argv: list[str]) -> int:
    """Run the load that `argv` describes. Returns 0 if all requests ended well, 1 if some failed, 2 for wrong usage; of
    a search, 1 if it found no rate or was stopped.

    Raises ConfigError, and LaunchError where the cluster of that name does not serve the target.
    """
    parser = CommandParser(prog="headrace bench", description=(__doc__ or "").partition("\n\n")[0])
    add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        plan, rows = read_plan(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    if options.json is not None and options.json.is_dir():
        parser.error(f"--json {options.json}: is a folder")
    if not plan.address:
        plan = msgspec.structs.replace(plan, address=served_at(options, options.target))
    credentials = client_credentials(options, os.environ)
    console = Console()
    outcome = None
    try:
        if plan.search is None:
            levels = asyncio.run(run(plan, credentials, rows))
        else:

            def told(level: Level) -> None:
                print_probe(level, console)

            levels, outcome = asyncio.run(find(plan, credentials, rows, told))
    except ApiError as error:
        return _fail(f"{error.code}: {error.message}")
    except (ProcessLookupError, PermissionError) as error:
        return _fail(f"cannot read the memory of --pid: {error}")
    report = LoadReport(plan, describe(), levels, outcome)
    print_report(report, console)
    if options.json is not None:
        options.json.write_bytes(to_json(report))
    if outcome is not None:
        return 1 if outcome.passed is None or outcome.stopped else 0
    return 1 if any(level.summary.failed for level in levels) else 0


def _fail(message: str) -> int:
    print(f"bench: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
