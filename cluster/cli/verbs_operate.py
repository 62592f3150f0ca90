"""Verbs that look at, change or stop a running cluster: status, top, trace, drain, scale, rotate-secret, down."""

import argparse
import os
import sys
from typing import Any

from cluster.cli.numbers import seconds, whole
from cluster.config import MAX_WORKERS, ConfigError
from cluster.resolve import add_flags, resolve

SIZES = {"prefill": whole(0, MAX_WORKERS), "decode": whole(1, MAX_WORKERS)}


def add(verbs: Any) -> None:
    status = verbs.add_parser("status", help="the processes of a running cluster")
    _common(status, _status)

    top = verbs.add_parser("top", help="a live view: pools, batches, blocks, migrations, latency")
    top.add_argument("--once", action="store_true", help="print one frame and end")
    top.add_argument("--interval", type=seconds, default=1.0, metavar="SECONDS")
    _common(top, _top, has_json=False)

    trace = verbs.add_parser("trace", help="what happened to a request, process by process")
    trace.add_argument("request", nargs="?", default="", help="its id (default: list the latest)")
    _common(trace, _trace)

    drain = verbs.add_parser("drain", help="let a worker finish or hand over, then take it away")
    drain.add_argument("worker", help="its name, such as decode-1")
    drain.add_argument("--replace", action="store_true", help="and start another in its place")
    _waits(drain)
    _common(drain, _drain)

    scale = verbs.add_parser("scale", help="change how many workers a pool has")
    scale.add_argument("sizes", nargs="+", metavar="POOL=N", help="prefill=N, decode=M")
    _waits(scale)
    _common(scale, _scale)

    rotate = verbs.add_parser("rotate-secret", help="give every process a new secret, while the cluster serves")
    _common(rotate, _rotate)

    down = verbs.add_parser("down", help="stop a running cluster, and prove that nothing is left")
    _common(down, _down, has_json=False)


def _common(parser: argparse.ArgumentParser, verb: Any, has_json: bool = True) -> None:
    if has_json:
        parser.add_argument("--json", action="store_true", help="as JSON")
    add_flags(parser, only=("name",))
    parser.set_defaults(verb=verb)


def _waits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=None,
        metavar="SECONDS",
        help="stop waiting after so long; what was asked for goes on",
    )


def _client(arguments: argparse.Namespace) -> Any:
    from cluster.admin_client import AdminClient
    from cluster.rundir import RunDir

    return AdminClient(RunDir(resolve(arguments, os.environ).config, os.environ))


def _show(arguments: argparse.Namespace, status: Any) -> int:
    from cluster.cli.status_view import print_json, print_status

    if arguments.json:
        print_json(status)
    else:
        print_status(status)
    return 0


def _rotate(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        return _show(arguments, client.rotate())


def _status(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        return _show(arguments, client.status())


def _top(arguments: argparse.Namespace) -> int:
    from cluster.cli.top import run_top

    with _client(arguments) as client:
        return run_top(client, arguments.once, arguments.interval)


def _trace(arguments: argparse.Namespace) -> int:
    from cluster.cli.status_view import print_json
    from cluster.cli.trace_view import is_router_silent, print_latest, print_trace, request_of

    request = request_of(arguments.request)
    with _client(arguments) as client:
        told = client.flights(request)
    if arguments.json:
        print_json(told)
    elif not request:
        print_latest(told)
    else:
        print_trace(told)
    if request and not told.flights:
        why = ", of those that could be asked" if told.silent else ": it is unknown, or long ago"
        print(f"headrace: no process remembers {request!r}{why}", file=sys.stderr)
        return 1
    return 1 if is_router_silent(told) else 0


def _drain(arguments: argparse.Namespace) -> int:
    from cluster.admin import Drain

    order = Drain(arguments.worker, arguments.replace, arguments.timeout)
    with _client(arguments) as client:
        return _show(arguments, client.drain(order))


def _scale(arguments: argparse.Namespace) -> int:
    from cluster.admin import Scale

    sizes: dict[str, int] = {}
    for text in arguments.sizes:
        pool, _, count = text.partition("=")
        if pool not in SIZES:
            raise ConfigError(f"{text!r} is not prefill=N, or decode=N with N of at least 1")
        if pool in sizes:
            raise ConfigError(f"{pool} is given twice")
        try:
            sizes[pool] = SIZES[pool](count)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{pool}: {error}") from error
    order = Scale(sizes.get("prefill"), sizes.get("decode"), arguments.timeout)
    with _client(arguments) as client:
        return _show(arguments, client.scale(order))


def _down(arguments: argparse.Namespace) -> int:
    from cluster.cli.down import take_down
    from cluster.rundir import RunDir

    config = resolve(arguments, os.environ).config
    return take_down(RunDir(config, os.environ), config.stop_grace_s)
