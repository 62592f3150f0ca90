"""What goes down, what is written ahead, and what is lost when a tier fails. Random requests over all tiers are in
test_machine.py, whoever moves the bytes in tests/engine/storage/tiers, workers with tiers in
tests/integration/test_tiers_fake.py and test_tiers_processes.py."""

from collections.abc import Sequence

import pytest

from engine import identity
from engine.kv.tiers.commands import (
    DiskHung,
    Loaded,
    OnDisk,
    Save,
    Spill,
    Spilled,
    Store,
    Stored,
    TierCommand,
    TierDrop,
    TierLoad,
    TierSlot,
)
from engine.kv.tiers.disk_index import segment_bytes
from engine.kv.tiers.tiers import Tiers
from engine.types import BlockId

BYTES = 4096
IDENTS = [bytes([n]) * 16 for n in range(16)]


def _tiers(host_blocks: int = 4, segments: int = 0) -> Tiers:
    """A host tier, and a disk tier of segments of one block."""
    return Tiers(host_blocks, BYTES, segments * segment_bytes(1, BYTES))


def _demote(tiers: Tiers, idents: Sequence[bytes]) -> list[TierCommand]:
    """Evict device blocks one by one; returns what is to be carried out."""
    told: list[TierCommand] = []
    for at, ident in enumerate(idents):
        assert tiers.demote(ident, BlockId(at))
        told += tiers.take_commands()
        tiers.check()
    return told


def _spilling(tiers: Tiers) -> Spill:
    """Fill the host tier until the oldest block is written ahead."""
    spills = [told for told in _demote(tiers, IDENTS[:3]) if isinstance(told, Spill)]
    (spill,) = spills
    assert spill.identities == (IDENTS[0],)
    return spill


def test_an_evicted_block_is_saved_once() -> None:
    tiers = _tiers()
    assert _demote(tiers, [IDENTS[0]]) == [Save(BlockId(0), TierSlot(0))]
    assert _demote(tiers, [IDENTS[0]]) == [], "it stays where it was when it was loaded"
    assert tiers.counts.saved_blocks == 1 and tiers.blocks == {"host": 1, "disk": 0}


def test_a_slot_is_not_given_away_before_its_save_was_told() -> None:
    """Guards two saves into one slot: the index would know both blocks, and hold the bytes of one."""
    tiers = _tiers(host_blocks=1)
    assert tiers.demote(IDENTS[0], BlockId(0)) and not tiers.demote(IDENTS[1], BlockId(1))
    tiers.take_commands()
    assert tiers.demote(IDENTS[2], BlockId(2))
    assert tiers.take_forgotten() == [IDENTS[0]] and tiers.counts.evicted["host"] == 1


def test_what_was_written_ahead_gives_way_without_loss() -> None:
    tiers = _tiers(segments=4)
    spill = _spilling(tiers)
    tiers.handle(Spilled(spill.segment))
    told = _demote(tiers, IDENTS[3:5])
    assert tiers.blocks["host"] == 4 and IDENTS[0] in tiers and IDENTS[0] not in tiers.host
    assert tiers.take_forgotten() == [] and tiers.counts.spilled_blocks == 1
    assert len([one for one in told if isinstance(one, Spill)]) <= 1, "one at a time"


def test_nothing_is_written_ahead_while_enough_slots_are_free() -> None:
    """Guards a disk that is written one block earlier than it must be: two of four slots are kept free, or on disk."""
    tiers = _tiers(segments=4)
    assert not [told for told in _demote(tiers, IDENTS[:2]) if isinstance(told, Spill)] and tiers.host.free == 2
    assert [told for told in _demote(tiers, IDENTS[2:3]) if isinstance(told, Spill)]


def test_a_block_is_on_disk_only_when_it_was_written() -> None:
    """Guards a segment that is being written: nobody may read it yet, and its slots may not be given away."""
    tiers = _tiers(segments=4)
    spill = _spilling(tiers)
    _demote(tiers, IDENTS[3:5])
    assert IDENTS[0] in tiers.host and IDENTS[1] not in tiers.host
    assert tiers.pin([IDENTS[0]]) == spill.slots == (TierSlot(0),) and tiers.blocks["disk"] == 0


def test_a_full_disk_drops_the_oldest_segment() -> None:
    tiers = _tiers(segments=1)
    tiers.handle(Spilled(_spilling(tiers).segment))
    told = _demote(tiers, IDENTS[3:5])[2:]
    assert told == [TierDrop(0), Spill(1, (IDENTS[1],), (TierSlot(1),))]
    assert tiers.counts.evicted["disk"] == 1 and tiers.take_forgotten() == [IDENTS[0]]


def test_a_disk_with_room_for_less_than_is_written_ahead_comes_to_rest() -> None:
    """Guards a disk that is written without end: two of the oldest blocks, and one place, which each takes from the
    other. The same when all other segments are pinned."""
    tiers = _tiers(segments=1)
    tiers.handle(Spilled(_spilling(tiers).segment))
    _demote(tiers, IDENTS[3:4])
    assert tiers.take_commands() == [] and tiers.blocks == {"host": 4, "disk": 1}


@pytest.mark.parametrize("hangs", [False, True])
def test_a_disk_that_fails_is_given_up(hangs: bool) -> None:
    """Guards the disk from a cache that keeps it full. A spill that is told of afterwards changes nothing."""
    tiers = _tiers(segments=4)
    assert tiers.disk_error == ""
    tiers.handle(Spilled(_spilling(tiers).segment))
    _demote(tiers, IDENTS[3:5])
    (pending,) = [number for number in (1, 2) if tiers.disk is not None and tiers.disk.has(number)]
    tiers.handle(DiskHung("no answer") if hangs else Spilled(pending, "full"))
    assert tiers.disk is None and tiers.disk_error == ("no answer" if hangs else "full")
    assert tiers.take_commands() == [TierDrop(0), TierDrop(pending)] and tiers.counts.hung_calls == hangs
    assert tiers.take_forgotten() == [IDENTS[0]], "the only block that was nowhere else"
    if hangs:
        tiers.handle(Spilled(pending))
    assert not [told for told in _demote(tiers, IDENTS[5:]) if isinstance(told, Spill)]


def _chain(tokens: list[int]) -> list[bytes]:
    idents = [b""]
    for token in tokens:
        idents.append(identity.extend(idents[-1], [token]))
    return idents[1:]


def test_what_is_found_ends_at_the_first_gap() -> None:
    tiers = _tiers(host_blocks=8)
    chain = _chain([1, 2, 3, 4])
    _demote(tiers, [chain[0], chain[1], chain[3]])
    assert tiers.find(b"", [1, 2, 3, 4], 0, 4, 1) == chain[:2]
    assert tiers.find(b"", [1, 2, 3, 4], 0, 1, 1) == chain[:1], "the limit"
    assert tiers.find(chain[0], [1, 2, 3, 4], 1, 4, 1) == chain[1:2]


@pytest.mark.parametrize("error", ["", "no memory"])
def test_what_is_being_stored_nobody_finds(error: str) -> None:
    """Guards a slot that a store has not written yet, or never will."""
    tiers = _tiers()
    chain = _chain([1, 2])
    assert tiers.keep(chain, [BlockId(7), BlockId(8)]) == {1}
    assert tiers.take_commands() == [Store(1, tuple(chain), (BlockId(7), BlockId(8)), (TierSlot(0), TierSlot(1)))]
    assert tiers.find(b"", [1, 2], 0, 2, 1) == []
    tiers.handle(Stored(1, 2, 0.1, error))
    tiers.unkeep(chain)
    tiers.check()
    assert tiers.find(b"", [1, 2], 0, 2, 1) == ([] if error else chain)
    assert tiers.take_forgotten() == (chain if error else []) and tiers.counts.saved_blocks == (0 if error else 2)


def test_a_store_is_shared_and_what_is_there_needs_none() -> None:
    tiers = _tiers()
    _demote(tiers, IDENTS[:1])
    assert tiers.keep(IDENTS[:2], [BlockId(0), BlockId(1)]) == {1}
    assert tiers.keep(IDENTS[:2], [BlockId(0), BlockId(1)]) == {1}
    (store,) = tiers.take_commands()
    assert isinstance(store, Store) and store.identities == (IDENTS[1],)
    tiers.handle(Stored(1, 1, 0.1))
    assert tiers.keep(IDENTS[:2], [BlockId(0), BlockId(1)]) == set()


def _loading(tiers: Tiers, idents: Sequence[bytes]) -> TierLoad:
    tiers.load(tiers.pin(idents), idents, [BlockId(at) for at in range(len(idents))])
    (load,) = tiers.take_commands()
    assert isinstance(load, TierLoad)
    return load


def test_a_load_reads_each_block_where_it_is_nearest() -> None:
    tiers = _tiers(segments=4)
    tiers.handle(Spilled(_spilling(tiers).segment))
    _demote(tiers, IDENTS[3:5])
    load = _loading(tiers, IDENTS[:2])
    assert load.places == (OnDisk(0, 0), TierSlot(1))
    tiers.handle(Loaded(load.number, 2, 0.5, 2.0))
    assert (tiers.cost.host_s, tiers.cost.disk_s) == (0.5, 2.0)
    assert tiers.counts.loaded_blocks == {"host": 1, "disk": 1}
    assert tiers.worthwhile(IDENTS[:2], block_size=4, tokens_per_s=4.0) == 0 and tiers.counts.refused == 1
    assert tiers.worthwhile(IDENTS[1:2], block_size=4, tokens_per_s=4.0) == 1 and tiers.counts.refused == 1
    tiers.check()


def test_a_block_that_is_not_whole_is_lost() -> None:
    """Guards against a load that fails again for every request that has the prefix."""
    tiers = _tiers(segments=4)
    tiers.handle(Spilled(_spilling(tiers).segment))
    _demote(tiers, IDENTS[3:5])
    tiers.handle(Loaded(_loading(tiers, IDENTS[:1]).number, 0, 0.0, 0.0))
    assert tiers.take_commands() == [TierDrop(0)] and tiers.take_forgotten() == [IDENTS[0]]
    tiers.handle(Loaded(_loading(tiers, IDENTS[2:4]).number, 1, 0.0, 0.0))
    assert IDENTS[2] in tiers and IDENTS[3] not in tiers.host
    assert tiers.counts.broken_blocks == 2 and tiers.counts.loaded_blocks == {"host": 1, "disk": 0}
    tiers.check()


def test_an_earlier_lifes_segments_are_taken_over_as_far_as_they_fit() -> None:
    tiers = _tiers(segments=2)
    size = segment_bytes(1, BYTES)
    tiers.adopt([(3, size, IDENTS[:1]), (4, size, IDENTS[1:2]), (5, size, IDENTS[2:3]), (6, 9 * size, IDENTS[3:4])])
    assert tiers.take_commands() == [TierDrop(3), TierDrop(4), TierDrop(5), TierDrop(6)]
    tiers.adopt([(7, size, IDENTS[:1])])
    assert IDENTS[0] in tiers and tiers.take_commands() == []


def test_a_disk_tier_needs_a_host_tier() -> None:
    with pytest.raises(ValueError, match="at least four blocks"):
        _tiers(host_blocks=3, segments=1)


def test_a_segment_that_is_read_outlives_what_would_take_its_room() -> None:
    """Guards a load from disk: its file must not be removed for another segment before the load has ended, and must
    give way after it."""
    tiers = _tiers(segments=2)
    size = segment_bytes(1, BYTES)
    tiers.adopt([(0, size, IDENTS[8:9]), (1, size, IDENTS[9:10])])
    load = _loading(tiers, IDENTS[8:10])
    assert load.places == (OnDisk(0, 0), OnDisk(1, 0))
    told = _demote(tiers, IDENTS[:3])
    assert not [one for one in told if isinstance(one, (Spill, TierDrop))], "there is no room but theirs"
    assert IDENTS[8] in tiers and IDENTS[9] in tiers
    tiers.handle(Loaded(load.number, 2, 0.0, 0.1))
    told = _demote(tiers, IDENTS[3:4])
    assert [one for one in told if isinstance(one, TierDrop)] == [TierDrop(0)]
    assert tiers.take_forgotten() == [IDENTS[8]] and tiers.counts.evicted["disk"] == 1
    tiers.check()


def test_a_segment_that_was_read_is_used_more_recently_than_the_others() -> None:
    """Guards the order in which segments go, and pins: one more than was asked for would keep its file for ever."""
    tiers = _tiers(segments=2)
    size = segment_bytes(1, BYTES)
    tiers.adopt([(0, size, IDENTS[8:9]), (1, size, IDENTS[9:10])])
    places = tiers.pin(IDENTS[8:9])
    tiers.unpin(places, IDENTS[8:9])
    told = _demote(tiers, IDENTS[:3])
    assert [one for one in told if isinstance(one, TierDrop)] == [TierDrop(1)]
    (spill,) = [one for one in told if isinstance(one, Spill)]
    tiers.handle(Spilled(spill.segment))
    told = tiers.take_commands() + _demote(tiers, IDENTS[3:4])
    assert [one for one in told if isinstance(one, TierDrop)] == [TierDrop(0)]


def test_the_next_oldest_is_written_as_soon_as_one_is() -> None:
    """Guards blocks that would wait for the next eviction: until then they could not give way without loss."""
    tiers = _tiers(segments=4)
    (spill,) = [told for told in _demote(tiers, IDENTS[:4]) if isinstance(told, Spill)]
    assert spill.identities == (IDENTS[0],)
    tiers.handle(Spilled(spill.segment))
    (following,) = tiers.take_commands()
    assert isinstance(following, Spill) and following.identities == (IDENTS[1],)
    tiers.handle(Spilled(following.segment))
    assert tiers.take_commands() == [], "the two oldest are there"


@pytest.mark.parametrize(("nbytes", "blocks"), [(0, 0), (3 * BYTES - 1, 2), (3 * BYTES, 3), (3 * BYTES + 1, 3)])
def test_a_disk_holds_as_many_blocks_as_fit_into_it(nbytes: int, blocks: int) -> None:
    assert Tiers(4, BYTES, nbytes).disk_blocks == blocks


def test_a_disk_that_is_not_there_fails_for_nobody() -> None:
    """Guards a worker without a disk tier against what its thread says of one, and against one of no bytes."""
    tiers = Tiers(4, 4096)
    assert tiers.disk is None
    tiers.disable_disk("it hangs")
    assert tiers.disk is None and not tiers.disk_error and not tiers.take_commands()


def test_so_many_are_written_ahead_of_a_large_tier() -> None:
    """Guards a disk against all that is in host memory: eight segments of sixteen blocks go there, when there is room
    for no more than so many."""
    tiers = Tiers(400, BYTES, 10_000 * BYTES)
    idents = [number.to_bytes(16, "big") for number in range(273)]
    *before, last = [_demote(tiers, [ident]) for ident in idents]
    assert not any(isinstance(told, Spill) for commands in before for told in commands)
    written = []
    while spills := [told for told in last if isinstance(told, Spill)]:
        written += spills[0].identities
        tiers.handle(Spilled(spills[0].segment))
        last = tiers.take_commands()
    assert written == idents[:128]
