"""`headrace bench`: a closed-loop load generator over gRPC or HTTP.

Closed loop means that a slow server is asked less often: read from it the throughput at a given concurrency, not the
latency that users would see at a given arrival rate. Every answer has its exact length (`ignore_eos`), prompts come
from a seed, and each concurrency draws its own, so that nothing is warm that the workload does not share. A second run
against the same server with the same seed does meet its own prompts in the cache: restart it or change the seed.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from cluster.bench.driver import LoadPlan, run
from cluster.bench.environment import describe
from cluster.bench.report import LoadReport, print_report, to_json
from cluster.bench.workloads import PRESETS, Kind, Preset, Workload
from cluster.cli.credentials import add_client_flags, client_credentials
from cluster.cli.find import served_at
from cluster.cli.numbers import seed
from cluster.resolve import add_flags
from router.front.api import ApiError

CUSTOM = Preset(
    Workload(kind=Kind.RANDOM, input_tokens=256, output_tokens=64), requests=32, concurrency=(8,)
)


def main(argv: list[str]) -> int:
    """Run the load that `argv` describes. Returns 0 if all requests ended well, 1 if some failed, 2 for wrong usage.

    Raises ConfigError, and LaunchError where the cluster of that name does not serve the target.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        plan = _plan(options)
    except ValueError as error:
        parser.error(str(error))
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    if not plan.address:
        plan = msgspec.structs.replace(plan, address=served_at(options, options.target))
    try:
        levels = asyncio.run(run(plan, client_credentials(options, os.environ)))
    except ApiError as error:
        return _fail(f"{error.code}: {error.message}")
    except (ProcessLookupError, PermissionError) as error:
        return _fail(f"cannot read the memory of --pid: {error}")
    report = LoadReport(plan, describe(), levels)
    print_report(report, Console())
    if options.json is not None:
        options.json.write_bytes(to_json(report))
    return 1 if any(level.summary.failed for level in levels) else 0


def _fail(message: str) -> int:
    print(f"bench: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace bench", description=(__doc__ or "").partition("\n\n")[0]
    )
    add = parser.add_argument
    add("--target", choices=("grpc", "http"), default="grpc")
    add(
        "--address",
        default="",
        metavar="HOST:PORT",
        help="of any server (default: the cluster of that name on this host, or the configured address)",
    )
    add_flags(parser, only=("name",))
    add_client_flags(parser)
    add(
        "--preset",
        choices=sorted(PRESETS),
        help="a workload of docs/benchmarks.md; flags below change it",
    )
    add("--workload", choices=[kind.value for kind in Kind])
    add("--input-tokens", type=int, help="prompt tokens new to every request")
    add("--output-tokens", type=int)
    add(
        "--prefix-tokens",
        type=int,
        help="shared-prefix: tokens common to a group, before the new ones",
    )
    add("--groups", type=int, help="shared-prefix: number of groups")
    add("--token-range", metavar="LOW:HIGH", help="draw token ids from here; default 100:32000")
    add("--concurrency", metavar="N[,N...]", help="requests at once, one level for each")
    add("--requests", type=int, help="per level")
    add(
        "--warmup",
        type=int,
        help="requests before the first level; default: the highest concurrency",
    )
    add("--seed", type=seed, default=0)
    add("--timeout-s", type=float, default=600.0, help="of one request")
    add("--model")
    add(
        "--pid",
        type=int,
        action="append",
        default=[],
        help="sum the PSS of this process and its descendants",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures and the environment here")
    return parser


def _plan(options: argparse.Namespace) -> LoadPlan:
    """Combine the preset, or the defaults, with the flags that were given. Raises `ValueError`."""
    base = PRESETS.get(options.preset, CUSTOM)
    workload = msgspec.structs.replace(base.workload, **_workload_flags(options, base))
    workload.check()
    streams = workload.kind is Kind.STREAM
    concurrency = (
        base.concurrency if workload.kind is base.workload.kind else (1,) if streams else (8,)
    )
    if options.concurrency is not None:
        concurrency = tuple(int(part) for part in options.concurrency.split(","))
    if streams and concurrency != (1,):
        raise ValueError("the stream workload runs one request at once")
    requests = base.requests if options.requests is None else options.requests
    warmup = max(concurrency) if options.warmup is None else options.warmup
    if min(*concurrency, requests) < 1 or warmup < 0 or not options.timeout_s > 0:
        raise ValueError("concurrency, requests and timeout must be above zero")
    return LoadPlan(
        target=options.target,
        address=options.address,
        workload=workload,
        requests=requests,
        concurrency=concurrency,
        warmup=warmup,
        seed=options.seed,
        timeout_s=options.timeout_s,
        model=options.model,
        pids=tuple(options.pid),
    )


def _workload_flags(options: argparse.Namespace, base: Preset) -> dict[str, object]:
    names = ("input_tokens", "output_tokens", "prefix_tokens", "groups")
    given: dict[str, object] = {
        n: getattr(options, n) for n in names if getattr(options, n) is not None
    }
    kind = base.workload.kind if options.workload is None else Kind(options.workload)
    given["kind"] = kind
    if kind is Kind.SHARED_PREFIX and base.workload.kind is not kind:
        shared = PRESETS["B"].workload
        given = {"prefix_tokens": shared.prefix_tokens, "groups": shared.groups} | given
    if options.token_range is not None:
        low, _, high = options.token_range.partition(":")
        given |= {"token_low": int(low), "token_high": int(high)}
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
