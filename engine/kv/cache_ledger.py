"""Checks pool, cache and tiers of one manager a slice at a time: what they say of each other, and of every block.

What is of one moment, sums and counts, is copied, or compared, at once. What is said of a block, a node, a slot or a
segment is looked up when its turn comes: it must be so at any moment. Of a line for eviction the first are gone
through, those that give way next. So nothing here takes time in proportion to the blocks but copies of plain lists, and
a block that is wrong is found when it has had its turn. All at once: `KVCacheManager.check`. Pure.
"""

from collections import Counter
from collections.abc import Iterator

from engine.identity import owner
from engine.kv.block_pool import PART_BLOCKS, BlockState
from engine.kv.groups import GONE
from engine.kv.ledger import COPIED_PER_BLOCK, Slices
from engine.kv.manager import KVCacheManager
from engine.kv.radix_cache import TOKEN_BYTES, Node
from engine.types import BlockId

LINE_BLOCKS = 1024
"""The first of each line, whose order is checked."""


class CacheLedger:
    """Fulfils `telemetry.audit.SlicedLedger`; changes nothing. Reads what the manager and its parts keep."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._slices = Slices(self._check_parts)

    def check(self) -> None:
        """Recompute everything at once, also what only slices look at."""
        self._kv.check()
        for _ in self._check_parts():
            pass

    def check_some(self, limit: int) -> bool:
        """Check some more, about `limit` blocks; True when everything has had its turn."""
        return self._slices.take(limit)

    def __repr__(self) -> str:
        return repr(self._kv)

    def _check_parts(self) -> Iterator[int]:
        """Yield how many blocks each part was; between two, anything may change."""
        yield from self._totals()
        yield from self._blocks()
        yield from self._lines()
        yield from self._tables()
        yield from self._windows()
        if self._kv.tiers is not None:
            yield from self._kv.tiers.check_parts()

    def _totals(self) -> Iterator[int]:
        kv, shares = self._kv, self._kv.cache.shares
        assert kv._promised >= 0 and kv.available >= 0, kv
        assert kv.cache.idle == kv.pool.counts()["cached"], kv
        assert len(kv._owners) == kv.pool.total - kv.pool.free
        assert kv.tiers is None or kv.windows is not None or len(kv._identities) == len(kv.cache)
        shares.check_lines()
        pool = kv.pool.copy()
        yield pool.total // COPIED_PER_BLOCK
        yield from pool.check_parts()
        owners, used = list(kv._owners.values()), shares.used()
        yield len(owners) // COPIED_PER_BLOCK
        counted = Counter[bytes]()
        for at in range(0, len(owners), PART_BLOCKS):
            counted.update(owners[at : at + PART_BLOCKS])
            yield PART_BLOCKS
        shares.compare(used, counted)

    def _blocks(self) -> Iterator[int]:
        """Every block that is indexed, and the children of its node."""
        kv, cache = self._kv, self._kv.cache
        for root in list(cache._roots.values()):
            assert root.children or cache._roots.get(root.key) is not root, "a namespace without blocks is kept"
            yield from self._children(root)
        for number in range(kv.pool.total):
            block = BlockId(number)
            node = cache.node(block)
            if node is None:
                assert kv.pool.state(block) is not BlockState.CACHED, "a cached block is indexed"
            elif node.block != block:
                assert block in (node.windows or ())
            else:
                self._node(node)
                yield from self._children(node)
            yield 1

    def _node(self, node: Node) -> None:
        kv, parent, tokens = self._kv, node.parent, len(node.key) // TOKEN_BYTES
        state = kv.pool.state(node.block)
        assert parent is not None and parent.children.get(node.key) is node
        above = kv.cache._roots.get(parent.key) if parent.parent is None else kv.cache.node(parent.block)
        assert above is parent, "a node is not below a root"
        assert 0 < tokens <= kv.block_size
        assert tokens == kv.block_size or not node.children, "a partial block has a child"
        assert (node.windows is None) == (kv.windows is None)
        assert state is not BlockState.FREE and state is not BlockState.RESERVED
        assert kv._owners[node.block] == node.namespace
        is_idle = state is BlockState.CACHED
        assert ((node.namespace, node.block) in kv.cache.shares) == is_idle, "a block that nobody holds is in line"
        assert is_idle or parent.parent is None or not kv._is_idle(parent.block), "a held block's parent is held"
        assert kv.tiers is None or node.identity in kv._identities
        for block in node.windows or ():
            if block != GONE:
                is_spare = kv._is_idle(block)
                assert kv.cache.node(block) is node and kv._owners[block] == node.namespace
                assert is_spare or not is_idle, "whoever holds a window's block holds its node"
                assert ((node.namespace, block) in kv.cache.shares) == is_spare

    def _children(self, node: Node) -> Iterator[int]:
        """All children of a node are indexed, and stand in order where there are several."""
        if node.order is None:
            assert len(node.children) < 2
        else:
            assert len(node.order) == len(node.children)
        children = list(node.children.values())
        for at, child in enumerate(children):
            if node.children.get(child.key) is child:
                assert self._kv.cache.node(child.block) is child and child.parent is node
                assert node.order is None or child.key in node.order.around(child.key)
            if at % PART_BLOCKS == PART_BLOCKS - 1:
                yield PART_BLOCKS
        yield 1 + len(children) % PART_BLOCKS

    def _lines(self) -> Iterator[int]:
        cache = self._kv.cache
        for name in cache.shares.names():
            before: set[BlockId] = set()
            for block in cache.shares.first(name, LINE_BLOCKS):
                node = cache.node(block)
                assert node is not None and owner(node.namespace) == name
                children = node.children.values() if node.block == block else ()
                assert all(child.block in before for child in children), "a parent stands before its child"
                before.add(block)
            yield len(before) + 1

    def _tables(self) -> Iterator[int]:
        """Every table of a lease, while it holds blocks, is of those of its group."""
        kv = self._kv
        for lease in list(kv.leases()):
            for group in range(len(lease.tables)):
                at = 0
                while lease in kv._leases and at < len(lease.tables[group]):
                    part = lease.tables[group][at : at + PART_BLOCKS]
                    assert all(block == GONE or kv.pool.group(block) == group for block in part), (group, part)
                    at += len(part)
                    yield len(part)

    def _windows(self) -> Iterator[int]:
        """What leases hold of window groups, and are promised."""
        kv, windows = self._kv, self._kv.windows
        if windows is None:
            return
        yield from windows.check_parts(list(kv.leases()))
