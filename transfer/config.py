"""How KV blocks travel."""

import msgspec


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    transport: str = "auto"
    """`auto` takes `shm` where both workers share a host and `tcp` elsewhere; or a name from `transfer.registry`."""
    verify_digests: bool = True
    tcp_host: str = ""
    """The address the tcp transport listens on and tells its peers; empty means the worker's own."""
    escalate_s: float = 5.0
    """A lost reader for whom blocks have been in quarantine for this long is called silent, to the router."""
    stuck_s: float = 10.0
    """A worker ends itself when its transfer thread has not come back from one call for this long. A call moves at most
    one chunk or 16 MiB."""
