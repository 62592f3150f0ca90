"""The index of the host tier: which blocks lie in which slots. Pure.

    free slot --put--> idle, in the line --pin--> pinned --last unpin--> idle
    idle --the first in line gives way to a newcomer--> forgotten
    pinned --spoil--> pinned until the last unpin, and then free: its content is not what it should be

The line is least recently used first. A pinned slot is in nobody's way: it is being read, or kept for somebody.
"""

from collections import OrderedDict
from itertools import islice

from engine.kv.tiers.commands import TierSlot


class HostIndex:
    """Mutable state, all of it: `_free`, `_slots`, the line `_idle`, `_pins` and `_spoilt`."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = [TierSlot(index) for index in range(slots - 1, -1, -1)]
        self._slots: dict[bytes, TierSlot] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._pins: dict[bytes, int] = {}
        self._spoilt: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._slots

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def room(self) -> int:
        """Slots that are free or would give way."""
        return len(self._free) + len(self._idle)

    def slot(self, identity: bytes) -> TierSlot:
        return self._slots[identity]

    def put(self, identity: bytes) -> tuple[TierSlot | None, bytes | None]:
        """A slot for a block that has none (None: all are pinned), and who was forgotten for it. Last in line."""
        forgotten = None
        if not self._free:
            if not self._idle:
                return None, None
            forgotten, _ = self._idle.popitem(last=False)
            self._free.append(self._slots.pop(forgotten))
        slot = self._slots[identity] = self._free.pop()
        self._idle[identity] = None
        return slot, forgotten

    def touch(self, identity: bytes) -> None:
        """The block was used: it is last in line again, if it stands there."""
        if identity in self._idle:
            self._idle.move_to_end(identity)

    def pin(self, identity: bytes) -> TierSlot:
        """Take the block out of the line until it is unpinned as often."""
        self._idle.pop(identity, None)
        self._pins[identity] = self._pins.get(identity, 0) + 1
        return self._slots[identity]

    def unpin(self, identity: bytes, *, first: bool = False) -> bool:
        """Put the block back into the line once nobody pins it: last, or `first` to give way. Returns True if it is
        gone instead, because it was spoilt."""
        self._pins[identity] -= 1
        if self._pins[identity]:
            return False
        del self._pins[identity]
        if identity in self._spoilt:
            self._spoilt.remove(identity)
            self._free.append(self._slots.pop(identity))
            return True
        self._idle[identity] = None
        if first:
            self._idle.move_to_end(identity, last=False)
        return False

    def spoil(self, identity: bytes) -> None:
        """A pinned block is not whole."""
        assert identity in self._pins
        self._spoilt.add(identity)

    def oldest(self, count: int) -> list[bytes]:
        """Return at most `count` idle blocks, the first in line first."""
        return list(islice(self._idle, count))

    def check(self) -> None:
        """Recompute that every slot is free or some block's, and every block in line or pinned."""
        used = [slot.index for slot in (*self._free, *self._slots.values())]
        assert sorted(used) == list(range(self.total)), self
        assert not self._idle.keys() & self._pins.keys()
        assert self._idle.keys() | self._pins.keys() == self._slots.keys()
        assert all(count > 0 for count in self._pins.values())
        assert self._spoilt <= self._pins.keys()

    def __repr__(self) -> str:
        return f"HostIndex({len(self)} of {self.total}, {len(self._pins)} pinned)"
