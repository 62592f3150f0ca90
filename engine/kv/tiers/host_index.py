"""The index of the host tier: which blocks lie in which slots. Pure.

    free slot --put--> idle, in the line --pin--> pinned --last unpin--> idle
    idle --the first in a line gives way to a newcomer--> forgotten
    pinned --spoil--> pinned until the last unpin, and then free: its content is not what it should be

Each namespace has a line of its own, least recently used first; whose gives way: `engine.kv.shares`. A pinned slot is
in nobody's way: it is being read, or kept for somebody.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from engine.kv.shares import CacheShares
from engine.kv.tiers.commands import TierSlot

PART_SLOTS = 64
"""Slots that are checked together."""


class HostIndex:
    """Mutable state, all of it: `_free`, `_slots`, the same by slot in `_names` (None: it is free), `_owners` (each
    block's namespace), `_idle` in order of last use, the same by namespace in `shares`, `_pins` and `_spoilt`."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = [TierSlot(index) for index in range(slots - 1, -1, -1)]
        self._slots: dict[bytes, TierSlot] = {}
        self._names: list[bytes | None] = [None] * slots
        self._owners: dict[bytes, bytes] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self.shares: CacheShares[bytes] = CacheShares(slots)
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

    def put(self, identity: bytes, namespace: bytes = b"") -> tuple[TierSlot | None, bytes | None]:
        """A slot for a block that has none (None: all are pinned), and who was forgotten for it. Last in line."""
        if not self.room:
            return None, None
        forgotten = None
        self.shares.took(namespace, 1)
        if self.shares.excess(namespace) or not self._free:
            loser = namespace if self.shares.excess(namespace) else self.shares.loser(namespace)
            forgotten = self.shares.pop(loser)
            self.shares.gave(self._owners.pop(forgotten))
            del self._idle[forgotten]
            self._give(forgotten)
        slot = self._slots[identity] = self._free.pop()
        assert self._names[slot.index] is None, "a slot is given twice"
        self._names[slot.index] = identity
        self._owners[identity] = namespace
        self._join(identity)
        return slot, forgotten

    def touch(self, identity: bytes) -> None:
        """The block was used: it is last in line again, if it stands there."""
        if identity in self._idle:
            self._join(identity)

    def pin(self, identity: bytes) -> TierSlot:
        """Take the block out of the line until it is unpinned as often."""
        if identity in self._idle:
            del self._idle[identity]
            self.shares.occupy(self._owners[identity], identity)
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
            self._give(identity)
            self.shares.gave(self._owners.pop(identity))
            return True
        self._join(identity, first=first)
        return False

    def put_first(self, identities: Sequence[bytes]) -> None:
        """Put these, which stand in line, before all others, in their order."""
        for identity in reversed(identities):
            self._join(identity, first=True)

    def spoil(self, identity: bytes) -> None:
        """A pinned block is not whole."""
        assert identity in self._pins
        self._spoilt.add(identity)

    def oldest(self, count: int) -> list[bytes]:
        """Return at most `count` idle blocks, whoever's they are, the least recently used first."""
        return list(islice(self._idle, count))

    def check(self) -> None:
        """Recompute that every slot is free or some block's, and every block in line or pinned."""
        for _ in self.check_parts():
            pass
        used = [slot.index for slot in (*self._free, *self._slots.values())]
        assert sorted(used) == list(range(self.total)), self
        assert not self._idle.keys() & self._pins.keys()
        assert self._idle.keys() | self._pins.keys() == self._slots.keys()
        assert all(count > 0 for count in self._pins.values())
        assert self._spoilt <= self._pins.keys()
        assert self._owners.keys() == self._slots.keys()
        self.shares.check(Counter(self._owners.values()))
        assert {identity for _, line in self.shares.lines() for identity in line} == self._idle.keys()

    def check_parts(self) -> Iterator[int]:
        """Do so a part at a time, and yield how many slots each was; between two, anything may change. What is said of
        all slots at once is taken from one moment."""
        free, owners, used = self._free.copy(), list(self._owners.values()), self.shares.used()
        assert len(free) + len(self._slots) == self.total, self
        assert len(self._idle) + len(self._pins) == len(self._slots) == len(owners), self
        assert self.shares.idle == len(self._idle)
        self.shares.check_lines()
        yield (len(free) + len(owners)) // PART_SLOTS
        found, counted = set[TierSlot](), Counter[bytes]()
        for at in range(0, len(free), PART_SLOTS):
            found.update(free[at : at + PART_SLOTS])
            assert all(self._names[slot.index] is None for slot in self._free[at : at + PART_SLOTS]), self
            yield PART_SLOTS
        assert len(found) == len(free), "a slot is free twice"
        for at in range(0, len(owners), PART_SLOTS):
            counted.update(owners[at : at + PART_SLOTS])
            yield PART_SLOTS
        self.shares.compare(used, counted)
        for at in range(0, self.total, PART_SLOTS):
            for index, name in enumerate(self._names[at : at + PART_SLOTS], at):
                if name is not None:
                    assert self._slots[name].index == index, (name, index)
                    is_idle = name in self._idle
                    assert is_idle != (name in self._pins) and self._pins.get(name, 1) > 0, name
                    assert ((self._owners[name], name) in self.shares) == is_idle, name
                    assert name not in self._spoilt or not is_idle, name
            yield PART_SLOTS

    def _give(self, identity: bytes) -> None:
        """The block's slot is free."""
        slot = self._slots.pop(identity)
        self._names[slot.index] = None
        self._free.append(slot)

    def _join(self, identity: bytes, *, first: bool = False) -> None:
        self._idle[identity] = None
        self._idle.move_to_end(identity, last=not first)
        self.shares.let_go(self._owners[identity], identity, first=first)

    def __repr__(self) -> str:
        return f"HostIndex({len(self)} of {self.total}, {len(self._pins)} pinned)"
