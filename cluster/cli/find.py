"""Finds the address at which the cluster of a name serves on this host, for the verbs that ask it."""

import argparse
import os
from typing import Literal

from cluster.admin_client import AdminClient, NotRunning
from cluster.processes.spec import LaunchError
from cluster.resolve import resolve
from cluster.rundir import RunDir


def served_at(arguments: argparse.Namespace, kind: Literal["grpc", "http"]) -> str:
    """Return HOST:PORT of the cluster that `arguments` name, whatever its ports; if none runs here, where it would
    serve by its settings. Raises ConfigError, and LaunchError where it runs and does not serve that, or does not
    answer: who listens at that port may be another cluster."""
    config = resolve(arguments, os.environ).config
    router = config.router
    try:
        with AdminClient(RunDir(config, os.environ)) as client:
            status = client.status()
    except NotRunning:
        port = router.grpc_port if kind == "grpc" else router.http_port
        return f"{router.host}:{port}"
    found = status.grpc if kind == "grpc" else status.http
    if not found:
        raise LaunchError(f"the cluster {config.name!r} is {status.state} and serves no {kind}")
    return found
