"""What one worker is believed to hold, in the order in which it would let go. Pure.

Of each worker a *stretch* is a vertical piece of a chain, the blocks of one use that no later use has touched:

    use 1  a b c d e          stretches    1: d e
    use 2  a b c x                         2: a b c x

A use takes the top off the stretches along its chain, and leaves the newest one. So every block that a worker holds
lies in one stretch, what hangs below a block is no newer than it, and the last block of the oldest stretch goes next.
The upper tiers keep the newest blocks: each is believed to lie in the first tier in which those newer leave it room.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from router.core.block_table import Nodes


@dataclass(slots=True)
class BelievedTier:
    """The newest blocks of a worker, at most `capacity` of them: those in one of its tiers, or in one above it."""

    bit: int
    name: str
    capacity: int
    blocks: int = 0
    uses: deque[int] = field(default_factory=deque)
    """The uses whose stretches have blocks here, oldest first; some have no stretch any more."""
    parts: dict[int, int] = field(default_factory=dict)
    """How many blocks of a use's stretch are here, where not all of them are; of the lowest tier there are none."""

    def of(self, use: int, length: int) -> int:
        """How many blocks of a stretch, whose top they are, lie here."""
        if not self.uses or use < self.uses[0]:
            return 0
        return min(self.parts.get(use, length), length)


class BelievedCache:
    """One worker's.

    Mutable state: the stretches by use, the use of the stretch that begins at a node, and the tiers, the lowest last.
    """

    def __init__(self, tiers: list[BelievedTier]) -> None:
        self.tiers = tiers
        self.mask = sum(1 << tier.bit for tier in tiers)
        self.stretches: dict[int, bytes] = {}
        self.tops: dict[int, int] = {}
        self.newest = self.oldest = 0

    @property
    def whole(self) -> BelievedTier:
        return self.tiers[-1]

    def use(self, path: Nodes) -> None:
        """`path`, from a root, was used just now."""
        held = self._take(path)
        self.newest += 1
        self.stretches[self.newest] = path.tobytes()
        self.tops[path.item(0)] = self.newest
        for tier, blocks in zip(self.tiers, held, strict=True):
            tier.blocks += len(path) - blocks
            tier.uses.append(self.newest)
            if len(tier.uses) > 2 * len(self.stretches) + 16:
                self._tidy(tier)

    def recall(self, path: Nodes) -> list[int]:
        """`path`, none of which is held, hangs below what is held, or is a root, and was used before everything else.
        Return how many of its blocks are in each tier."""
        self.oldest -= 1
        self.stretches[self.oldest] = path.tobytes()
        self.tops[path.item(0)] = self.oldest
        newer, found = self.whole.blocks, []
        for tier in self.tiers:
            # There is room for it only where there is for all that is newer.
            here = min(len(path), tier.capacity - tier.blocks) if tier.blocks == newer else 0
            if here > 0:
                tier.blocks += here
                tier.uses.appendleft(self.oldest)
                if here < len(path):
                    tier.parts[self.oldest] = here
            found.append(here)
        return found

    def _take(self, path: Nodes) -> list[int]:
        """Take the blocks of `path` out of their stretches; return how many of them were in each tier."""
        held, at = [0] * len(self.tiers), 0
        while at < len(path) and (use := self.tops.pop(path.item(at), None)) is not None:
            stretch = nodes_of(self.stretches[use])
            common = min(len(stretch), len(path) - at)
            same = stretch[:common] == path[at : at + common]
            if not same.all():
                common = int(same.argmin())
            self._shorten(use, len(stretch), common, held)
            if common < len(stretch):
                self.stretches[use] = stretch[common:].tobytes()
                self.tops[stretch.item(common)] = use
            else:
                self._forget(use)
            at += common
        return held

    def _shorten(self, use: int, length: int, taken: int, held: list[int]) -> None:
        """A stretch loses its first `taken` blocks."""
        for number, tier in enumerate(self.tiers):
            here = tier.of(use, length)
            held[number] += min(here, taken)
            if use in tier.parts:
                tier.parts[use] = here - min(here, taken)

    def cut(self, use: int, keep: int) -> Nodes:
        """Let go of a stretch's blocks but for the first `keep`, and return them."""
        stretch = nodes_of(self.stretches[use])
        for tier in self.tiers:
            here = tier.of(use, len(stretch))
            tier.blocks -= max(0, here - keep)
            if use in tier.parts:
                tier.parts[use] = min(here, keep)
        if keep:
            self.stretches[use] = stretch[:keep].tobytes()
        else:
            del self.tops[stretch.item(0)]
            self._forget(use)
        return stretch[keep:]

    def sink(self, tier: BelievedTier, use: int, keep: int) -> Nodes:
        """Let a stretch's blocks but for the first `keep` leave a tier for one below it; return those that were in
        it."""
        stretch = nodes_of(self.stretches[use])
        here = tier.of(use, len(stretch))
        if here > keep:
            tier.blocks -= here - keep
            tier.parts[use] = keep
        return stretch[keep:here]

    def _forget(self, use: int) -> None:
        """There is nothing left of a stretch."""
        del self.stretches[use]
        for tier in self.tiers:
            tier.parts.pop(use, None)

    def settle(self) -> Iterator[tuple[Nodes, int]]:
        """Let each tier's oldest blocks go that have no room in it or above it: (nodes, the bits of the tiers)."""
        for at, tier in enumerate(self.tiers[:-1], 1):
            while tier.blocks > tier.capacity:
                use = self._oldest_use(tier)
                here = tier.of(use, len(nodes_of(self.stretches[use])))
                keep = max(0, here - tier.blocks + tier.capacity)
                for upper in self.tiers[:at]:
                    yield self.sink(upper, use, keep), 1 << upper.bit
        while self.whole.blocks > self.whole.capacity:
            use = self._oldest_use(self.whole)
            keep = len(nodes_of(self.stretches[use])) - self.whole.blocks + self.whole.capacity
            yield self.cut(use, max(0, keep)), self.mask

    def _oldest_use(self, tier: BelievedTier) -> int:
        """The oldest use that has blocks in a tier; there is one."""
        while tier.uses[0] not in self.stretches or tier.parts.get(tier.uses[0]) == 0:
            tier.parts.pop(tier.uses.popleft(), None)
        return tier.uses[0]

    def _tidy(self, tier: BelievedTier) -> None:
        oldest = tier.uses[0]
        tier.uses = deque(sorted(use for use in self.stretches if use >= oldest))

    def nodes(self) -> Nodes:
        """All that is held."""
        return nodes_of(b"".join(self.stretches.values()))


def nodes_of(stretch: bytes) -> Nodes:
    return np.frombuffer(stretch, np.int32)
