"""The index of the disk tier, segment by segment. The files themselves are in test_segments.py and test_hung.py of
tests/engine/storage/tiers, random requests over all tiers in test_machine.py."""

import pytest

from engine.kv.tiers.commands import OnDisk
from engine.kv.tiers.disk_index import ENTRY_BYTES, FIXED_BYTES, PAGE_BYTES, DiskIndex, header_bytes, segment_bytes

A, B, C = (bytes([n]) * 16 for n in range(3))


def _index(*segments: tuple[bytes, ...]) -> DiskIndex:
    """Room for two segments of one byte; these are written."""
    index = DiskIndex(2)
    for identities in segments:
        number, _, _ = index.reserve(1)
        assert number is not None
        index.written(number, identities)
    index.check()
    return index


def test_blocks_begin_on_a_page() -> None:
    """Guards reads past the page cache, which need whole pages."""
    most = (PAGE_BYTES - FIXED_BYTES) // ENTRY_BYTES
    assert header_bytes(most) == PAGE_BYTES and header_bytes(most + 1) == 2 * PAGE_BYTES
    assert segment_bytes(2, 100) == PAGE_BYTES + 200


def test_the_segment_used_least_recently_goes_with_all_its_blocks() -> None:
    index = _index((A,), (B,))
    index.unpin(index.pin(A).segment)
    assert index.reserve(1) == (2, [1], [B])
    assert A in index.places and B not in index.places
    index.check()


def test_what_is_read_or_written_stays() -> None:
    """Guards a load under way, and a file that is not whole yet, from being removed for another segment."""
    index = _index((A,))
    index.pin(A)
    assert index.reserve(1) == (1, [], [])
    assert index.reserve(1) == (None, [], [])
    index.unpin(0)
    assert index.reserve(1) == (2, [0], [A])


def test_a_pin_counts() -> None:
    index = _index((A, B))
    index.pin(A)
    index.pin(B)
    index.unpin(0)
    assert index.reserve(2) == (None, [], [])


def test_a_block_in_two_segments_is_forgotten_with_the_newer_one() -> None:
    """Guards a block that was written again: the segment that goes must not take the place in the other with it."""
    index = _index((A, B), (A, C))
    assert index.places[A] == OnDisk(1, 0)
    assert index.remove(0) == [B]
    assert index.remove(1) == [A, C]
    assert index.used_bytes == 0
    index.unpin(1)  # a load of it ends later than the segment was found unreadable


def test_what_is_left_of_a_block_whose_newer_segment_went_first_names_nobody() -> None:
    """Guards a worker whose disk kept a file that was to go: the next life finds a block twice."""
    index = _index((A, B), (A, C))
    index.unpin(index.pin(B).segment)
    assert index.reserve(1) == (2, [1], [A, C])
    index.written(2, (C,))
    index.unpin(index.pin(C).segment)
    assert index.reserve(1) == (3, [0], [B])
    index.check()


def test_numbers_of_an_earlier_life_are_not_given_again() -> None:
    index = DiskIndex(3)
    assert index.reserve(1, 7)[0] == 7 and index.reserve(1)[0] == 8
    index.check()


@pytest.mark.parametrize("has_spill", [False, True])
def test_all_is_forgotten_at_once(has_spill: bool) -> None:
    index = _index((A,))
    if has_spill:
        index.reserve(1)
    assert index.clear() == ([0, 1] if has_spill else [0], [A])
    assert index.used_bytes == len(index) == 0 and not index.has(0)
