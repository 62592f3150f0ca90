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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.kv.block_pool import PART_BLOCKS, BlockState
from engine.kv.manager import KVCacheManager
from engine.types import BlockId

NAMED = 5
"""Blocks that an error names."""
COPIED_PER_BLOCK = 32
"""Entries of tables that are copied while one block is checked."""


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


class Slices:
    """A long check that is made some parts at a time, over and over. Mutable state: the one under way."""

    def __init__(self, parts: Callable[[], Iterator[int]]) -> None:
        """`parts` begins a check, whose parts yield how much each was."""
        self._parts = parts
        self._under_way: Iterator[int] = iter(())
        self._has_begun = False

    def take(self, limit: int) -> bool:
        """Make parts of about `limit` in all; True when the check has ended. Raises what the check raises; the next
        one begins anew."""
        if not self._has_begun:
            self._under_way, self._has_begun = self._parts(), True
        try:
            for size in self._under_way:
                limit -= size
                if limit <= 0:
                    return False
        except BaseException:
            self._has_begun = False
            raise
        self._has_begun = False
        return True


class BlockLedger:
    """The owners of the blocks of one manager. Fulfils `telemetry.audit.SlicedLedger`; changes nothing."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._slices = Slices(self._check_parts)

    def recount(self) -> Recount:
        """Compare what the pool says of every block with who has it. Takes time in proportion to the blocks."""
        leaked, doubly_owned = list[BlockId](), list[BlockId]()
        for _ in self._recount_parts(leaked, doubly_owned):
            pass
        return Recount(tuple(leaked), tuple(doubly_owned))

    def _recount_parts(self, leaked: list[BlockId], doubly_owned: list[BlockId]) -> Iterator[int]:
        """Do so a part at a time, and yield how many blocks each was. Pool and tables are copied in the beginning, so
        that counts and holders are of one moment, and gone through later."""
        kv, pool = self._kv, self._kv.pool.copy()
        tables = []
        for lease in kv.leases():
            tables += [table.copy() for table in lease.tables]
            tables += [[source for source, _ in lease.copies], lease.displaced.copy()]
        yield (pool.total + sum(map(len, tables))) // COPIED_PER_BLOCK
        holders, free = Counter[BlockId](), Counter[BlockId]()
        for count, lists in ((holders, tables), (free, [pool.free_list])):
            for blocks in lists:
                for at in range(0, len(blocks), PART_BLOCKS):
                    count.update(blocks[at : at + PART_BLOCKS])
                    yield PART_BLOCKS
        for number in range(pool.total):
            block = BlockId(number)
            state, refs, held, spare = pool.state(block), pool.refs(block), holders[block], free[block]
            now, is_indexed = kv.pool.state(block), kv.cache.holds(block)
            # 1. Too many have it: more than it counts, or somebody while the next request may get it, too.
            is_free_beside = spare and (held or state is not BlockState.FREE)
            if held > refs or spare > 1 or is_free_beside or (now is BlockState.FREE and is_indexed):
                doubly_owned.append(block)
            # 2. Too few have it: nobody will ever let it go, hand it out, or evict it.
            elif (
                held < refs
                or (not held and not spare and state is not BlockState.CACHED)
                or (now is BlockState.CACHED and not is_indexed)
            ):
                leaked.append(block)
            if not number % PART_BLOCKS:
                yield PART_BLOCKS

    def check(self) -> None:
        """Raise LedgerError unless every block has the owners that it counts."""
        for _ in self._check_parts():
            pass

    def check_some(self, limit: int) -> bool:
        """Do so for some more blocks, about `limit`; True when all have been checked that there were in the beginning.
        """
        return self._slices.take(limit)

    def _check_parts(self) -> Iterator[int]:
        leaked, doubly_owned = list[BlockId](), list[BlockId]()
        yield from self._recount_parts(leaked, doubly_owned)
        if leaked or doubly_owned:
            raise LedgerError(str(Recount(tuple(leaked), tuple(doubly_owned))))

    def __repr__(self) -> str:
        return f"BlockLedger({self.recount()})"
