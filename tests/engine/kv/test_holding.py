"""What a worker tells of its cache, taken in by a router's index: never more than is held, and all of it in the end."""

from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.identity import SHORT_BYTES, chain
from engine.kv.holding import Holding
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.commands import Spill, Spilled
from engine.kv.tiers.tiers import Tiers
from router.core.prefix_index import PrefixIndex

BLOCKS, SIZE = 12, 2
PROMPTS = [[*[0] * 8, *[n] * 9] for n in range(5)] + [[n] * 11 for n in range(1, 5)]
NAMESPACES = (b"", b"other")


class Site:
    """A worker's cache, and the index of a router that it tells what it holds."""

    def __init__(self, tiers: Tiers | None) -> None:
        self.kv = KVCacheManager(BLOCKS, SIZE, "m", tiers)
        self.leases: list[Lease] = []
        self.told: set[bytes] = set()
        self.heard, self.is_cut = 0, False
        self.attach()

    def attach(self) -> None:
        self.index = PrefixIndex()
        self.index.add("w", 1000)
        self.holding = Holding(self.kv)
        self.told.clear()
        self.heard, self.is_cut = 0, False

    def resume(self) -> None:
        """The stream is back."""
        self.holding.resume(self.heard)
        self.is_cut = False

    def run(self, namespace: bytes, tokens: list[int]) -> None:
        """A sequence is computed; what the device has of it is reused, and it stays held."""
        lease = self.kv.acquire(namespace, tokens, match_limit=len(tokens) - 1, room_tokens=len(tokens))
        if lease is not None:
            self.kv.copied(lease)
            self.kv.commit(lease, tokens, tail=True)
            self.leases.append(lease)
        self._move()

    def end(self, number: int) -> None:
        if self.leases:
            self.kv.release(self.leases.pop(number % len(self.leases)))

    def _move(self) -> None:
        """Carry out what the tiers ask for."""
        while self.kv.tiers is not None and (commands := self.kv.tiers.take_commands()):
            for command in commands:
                if isinstance(command, Spill):
                    self.kv.tiers.handle(Spilled(command.segment, ""))

    def tell(self, limit: int) -> None:
        self.report()
        for parent, blocks in self.holding.take(limit):
            fresh = {blocks[at : at + SHORT_BYTES] for at in range(0, len(blocks), SHORT_BYTES)}
            assert fresh <= {one[:SHORT_BYTES] for one in self.held()}, "it says what it does not hold"
            assert not fresh & self.told, "it says something twice"
            assert self.is_cut or not parent or parent in self.told, "a block comes before its parent"
            if not self.is_cut:
                self.told |= fresh
                self.index.recall("w", parent, blocks)
        if not self.is_cut:
            self.heard = self.holding.number
        self.index.check()

    def report(self) -> None:
        gone = self.kv.take_evicted()
        self.index.evict("w", gone)
        self.holding.forget(gone)
        self.told -= {one[:SHORT_BYTES] for one in gone}

    def held(self) -> set[bytes]:
        device = {node.identity for node in self.kv.cache.nodes()}
        return device | {one for one in self.kv.lower() if self.kv.above(one) is not None}

    def depths(self) -> list[tuple[int, int]]:
        """How many leading blocks of every prompt the router believes to be held, and how many are."""
        found, held = [], self.held()
        for namespace in NAMESPACES:
            for tokens in PROMPTS:
                identities = chain(self.kv.cache.root_identity(namespace), tokens, SIZE)
                really = next((at for at, one in enumerate(identities) if one not in held), len(identities))
                found.append((self.index.match("w", identities), really))
        return found


def tiers(kind: str) -> Tiers | None:
    if kind == "device":
        return None
    return Tiers(8, 4096, disk_bytes=6 * 3 * 4096 if kind == "disk" else 0)


STEPS = st.tuples(
    st.sampled_from(["run", "run", "run", "end", "end", "tell", "tell", "report", "attach", "cut", "resume"]),
    st.integers(0, len(PROMPTS) - 1),
    st.sampled_from(NAMESPACES),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["device", "host", "disk"]), st.lists(STEPS, max_size=40), st.integers(1, 6))
def test_a_router_learns_all_and_nothing_that_is_not_so(
    kind: str, steps: list[tuple[str, int, bytes]], limit: int
) -> None:
    """Guards what is told while blocks come and go, in pieces, from the beginning again, and from where a stream was
    cut, nothing of it twice, with the device's blocks in use or idle, and others below it; and prefixes of one
    namespace that are taken for another's."""
    site = Site(tiers(kind))
    for what, number, namespace in steps:
        if what == "run":
            site.run(namespace, PROMPTS[number])
        elif what == "end":
            site.end(number)
        elif what == "tell":
            site.tell(limit)
        elif what == "report":
            site.report()
        elif what == "cut":
            site.is_cut = True
        elif what == "resume":
            site.resume()
        else:
            site.attach()
        site.kv.check()
    site.report()
    assert all(believed <= really for believed, really in site.depths())
    site.resume()
    while site.holding:
        site.tell(limit)
    assert all(believed == really for believed, really in site.depths())
    site.attach()
    while site.holding:
        site.tell(limit)
    assert all(believed == really for believed, really in site.depths())


def test_no_piece_is_larger_than_what_was_asked_for() -> None:
    """Guards a busy worker's step: 4,096 blocks of a long line are looked at, not all of them."""
    kv = KVCacheManager(3000, SIZE, "m")
    for number in range(100):
        tokens = [number] * (30 * SIZE)
        lease = kv.acquire(b"", tokens, match_limit=0, room_tokens=len(tokens))
        assert lease is not None
        kv.commit(lease, tokens)
        kv.release(lease)
    holding, pieces = Holding(kv), []
    while holding:
        pieces.append(sum(len(blocks) // SHORT_BYTES for _, blocks in holding.take(500)))
    assert sum(pieces) == 3000 and max(pieces) <= 500


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_latest_used_comes_first(namespace: bytes) -> None:
    """Guards the order in which a router will believe them gone."""
    kv = KVCacheManager(8, SIZE, "m")
    for number in range(2):
        tokens = [number] * (3 * SIZE)
        lease = kv.acquire(namespace, tokens, match_limit=0, room_tokens=len(tokens))
        assert lease is not None
        kv.commit(lease, tokens)
        kv.release(lease)
    newest = chain(kv.cache.root_identity(namespace), [1] * (3 * SIZE), SIZE)
    (first, *_) = Holding(kv).take(100)
    assert first == (b"", b"".join(one[:SHORT_BYTES] for one in newest))


def test_what_is_held_by_nobody_yet_is_passed_over() -> None:
    """Guards a worker that ends because a router comes while a prompt is being computed."""
    kv = KVCacheManager(8, SIZE, "m")
    computing = kv.acquire(b"", [1] * 4, match_limit=0, room_tokens=4)
    done = kv.acquire(b"", [2] * 4, match_limit=0, room_tokens=4)
    assert computing is not None and done is not None
    kv.commit(done, [2] * 4)
    identities = chain(kv.cache.root_identity(b""), [2] * 4, SIZE)
    assert Holding(kv).take(100) == [(b"", b"".join(one[:SHORT_BYTES] for one in identities))]


def test_lower_tiers_are_told_parents_first_and_without_what_lost_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a run that no router can place: backwards, or behind a block that no tier has."""
    one, two, three, lost, found, last = (bytes([n]) * 32 for n in range(1, 7))
    above = {three: two, one: b"", two: one, lost: bytes(32), found: three, last: lost}
    kv = KVCacheManager(8, SIZE, "m")
    monkeypatch.setattr(kv, "lower", lambda: [last, found, lost, one, three])
    monkeypatch.setattr(kv, "above", above.get)
    holding = Holding(kv)
    short = {ident: ident[:SHORT_BYTES] for ident in above}
    assert holding.take(1) == [(b"", short[one] + short[two] + short[three])]
    assert holding.take(1) == [] and holding, "whoever looks in vain has looked"
    assert holding.take(100) == [(short[three], short[found])] and not holding
    together = Holding(kv).take(100)
    assert together == [(b"", b"".join(short[ident] for ident in (one, two, three, found)))], "one run goes on"


@pytest.mark.parametrize("is_head_first", [True, False])
def test_a_hole_in_a_long_context_is_walked_to_once(is_head_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker's streams: one block that is lost near the head made the telling quadratic, in one turn."""
    line = [number.to_bytes(32, "big") for number in range(1, 1001)]
    above = dict(zip(line[1:], line, strict=False))
    del above[line[1]]
    kv, asked = KVCacheManager(8, SIZE, "m"), 0

    def look(ident: bytes) -> bytes | None:
        nonlocal asked
        asked += 1
        return above.get(ident)

    monkeypatch.setattr(kv, "lower", lambda: line[::-1] if is_head_first else line.copy())
    monkeypatch.setattr(kv, "above", look)
    holding, turns = Holding(kv), []
    while holding:
        before = asked
        assert not holding.take(100)
        turns.append(asked - before)
    assert asked <= 2 * len(line) and (max(turns) <= 100 or not is_head_first)
    above[line[0]], above[line[1]] = b"", line[0]
    holding.resume(0)
    told = [len(blocks) // SHORT_BYTES for _, blocks in holding.take(10_000)]
    assert sum(told) == len(line), "what is whole again is told"


def test_a_telling_that_goes_on_looks_at_nothing_that_was_heard() -> None:
    """Guards a worker's streams each time that a router's comes back: half a million blocks were gone through."""

    class Told(dict[bytes, int]):
        dropped = 0

        def popitem(self) -> tuple[bytes, int]:
            Told.dropped += 1
            return super().popitem()

        def items(self) -> NoReturn:
            raise AssertionError("all are looked at")

    site = Site(None)
    for number in range(3, 7):
        site.run(b"", PROMPTS[number])
        site.end(0)
    site.attach()
    while site.holding:
        site.tell(1)
    holding = site.holding
    told, pieces = holding.told_blocks, holding.number
    holding._told = Told(holding._told)
    holding.resume(pieces)
    assert (holding.told_blocks, Told.dropped) == (told, 1) and pieces > 1
    assert holding.take(1000) == [], "nothing twice"
    last = sum(piece == pieces for piece in holding._told.values())
    holding.resume(pieces - 1)
    assert (holding.told_blocks, Told.dropped) == (told - last, last + 2)
    holding.resume(pieces + 1)
    assert holding.told_blocks == 0, "it is none of these pieces"


def test_what_is_cached_no_more_is_not_told() -> None:
    """Guards a worker whose cache moves on while it tells a router what it holds."""
    site = Site(None)
    site.run(b"", PROMPTS[0])
    site.end(0)
    site.attach()
    while site.kv.cache.idle:
        site.kv._evict(b"")
    assert site.holding
    site.tell(100)
    assert not site.told and not site.holding


@pytest.mark.parametrize(("limit", "prompts"), [(1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_so_much_is_looked_at_in_one_turn_and_no_more(limit: int, prompts: int) -> None:
    """Guards a step against a cache of half a million blocks: a prompt of one block counts three, with its root."""
    kv = KVCacheManager(BLOCKS, SIZE, "m")
    for number in range(4):
        lease = kv.acquire(b"", [number] * SIZE, match_limit=0, room_tokens=SIZE)
        assert lease is not None
        kv.commit(lease, [number] * SIZE)
        kv.release(lease)
    assert len(Holding(kv).take(limit)) == prompts


def test_a_tail_is_told_as_the_whole_blocks_before_it() -> None:
    """Guards a router's index against blocks that no prompt asks for: the last block is filled in part."""
    kv = KVCacheManager(BLOCKS, SIZE, "m")
    lease = kv.acquire(b"", [1, 2, 3, 4, 5], match_limit=0, room_tokens=5)
    assert lease is not None
    kv.commit(lease, [1, 2, 3, 4, 5], tail=True)
    assert len(lease.path) == 3
    names = chain(kv.cache.root_identity(b""), [1, 2, 3, 4], SIZE)
    for _ in range(2):  # in use, and cached
        assert Holding(kv).take(9) == [(b"", b"".join(name[:SHORT_BYTES] for name in names))]
        if not lease.released:
            kv.release(lease)
