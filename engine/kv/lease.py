"""One request's hold on the blocks of its sequence. What it means is said in `engine.kv.manager`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv.radix_cache import Node
from engine.types import BlockId


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lease:
    """Mutable; owned by the scheduler that acquired it, changed by the manager only."""

    blocks: list[BlockId]
    cached_tokens: int
    copies: list[tuple[BlockId, BlockId]]
    """(source, target) block copies to be made before the first step; then call `KVCacheManager.copied`."""
    promised: int
    namespace: bytes
    path: list[Node]
    """Committed nodes, one per leading block."""
    released: bool = False
    steps: int = 0
    """Steps under way that read or write its blocks."""
    displaced: list[BlockId] = field(default_factory=list)
    """Blocks that gave way to others of the same content, and that steps under way still read."""
    tail: Sequence[int] = ()
    """What is to be committed with its tail, when those steps have ended."""
    windows: tuple[list[BlockId], ...] = ()
    """The tables of the layer groups but the first, each as long as `blocks`; what is not held is GONE."""

    charges: list[int] = field(default_factory=list)
    """By group: the most blocks of those tables that it may hold; what it holds less, it is promised."""
    held: list[int] = field(default_factory=list)
    """By group: how many it holds."""
    starts: list[int] = field(default_factory=list)
    """By group: the first that it may hold."""
    to_share: int | None = None
    """Leading blocks that a fork to come will share with its parent; None: it is none."""

    @property
    def tables(self) -> tuple[list[BlockId], ...]:
        """The block table of every layer group."""
        return (self.blocks, *self.windows)
