"""Tells whose block goes when room is needed: counts each namespace's blocks, and lines up those nobody holds. Pure.

Every namespace has a line of its own, least recently used first. What each has taken decides whose line gives way:

- A namespace with a share of its own never fills more than that share with idle blocks: once it has as many blocks,
  each new one costs it its own oldest, though there be room elsewhere. So what it finds cached depends on its own
  requests.
- All others live on what is left. When there is no room, whoever is furthest beyond its share gives way first, one
  without a share being beyond it with every block. So a flood takes the flood's own blocks, and those without a share
  end with equal parts (max-min fairness).

Namespaces of one owner (`engine.identity.owner`) are one here: a tenant that parts its cache by salts has no more of
it.

Running requests are served before anything is kept: where nobody is beyond a share, the one nearest to it gives way.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Generic, TypeVar

from engine.identity import owner

KeyT = TypeVar("KeyT")


class CacheShares(Generic[KeyT]):
    """Mutable state, all of it: `idle`, `_lines` without empty ones, `_used` without zeros, `_own`, and `_order`, which
    holds for every namespace with a line an entry that is at least as far beyond its share as it is."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.idle = 0
        """Blocks in all lines."""
        self._lines: dict[bytes, OrderedDict[KeyT, None]] = {}
        self._used: dict[bytes, int] = {}
        self._own: dict[bytes, int] = {}
        self._order: list[tuple[int, bytes]] = []

    def __contains__(self, at: tuple[bytes, KeyT]) -> bool:
        namespace, key = at
        return key in self._lines.get(owner(namespace), ())

    def entitle(self, namespace: bytes, share: float) -> None:
        """Make `share` of all blocks the namespace's own; 0 makes it live on what is left."""
        namespace = owner(namespace)
        own = int(share * self.total)
        if own == self._own.get(namespace, 0):
            return
        if own:
            self._own[namespace] = own
        else:
            del self._own[namespace]
        self._enter(namespace)

    def took(self, namespace: bytes, blocks: int) -> None:
        """So many more blocks are the namespace's, or are about to be."""
        namespace = owner(namespace)
        if blocks:
            self._used[namespace] = self._used.get(namespace, 0) + blocks
            self._enter(namespace)

    def gave(self, namespace: bytes) -> None:
        """One block less is the namespace's; it stands in no line."""
        namespace = owner(namespace)
        left = self._used[namespace] - 1
        if left:
            self._used[namespace] = left
        else:
            del self._used[namespace]

    def let_go(self, namespace: bytes, key: KeyT, *, first: bool = False) -> None:
        """The block joins its namespace's line: last, or `first` to give way."""
        namespace = owner(namespace)
        line = self._lines.get(namespace)
        if line is None:
            line = self._lines[namespace] = OrderedDict()
            self._enter(namespace)
        if key not in line:
            self.idle += 1
        line[key] = None
        line.move_to_end(key, last=not first)

    def occupy(self, namespace: bytes, key: KeyT) -> bool:
        """The block leaves the line; returns whether it stood there."""
        namespace = owner(namespace)
        line = self._lines.get(namespace)
        if line is None or key not in line:
            return False
        del line[key]
        self.idle -= 1
        if not line:
            del self._lines[namespace]
        return True

    def excess(self, namespace: bytes) -> int:
        """Return how many idle blocks the namespace must give for those that it has taken beyond its own."""
        namespace = owner(namespace)
        if namespace not in self._own:
            return 0
        return max(0, min(self._beyond(namespace), len(self._lines.get(namespace, ()))))

    def pop(self, namespace: bytes) -> KeyT:
        """Take the first block out of the namespace's line. Raises KeyError where it has none."""
        namespace = owner(namespace)
        key = next(iter(self._lines[namespace]))
        self.occupy(namespace, key)
        return key

    def loser(self, asking: bytes) -> bytes:
        """Return the namespace that gives way to `asking`, which has said what it takes. Raises KeyError when all lines
        are empty."""
        asking = owner(asking)
        while self._order:
            entered, namespace = self._order[0]
            beyond = -self._beyond(namespace)
            if namespace not in self._lines:
                heappop(self._order)
            elif beyond > entered:
                heapreplace(self._order, (beyond, namespace))  # it has given blocks since
            elif asking in self._lines and -self._beyond(asking) <= beyond:
                return asking
            else:
                return namespace
        raise KeyError("no block is idle")

    def names(self) -> list[bytes]:
        """Every owner that has idle blocks."""
        return list(self._lines)

    def first(self, namespace: bytes, count: int) -> list[KeyT]:
        """Return at most so many of an owner's idle blocks, the first to give way first."""
        return list(islice(self._lines.get(namespace, ()), count))

    def used(self) -> dict[bytes, int]:
        """Return how many blocks each owner has taken."""
        return self._used.copy()

    def lines(self) -> Iterator[tuple[bytes, list[KeyT]]]:
        """Every owner's idle blocks, the first to give way first."""
        return ((namespace, list(line)) for namespace, line in self._lines.items())

    def _beyond(self, namespace: bytes) -> int:
        return self._used.get(namespace, 0) - self._own.get(namespace, 0)

    def _enter(self, namespace: bytes) -> None:
        if namespace not in self._lines:
            return
        heappush(self._order, (-self._beyond(namespace), namespace))
        if len(self._order) > 4 * len(self._lines) + 64:
            self._order = [(-self._beyond(name), name) for name in self._lines]
            heapify(self._order)

    def check(self, used: dict[bytes, int]) -> None:
        """Recompute every count; `used` is how many blocks each namespace really has."""
        self.compare(self._used, used)
        self.check_lines()

    @staticmethod
    def compare(taken: Mapping[bytes, int], used: Mapping[bytes, int]) -> None:
        """Say if what each owner has taken is how many blocks its namespaces really have."""
        owned: dict[bytes, int] = {}
        for namespace, blocks in used.items():
            owned[owner(namespace)] = owned.get(owner(namespace), 0) + blocks
        assert taken == owned, (taken, owned)

    def check_lines(self) -> None:
        """Recompute what is known of every line, without going through any. Takes time in proportion to the lines."""
        used = self._used
        assert self.idle == sum(map(len, self._lines.values()))
        assert all(self._lines.values())
        assert all(len(line) <= used.get(name, 0) for name, line in self._lines.items())
        entered: dict[bytes, int] = {}
        for at, name in self._order:
            entered[name] = min(at, entered.get(name, at))
        for name in self._lines:
            assert name in entered and entered[name] <= -self._beyond(name), "it would never give way"

    def __repr__(self) -> str:
        return f"CacheShares({self.idle} idle in {len(self._lines)} lines, {len(self._own)} with shares)"
