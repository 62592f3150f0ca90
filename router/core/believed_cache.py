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
    rest: int = -1
    """How many blocks of the oldest use's stretch are here; all of them where it is negative."""

    def of(self, use: int, length: int) -> int:
        """How many blocks of a stretch, whose top they are, lie here."""
        if not self.uses or use < self.uses[0]:
            return 0
        return min(self.rest, length) if use == self.uses[0] and self.rest >= 0 else length


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
                tier.rest = here
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
                del self.stretches[use]
            at += common
        return held

    def _shorten(self, use: int, length: int, taken: int, held: list[int]) -> None:
        """A stretch loses its first `taken` blocks."""
        for number, tier in enumerate(self.tiers):
            here = tier.of(use, length)
            held[number] += min(here, taken)
            if tier.uses and use == tier.uses[0] and tier.rest >= 0:
                tier.rest = here - min(here, taken)

    def cut(self, use: int, keep: int) -> Nodes:
        """Let go of a stretch's blocks but for the first `keep`, and return them."""
        stretch = nodes_of(self.stretches[use])
        for tier in self.tiers:
            here = tier.of(use, len(stretch))
            tier.blocks -= max(0, here - keep)
            if tier.uses and use == tier.uses[0] and tier.rest >= 0:
                tier.rest = min(here, keep)
        if keep:
            self.stretches[use] = stretch[:keep].tobytes()
        else:
            del self.stretches[use], self.tops[stretch.item(0)]
        return stretch[keep:]

    def settle(self) -> Iterator[tuple[Nodes, int]]:
        """Let each tier's oldest blocks go that have no room in it: (nodes, the bits of the tiers)."""
        for tier in self.tiers[:-1]:
            while tier.blocks > tier.capacity:
                stretch = self._oldest(tier)
                here = len(stretch) if tier.rest < 0 else tier.rest
                gone = min(here, tier.blocks - tier.capacity)
                tier.blocks -= gone
                tier.rest = here - gone
                yield stretch[here - gone : here], 1 << tier.bit
        while self.whole.blocks > self.whole.capacity:
            stretch = self._oldest(self.whole)
            use = self.whole.uses[0]
            yield self.cut(use, max(0, len(stretch) - self.whole.blocks + self.whole.capacity)), self.mask

    def _oldest(self, tier: BelievedTier) -> Nodes:
        """The stretch of the oldest use that has blocks in a tier."""
        while tier.uses[0] not in self.stretches or tier.rest == 0:
            tier.uses.popleft()
            tier.rest = -1
        return nodes_of(self.stretches[tier.uses[0]])

    def _tidy(self, tier: BelievedTier) -> None:
        oldest = tier.uses[0]
        if oldest not in self.stretches:
            tier.rest = -1
        tier.uses = deque(sorted(use for use in self.stretches if use >= oldest))

    def nodes(self) -> Nodes:
        """All that is held."""
        return nodes_of(b"".join(self.stretches.values()))


def nodes_of(stretch: bytes) -> Nodes:
    return np.frombuffer(stretch, np.int32)
