"""The index of the disk tier: which blocks lie in which segments. Pure.

A segment is written once and removed as a whole: the one that was used least recently goes first, and with it all
blocks that it holds. One that is being written counts with its full size; one that is being read stays.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from engine.identity import IDENTITY_BYTES
from engine.kv.tiers.commands import OnDisk

PAGE_BYTES = 4096
FIXED_BYTES = 48
"""Size of a segment's header before what it says of each block."""
ENTRY_BYTES = IDENTITY_BYTES + 8


def header_bytes(blocks: int) -> int:
    """Size of the header of a segment of so many blocks: the first of them begins behind it."""
    return -(-(FIXED_BYTES + blocks * ENTRY_BYTES) // PAGE_BYTES) * PAGE_BYTES


def segment_bytes(blocks: int, block_bytes: int) -> int:
    """Size of a segment's file."""
    return header_bytes(blocks) + blocks * block_bytes


@dataclass(slots=True)
class Segment:
    """Mutable; owned by the index. `identities` is empty until the segment is written."""

    nbytes: int
    identities: tuple[bytes, ...] = ()
    pins: int = 0

    def may_go(self, spared: Collection[bytes]) -> bool:
        return bool(self.identities) and not self.pins and not any(ident in spared for ident in self.identities)


class DiskIndex:
    """Mutable state, all of it: `_segments` in the order of their last use, `places`, `used_bytes`, `_next`, and how
    often `places` has changed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.places: dict[bytes, OnDisk] = {}
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._next = 0
        self._changes = 0

    def __len__(self) -> int:
        return len(self.places)

    def has(self, segment: int) -> bool:
        return segment in self._segments

    def reserve(
        self, nbytes: int, number: int | None = None, spared: Collection[bytes] = ()
    ) -> tuple[int | None, list[int], list[bytes]]:
        """Room for a segment to be written: its number (None: there is none), which segments must go for it, and the
        blocks in them, none of which is `spared`. `number` is that of a segment found on disk, else a new one."""
        dropped: list[int] = []
        forgotten: list[bytes] = []
        while self.used_bytes + nbytes > self.limit_bytes:
            oldest = next((n for n, one in self._segments.items() if one.may_go(spared)), None)
            if oldest is None:
                return None, dropped, forgotten
            forgotten += self.remove(oldest)
            dropped.append(oldest)
        segment = self._next if number is None else number
        self._next = max(self._next, segment + 1)
        self._segments[segment] = Segment(nbytes)
        self.used_bytes += nbytes
        return segment, dropped, forgotten

    def written(self, segment: int, identities: Sequence[bytes]) -> None:
        """The segment is there. A block that another one holds too is found in this one."""
        self._changes += 1
        self._segments[segment].identities = tuple(identities)
        for at, identity in enumerate(identities):
            self.places[identity] = OnDisk(segment, at)

    def remove(self, segment: int) -> list[bytes]:
        """The segment is gone; returns the blocks that are nowhere on disk any more."""
        self._changes += 1
        one = self._segments.pop(segment)
        self.used_bytes -= one.nbytes
        # Of one that two segments held, nothing is known once the newer has gone.
        gone = [i for i in one.identities if i in self.places and self.places[i].segment == segment]
        for identity in gone:
            del self.places[identity]
        return gone

    def pin(self, identity: bytes) -> OnDisk:
        """The block's segment stays until it is unpinned as often; it is the most recently used."""
        place = self.places[identity]
        self._segments[place.segment].pins += 1
        self._segments.move_to_end(place.segment)
        return place

    def unpin(self, segment: int) -> None:
        if segment in self._segments:  # it may have turned out to be unreadable
            self._segments[segment].pins -= 1

    def clear(self) -> tuple[list[int], list[bytes]]:
        """Forget everything; returns the segments and the blocks that there were."""
        self._changes += 1
        segments, identities = list(self._segments), list(self.places)
        self._segments.clear()
        self.places.clear()
        self.used_bytes = 0
        return segments, identities

    def check(self) -> None:
        """Recompute the bytes and where every block lies."""
        for _ in self.check_parts():
            pass

    def check_parts(self) -> Iterator[int]:
        """Do so a segment at a time, and yield how many blocks each was; between two, anything may change. A block
        whose place is in no segment is found by a check during which none came or went."""
        # In no order: in that of their use, which is a list of links, it takes ten times as long.
        numbers, segments = list(dict.keys(self._segments)), list(dict.values(self._segments))
        used_bytes, changes = self.used_bytes, self._changes
        nbytes = lying = 0
        yield len(segments) // 16
        for number, segment in zip(numbers, segments, strict=True):
            nbytes += segment.nbytes
            assert segment.pins >= 0 and number < self._next, (number, segment)
            if self._segments.get(number) is segment:
                places = {ident: self.places.get(ident) for ident in segment.identities}
                here = {ident: place.at for ident, place in places.items() if place and place.segment == number}
                assert all(segment.identities[at] == ident for ident, at in here.items()), (number, here)
                lying += len(here)
            yield 1 + len(segment.identities)
        assert used_bytes == nbytes <= self.limit_bytes, (used_bytes, nbytes)
        assert lying == len(self.places) or changes != self._changes, (lying, len(self.places))

    def __repr__(self) -> str:
        return f"DiskIndex({len(self)} blocks, {len(self._segments)} segments, {self.used_bytes} bytes)"
