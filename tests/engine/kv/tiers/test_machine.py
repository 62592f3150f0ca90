"""The machine of tests/engine/kv/test_machine.py over tiers: what is in no device block lies in host slots and in
segments, which the shadow knows as well. Stores, loads and spills end when they like, or fail; a disk may be full.
Whoever reads a slot finds exactly his own prefix there, wherever it has been meanwhile; what a store reads is held, and
as it was, whatever becomes of whoever had it. Each part alone is in the other files of this folder, the files of the
disk tier are in tests/engine/storage/tiers."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine import identity
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import (
    Loaded,
    OnDisk,
    Save,
    Spill,
    Spilled,
    Store,
    Stored,
    TierDrop,
    TierLoad,
)
from engine.kv.tiers.fetches import Fetches
from engine.kv.tiers.stashes import Stash, Stashes
from engine.kv.tiers.tiers import Tiers
from tests.engine.kv.slices import KVSlices
from tests.engine.kv.test_machine import BLOCKS, SIZE, Machine, Slot, names

HOST_BLOCKS, SEGMENTS = 8, 6
Content = list[Slot | None]
PROMPTS = [[*[0] * 8, *[n] * 13] for n in range(8)] + [[n] * 20 for n in range(1, 5)]
"""More prompts than the device holds, some with a common beginning: they push each other down, and are wanted again."""
OTHER: Content = [(b"torn", (9,))] * SIZE


class TieredMachine(Machine):
    def __init__(self) -> None:
        super().__init__()
        # Segments of two blocks of 4096 bytes, with a page before them.
        self.tiers = Tiers(HOST_BLOCKS, 4096, disk_bytes=SEGMENTS * 3 * 4096)
        self.kv = KVCacheManager(BLOCKS, SIZE, "m", self.tiers)
        self.slices = KVSlices(self.kv)
        self.fetches = Fetches(self.kv, self.tiers)
        self.slots: list[Content] = [[None] * SIZE for _ in range(HOST_BLOCKS)]
        self.segments: dict[int, list[Content]] = {}
        self.jobs: list[TierLoad | Spill | Store] = []
        self.stashes = Stashes(self.kv, self.tiers)
        self.stashed: list[Stash] = []
        self.awaited: dict[Stash, set[int]] = {}
        """The stores that a stash has waited for."""
        self.unread: set[int] = set()
        """Stores that could not be made."""
        self.read: dict[int, list[Content]] = {}
        """What the blocks of a store held when it began."""
        self.told: dict[bytes, str] = {}
        """Where a router has been told that a block lies."""
        self.digested: set[int] = set()
        """Slots that were stored: whether they are whole can be seen."""

    def _advance(self) -> None:
        for command in self.tiers.take_commands():
            match command:
                case Save(block, slot):
                    self.slots[slot.index] = list(self.memory[block])
                    self.digested.discard(slot.index)
                case TierDrop(segment):
                    self.segments.pop(segment, None)
                case Store(number, _, blocks):
                    self.read[number] = [list(self.memory[block]) for block in blocks]
                    self.jobs.append(command)
                case _:
                    self.jobs.append(command)
        super()._advance()

    @rule(
        name=names,
        prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=6),
        keeps_up=st.booleans(),
    )
    def serve(self, name: bytes, prompts: list[list[int]], keeps_up: bool) -> None:
        """Whole requests, one after the other; the disk keeps up with what they push down, or does not."""
        for tokens in prompts:
            count = len(self.live)
            self.acquire(name, tokens, 0, False)
            if len(self.live) > count:
                request = self.live.pop()
                self.kv.copied(request.lease)
                self._write(request, len(tokens))
                self.kv.commit(request.lease, tokens, tail=True)
                self.kv.release(request.lease)
                self.sound()
            for job in [job for job in self.jobs if keeps_up and isinstance(job, Spill)]:
                self.jobs.remove(job)
                self._spill(job, "")
                self._advance()

    @rule(name=names, tokens=st.sampled_from(PROMPTS))
    def fetch(self, name: bytes, tokens: list[int]) -> None:
        before = self.kv.matched_tokens(name, tokens, len(tokens))
        fetch = self.fetches.wanted(name, tokens, len(tokens), tokens_per_s=10.0)
        self._advance()
        assert fetch is None or len(fetch.tokens) > before - before % SIZE
        if fetch is not None:
            again = self.fetches.wanted(name, tokens, len(tokens), tokens_per_s=10.0)
            assert again is fetch, "the same prefix is fetched once"

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_released=st.booleans(), is_quarantined=st.booleans())
    def swap(self, data: st.DataObject, is_released: bool, is_quarantined: bool) -> None:
        """Somebody is preempted: his whole blocks are kept, and his lease goes at once, or when a peer has read it."""
        request = data.draw(st.sampled_from(self.live))
        if request.migrating:
            return
        counts = self.kv.pool.counts()
        stash = self.stashes.put(request.lease, request.computed)
        assert self.kv.pool.counts() == counts, "it holds what is held"
        if stash is not None:
            self.stashed.append(stash)
            self.awaited[stash] = set(stash.stores)
        if is_released:
            self.live.remove(request)
            if is_quarantined:
                self.kv.quarantine(request.lease)
                self.parked.append(request.lease)
            else:
                self.kv.release(request.lease)
        self._advance()

    @precondition(lambda self: self.stashed)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """End a stash: its request is back, or will never be."""
        stash = data.draw(st.sampled_from(self.stashed))
        self.stashed.remove(stash)
        self.stashes.drop(stash)
        self._advance()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), luck=st.integers(0, 15))
    def io(self, data: st.DataObject, luck: int) -> None:
        """One load or spill ends, in any order; disks tear, and fill up."""
        job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        if isinstance(job, Spill):
            self._spill(job, "" if luck else "No space left on device")
        elif isinstance(job, Store):
            self._store(job, "" if luck > 2 else "cannot be read")
        else:
            self._load(job, is_whole=luck > 3)
        self._advance()

    def _store(self, job: Store, error: str) -> None:
        for block, content in zip(job.blocks, self.read.pop(job.number), strict=True):
            assert self.kv.pool.refs(block) and self.memory[block] == content, "reused while a copy reads it"
        for slot, block in zip(job.slots, job.blocks, strict=True):
            self.slots[slot.index] = list(OTHER) if error else list(self.memory[block])
            self.digested.add(slot.index)
        if error:
            self.unread.add(job.number)
        waited = [stash for stash in self.stashed if stash.stores == {job.number}]
        event = Stored(job.number, 0 if error else len(job.blocks), 0.001, error)
        self.tiers.handle(event)
        failed = self.stashes.stored(event)
        # One that waits for several is told with the last of them, whichever has failed.
        assert set(failed) == {stash for stash in waited if self.awaited[stash] & self.unread}
        self.stashed = [stash for stash in self.stashed if stash not in failed]

    def _spill(self, job: Spill, error: str) -> None:
        if not error:
            self.segments[job.segment] = [list(self.slots[slot.index]) for slot in job.slots]
        self.fetches.handle(Spilled(job.segment, error))
        assert (self.tiers.disk is None) == bool(error)

    def _load(self, job: TierLoad, is_whole: bool) -> None:
        done = 0
        for place, target in zip(job.places, job.targets, strict=True):
            if isinstance(place, OnDisk):
                if not is_whole or place.segment not in self.segments:
                    self.memory[target] = list(OTHER)
                    break
                self.memory[target] = list(self.segments[place.segment][place.at])
            else:
                content = self.slots[place.index]
                if place.index in self.digested and content == OTHER:
                    self.memory[target] = list(OTHER)
                    break
                self.memory[target] = list(content)
            done += 1
        self.fetches.handle(Loaded(job.number, done, 0.001, 0.001))

    @rule(limit=st.sampled_from([3, 1000]))
    def report(self, limit: int) -> None:
        """A router hears what has gone, and which blocks have gone to another tier: then it knows where each lies."""
        for ident in self.kv.take_evicted():
            self.told.pop(ident, None)
        while moved := self.kv.take_moved(limit):
            assert sum(map(len, moved.values())) <= limit
            self.told |= {ident: tier for tier, identities in moved.items() for ident in identities}
        if self.kv._moved:
            return  # those that nobody has filled the limit
        here = {node.identity for node in self.kv.cache.nodes()}
        for ident in self.kv.lower():
            tier = "device" if ident in here else self.tiers.tier(ident)
            assert not tier or self.told[ident] == tier, "it lies elsewhere than was told"

    @rule()
    def pressure(self) -> None:
        """Somebody takes all there is: what nobody holds leaves the device, and is in a tier or told to be gone."""
        here = {node.identity for node in self.kv.cache.nodes()}
        room = self.kv.available
        lease = self.kv.acquire(b"x", [0], match_limit=0, room_tokens=room * SIZE)
        assert lease is not None and self.kv.available == 0
        self._advance()
        gone = set(self.kv.take_evicted())
        left = {node.identity for node in self.kv.cache.nodes()}
        assert all(ident in self.tiers or ident in gone for ident in here - left)
        assert not any(ident in self.tiers or ident in left for ident in gone), "told to be gone, and there"
        self.kv.release(lease)

    def check_tiers(self) -> None:
        self.fetches.check()
        self.stashes.check()
        for ident, slot in self.tiers.host._slots.items():
            if not (ident in self.tiers._saving or ident in self.tiers._storing or ident in self.tiers.host._spoilt):
                assert _identity(self.slots[slot.index]) == ident, "a slot holds another block"
        if self.tiers.disk is not None:
            for ident, place in self.tiers.disk.places.items():
                assert _identity(self.segments[place.segment][place.at]) == ident

    @invariant()
    def sound_below(self) -> None:
        self.check_tiers()

    def teardown(self) -> None:
        while self.jobs:
            job = self.jobs.pop()
            if isinstance(job, Spill):
                self._spill(job, "")
            elif isinstance(job, Store):
                self._store(job, "")
            else:
                self._load(job, True)
            self._advance()
        for stash in self.stashed:
            self.stashes.drop(stash)
        assert not self.stashes.kept and not self.tiers.host._spoilt
        assert not self.tiers.host._pins, "pinned by nobody"
        assert not len(self.fetches)
        super().teardown()


def _identity(content: Content) -> bytes:
    """Return the identity of the block whose slots hold this; the last slot knows the whole prefix."""
    assert content[-1] is not None
    name, tokens = content[-1]
    assert content == [(name, tokens[: at + 1]) for at in range(len(tokens) - SIZE, len(tokens))]
    return identity.chain(identity.root(name, "m"), tokens, SIZE)[-1]


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
