"""What a worker holds, told piece by piece to a router that has attached. Pure.

The list is made when the router comes, of numbers only; what each stands for is looked up when its turn comes. So what
is told is held at that moment, what went meanwhile is left out, and nobody waits for all of it. What came meanwhile the
router knows from its own requests. Where a stream is cut, the list is dropped, and made anew when the router is back;
what was heard is passed over.
"""

from collections.abc import Iterable

from engine import identity
from engine.kv.manager import KVCacheManager
from engine.kv.radix_cache import TOKEN_BYTES, Node
from engine.types import BlockId

Run = tuple[bytes, bytes]
"""Parent and blocks of `engine.messages.HeldRun`."""


class Holding:
    """Mutable state: the blocks and lower identities that are still to be told, the next one last, those of them whose
    way up has been found to be cut, and the number of the piece in which each was told, of which the last had
    `number`, in the order of the pieces. Owner: the engine thread."""

    def __init__(self, kv: KVCacheManager, number: int = 0) -> None:
        """The first piece has the number after this one. None is given twice, so that what was heard of another
        telling is never taken for what was heard of this one."""
        self._kv = kv
        self._told: dict[bytes, int] = {}
        self.number = number
        self._whole = kv.block_size * TOKEN_BYTES
        self._list()

    def _list(self) -> None:
        kv = self._kv
        self._dead: set[bytes] = set()
        self._lower = kv.lower()
        self._blocks = [block for _, line in kv.cache.shares.lines() for block in line]
        # What is in use comes first: the last node of a lease brings all that are before it.
        self._blocks += [lease.path[-1].block for lease in kv.leases() if lease.path]

    def __bool__(self) -> bool:
        """True while something is left to be told."""
        return bool(self._blocks or self._lower)

    @property
    def told_blocks(self) -> int:
        """How many blocks it remembers to have told."""
        return len(self._told)

    def pause(self) -> None:
        """Keep only what cannot be made anew: nothing more is told before `resume`."""
        self._blocks, self._lower, self._dead = [], [], set()

    def resume(self, heard: int) -> None:
        """Go on behind the piece of this number, with what is held now; from the beginning on where it is none of
        these pieces."""
        last = heard if heard <= self.number else 0
        while self._told:
            ident, piece = self._told.popitem()  # the one told last
            if piece <= last:
                self._told[ident] = piece
                break
        self._list()

    def forget(self, identities: Iterable[bytes]) -> None:
        """Tell these again where they come back: whoever listens hears that they are gone, or is told too late."""
        for ident in identities:
            self._told.pop(ident, None)

    def take(self, limit: int) -> list[Run]:
        """Return runs of what comes next, after looking at `limit` blocks or a few more, parents first: what the device
        has, about in the order of use, the latest first; then the tiers below it."""
        runs: list[tuple[bytes, list[bytes]]] = []
        last = None
        while self and limit > 0:
            if self._blocks:
                path = self._device_path(self._blocks.pop())
                looked = len(path)
            else:
                path, looked = self._lower_path(self._lower.pop())
            limit -= 1 + looked
            if len(path) < 2:
                continue
            parent, *fresh = path
            if parent and parent == last:
                runs[-1][1].extend(fresh)
            else:
                runs.append((parent, fresh))
            last = fresh[-1]
            self._told.update(dict.fromkeys(fresh, self.number + 1))
        self.number += bool(runs)
        cut = slice(identity.SHORT_BYTES)
        return [(parent[cut], b"".join(one[cut] for one in fresh)) for parent, fresh in runs]

    def _device_path(self, block: BlockId) -> list[bytes]:
        """What is not told of the way to a cached block: the last identity that was, or nothing for a root, and those
        after it. Empty where the block is cached no more."""
        node: Node | None = self._kv.cache.node(block)
        if node is not None and len(node.key) < self._whole:
            node = node.parent  # a router knows whole blocks only
        path = []
        while node is not None and node.parent is not None and node.identity not in self._told:
            path.append(node.identity)
            node = node.parent
        if node is None:
            return []
        return [b"" if node.parent is None else node.identity, *reversed(path)]

    def _lower_path(self, ident: bytes) -> tuple[list[bytes], int]:
        """The same of a block in a lower tier, and how many were looked at. Empty where what was before it is held no
        more: then nothing on the way is looked at again."""
        path: list[bytes] = []
        while ident and ident not in self._told:
            above = None if ident in self._dead else self._kv.above(ident)
            if above is None:
                self._dead.update(path, (ident,))
                return [], len(path) + 1
            path.append(ident)
            ident = above
        return [ident, *reversed(path)], len(path) + 1
