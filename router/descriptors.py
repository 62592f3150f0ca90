"""How many connections each front may hold: as many as the settings say, while there are descriptors for them.

A process that runs out of descriptors cannot answer anybody, reach a worker or open a file. So what is left when the
fronts open is shared out beforehand: a part stays free for workers, files and connections on their way in or out, and
the fronts divide the rest: what one does not want is the others'.
"""

import os
import resource
from collections.abc import Sequence

from router.config import FrontLimits

RESERVE = 64
PENDING_CALLS = 1_000
"""Calls that may wait for the event loop to take them in, even where fewer connections are allowed. gRPC cancels some
of those beyond this, at random, and all beyond thrice as many; the client is told nothing but CANCELLED."""
LEAST = 8
"""Every front takes as many, however little there is."""


def front_connections(wanted: Sequence[int], *, may_open: int, are_open: int) -> list[int]:
    """Return the connections that each front may hold, who wants so many, where the process may open so many
    descriptors."""
    left, shares = max(0, may_open - are_open - RESERVE), [0] * len(wanted)
    modest_first = sorted(range(len(wanted)), key=wanted.__getitem__)
    for at, front in enumerate(modest_first):
        shares[front] = min(wanted[front], left // (len(wanted) - at))
        left -= shares[front]
    return [max(LEAST, share) for share in shares]


def connections_now(wanted: Sequence[int]) -> list[int]:
    """Return the same for this process."""
    may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if may_open == resource.RLIM_INFINITY:
        return [*wanted]
    return front_connections(wanted, may_open=may_open, are_open=len(os.listdir("/proc/self/fd")))


def grpc_options(limits: FrontLimits, connections: int) -> list[tuple[str, int]]:
    """Return what gRPC's server is told of them."""
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", round(limits.header_s * 1e3)),
        ("grpc.max_connection_idle_ms", round(limits.idle_s * 1e3)),
        # Without all three a client that has gone without a word is believed in for ever.
        ("grpc.keepalive_time_ms", round(limits.keepalive_s * 1e3)),
        ("grpc.keepalive_timeout_ms", round(limits.keepalive_s * 1e3)),
        ("grpc.http2.ping_timeout_ms", round(limits.keepalive_s * 1e3)),
        ("grpc.server.max_pending_requests", max(PENDING_CALLS, connections)),
        ("grpc.server.max_pending_requests_hard_limit", 3 * max(PENDING_CALLS, connections)),
    ]
