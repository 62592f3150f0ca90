"""The index of the host tier, slot by slot. Copies into its slots are in tests/engine/storage/tiers, random requests
over all tiers in test_machine.py."""

from engine.kv.tiers.commands import TierSlot
from engine.kv.tiers.host_index import HostIndex

A, B, C = b"a", b"b", b"c"


def _full() -> HostIndex:
    index = HostIndex(2)
    assert index.put(A) == (TierSlot(0), None) and index.put(B) == (TierSlot(1), None)
    return index


def test_the_least_recently_used_gives_way() -> None:
    index = _full()
    index.touch(A)
    assert index.oldest(5) == [B, A] and index.oldest(1) == [B]
    assert index.put(C) == (TierSlot(1), B)
    assert B not in index and A in index and len(index) == 2
    index.check()


def test_what_is_pinned_stays_until_it_is_unpinned_as_often() -> None:
    """Guards a slot that is being read: it must not be written for another block."""
    index = _full()
    for ident in (A, B, A):
        index.pin(ident)
    index.touch(A)
    assert index.room == 0 and index.put(C) == (None, None)
    index.unpin(A)
    assert index.room == 0
    index.unpin(A)
    assert index.put(C) == (TierSlot(0), A)
    index.check()


def test_what_is_on_disk_too_gives_way_first() -> None:
    index = _full()
    index.pin(B)
    index.unpin(B, first=True)
    assert index.oldest(2) == [B, A]
    index.pin(A)
    index.unpin(A)
    assert index.oldest(2) == [B, A], "else last"


def test_a_spoilt_block_is_gone_with_its_last_pin() -> None:
    """Guards whoever wants it next from bytes that are not what they should be."""
    index = _full()
    index.pin(A)
    index.pin(A)
    index.spoil(A)
    assert not index.unpin(A) and A in index
    assert index.unpin(A) and A not in index and index.free == 1
    assert index.put(A) == (TierSlot(0), None)
    index.pin(A)
    assert not index.unpin(A), "it was written anew"
    index.check()
