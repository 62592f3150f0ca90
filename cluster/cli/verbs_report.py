"""The verb `report`: what live traffic says of how a cluster is arranged."""

import argparse
import os
import sys
from typing import Any

import msgspec

from cluster.cli.numbers import whole
from cluster.resolve import add_flags, resolve


def add(verbs: Any) -> None:
    report = verbs.add_parser("report", help="what live traffic says of a running cluster")
    subjects = report.add_subparsers(required=True, metavar="SUBJECT")
    disagg = subjects.add_parser("disagg", help="whether two pools pay, and what another split would give")
    disagg.add_argument(
        "--objective",
        choices=("goodput", "latency"),
        default="goodput",
        help="requests within both limits (the default), or the mean of both times in parts of their limits",
    )
    disagg.add_argument(
        "--slo", metavar="LIMITS", default="", help="such as ttft=0.5,itl=50ms (default: router.slo_*_s of the cluster)"
    )
    disagg.add_argument(
        "--last",
        metavar="N",
        type=whole(1, 2**31 - 1),
        default=0,
        help="only the latest N requests (default: all)",
    )
    disagg.add_argument("--json", action="store_true", help="as JSON")
    add_flags(disagg, only=("name",))
    disagg.set_defaults(verb=_disagg)


def _disagg(arguments: argparse.Namespace) -> int:
    from cluster.admin_client import AdminClient
    from cluster.report.disagg import StepBounds, TimeLimits, TooLittleTrafficError, report, text
    from cluster.rundir import RunDir

    with AdminClient(RunDir(resolve(arguments, os.environ).config, os.environ)) as client:
        told, settings = client.traffic(), client.config()
    limits = _limits(arguments.slo, TimeLimits(told.slo_ttft_s, told.slo_itl_s))

    def setting(key: str) -> Any:
        return settings[key]["value"]

    bounds = StepBounds(
        setting("decode.mixed_step_s"), setting("decode.local_chunk_tokens"), setting("decode.engine.block_size")
    )
    try:
        found = report(told, bounds, limits, arguments.objective, arguments.last)
    except TooLittleTrafficError as error:
        silent = "".join(f"; {name} could not be asked: {why}" for name, why in told.silent.items())
        print(f"headrace: {error}{silent}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(found).decode() if arguments.json else text(found))
    return 0


def _limits(asked: str, configured: Any) -> Any:
    """Return the limits that are asked for, where they say nothing those of the cluster. Raises ConfigError."""
    from cluster.bench.slo import parse_slo
    from cluster.config import ConfigError

    if not asked:
        return configured
    try:
        slo = parse_slo(asked)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}") from error
    if slo.e2e_s is not None:
        raise ConfigError("--slo: there is no limit of e2e here; ttft and itl are")
    return type(configured)(slo.ttft_s or configured.ttft_s, slo.itl_s or configured.itl_s)
