"""Verbs that start something: up, demo, worker."""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

from access.client import credentials_from
from access.config import AccessError
from cluster.cli.numbers import port
from cluster.cli.progress import Bars
from cluster.config import ConfigError, check_listening
from cluster.model_hub import hub_model, located
from cluster.resolve import FLAGS, Resolved, add_flags, resolve, settled
from cluster.rundir import RunDir


def add(verbs: Any) -> None:
    up = verbs.add_parser("up", help="start a cluster and serve until Ctrl-C; or tell that it runs")
    add_flags(up)
    up.add_argument(
        "-d", "--detach", action="store_true", help="return when it is ready; it serves on"
    )
    up.set_defaults(verb=_up)

    demo = verbs.add_parser("demo", help="start a cluster, ask it four questions, show the figures")
    add_flags(demo)
    demo.add_argument("-v", "--verbose", action="store_true", help="every figure, also of each stage")
    demo.add_argument("--json", dest="json_file", type=Path, metavar="FILE", help="figures as JSON")
    demo.set_defaults(verb=_demo)

    worker = verbs.add_parser("worker", help="one worker alone, in the foreground")
    worker.add_argument("role", choices=("prefill", "decode"))
    worker.add_argument("--name", default="", help="its stable name (default: its role and -0)")
    worker.add_argument("--port", type=port, default=0, help="gRPC port (default: a free one)")
    add_flags(worker, only=[key for _, key, _, _ in FLAGS if key != "name"])
    worker.set_defaults(verb=_worker)


def _up(arguments: argparse.Namespace) -> int:
    from cluster.cli import serve

    resolved = _with_model(resolve(arguments, os.environ))
    check_listening(resolved.config)
    if arguments.detach:
        return serve.detach(resolved, os.environ, arguments.given)
    return serve.serve(resolved, os.environ)


def _with_model(resolved: Resolved) -> Resolved:
    """Settle what the model's files say, and bring a model of the hub here first, unless its cluster runs already.
    Raises ConfigError, ModelError."""
    config = resolved.config
    if hub_model(config.model) is not None and not RunDir(config, os.environ).is_held:
        with Bars() as bars:
            located(config.model, partial(bars.report, "download"))
    return settled(resolved)


def _demo(arguments: argparse.Namespace) -> int:
    from cluster.cli.demo import run_demo

    resolved = _with_model(resolve(arguments, os.environ))
    check_listening(resolved.config)
    try:
        credentials = credentials_from(os.environ)
        return run_demo(resolved, arguments.json_file, credentials, is_verbose=arguments.verbose)
    except AccessError as error:
        raise ConfigError(str(error)) from error


def _worker(arguments: argparse.Namespace) -> int:
    from cluster.cli.solo import run_worker

    name = arguments.name or f"{arguments.role}-0"
    config = _with_model(resolve(arguments, os.environ)).config
    return run_worker(config, arguments.role, name, arguments.port)
