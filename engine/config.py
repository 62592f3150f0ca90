"""What one engine (one device, one pool) is told. Every package owns its own struct; `cluster.config` composes them."""

from typing import Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`model_dir` is a prepared model (see `engine.model.cache`), never the file a user names."""

    model_dir: str = ""
    dtype: str = "float32"
    block_size: int = 16
    pool_bytes: int | Literal["auto"] = 384 * 1024 * 1024
    """Of KV blocks. "auto": what weights, measured workspace and reserve leave of `memory_bytes`."""
    memory_bytes: int = 0
    """All that this worker may use; for "auto", `cluster` sets it to the memory available at start / workers on the
    host. A worker that replaces another is told the same number, whatever the others have filled by then."""
    reserve_bytes: int = 512 * 1024 * 1024
    """Left alone by "auto": interpreter, libraries, frames under way."""
    profile_workspace: bool = False
    """Measure the workspace of the largest step at start, also where the pool's size is given."""
    threads: int = 1
    """Compute threads of this process; `cluster` sets it to max(1, cores / workers on the host)."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """`on`: every token is a function of its own sequence alone, whatever is in the batch, however the prompt was
    chunked, wherever it was recomputed; a machine or dtype where a check at start finds otherwise is refused. `auto`:
    the same where the check holds, else a warning and the other path. `off`: the other path, whose rounding depends on
    how a prompt was chunked."""

    def kv_bytes(self, weights_bytes: int, workspace_bytes: int) -> int:
        """The pool's size; negative where "auto" finds that the rest alone does not fit."""
        if self.pool_bytes != "auto":
            return self.pool_bytes
        return self.memory_bytes - self.reserve_bytes - weights_bytes - workspace_bytes


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest step that a worker's scheduler asks for."""

    chunk_tokens: int
    """New tokens of a prompt, at the end of a full context."""
    batch: int = 0
    """Decoding sequences beside it, each at the end of a full context."""
    context_tokens: int = 0
    """Of each sequence; 0 stands for the model's longest."""
