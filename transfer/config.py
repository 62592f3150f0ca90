"""How KV blocks travel."""

import msgspec


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    transport: str = "auto"
    """`auto` takes `shm` where both workers share a host and `tcp` elsewhere; or a name from `transfer.registry`."""
    verify_digests: bool = True
    tcp_host: str = ""
    """The address the tcp transport listens on and tells its peers; empty means the worker's own."""
