"""Recounts who owns each KV block: from the leases, the index and the free list, not from what the pool has counted.

The pool's own counts move in pairs, so they add up whatever happens to a block: one that nobody holds any more, or that
two requests believe to be theirs, is a sound block to it. Here a block's holders are found where they are:

    free list   the block may be handed out next
    lease       a request's table of blocks names it, a copy that is still to be made reads it, or a step under way does
    index       its content is cached

A block is *leaked* when it counts more holders than there are, or has no place at all; it has *two owners* when there
are more holders than it counts, or it is free besides. Pure.
"""

from collections import Counter
from dataclasses import dataclass

from engine.kv.block_pool import BlockState
from engine.kv.groups import GONE
from engine.kv.manager import KVCacheManager
from engine.types import BlockId

NAMED = 5
"""Blocks that an error names."""


class LedgerError(Exception):
    """Blocks are leaked, or have two owners."""


@dataclass(frozen=True, slots=True)
class Recount:
    leaked: tuple[BlockId, ...]
    doubly_owned: tuple[BlockId, ...]

    def __str__(self) -> str:
        told = []
        for what, blocks in (("leaked", self.leaked), ("with two owners", self.doubly_owned)):
            if blocks:
                named = ", ".join(map(str, blocks[:NAMED])) + (", ..." if len(blocks) > NAMED else "")
                told.append(f"{len(blocks)} {what} (block {named})")
        return " and ".join(told) or "every block has its owners"


class BlockLedger:
    """The owners of the blocks of one manager. Fulfils `telemetry.audit.Ledger`; changes nothing."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def recount(self) -> Recount:
        """Compare what the pool says of every block with who has it. Takes time in proportion to the blocks."""
        kv, pool = self._kv, self._kv.pool
        holders: Counter[BlockId] = Counter()
        for lease in kv.leases():
            for table in lease.tables:
                holders.update(block for block in table if block != GONE)
            holders.update(source for source, _ in lease.copies)
            holders.update(lease.displaced)
        free = Counter(pool.free_list)
        leaked, doubly_owned = [], []
        for number in range(pool.total):
            block = BlockId(number)
            state, held, spare = pool.state(block), holders[block], free[block]
            is_indexed = kv.cache.holds(block)
            # 1. Too many have it: more than it counts, or somebody while the next request may get it, too.
            if held > pool.refs(block) or spare > 1 or (spare and (held or is_indexed or state is not BlockState.FREE)):
                doubly_owned.append(block)
            # 2. Too few have it: nobody will ever let it go, hand it out, or evict it.
            elif held < pool.refs(block) or (not held and not spare and not is_indexed):
                leaked.append(block)
        return Recount(tuple(leaked), tuple(doubly_owned))

    def check(self) -> None:
        """Raise LedgerError unless every block has the owners that it counts."""
        found = self.recount()
        if found.leaked or found.doubly_owned:
            raise LedgerError(str(found))

    def __repr__(self) -> str:
        return f"BlockLedger({self.recount()})"
