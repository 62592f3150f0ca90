"""The ports that several routers share: the kernel hands each new connection to one of those that listen.

The process that starts the routers holds both ports for as long as the cluster lives, without listening: so they are
known before the first router is up, and stay the cluster's while one is started again. That several may bind a port is
said by every one of them (SO_REUSEPORT), and Linux lets only processes of the same user do so.
"""

import socket

import msgspec

from cluster.config import ClusterConfig
from cluster.processes.spec import LaunchError
from engine.types import host_port


def shared_fronts(config: ClusterConfig) -> tuple[list[socket.socket], ClusterConfig]:
    """Return what holds the ports of several routers, and the configuration with these ports; of one router, nothing,
    and the configuration as it is. Raises LaunchError where a port cannot be had."""
    router = config.router
    if config.routers == 1:
        return [], config
    held: list[socket.socket] = []
    try:
        held.append(_held(router.host, router.grpc_port, "gRPC"))
        ports = {"grpc_port": held[0].getsockname()[1]}
        if router.http_port >= 0:
            held.append(_held(router.host, router.http_port, "HTTP"))
            ports["http_port"] = held[1].getsockname()[1]
    except BaseException:
        for one in held:
            one.close()
        raise
    return held, msgspec.structs.replace(config, router=msgspec.structs.replace(router, **ports))


def _held(host: str, port: int, what: str) -> socket.socket:
    """Return a socket that has the port and does not listen. Raises LaunchError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port:
            # Alone first: another cluster of this user that shares it would let us in.
            with socket.socket(family, socket.SOCK_STREAM) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((host, port))
        shared = socket.socket(family, socket.SOCK_STREAM)
        try:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((host, port))
        except BaseException:
            shared.close()
            raise
    except OSError as error:
        raise LaunchError(f"cannot listen on {host_port(host, port)} for {what}: {error}") from error
    return shared
