"""What goes down, what is written ahead, and what is lost when a tier fails. Random requests over all tiers are in
test_machine.py, whoever moves the bytes in tests/engine/storage/tiers, workers with tiers in
tests/integration/test_tiers_fake.py and test_tiers_processes.py."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

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


@pytest.mark.parametrize(("host_blocks", "segments"), [(16, 40), (64, 12), (256, 40)])
def test_the_tiers_hold_what_was_used_last(host_blocks: int, segments: int) -> None:
    """Guards half of the host memory, and as much of the disk, kept for ever by what nobody asks for: each segment that
    was written ahead gave way before those written earlier."""
    tiers = Tiers(host_blocks, BYTES, segments * segment_bytes(16, BYTES))
    passed, names = 3000, [number.to_bytes(16) for number in range(3000)]
    for name in names:
        tiers.demote(name, BlockId(0))
        while told := tiers.take_commands():
            for command in told:
                if isinstance(command, Spill):
                    tiers.handle(Spilled(command.segment))
    tiers.check()
    assert all(name in tiers.host for name in names[-host_blocks:]) and tiers.disk is not None
    oldest = min(names.index(name) for name in tiers.disk.places)
    assert passed - oldest <= len(tiers.disk) + host_blocks, "and what is on disk is without a gap"


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


def test_a_load_from_a_disk_that_was_given_up_meanwhile_ends_as_any_other() -> None:
    """Guards a worker against what its disk was still reading: there is nothing any more to be let go."""
    tiers = _tiers(segments=2)
    tiers.adopt([(0, segment_bytes(1, BYTES), IDENTS[:1])])
    load = _loading(tiers, IDENTS[:1])
    assert load.places == (OnDisk(0, 0),)
    tiers.handle(DiskHung("no answer"))
    tiers.handle(Loaded(load.number, 0, 0.0, 0.0))
    tiers.check()
    assert tiers.counts.broken_blocks == 1 and tiers.take_forgotten() == IDENTS[:1]


@pytest.mark.parametrize("error", ["", "full"])
def test_what_is_not_whole_is_not_found_on_disk_because_it_was_being_written(error: str) -> None:
    """Guards a wrong answer, and a router that believes in what is nowhere: a load has seen that the block is not whole
    while it was written ahead, as it was."""
    tiers = _tiers(segments=4)
    spill = _spilling(tiers)
    load = _loading(tiers, IDENTS[:1])
    tiers.handle(Loaded(load.number, 0, 0.0, 0.0))
    assert IDENTS[0] in tiers and not tiers.take_forgotten(), "its slot is read"
    tiers.handle(Spilled(spill.segment, error))
    tiers.check()
    assert IDENTS[0] not in tiers and tiers.take_forgotten() == [IDENTS[0]]
    assert TierDrop(spill.segment) in tiers.take_commands() and tiers.counts.spilled_blocks == 0


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


@dataclass(eq=False)
class PlainSegment:
    number: int
    nbytes: int
    idents: tuple[bytes, ...] = ()
    pins: int = 0


class PlainTiers:
    """Both tiers in lists: blocks by name, without slots, in the order in which they go."""

    def __init__(self, host_blocks: int, disk_bytes: int) -> None:
        self.size, self.disk_bytes = host_blocks, disk_bytes
        self.at_once = max(1, host_blocks // 4)
        self.line: list[bytes] = []
        self.pins = Counter[bytes]()
        self.spoilt: set[bytes] = set()
        self.storing: dict[bytes, int] = {}
        self.stores: dict[int, list[bytes]] = {}
        self.disk: list[PlainSegment] | None = []
        self.places: dict[bytes, tuple[int, int]] = {}
        self.spill: tuple[PlainSegment, list[bytes]] | None = None
        self.next = self.numbers = 0
        self.saving: list[bytes] = []
        self.told: list[object] = []
        self.forgotten: list[bytes] = []
        self.counts = Counter[str]()

    def has(self, ident: bytes) -> bool:
        return ident in self.line or ident in self.pins or ident in self.places

    def in_host(self, ident: bytes) -> bool:
        return ident in self.line or ident in self.pins

    def forget(self, idents: Iterable[bytes]) -> None:
        self.forgotten += [ident for ident in idents if not self.has(ident)]

    def pin(self, ident: bytes) -> None:
        if ident in self.line:
            self.line.remove(ident)
        self.pins[ident] += 1

    def unpin(self, ident: bytes, at: int | None = None) -> None:
        self.pins[ident] -= 1
        if self.pins[ident]:
            return
        del self.pins[ident]
        if ident in self.spoilt:
            self.spoilt.remove(ident)
            self.forget([ident])
        else:
            self.line.insert(len(self.line) if at is None else at, ident)

    def put(self, ident: bytes) -> bool:
        if not self.line and len(self.pins) == self.size:
            return False
        if len(self.line) + len(self.pins) == self.size:
            gone = self.line.pop(0)
            self.counts["from host"] += 1
            self.forget([gone])
        self.pins[ident] += 1
        return True

    def demote(self, ident: bytes, block: int) -> bool:
        if self.in_host(ident):
            if ident in self.line:
                self.line.remove(ident)
                self.line.append(ident)
            return True
        if not self.put(ident):
            return ident in self.places
        self.saving.append(ident)
        self.told.append(("save", block))
        self.counts["saved"] += 1
        self.ahead()
        return True

    def keep(self, idents: list[bytes]) -> set[int] | None:
        here = [ident for ident in idents if self.in_host(ident)]
        for ident in here:
            self.pin(ident)
        new = [ident for ident in idents if ident not in here]
        if len(new) > self.size - len(self.pins):
            for ident in here:
                self.unpin(ident)
            return None
        for ident in new:
            assert self.put(ident)
        if new:
            self.numbers += 1
            self.stores[self.numbers] = new
            self.storing |= dict.fromkeys(new, self.numbers)
            self.told.append(("store", self.numbers, tuple(new)))
        return {self.storing[ident] for ident in idents if ident in self.storing}

    def stored(self, number: int, *, failed: bool) -> None:
        idents = self.stores.pop(number)
        for ident in idents:
            del self.storing[ident]
        if failed:
            self.spoilt |= set(idents)
        else:
            self.counts["saved"] += len(idents)
            self.ahead()

    def drop(self, segment: PlainSegment) -> list[bytes]:
        assert self.disk is not None
        self.disk.remove(segment)
        gone = [ident for ident in segment.idents if self.places[ident][0] == segment.number]
        for ident in gone:
            del self.places[ident]
        self.told.append(("drop", segment.number))
        return gone

    def ahead(self) -> None:
        """Half of the tier is free, or on disk as well."""
        free, oldest = self.size - len(self.line) - len(self.pins), self.line[: self.size // 2]
        unwritten = [ident for ident in oldest if ident not in self.places][: self.at_once]
        if self.disk is None or self.spill or free >= self.size // 2 or len(unwritten) < self.at_once:
            return
        nbytes, lost = segment_bytes(self.at_once, BYTES), list[bytes]()
        while has_room := sum(one.nbytes for one in self.disk) + nbytes > self.disk_bytes:
            may_go = [one for one in self.disk if one.idents and not one.pins and not {*one.idents} & {*oldest}]
            if not may_go:
                break
            lost += self.drop(may_go[0])
        self.counts["from disk"] += len(lost)
        self.forget(lost)
        if has_room:
            return
        segment = PlainSegment(self.next, nbytes)
        self.next += 1
        self.disk.append(segment)
        for ident in unwritten:
            self.pin(ident)
        self.spill = segment, unwritten
        self.told.append(("spill", segment.number, tuple(unwritten)))

    def spilled(self, *, failed: bool) -> None:
        assert self.spill is not None
        (segment, idents), self.spill = self.spill, None
        older = [ident for ident in self.line[: self.size // 2] if ident in self.places]
        broken = [ident for ident in idents if ident in self.spoilt and self.pins[ident] == 1]
        if not failed and self.disk is not None and not broken:
            segment.idents = tuple(idents)
            self.places |= {ident: (segment.number, at) for at, ident in enumerate(idents)}
            self.counts["spilled"] += len(idents)
        elif not failed and self.disk is not None:
            self.drop(segment)
        for ident in reversed(idents):
            self.unpin(ident, 0)
        self.line = older + [ident for ident in self.line if ident not in older]
        if failed:
            self.give_up()
        self.ahead()

    def give_up(self) -> None:
        if self.disk is not None:
            self.told += [("drop", one.number) for one in self.disk]
            lost, self.disk, self.places = list(self.places), None, {}
            self.forget(lost)

    def load(self, idents: list[bytes]) -> list[int | None]:
        """Return where each is pinned: in a segment, or in host memory."""
        places: list[int | None] = []
        for ident in idents:
            if self.in_host(ident):
                self.pin(ident)
                places.append(None)
            else:
                (segment,) = [one for one in self.disk or () if one.number == self.places[ident][0]]
                segment.pins += 1
                assert self.disk is not None
                self.disk.remove(segment)
                self.disk.append(segment)
                places.append(segment.number)
        self.numbers += 1
        self.told.append(("load", self.numbers, tuple(idents)))
        return places

    def loaded(self, idents: list[bytes], places: list[int | None], whole: int) -> None:
        for place in places[:whole]:
            self.counts["loaded host" if place is None else "loaded disk"] += 1
        if whole < len(places):
            self.counts["broken"] += 1
            if places[whole] is None:
                self.spoilt.add(idents[whole])
            else:
                for one in [one for one in self.disk or () if one.number == places[whole]]:
                    self.forget(self.drop(one))
        for ident, place in zip(idents, places, strict=True):
            if place is None:
                self.unpin(ident)
            for one in [one for one in self.disk or () if one.number == place]:
                one.pins -= 1

    def take_told(self) -> list[object]:
        for ident in self.saving:
            self.unpin(ident)
        self.saving = []
        told, self.told = self.told, []
        return told


def _in_words(command: TierCommand) -> object:
    match command:
        case Save():
            return "save", command.block
        case Store():
            return "store", command.number, command.identities
        case Spill():
            return "spill", command.segment, command.identities
        case TierDrop():
            return "drop", command.segment
        case TierLoad():
            return "load", command.number, command.identities


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_events_does_what_the_lists_say(seed: int) -> None:
    """Guards which block is in which tier, and which goes next: one copied, pinned, dropped or told too many."""
    random, host_blocks = Random(seed), 4 + seed % 7
    disk_bytes = (seed % 5) * segment_bytes(max(1, host_blocks // 4), BYTES) + seed % 2
    tiers, plain = Tiers(host_blocks, BYTES, disk_bytes), PlainTiers(host_blocks, disk_bytes)
    if not disk_bytes:
        plain.disk = None
    kept: list[list[bytes]] = []
    loads: list[tuple[int, list[bytes], list[int | None]]] = []
    for _ in range(150):
        idents = random.sample(IDENTS, random.randint(1, 4))
        match random.randrange(10):
            case 0 | 1 | 2:
                block = random.randrange(99)
                assert tiers.demote(idents[0], BlockId(block)) == plain.demote(idents[0], block)
            case 3 if len(kept) < 2:
                stores = tiers.keep(idents, [BlockId(0)] * len(idents))
                assert stores == plain.keep(idents)
                kept += [idents] if stores is not None else []
            case 4 if plain.stores:
                number, failed = random.choice(list(plain.stores)), random.random() < 0.2
                tiers.handle(Stored(number, 1, 0.1, "broken" * failed))
                plain.stored(number, failed=failed)
            case 5 if kept and not set(kept[0]) & plain.storing.keys():
                gone = kept.pop(0)
                tiers.unkeep(gone)
                for ident in gone:
                    plain.unpin(ident)
            case 6 if plain.spill is not None:
                failed = random.random() < 0.04
                tiers.handle(Spilled(plain.spill[0].number, "full" * failed))
                plain.spilled(failed=failed)
            case 7 if idents := [ident for ident in idents if plain.has(ident) and ident not in plain.storing]:
                assert all(tiers.can_load(ident) for ident in idents)
                number = tiers.load(tiers.pin(idents), idents, [BlockId(0)] * len(idents))
                loads.append((number, idents, plain.load(idents)))
            case 8 if loads:
                number, idents, places = loads.pop(random.randrange(len(loads)))
                whole = random.choice((len(idents), random.randint(0, len(idents))))
                tiers.handle(Loaded(number, whole, 0.0, 0.0))
                plain.loaded(idents, places, whole)
        if random.random() < 0.7:
            assert list(map(_in_words, tiers.take_commands())) == plain.take_told()
        tiers.check()
        assert tiers.take_forgotten() == plain.forgotten
        plain.forgotten = []
        assert list(tiers.host._idle) == plain.line and tiers.host._pins == plain.pins
        assert tiers.blocks == {"host": len(plain.line) + len(plain.pins), "disk": len(plain.places)}
        assert [ident in tiers for ident in IDENTS] == list(map(plain.has, IDENTS))
        assert (tiers.disk is None) == (plain.disk is None)
        if tiers.disk is not None and plain.disk is not None:
            assert list(tiers.disk._segments) == [one.number for one in plain.disk]
            assert {i: (p.segment, p.at) for i, p in tiers.disk.places.items()} == plain.places
        counts, evicted, loaded = tiers.counts, tiers.counts.evicted, tiers.counts.loaded_blocks
        names = ("saved", "spilled", "from host", "from disk", "loaded host", "loaded disk", "broken")
        assert [plain.counts[name] for name in names] == [
            *(counts.saved_blocks, counts.spilled_blocks, evicted["host"], evicted["disk"]),
            *(loaded["host"], loaded["disk"], counts.broken_blocks),
        ]
