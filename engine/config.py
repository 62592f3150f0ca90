"""What one engine (one device, one pool) is told. Every package owns its own struct; `cluster.config` composes them."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`model_dir` is a prepared model (see `engine.model.cache`), never the file a user names."""

    model_dir: str = ""
    dtype: str = "float32"
    block_size: int = 16
    pool_bytes: int = 384 * 1024 * 1024
    threads: int = 1
    """Compute threads of this process; `cluster` sets it to max(1, cores / workers on the host)."""
