"""The router's belief of what is cached where: one forest of blocks for all workers (`router.core.block_table`).

Beliefs come from requests that workers accepted and from what workers tell of themselves when a router attaches, shrink
by what they report they evicted or really reused, and are bounded by what a worker can hold in all its tiers, with its
own rule: least recently used, leaves first (`router.core.believed_cache`). So is the tier of each block, until a worker
says that it has gone to another one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np

from engine.identity import IDENTITY_BYTES, SHORT_BYTES
from router.core.believed_cache import BelievedCache, BelievedTier, nodes_of
from router.core.block_table import CHECKED_AT_ONCE, BlockTable, Keys, Nodes, leading

Chain = Sequence[bytes]

TIERS = ("device", "host", "disk")
RESERVED_BLOCKS = 1 << 24
"""Blocks that the table is made for when workers join, so that it need not be copied while requests wait."""
SETS_AT_ONCE = 64
"""Sets of holders of one step of a check."""


class PrefixIndex:
    """Workers by name. The router core owns it, and `ClusterView` and `Router` alone change it."""

    # Mutable state: the table, the caches by name, whose each bit of the table's sets is, the bits of the workers that
    # have lower tiers, and the chain that was looked for last, with its keys and their nodes, and what the table's
    # count of changes was; and the index's own count.

    def __init__(self) -> None:
        self._table = BlockTable()
        self._caches: dict[str, BelievedCache] = {}
        self._owners: list[tuple[str, int] | None] = []
        self._tiered = 0
        self._latest: tuple[Chain, Keys, Nodes, int] = ((), _keys(()), self._table.find(_keys(())), 0)
        self.changes = 0
        """How often something was learned that may have changed what is believed."""

    def __repr__(self) -> str:
        held = ", ".join(f"{name}: {h.whole.blocks}/{h.whole.capacity}" for name, h in self._caches.items())
        return f"PrefixIndex({held}; {self._table!r})"

    def add(self, worker: str, blocks: int, host_blocks: int = 0, disk_blocks: int = 0) -> None:
        """Begin with nothing for `worker`, whatever was believed of it. It can hold so many blocks in each tier."""
        self.forget(worker)
        self.changes += 1
        tiers: list[BelievedTier] = []
        capacity = 0
        for number, (name, more) in enumerate(zip(TIERS, (blocks, host_blocks, disk_blocks), strict=True)):
            capacity += more
            if not number or more:
                tiers.append(BelievedTier(self._bit(worker, number), name, capacity))
        self._caches[worker] = cache = BelievedCache(tiers)
        if len(tiers) > 1:
            self._tiered |= cache.mask
        everything = sum(cache.whole.capacity for cache in self._caches.values())
        self._table.reserve(min(everything, RESERVED_BLOCKS))

    def _bit(self, worker: str, tier: int) -> int:
        bit = self._owners.index(None) if None in self._owners else len(self._owners)
        self._owners[bit : bit + 1] = [(worker, tier)]
        return bit

    def forget(self, worker: str) -> None:
        cache = self._caches.pop(worker, None)
        if cache is not None:
            self.changes += 1
            self._table.drop(cache.nodes(), cache.mask)
            self._tiered &= ~cache.mask
            for tier in cache.tiers:
                self._owners[tier.bit] = None

    def held_blocks(self, worker: str) -> int:
        """Return the number of blocks that `worker` is believed to hold."""
        cache = self._caches.get(worker)
        return cache.whole.blocks if cache is not None else 0

    # what is asked

    def depths(self, chain: Chain) -> dict[str, int]:
        """Return how many leading blocks of `chain` each worker holds, in whichever tier; those that hold none are
        left out. One walk for all of them, which changes nothing."""
        depths: dict[str, int] = {}
        # The lower a tier, the more it holds; of a worker's bits the last to end is that of all its tiers.
        for worker, _, blocks in self._walk(chain):
            depths[worker] = blocks
        return depths

    def tiers(self, chain: Chain) -> dict[str, dict[str, int]]:
        """Return of each worker that holds a leading block how many it holds by tier: in this one or one above it."""
        found: dict[str, dict[str, int]] = {}
        for worker, tier, blocks in self._walk(chain):
            found.setdefault(worker, {})[TIERS[tier]] = blocks
        return {
            worker: {tier.name: blocks.get(tier.name, 0) for tier in self._caches[worker].tiers}
            for worker, blocks in found.items()
        }

    def lower(self, chain: Chain) -> dict[str, tuple[int, int]]:
        """Return, of each worker that holds leading blocks below its device, how many of them are in host memory, and
        how many behind those on disk. One walk, of the workers that have lower tiers."""
        if not self._tiered:
            return {}
        found: dict[str, list[int]] = {}
        for worker, tier, blocks in self._walk(chain, self._tiered):
            found.setdefault(worker, [0, 0, 0])[tier] = blocks
        below = {}
        for worker, (device, host, disk) in found.items():
            host = max(device, host)
            if max(host, disk) > device:
                below[worker] = host - device, max(disk - host, 0)
        return below

    def match(self, worker: str, chain: Chain) -> int:
        """Return how many leading blocks of `chain` one worker holds."""
        return self.depths(chain).get(worker, 0)

    def _walk(self, chain: Chain, bits: int = -1) -> Iterator[tuple[str, int, int]]:
        """Yield (worker, number of a tier, blocks), the fewest first, of these bits."""
        found = self._find(chain)[1]
        for mask, blocks in self._table.walk(found[: leading(found > 0)]):
            for bit in _bits(mask & bits):
                owner = self._owners[bit]
                assert owner is not None, "a set names nobody"
                yield *owner, blocks

    def _find(self, chain: Chain) -> tuple[Keys, Nodes]:
        """The keys of a chain, and the node of each. What a request was placed by is believed next."""
        known, keys, found, changes = self._latest
        if known is not chain or len(keys) != len(chain):
            keys, changes = _keys(chain), -1
        if changes != self._table.changes:
            found = self._table.find(keys)
            self._latest = chain, keys, found, self._table.changes
        return keys, found

    # what is learned

    def insert(self, worker: str, chain: Chain) -> None:
        """Believe that `chain` is held, and was used just now."""
        cache = self._caches.get(worker)
        if cache is None:
            return
        self.changes += 1
        most = cache.whole.capacity
        keys, found = self._find(chain)
        path = self._table.extend(keys[:most], found=found[:most])
        if len(path) == len(keys):
            self._latest = chain, keys, path, self._table.changes
        if len(path):
            cache.use(path)
            self._table.mark(path, cache.mask)
            self._settle(cache)

    def learn(self, worker: str, parent: bytes, blocks: bytes) -> None:
        """Believe that a run of blocks (as for `recall`) is held below `parent`, and was used just now: another
        router's request. Below a `parent` that is not held it says nothing."""
        cache = self._caches.get(worker)
        if cache is None or len(blocks) % SHORT_BYTES or len(parent) not in (0, SHORT_BYTES):
            return
        self.changes += 1
        above, top = list[int](), 0
        if parent:
            top = self._table.find(np.frombuffer(parent, "<u8")).item(0)
            if not self._holds(cache, top):
                return
            above = self._path(top)
        room = max(0, cache.whole.capacity - len(above))
        below = self._table.extend(_distinct(np.frombuffer(blocks, "<u8"))[:room], top)
        if len(below):
            path = np.concatenate((np.array(above, np.int32), below))
            cache.use(path)
            self._table.mark(path, cache.mask)
            self._settle(cache)

    def recall(self, worker: str, parent: bytes, blocks: bytes) -> None:
        """Believe that a run of blocks is held (short identities, packed, each the parent of the next), and was used
        before all that is known already. Below a `parent` that is not held it says nothing; empty: it begins there. A
        run ends before the first block that it names once more."""
        cache = self._caches.get(worker)
        if cache is None or len(blocks) % SHORT_BYTES or len(parent) not in (0, SHORT_BYTES):
            return
        self.changes += 1
        keys, top = _distinct(np.frombuffer(blocks, "<u8")), 0
        if parent:
            top = self._table.find(np.frombuffer(parent, "<u8")).item(0)
            if not self._holds(cache, top):
                return
        # What is held already was used since.
        known = self._table.find(keys).tolist()
        held = next((at for at, node in enumerate(known) if not self._holds(cache, node)), len(known))
        path = self._table.extend(keys[: held + cache.whole.capacity - cache.whole.blocks], top)[held:]
        if len(path):
            for tier, here in zip(cache.tiers, cache.recall(path), strict=True):
                self._table.mark(path[:here], 1 << tier.bit)

    def _holds(self, cache: BelievedCache, node: int, tier: BelievedTier | None = None) -> bool:
        """Return True if a node is in this tier or one above it; in any, where none is given."""
        return bool(self._table.mask(node) >> (tier or cache.whole).bit & 1)

    def correct(self, worker: str, chain: Chain, actual_blocks: int) -> None:
        """The worker held only `actual_blocks` of `chain`: drop the next one and all below it. Never raises the
        belief."""
        if actual_blocks < len(chain):
            self.evict(worker, [chain[actual_blocks]])

    def left_device(self, worker: str, chain: Chain, actual_blocks: int) -> None:
        """The worker has only `actual_blocks` of `chain` on its device: the next one and all below it lie in the tier
        below, until it says otherwise. Where there is none they are dropped."""
        cache = self._caches.get(worker)
        if cache is None or len(cache.tiers) == 1:
            self.correct(worker, chain, actual_blocks)
        elif actual_blocks < len(chain):
            self.moved(worker, {cache.tiers[1].name: chain[actual_blocks][:SHORT_BYTES]})

    def evict(self, worker: str, identities: Sequence[bytes]) -> None:
        """Drop blocks with everything below them; unknown ones are ignored."""
        cache = self._caches.get(worker)
        if cache is not None and identities:
            self.changes += 1
            gone = self._let_go(cache, self._table.find(_keys(identities)), cache.whole, cache.cut)
            if gone:
                self._table.drop(np.concatenate(gone), cache.mask)

    def moved(self, worker: str, blocks: Mapping[str, bytes]) -> None:
        """Take in, by tier, which blocks (short identities, packed) have gone to it, and are in none above it: what is
        below them lies no higher; what is on the device was used just now, for that is why it came back. Of others than
        are believed to lie higher, or are unknown, it says nothing."""
        cache = self._caches.get(worker)
        if cache is None or not blocks:
            return
        self.changes += 1
        for at, below in enumerate(cache.tiers[1:], 1):
            nodes = self._nodes(blocks.get(below.name, b""))
            for tier in cache.tiers[:at] if len(nodes) else ():
                sunk = self._let_go(cache, nodes, tier, partial(cache.sink, tier))
                if sunk:
                    self._table.drop(np.concatenate(sunk), 1 << tier.bit)
        for node in reversed(self._nodes(blocks.get(cache.tiers[0].name, b"")).tolist()):
            if node and not self._holds(cache, node, cache.tiers[0]):
                path = np.array(self._path(node), np.int32)
                cache.use(path)
                self._table.mark(path, cache.mask)
        self._settle(cache)

    def _nodes(self, blocks: bytes) -> Nodes:
        """The nodes of packed short identities, 0 for what is unknown; none where some are cut."""
        return self._table.find(np.frombuffer(blocks if len(blocks) % SHORT_BYTES == 0 else b"", "<u8"))

    def _path(self, node: int) -> list[int]:
        """The nodes from a root to `node`."""
        path = []
        while node:
            path.append(node)
            node = self._table.parents.item(node)
        return path[::-1]

    def _let_go(
        self, cache: BelievedCache, nodes: Nodes, tier: BelievedTier, cut: Callable[[int, int], Nodes]
    ) -> list[Nodes]:
        """Let go of `nodes`, as far as they are in a tier, with all below them; return what has gone. `cut` lets go of
        the blocks of a use but for its first ones."""
        gone: list[Nodes] = []
        dropped: set[int] = set()
        # Workers evict leaves first; from the other end, most of a report lies below what has gone with its parent.
        for node in reversed(nodes.tolist()):
            if node not in dropped and self._holds(cache, node, tier):
                gone.append(cut(*self._place(cache, node)))
                dropped.update(gone[-1].tolist())
        forks = gone
        while len(below := self._hanging(cache, forks)):
            forks = [part for top in below if len(part := cut(cache.tops[top], 0))]
            gone += forks
        return gone

    def _place(self, cache: BelievedCache, node: int) -> tuple[int, int]:
        """The use that a held node is of, and how many blocks of its stretch are before it."""
        keep, top = 0, node
        while (use := cache.tops.get(top)) is None:
            top = self._table.parents.item(top)
            keep += 1
        return use, keep

    def _hanging(self, cache: BelievedCache, gone: Sequence[Nodes]) -> list[int]:
        """The tops of stretches that hang below what has gone."""
        table, forks = self._table, []
        for part in gone:
            more = table.children[part]
            more[:-1] -= 1  # the next one of the same stretch
            forks.append(part[more > 0])
        if not any(map(len, forks)):
            return []
        tops = np.fromiter(cache.tops, np.int32, len(cache.tops))
        found: list[int] = tops[np.isin(table.parents[tops], np.concatenate(forks))].tolist()
        return found

    def _settle(self, cache: BelievedCache) -> None:
        gone: dict[int, list[Nodes]] = {}
        for nodes, bits in cache.settle():
            gone.setdefault(bits, []).append(nodes)
        for bits, parts in gone.items():
            self._table.drop(np.concatenate(parts), bits)

    def check(self) -> None:
        """Raise AssertionError if table and stretches disagree, or a tier holds more than it can."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """Check as `check` does, in steps of a few milliseconds at most. No step may follow a change: `changes` says
        whether there was one."""
        yield from self._table.checks()
        bits = {tier.bit: cache for cache in self._caches.values() for tier in cache.tiers}
        assert {bit for bit, owner in enumerate(self._owners) if owner is not None} == bits.keys()
        marked = dict.fromkeys(bits, 0)
        for at, (mask, blocks) in enumerate(self._table.held()):
            for bit in _bits(mask):
                marked[bit] += blocks
            if at % SETS_AT_ONCE == 0:
                yield
        for cache in self._caches.values():
            yield from self._check_cache(cache)
            for tier in cache.tiers:
                assert marked[tier.bit] == tier.blocks <= tier.capacity, f"{tier} of {marked[tier.bit]} blocks"

    def _check_cache(self, cache: BelievedCache) -> Iterator[None]:
        uses = np.zeros(len(self._table.keys), np.int64)  # by node; 0 is none
        blocks = 0
        for some in _batches(cache.stretches):
            nodes = nodes_of(b"".join(some.values()))
            lengths = [len(nodes_of(stretch)) for stretch in some.values()]
            tops = np.cumsum([0, *lengths[:-1]])
            theirs = np.repeat(list(some), lengths)
            assert [cache.tops.get(top) for top in nodes[tops].tolist()] == list(some)
            assert not uses[nodes].any(), "two stretches share a block"
            uses[nodes] = theirs
            assert (uses[nodes] == theirs).all(), "two stretches share a block"
            blocks += len(nodes)
            assert self._table.are_held(nodes, cache.whole.bit)
            is_below = self._table.parents[nodes[1:]] == nodes[:-1]
            is_below[tops[1:] - 1] = True
            assert is_below.all(), "a stretch is no piece of a chain"
            yield
        assert len(cache.tops) == len(cache.stretches)
        assert blocks == cache.whole.blocks, "two stretches share a block"
        items = iter(cache.tops.items())
        while pairs := list(islice(items, CHECKED_AT_ONCE)):
            nodes, theirs = np.array(pairs, np.int64).T
            above = self._table.parents[nodes]
            assert ((above == 0) | (uses[above] > theirs)).all(), "a block is newer than its parent"
            yield


def _batches(stretches: Mapping[int, bytes]) -> Iterator[dict[int, bytes]]:
    """The stretches by use, some at a time: CHECKED_AT_ONCE blocks of them, or one that is longer."""
    batch, blocks = dict[int, bytes](), 0
    for use, stretch in stretches.items():
        batch[use] = stretch
        blocks += len(nodes_of(stretch))
        if blocks >= CHECKED_AT_ONCE:
            yield batch
            batch, blocks = {}, 0
    if batch:
        yield batch


def _keys(chain: Chain) -> Keys:
    """The first 64 bits of each identity."""
    packed = b"".join(chain)
    if len(packed) != len(chain) * IDENTITY_BYTES:  # another's mistake, or a test's: one of a wrong length is unknown
        packed = b"".join(one[:IDENTITY_BYTES].ljust(IDENTITY_BYTES, b"\0") for one in chain)
    keys: Keys = np.frombuffer(packed, "<u8")[:: IDENTITY_BYTES // SHORT_BYTES]
    return keys


def _distinct(keys: Keys) -> Keys:
    """The first keys, as far as no two are the same."""
    order = keys.argsort(kind="stable")
    ranked = keys.take(order)
    again = order[1:][ranked[1:] == ranked[:-1]]
    return keys[: again.min()] if len(again) else keys


def _bits(mask: int) -> list[int]:
    """The places of the bits that are set."""
    if mask.bit_count() > 16:
        octets = np.frombuffer(mask.to_bytes(mask.bit_length() // 8 + 1, "little"), np.uint8)
        many: list[int] = np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()
        return many
    bits = []
    while mask:
        lowest = mask & -mask
        bits.append(lowest.bit_length() - 1)
        mask ^= lowest
    return bits
