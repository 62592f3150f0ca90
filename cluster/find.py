"""Where the cluster of a name serves on this host: what verbs that ask it go by."""

from collections.abc import Mapping
from typing import Literal

from cluster.admin_client import AdminClient
from cluster.config import ClusterConfig
from cluster.rundir import RunDir
from cluster.spec import LaunchError


def served_at(
    config: ClusterConfig, environ: Mapping[str, str], kind: Literal["grpc", "http"]
) -> str:
    """HOST:PORT of the cluster that runs here, whatever its ports; if none does, where it would serve by `config`.
    Raises LaunchError where it runs and does not serve that."""
    router = config.router
    try:
        with AdminClient(RunDir(config, environ)) as client:
            status = client.status()
    except LaunchError:
        port = router.grpc_port if kind == "grpc" else router.http_port
        return f"{router.host}:{port}"
    found = status.grpc if kind == "grpc" else status.http
    if not found:
        raise LaunchError(f"the cluster {config.name!r} is {status.state} and serves no {kind}")
    return found
