"""The blocks that any worker is believed to hold: a forest of chained identities, each with the set of its holders.

    identity --hash table--> node: parent | number of children | set of holders, by number

A node is a number into flat arrays, so that half a million of them are five objects to the garbage collector. Equal
sets are stored once, as the bits of an integer: the blocks of a prompt that the same workers hold share one. Who holds
a block holds its parent too: along a chain the sets only shrink, and one walk finds where each holder's part ends.

Identities are cut to 64 bits: where two coincide a worker is believed to hold what it does not, and nothing worse. The
hash table chains nodes that share a bucket, and grows by splitting a few buckets at a time (linear hashing, Litwin
1980): no insertion has to wait for all of it. Pure.
"""

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Nodes = NDArray[np.int32]
Number = TypeVar("Number", np.uint64, np.int32)

_DEAD = -1  # in the place of a parent
_FIRST_BUCKETS = 1024
BUCKETS_PER_BLOCK = 2
"""So that most lookups end with the first node of a bucket, or without any: each further one is a pass of all keys."""
CHECKED_AT_ONCE = 4096
"""Nodes of one step of a check: some 0.5 ms."""


class BlockTable:
    """Node 0 stands for none. Mutable state, all of it: the arrays by node, the free nodes, the buckets and the sets.

    `keys`, `_next` (in its bucket), `parents`, `children` and `_sets` are by node; a node from `_fresh` on was never
    used, and `_free[:_free_count]` are those that were.
    """

    def __init__(self) -> None:
        self.keys: Keys = np.zeros(1, np.uint64)
        self.parents: Nodes = np.zeros(1, np.int32)
        self.children: Nodes = np.zeros(1, np.int32)
        self._next: Nodes = np.zeros(1, np.int32)
        self._sets: Nodes = np.zeros(1, np.int32)
        self._free: Nodes = np.zeros(1, np.int32)
        self._free_count, self._fresh = 0, 1
        self.changes = 0
        """How often nodes were made or forgotten."""
        # Buckets below `_split` are those of a table of twice the size.
        self._heads: Nodes = np.zeros(2 * _FIRST_BUCKETS, np.int32)
        self._buckets, self._split = _FIRST_BUCKETS, 0
        # Set 0 is the empty one. By number: the bits, and how many nodes have it.
        self._masks, self._uses = [0], [0]
        self._numbers: dict[int, int] = {0: 0}
        self._unused: list[int] = []

    def __len__(self) -> int:
        return self._fresh - 1 - self._free_count

    def __repr__(self) -> str:
        return f"BlockTable({len(self)} blocks, {len(self._numbers) - 1} sets)"

    def reserve(self, blocks: int) -> None:
        """Make room for `blocks` nodes in all; memory is taken when they are used."""
        if blocks < len(self.keys):
            return
        size = max(blocks + 1, 2 * len(self.keys))
        self.keys = _grown(self.keys, size, self._fresh)
        self.parents = _grown(self.parents, size, self._fresh)
        self.children = _grown(self.children, size, self._fresh)
        self._next = _grown(self._next, size, self._fresh)
        self._sets = _grown(self._sets, size, self._fresh)
        self._free = _grown(self._free, size, self._free_count)

    # nodes

    def find(self, keys: Keys) -> Nodes:
        """Return the node of each key; 0 where there is none."""
        nodes = self._heads.take(self._bucket(keys))
        found: Nodes = nodes * (self.keys.take(nodes) == keys)
        at = (found != nodes).nonzero()[0]
        nodes = nodes.take(at)
        while len(at):
            nodes = self._next.take(nodes)
            hit = self.keys.take(nodes) == keys.take(at)
            found[at] = nodes * hit
            rest = (hit < (nodes > 0)).nonzero()[0]
            at, nodes = at.take(rest), nodes.take(rest)
        return found

    def extend(self, keys: Keys, parent: int = 0, found: Nodes | None = None) -> Nodes:
        """Return the nodes of a path below `parent`, those that are missing made, held by nobody yet. Where a key is
        known as another block's (two have coincided), the path ends before it. `found` is what `find` gives for `keys`,
        if it is known already."""
        path = self.find(keys) if found is None else found.copy()
        known = leading(path > 0)
        above, same = self.parents[path[:known]], 0
        if known and above.item(0) == parent:
            same = 1 + leading(above[1:] == path[: known - 1])
        missing = len(keys) - known
        if same < known or not missing:
            return path[:same]
        path = path[: known + leading(path[known:] == 0)]
        self.changes += 1
        made = self._allocate(len(path) - known)
        path[known:] = made
        above = path[known - 1 : -1] if known else np.concatenate((np.array([parent], np.int32), made[:-1]))
        self.keys[made] = keys[known : len(path)]
        self.children[made] = 0
        self._sets[made] = 0
        self.parents[made] = above
        self.children[above] += 1
        self._link(made)
        self._split_some()
        return path

    def _allocate(self, count: int) -> Nodes:
        left = max(self._free_count - count, 0)
        used = self._free[left : self._free_count]
        end = self._fresh + count - len(used)
        self.reserve(end)
        fresh = np.arange(self._fresh, end, dtype=np.int32)
        self._free_count, self._fresh = left, end
        return np.concatenate((used, fresh))

    def _remove(self, nodes: Nodes) -> None:
        """Forget nodes that nobody holds, and below which there are none left."""
        self.changes += 1
        np.subtract.at(self.children, self.parents.take(nodes), 1)
        self.parents[nodes] = _DEAD
        buckets = np.sort(self._bucket(self.keys.take(nodes)))
        self._relink(buckets[np.diff(buckets, prepend=-1).nonzero()])
        self._free[self._free_count : self._free_count + len(nodes)] = nodes
        self._free_count += len(nodes)

    # sets of holders

    def mask(self, node: int) -> int:
        """Return the holders of a node, as bits."""
        return self._masks[self._sets.item(node)]

    def mark(self, nodes: Nodes, bits: int) -> None:
        """Let `bits` hold these nodes, all different."""
        self._change(nodes, bits, 0)

    def drop(self, nodes: Nodes, bits: int) -> None:
        """Let `bits` hold these nodes, all different, no more; those that nobody holds are forgotten."""
        self._change(nodes, 0, bits)
        dead = nodes[self._sets.take(nodes) == 0]
        if len(dead):
            self._remove(dead)

    def walk(self, path: Nodes) -> list[tuple[int, int]]:
        """Return (bits, blocks): how many leading blocks of a chain each of these bits holds, if `path` are its
        known nodes. Others hold none."""
        if not len(path):
            return []
        sets = self._sets.take(path)
        ended, left = [], self._masks[sets.item(0)]
        for begin, _, number in _runs(sets):
            still = left & self._masks[number]
            if still != left:
                ended.append((left & ~still, begin))
                left = still
        return [*ended, (left, len(path))]

    def _change(self, nodes: Nodes, add: int, remove: int) -> None:
        sets = self._sets.take(nodes)
        fading = []
        for begin, end, number in _runs(sets):
            old = self._masks[number]
            new = (old | add) & ~remove
            if new == old:
                continue
            changed = self._number(new)
            self._uses[changed] += end - begin
            self._uses[number] -= end - begin
            fading.append(number)
            sets[begin:end] = changed
        self._sets[nodes] = sets
        for number in fading:
            if number and not self._uses[number] and self._numbers.get(self._masks[number]) == number:
                del self._numbers[self._masks[number]]
                self._unused.append(number)

    def _number(self, mask: int) -> int:
        number = self._numbers.get(mask)
        if number is None:
            if self._unused:
                number = self._unused.pop()
                self._masks[number] = mask
            else:
                number = len(self._masks)
                self._masks.append(mask)
                self._uses.append(0)
            self._numbers[mask] = number
        return number

    # buckets

    def _bucket(self, keys: Keys) -> NDArray[np.int64]:
        """Identities are digests: their lowest bits are as good as any hash of them."""
        if not self._split:
            return (keys & np.uint64(self._buckets - 1)).view(np.int64)
        low = (keys & np.uint64(2 * self._buckets - 1)).view(np.int64)
        # A bucket of the second half that has not been made yet is still part of its twin.
        return np.where(low < self._buckets + self._split, low, low - self._buckets)

    def _link(self, nodes: Nodes) -> None:
        buckets = self._bucket(self.keys[nodes])
        while len(nodes):
            self._next[nodes] = self._heads.take(buckets)
            self._heads[buckets] = nodes
            # Of several in one bucket the last has won; the others go before it.
            lost = (self._heads.take(buckets) != nodes).nonzero()[0]
            nodes, buckets = nodes.take(lost), buckets.take(lost)

    def _relink(self, buckets: NDArray[np.int64]) -> None:
        """Put all living nodes of these buckets, all different, where they belong now."""
        nodes, parts = self._heads.take(buckets), []
        while len(nodes := nodes[nodes > 0]):
            parts.append(nodes)
            nodes = self._next.take(nodes)
        self._heads[buckets] = 0
        if parts:
            nodes = np.concatenate(parts)
            self._link(nodes[self.parents.take(nodes) != _DEAD])

    def _split_some(self) -> None:
        """Make as many buckets as there are too few for the nodes."""
        while (missing := BUCKETS_PER_BLOCK * len(self) - self._buckets - self._split) > 0:
            begin, self._split = self._split, min(self._split + missing, self._buckets)
            self._relink(np.arange(begin, self._split))
            if self._split == self._buckets:
                self._buckets, self._split = 2 * self._buckets, 0
                self._heads = _grown(self._heads, 2 * self._buckets, self._buckets)

    def check(self) -> None:
        """Raise AssertionError if nodes, buckets and sets disagree, or a holder holds a block without its parent."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """Check as `check` does, in steps of CHECKED_AT_ONCE nodes. No step may follow a change."""
        is_living = np.ones(self._fresh, np.bool_)
        is_living[0] = False
        is_living[self._free[: self._free_count]] = False
        children = np.zeros(self._fresh, np.int32)
        uses = np.zeros(len(self._masks), np.int64)
        for living in self._parts(is_living):
            assert np.array_equal(self.find(self.keys[living]), living), "a node is not found"
            parents, sets = self.parents[living], self._sets[living]
            assert (parents != _DEAD).all()
            below = parents > 0
            assert is_living[parents[below]].all(), "a parent is forgotten"
            np.add.at(children, parents[below], 1)
            uses += np.bincount(sets, minlength=len(uses))
            pairs = zip(sets[below].tolist(), self._sets[parents[below]].tolist(), strict=True)
            for mine, above in set(pairs):
                assert not self._masks[mine] & ~self._masks[above], "a block is held without its parent"
            yield
        for living in self._parts(is_living):
            assert np.array_equal(children[living], self.children[living])
            yield
        assert uses[0] == 0, "a node is held by nobody"
        named = 0
        for at, (mask, number) in enumerate(self._numbers.items()):
            assert self._masks[number] == mask and (not number or uses[number] == self._uses[number] > 0)
            named += uses.item(number)
            if at % CHECKED_AT_ONCE == 0:
                yield
        assert uses.sum() == named

    def _parts(self, is_living: NDArray[np.bool_]) -> Iterator[Nodes]:
        """The nodes that are somebody's, some at a time."""
        for begin in range(0, self._fresh, CHECKED_AT_ONCE):
            yield is_living[begin : begin + CHECKED_AT_ONCE].nonzero()[0].astype(np.int32) + np.int32(begin)

    def are_held(self, nodes: Nodes, bit: int) -> bool:
        """Return True if a bit holds all of these nodes."""
        return all(self._masks[number] >> bit & 1 for number in set(self._sets.take(nodes).tolist()))

    def held(self) -> Iterator[tuple[int, int]]:
        """Yield every set of holders that there is, as bits, and how many blocks it holds."""
        return ((mask, self._uses[number]) for mask, number in self._numbers.items() if number)


def _grown(array: NDArray[Number], size: int, used: int) -> NDArray[Number]:
    """A larger copy of the first `used` elements; the rest are zeros that take no memory yet."""
    grown = np.zeros(size, array.dtype)
    grown[:used] = array[:used]
    return grown


def leading(true: NDArray[np.bool_]) -> int:
    """How many elements are true before the first that is not."""
    if not len(true):
        return 0
    first = int(true.argmin())
    return len(true) if true.item(first) else first


def _runs(numbers: Nodes) -> Iterator[tuple[int, int, int]]:
    """The runs of equal numbers: (begin, end, number)."""
    begin = 0
    for end in [*((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist(), len(numbers)]:
        if end > begin:
            yield begin, end, numbers.item(begin)
        begin = end
