"""Whole blocks of a sequence, kept in host memory for whoever computed them. Pure.

    put: a lease of its own holds the device blocks --every copy of them has ended--> the lease is let go: they are
         cached, evictable, and in host memory, where they stay --drop--> the tier's, like any others

So a stash belongs to nobody until it is asked for, and a device block is not reused while a copy reads it, whatever
becomes of the request meanwhile. Sequences that share a prefix share its copies, and wait for them together.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.identity import in_group
from engine.kv.groups import GONE
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.commands import Stored
from engine.kv.tiers.tiers import Tiers
from engine.types import BlockId


@dataclass(slots=True, eq=False)
class Stash:
    """Mutable; owned by `Stashes`."""

    lease: Lease
    identities: tuple[bytes, ...]
    stores: set[int]
    """Copies under way that it waits for."""
    failed: bool = False
    dropped: bool = False


class Stashes:
    """Mutable state: `kept`, all that there are, and what is counted. Owner: the scheduler."""

    def __init__(self, kv: KVCacheManager, tiers: Tiers) -> None:
        self._kv = kv
        self._tiers = tiers
        self.kept: set[Stash] = set()
        self.stored_blocks = 0
        self.store_s = 0.0

    @property
    def under_way(self) -> int:
        """Stashes whose copies have not ended."""
        return sum(bool(stash.stores) for stash in self.kept)

    @property
    def freeing(self) -> int:
        """Device blocks that nobody but stashes holds: evictable as soon as copies have ended."""
        held = Counter(block for stash in self.kept if stash.stores for block in _blocks(stash.lease))
        return sum(self._kv.pool.refs(block) == count for block, count in held.items())

    def missing(self, lease: Lease, tokens: int) -> int:
        """Return how many of the whole blocks of the lease's first `tokens` tokens would have to be copied."""
        return sum(name not in self._tiers.host for name, _ in self._whole(lease, tokens))

    def is_possible(self, lease: Lease, tokens: int) -> bool:
        """Return True where going on behind the whole blocks of so many tokens takes nothing that is not here: the
        windows of what has just landed, or forked, begin behind it now and then."""
        return self._kv.can_fork(lease, tokens - tokens % self._kv.block_size)

    def _whole(self, lease: Lease, tokens: int) -> list[tuple[bytes, BlockId]]:
        """Return the whole blocks that going on from their end takes, with their names: of layer groups with a window
        those that it sees."""
        kv = self._kv
        path = lease.path[: tokens // kv.block_size]
        named = [(node.identity, node.block) for node in path]
        for number, group in enumerate(kv.groups[1:], 1):
            first = group.first_needed(len(path) * kv.block_size, kv.block_size)
            blocks = lease.tables[number][first : len(path)]
            named += [(in_group(node.identity, number), b) for node, b in zip(path[first:], blocks, strict=True)]
        return named

    def put(self, lease: Lease, tokens: int) -> Stash | None:
        """Keep the whole blocks of the lease's first `tokens` tokens, which are committed. None: there are none, or
        host memory has no room for them."""
        size = self._kv.block_size
        whole = min(len(lease.path), tokens // size) * size
        if not whole or not self.is_possible(lease, whole):
            return None
        identities, blocks = zip(*self._whole(lease, whole), strict=True)
        stores = self._tiers.keep(identities, blocks, lease.namespace)
        if stores is None:
            return None
        held = self._kv.promise(lease.namespace, 0)
        assert held is not None
        self._kv.fork(lease, held, whole)
        stash = Stash(held, identities, stores)
        self.kept.add(stash)
        if not stores:
            self._kv.release(held)
        return stash

    def drop(self, stash: Stash) -> None:
        """Let a stash go that nobody wants any more."""
        stash.dropped = True
        self._settle([stash])

    def stored(self, event: Stored) -> list[Stash]:
        """Copies have ended; returns the stashes that have failed by it. To be called after `Tiers.handle`."""
        self.stored_blocks += event.blocks
        self.store_s += event.seconds
        waited = [stash for stash in self.kept if event.number in stash.stores]
        for stash in waited:
            stash.stores.remove(event.number)
            stash.failed |= bool(event.error)
            if not stash.stores:
                self._kv.release(stash.lease)
        self._settle(waited)
        return [stash for stash in waited if stash.failed and not stash.stores and not stash.dropped]

    def _settle(self, stashes: Iterable[Stash]) -> None:
        for stash in stashes:
            if not stash.stores and (stash.dropped or stash.failed) and stash in self.kept:
                self.kept.remove(stash)
                self._tiers.unkeep(stash.identities)

    def check(self) -> None:
        """Recompute that what is copied is held, and what is kept is there."""
        for stash in self.kept:
            assert stash.lease.released == (not stash.stores), "a lease ends with its copies"
            assert all(ident in self._tiers.host for ident in stash.identities)
            if stash.stores:
                assert [node.block for node in stash.lease.path] == stash.lease.blocks
                held = self._whole(stash.lease, len(stash.lease.path) * self._kv.block_size)
                assert [name for name, _ in held] == list(stash.identities)
                assert all(self._kv.pool.refs(block) for _, block in held)


def _blocks(lease: Lease) -> list[BlockId]:
    return [block for table in lease.tables for block in table if block != GONE]
