"""The machine of tests/engine/kv/test_window_machine.py over tiers: blocks of window groups go down beside those of the
first group, and a prefix comes back only with every window's tail. The shadow knows what slots and segments hold, whose
it is, and of which group; so a tail that is stale, of another group or one block short is a wrong read by whoever goes
on behind it. That the shadow notices is shown by the planted errors at the end."""



import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from engine import identity
from engine.kv.groups import LayerGroup
from engine.kv.manager import KVCacheManager
from engine.kv.tiers import resuming
from engine.kv.tiers.commands import Loaded, OnDisk, Save, Spill, Spilled, Store, Stored, TierDrop, TierLoad
from engine.kv.tiers.fetches import Fetches
from engine.kv.tiers.stashes import Stash, Stashes
from engine.kv.tiers.tiers import Tiers
from tests.engine.kv.slices import KVSlices
from tests.engine.kv.test_window_machine import BLOCKS, CHUNK, SIZE, Slot, WindowMachine, names, windows

HOST_BLOCKS, SEGMENTS = 40, 8
Content = list[Slot | None]
PROMPTS = [[*[0] * 8, *[n] * 21] for n in range(6)] + [[n] * 30 for n in range(1, 4)]
TORN: Content = [(9, b"torn", (9,))] * SIZE


class GroupedTierMachine(WindowMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots: list[Content] = [[None] * SIZE for _ in range(HOST_BLOCKS)]
        self.segments: dict[int, list[Content]] = {}
        self.jobs: list[TierLoad | Spill | Store] = []
        self.read: dict[int, list[Content]] = {}
        self.stashed: list[Stash] = []

    @initialize(windows=windows)
    def open(self, windows: list[int]) -> None:
        self.groups = (LayerGroup((0,)), *(LayerGroup((at,), window) for at, window in enumerate(windows, 1)))
        self.tiers = Tiers(HOST_BLOCKS, 4096, disk_bytes=SEGMENTS * 11 * 4096)
        self.kv = KVCacheManager(BLOCKS, SIZE, "m", self.tiers, self.groups, ahead_tokens=CHUNK)
        self.slices = KVSlices(self.kv)
        self.fetches, self.stashes = Fetches(self.kv, self.tiers), Stashes(self.kv, self.tiers)
        self.memory: list[Content] = [[None] * SIZE for _ in range(BLOCKS)]

    def _is_idle(self) -> bool:
        return not (self.live or self.jobs)

    def _advance(self) -> None:
        for command in self.tiers.take_commands():
            match command:
                case Save(block, slot):
                    self.slots[slot.index] = list(self.memory[block])
                case TierDrop(segment):
                    self.segments.pop(segment, None)
                case Store(number, _, blocks):
                    self.read[number] = [list(self.memory[block]) for block in blocks]
                    self.jobs.append(command)
                case _:
                    self.jobs.append(command)
        super()._advance()

    @rule(name=names, prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=5), data=st.data())
    def serve(self, name: bytes, prompts: list[list[int]], data: st.DataObject) -> None:
        """Whole requests, one after the other, in chunks: their windows slide, and they push each other down."""
        for tokens in prompts:
            count = len(self.live)
            self.acquire(name, tokens, 0, False)
            if len(self.live) > count:
                request = self.live.pop()
                while request.computed < len(tokens):
                    self._compute(request, min(len(tokens), request.computed + CHUNK))
                    self.kv.commit(request.lease, tokens[: request.computed])
                    self.kv.slide(request.lease, request.computed)
                self.kv.commit(request.lease, tokens, tail=True)
                self.kv.release(request.lease)
                self.sound()

    @rule(name=names, tokens=st.sampled_from(PROMPTS))
    def fetch(self, name: bytes, tokens: list[int]) -> None:
        before = self.kv.matched_tokens(name, tokens, len(tokens))
        fetch = self.fetches.wanted(name, tokens, len(tokens), tokens_per_s=10.0)
        self._advance()
        if fetch is not None:
            assert len(fetch.tokens) > before - before % SIZE, "nothing is gained"
            assert self.fetches.wanted(name, tokens, len(tokens), tokens_per_s=10.0) is fetch

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        """Somebody is preempted: what going on from his whole blocks takes is kept, and his lease goes."""
        request = data.draw(st.sampled_from(self.live))
        if request.migrating or request.lease.copies:
            return
        self.kv.commit(request.lease, request.tokens[: request.computed])
        if self.stashes.is_possible(request.lease, request.computed):
            stash = self.stashes.put(request.lease, request.computed)
            if stash is not None:
                self.stashed.append(stash)
        self.live.remove(request)
        self.kv.release(request.lease)
        self._advance()

    @precondition(lambda self: self.stashed)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.stashes.drop(self.stashed.pop(data.draw(st.integers(0, len(self.stashed) - 1))))
        self._advance()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), luck=st.integers(0, 15))
    def io(self, data: st.DataObject, luck: int) -> None:
        """One load, store or spill ends, in any order; now and then it fails."""
        job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        self._end(job, is_well=luck > 1)
        self._advance()

    def _end(self, job: TierLoad | Spill | Store, is_well: bool) -> None:
        if isinstance(job, Spill):
            if is_well:
                self.segments[job.segment] = [list(self.slots[slot.index]) for slot in job.slots]
            self.fetches.handle(Spilled(job.segment, "" if is_well else "No space left on device"))
        elif isinstance(job, Store):
            for block, content in zip(job.blocks, self.read.pop(job.number), strict=True):
                assert self.kv.pool.refs(block) and self.memory[block] == content, "reused while a copy reads it"
            for slot, block in zip(job.slots, job.blocks, strict=True):
                self.slots[slot.index] = list(self.memory[block]) if is_well else list(TORN)
            event = Stored(job.number, len(job.blocks) if is_well else 0, 0.001, "" if is_well else "cannot be read")
            self.tiers.handle(event)
            failed = self.stashes.stored(event)
            self.stashed = [stash for stash in self.stashed if stash not in failed]
        else:
            self._load(job, is_well)

    def _load(self, job: TierLoad, is_whole: bool) -> None:
        done = 0
        for place, target in zip(job.places, job.targets, strict=True):
            is_there = not isinstance(place, OnDisk) or (is_whole and place.segment in self.segments)
            found = self.segments[place.segment][place.at] if isinstance(place, OnDisk) and is_there else None
            content = self.slots[place.index] if not isinstance(place, OnDisk) else found
            if content is None or content == TORN:
                self.memory[target] = list(TORN)
                break
            self.memory[target] = list(content)
            done += 1
        self.fetches.handle(Loaded(job.number, done, 0.001, 0.001))

    @rule()
    def pressure(self) -> None:
        """Somebody takes all there is: what nobody holds leaves the device."""
        room = self.kv.available // 2  # of which windows take their part
        lease = self.kv.acquire(b"x", [0], match_limit=0, room_tokens=room * SIZE) if room else None
        if lease is not None:
            self.kv.reach(lease, 0, min(room * SIZE, CHUNK))
            self._advance()
            self.kv.release(lease)

    @invariant()
    def sound_below(self) -> None:
        if not hasattr(self, "tiers"):
            return
        self.fetches.check()
        self.stashes.check()
        for ident, slot in self.tiers.host._slots.items():
            if not (ident in self.tiers._saving or ident in self.tiers._storing or ident in self.tiers.host._spoilt):
                assert _identity(self.slots[slot.index]) == ident, "a slot holds another block"
        if self.tiers.disk is not None:
            for ident, at in self.tiers.disk.places.items():
                assert _identity(self.segments[at.segment][at.at]) == ident

    def teardown(self) -> None:
        if not hasattr(self, "tiers"):
            return
        while self.jobs:
            self._end(self.jobs.pop(), is_well=True)
            self._advance()
        for stash in self.stashed:
            self.stashes.drop(stash)
        assert not self.stashes.kept and not self.tiers.host._pins and not len(self.fetches)
        super().teardown()


def _identity(content: Content) -> bytes:
    """Return the name of the block whose slots hold this; the last slot knows the whole prefix."""
    assert content[-1] is not None
    group, name, tokens = content[-1]
    assert content == [(group, name, tokens[: at + 1]) for at in range(len(tokens) - SIZE, len(tokens))]
    chain = identity.chain(identity.root(name, "m"), tokens, SIZE)
    return identity.in_group(chain[-1], group)


TestGroupedTierMachine = GroupedTierMachine.TestCase
TestGroupedTierMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def _forgets_a_group(*args: object) -> list[tuple[int, int]] | int:
    lacks = _lacking(*args)  # type: ignore[arg-type]
    return [one for one in lacks if one[1] != 1] if isinstance(lacks, list) else lacks


def _any_name(ident: bytes, group: int) -> bytes:
    return ident


_lacking = resuming._lacking


@pytest.mark.slow
@pytest.mark.parametrize("planted", [{"_lacking": _forgets_a_group}, {"in_group": _any_name}], ids=["tail", "name"])
def test_the_shadow_notices(planted: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's tail that is not loaded, and one that is loaded from the first group's block, are found."""
    for name, value in planted.items():
        monkeypatch.setattr(resuming, name, value)
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            GroupedTierMachine,
            settings=settings(
                max_examples=8000,  # a wrong name is found after a thousand, on average
                stateful_step_count=40,
                deadline=None,
                database=None,
                print_blob=False,
                phases=[Phase.generate],
            ),
        )
