"""A decode scheduler whose layers are kept in groups: what a handoff brings of each, what a failed one leaves, and who
can share. Tokens are compared in tests/integration/test_layer_groups_fake.py, block tables in
tests/engine/kv/test_windows.py."""

from typing import Any

import pytest

from decode_worker.scheduler.events import FromPeer, PeerDown, Unloaded
from decode_worker.scheduler.request import NO_PREFILL, RequestState
from decode_worker.scheduler.samples import forks
from engine import identity
from engine.identity import in_group
from engine.kv.block_pool import BlockState
from engine.kv.groups import GONE, LayerGroup, migrated, place
from engine.kv.lease import Lease
from engine.kv.tiers.commands import Loaded, Store, Stored, TierLoad
from engine.kv.tiers.tiers import Tiers
from engine.messages import BlockOffer, Cancel, Ended, Handoff, Offer, UsePrefill
from engine.types import BeamParams, BlockId, FinishReason, RequestId, TokenLogprobs
from tests.decode_worker.scheduler.bench import POOL, Fetching, P
from transfer.handoff.commands import Received, Rows

SIZE = 4
GROUPS = (LayerGroup((0,)), LayerGroup((1,), 5), LayerGroup((2,), 9))


class Grouped(Fetching):
    """A bench with three groups of layers, two of which keep a window."""

    def __init__(self, blocks: int = 96, groups: tuple[LayerGroup, ...] = GROUPS, **config: object) -> None:
        super().__init__(blocks, groups=groups, **{"local_chunk_tokens": 8, **config})

    def offer(self, handoff: Handoff, seq: int, places: list[int], error: str = "") -> None:
        """Let the blocks at these places land, or fail."""
        tokens = len(self.asked().record.tokens)
        counts = [min(SIZE, tokens - at // len(GROUPS) * SIZE) for at in places]
        blocks = [BlockOffer(BlockId(at), 1, at, count, 0) for at, count in zip(places, counts, strict=True)]
        self.tell(FromPeer(P, Offer(handoff, seq, blocks)))
        self.tell(Received(handoff, seq, error, 0.1, 0 if error else len(blocks)))

    def wanted(self) -> list[int]:
        """The places that the latest handoff is to bring."""
        asked = self.asked()
        tokens = len(asked.record.tokens)
        blocks = range(asked.have_tokens // SIZE, -(-tokens // SIZE))
        return [place(at, group, len(GROUPS)) for at, group in migrated(GROUPS, blocks, tokens, SIZE)]

    def held(self, name: str) -> list[list[int]]:
        """Which blocks of each window group the request has."""
        return [[at for at, block in enumerate(t) if block != GONE] for t in self.request(name).lease.windows]


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 12, 17, 18, 20])
def test_a_handoff_brings_all_of_the_first_group_and_the_tail_of_each_window(length: int) -> None:
    """Guards the places, names and numbers of rows that both sides must agree on, at each length of the last block."""
    bench, prompt = Grouped(), list(range(length))
    assert bench.place("a", prompt, POOL, max_tokens=20)
    request = bench.request("a")
    targets = bench.scheduler.prefills.handoffs._targets(request)
    names = identity.blocks(identity.root(b"", "m"), prompt, SIZE)
    last = -(-length // SIZE)
    firsts = [0, *(max(0, length - 1 - group.window + 1) // SIZE for group in GROUPS[1:])]
    assert set(targets) == {at * 3 + group for group in range(3) for at in range(firsts[group], last)}
    for number, expected in targets.items():
        at, group = divmod(number, 3)
        count = min(SIZE, length - at * SIZE)
        assert expected.rows == (Rows(0, request.lease.tables[group][at], 0, count),)
        assert (expected.tokens, expected.identity) == (count, in_group(names[at], group))
    handoff = bench.asked().handoff
    bench.offer(handoff, 0, bench.wanted())
    assert request.arrived and request.known == length and request.origin.migrated_blocks == len(targets)
    (done,) = bench.scheduler.prefills.handoffs.take_migrated()
    assert (done.outcome, done.blocks) == ("ok", len(targets))
    bench.name_token(handoff)
    assert request.state is RequestState.READY
    assert bench.held("a") == [list(range(first, last)) for first in firsts[1:]]


@pytest.mark.parametrize(
    ("landed", "have"),
    [
        ([], 0),  # nothing
        ([0, 3], 8),  # two blocks of the first group: no window needs them
        ([0, 3, 6, 9], 8),  # from the third on a window needs its own as well
        ([0, 3, 6, 8, 9], 12),
        ([0, 3, 6, 8, 9, 10, 11], 16),
        ([3, 6, 8, 9], 0),  # the first is missing
    ],
)
def test_a_failed_handoff_leaves_what_all_groups_have(landed: list[int], have: int) -> None:
    """Guards a prefix that one group lacks, and one that is brought again. Of 18 tokens the windows want the blocks
    from the fourth and the third on."""
    bench, prompt = Grouped(), list(range(18))
    assert bench.place("a", prompt, POOL, max_tokens=20)
    first = bench.asked()
    assert bench.wanted() == [0, 3, 6, 8, 9, 10, 11, 12, 13, 14] and first.have_tokens == 0
    if landed:
        bench.offer(first.handoff, 0, landed)
    bench.offer(first.handoff, 1, [14], "its bytes are others")
    again, request = bench.asked(), bench.request("a")
    assert again.handoff.attempt == 1 and again.have_tokens == have
    assert request.origin.migrated_blocks == len(landed)
    (failed,) = bench.scheduler.prefills.handoffs.take_migrated()
    assert (failed.outcome, failed.blocks) == ("retry", len(landed))
    bench.offer(again.handoff, 0, bench.wanted())
    assert request.arrived and request.known == 18


@pytest.mark.parametrize(("group", "have"), [(1, 12), (2, 8)])
def test_a_tail_whose_first_block_has_not_landed_is_brought_again(group: int, have: int) -> None:
    """Guards a hole at a window's far end, which the next token still sees: all else of twenty tokens is here, and the
    window of a token more would begin a block later."""
    bench, prompt = Grouped(), list(range(20))
    assert bench.place("a", prompt, POOL, max_tokens=20)
    first, wanted = bench.asked().handoff, bench.wanted()
    far = min(at for at in wanted if at % len(GROUPS) == group)
    bench.offer(first, 0, [at for at in wanted if at != far])
    bench.offer(first, 1, [far], "its bytes are others")
    again = bench.asked()
    assert again.have_tokens == have == far // len(GROUPS) * SIZE and far in bench.wanted()
    bench.offer(again.handoff, 0, bench.wanted())
    bench.name_token(again.handoff)
    assert bench.request("a").state is RequestState.READY and far // len(GROUPS) in bench.held("a")[group - 1]


def test_of_what_has_landed_the_last_token_is_computed_again_by_who_goes_on() -> None:
    """Guards the next token, which is drawn from a computed row: sixteen landed, and the last block is not counted."""
    bench, prompt = Grouped(), list(range(16))
    assert bench.place("a", prompt, POOL, max_tokens=20)
    first, wanted = bench.asked().handoff, bench.wanted()
    bench.offer(first, 0, wanted[:-1])
    bench.offer(first, 1, wanted[-1:], "its bytes are others")
    assert bench.asked().have_tokens == 12


@pytest.mark.parametrize("scores", [0, 5, 19])
def test_a_prompt_whose_log_probabilities_are_not_all_known_is_computed_from_where_its_windows_are(scores: int) -> None:
    """Guards its tokens: what has landed behind the match has no windows that computing from its middle would see."""
    bench, prompt = Grouped(), list(range(20))
    assert bench.place("a", prompt, POOL, max_tokens=20, prompt_logprobs=0)
    bench.offer(bench.asked().handoff, 0, bench.wanted())
    request = bench.request("a")
    request.scores.extend([TokenLogprobs(at, -1.0) for at in range(scores)])
    bench.tell(PeerDown(POOL, P, "gone"))
    bench.router(UsePrefill(RequestId("a"), 1, None))
    assert request.state is RequestState.LOCAL and request.known == (19 if scores == 19 else 0)


def test_of_what_has_all_landed_only_the_last_token_is_computed_here() -> None:
    """Guards a prompt that is computed a second time: its worker is lost before it names the token, and the tails of
    the windows have come with the rest."""
    bench, prompt = Grouped(), list(range(20))
    assert bench.place("a", prompt, POOL, max_tokens=20)
    bench.offer(bench.asked().handoff, 0, bench.wanted())
    bench.tell(PeerDown(POOL, P, "gone"))
    bench.router(UsePrefill(RequestId("a"), 1, None))
    request, batch = bench.request("a"), bench.scheduler.batch
    assert request.state is RequestState.LOCAL and request.known == 19
    assert (request.origin.prefill_cached_tokens, batch.hit_tokens) == (19, 0), "none of it was cached here"
    plan = bench.step()
    assert plan is not None and [(row.start, row.end) for row in plan.rows] == [(19, 20)]


@pytest.mark.parametrize("length", [13, 16, 17])
def test_samples_share_the_tails_of_a_prompt_that_has_landed(length: int) -> None:
    """Guards a fork without the windows of the prompt's last token, which it computes again."""
    bench, prompt = Grouped(), list(range(length))
    assert bench.place("a", prompt, POOL, max_tokens=20) and bench.place("b", prompt, POOL, fork_of="a", max_tokens=20)
    handoff = bench.asked().handoff
    bench.offer(handoff, 0, bench.wanted())
    bench.name_token(handoff)
    parent, fork = bench.request("a"), bench.request("b")
    assert fork.state is RequestState.LOCAL and fork.known == length - 1
    whole = (length - 1) // SIZE
    for ours, theirs in zip(fork.lease.windows, parent.lease.windows, strict=True):
        assert ours[:whole] == theirs[:whole]
    while len(fork.tokens) < length + 2:
        bench.step()


def test_where_windows_slide_all_samples_begin_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards samples whose windows would be gone when they begin, so that each fetches the prompt again."""
    monkeypatch.setattr(forks, "MAX_FORKED_BLOCKS", 1)
    bench, prompt = Grouped(), list(range(17))
    assert bench.place("a", prompt, POOL, max_tokens=20)
    for name in "bcd":
        assert bench.place(name, prompt, POOL, fork_of="a", max_tokens=20)
    handoff = bench.asked().handoff
    bench.offer(handoff, 0, bench.wanted())
    bench.name_token(handoff)
    assert [bench.request(name).state for name in "bcd"] == [RequestState.LOCAL] * 3


def test_a_sample_whose_parent_has_gone_on_fetches_its_own_windows() -> None:
    """Guards a fork of blocks that have slid out of the parent's windows."""
    bench, prompt = Grouped(), list(range(17))
    assert bench.place("a", prompt, POOL, max_tokens=40)
    handoff = bench.asked().handoff
    bench.offer(handoff, 0, bench.wanted())
    bench.name_token(handoff)
    assert bench.place("b", prompt, POOL, fork_of="a", max_tokens=40)
    assert bench.request("b").state is RequestState.LOCAL, "nothing has slid yet"
    while len(bench.request("a").tokens) < 30:
        bench.step()
    assert bench.place("c", prompt, POOL, fork_of="a", max_tokens=40)
    late = bench.request("c")
    assert late.state is RequestState.HANDOFF and bench.asked().handoff.request == "c"


@pytest.mark.parametrize("named", [False, True])
def test_who_waits_for_a_prompt_that_came_with_a_token_does_not_share(named: bool) -> None:
    """Guards a share whose windows begin a token too late: the lost attempt had named one. Sixteen tokens fill their
    blocks, and of the window of a seventeenth the block before is none."""
    bench, prompt = Grouped(local_chunk_tokens=8), list(range(20))
    assert bench.place("a", prompt, POOL, max_tokens=20) and bench.place("b", prompt, POOL, fork_of="a", max_tokens=20)
    first = bench.asked().handoff
    if named:
        bench.name_token(first)
    bench.offer(first, 0, bench.wanted()[:1], "its bytes are others")
    again = bench.asked().handoff
    bench.offer(again, 0, bench.wanted())
    bench.name_token(again, token=8)
    fork = bench.request("b")
    assert (fork.state is RequestState.FORKING) == named
    assert bench.scheduler.prefills.forks.stranded() == ([fork] if named else [])
    bench.step()
    assert fork.state in (RequestState.LOCAL, RequestState.READY, RequestState.HANDOFF)
    assert dict(bench.scheduler.preemption.preempted) == ({"forking": 1} if named else {})


def test_a_sample_that_comes_when_its_parent_has_a_token_and_no_blocks_fetches_its_own() -> None:
    """Guards a sample that waits for windows which an attempt that is lost would not bring: the next one's prompt ends
    with the token that was named."""
    bench, prompt = Grouped(), list(range(20))
    assert bench.place("a", prompt, POOL, max_tokens=20)
    bench.name_token(bench.asked().handoff)
    assert bench.place("b", prompt, POOL, fork_of="a", max_tokens=20)
    assert bench.request("b").state is RequestState.HANDOFF and bench.asked().handoff.request == "b"


@pytest.mark.parametrize(("blocks", "field"), [(18, ""), (17, "max_tokens")])
def test_a_search_that_just_fits_the_pool_is_taken(blocks: int, field: str) -> None:
    """Guards the border where hypotheses hold windows too: of a prompt of nine tokens, and three behind it, both share
    two blocks of the first group, each holds seven others, and one copies a block of each of the two windows."""
    bench = Grouped(blocks, max_batch=2, local_chunk_tokens=1)
    taken = bench.place("a", [1] * 9, max_tokens=3, beams=BeamParams(width=2, answers=1))
    assert taken == (not field)
    assert [one.fault.field for one in bench.of(Ended) if isinstance(one, Ended) and one.fault] == [field] * bool(field)


class GroupedTiers(Grouped):
    """The same above a host tier."""

    def __init__(self, **config: object) -> None:
        self.tiers = Tiers(96, 4096)
        super().__init__(tiers=self.tiers, **config)

    def evict(self) -> None:
        """Let all that is cached on the device go down."""
        kv = self.scheduler.kv
        while kv.cache.idle:
            kv._evict(kv.cache.shares.loser(b""))
        self.tiers.take_commands()

    def load(self) -> TierLoad:
        (load,) = [command for command in self.tiers.take_commands() if isinstance(command, TierLoad)]
        return load


@pytest.mark.parametrize(("host_s", "is_loaded"), [(0.01, True), (1.2, True), (1.3, False), (99.0, False)])
def test_a_prefix_with_its_tails_is_loaded_where_that_is_sooner_than_computing_it(
    host_s: float, is_loaded: bool
) -> None:
    """Guards both prices: what is in a lower tier is computed again, or waited for longer than that takes. Eight blocks
    are loaded instead of twenty tokens, which take ten seconds."""
    bench, prompt = GroupedTiers(), list(range(22))
    assert bench.place("before", prompt, max_tokens=1)
    while bench.step() is not None:
        pass
    bench.evict()
    assert bench.scheduler.kv.matched_tokens(b"", prompt, 21) == 0
    costs = bench.scheduler.swapping.costs
    costs.pool_s = costs.here_s = 0.5
    bench.tiers.cost.host_s = host_s
    assert bench.place("a", prompt, POOL, max_tokens=20)
    request = bench.request("a")
    assert (request.state is RequestState.LOADING) == is_loaded
    if not is_loaded:
        assert bench.asked().have_tokens == 0
        return
    load = bench.load()
    # Five whole blocks of the first group, and the tails of two windows behind twenty tokens.
    assert len(load.places) == 5 + 1 + 2
    bench.tell(Loaded(load.number, len(load.places), 0.1, 0.0))
    assert request.state is RequestState.HANDOFF and bench.asked().have_tokens == 20
    assert request.origin.decode_cached_tokens == 20


def test_of_a_load_in_part_nothing_is_used() -> None:
    """Guards going on behind a tail that did not come."""
    bench, prompt = GroupedTiers(), list(range(22))
    assert bench.place("before", prompt, max_tokens=1)
    while bench.step() is not None:
        pass
    bench.evict()
    assert bench.place("a", prompt, POOL, max_tokens=20)
    load = bench.load()
    bench.tell(Loaded(load.number, len(load.places) - 1, 0.1, 0.0))
    assert bench.request("a").state is RequestState.HANDOFF and bench.asked().have_tokens == 0


@pytest.mark.parametrize("scores", [None, 0])
def test_who_begins_again_shares_only_what_it_need_not_compute(
    scores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards blocks that others read: a prompt whose log probabilities are still to be told is computed from its first
    token, and not into what it shares."""
    bench, prompt = GroupedTiers(), list(range(22))
    assert bench.place("a", prompt, POOL, max_tokens=20, prompt_logprobs=scores)
    request = bench.request("a")
    assert bench.place("before", prompt, max_tokens=1)
    while bench.step() is not None:
        pass
    kv = bench.scheduler.kv
    assert kv.matched_tokens(b"", prompt, 21) == 21
    monkeypatch.setattr(bench.scheduler.prefills, "begin", lambda request, now: [])  # it has begun before
    bench.scheduler.endings.settle([Unloaded(request)], bench.now)
    assert request.lease.cached_tokens == (20 if scores is None else 0)


@pytest.mark.parametrize(("spare", "state"), [(1, RequestState.HANDOFF), (2, RequestState.LOADING)])
def test_what_a_full_pool_does_not_load_is_not_kept_from_others_in_host_memory(
    spare: int, state: RequestState
) -> None:
    """Guards a tier that fills with blocks which nobody reads: where the pool has no room for the windows behind what
    was to be loaded, two blocks more than without it, all is computed, and nothing stays pinned."""
    bench = GroupedTiers(local_chunk_tokens=1, groups=(LayerGroup((0,)), LayerGroup((1,), 10)))
    kv, host, prompt = bench.scheduler.kv, bench.tiers.host, list(range(28))
    assert bench.place("before", prompt[:18], max_tokens=1)
    while bench.step() is not None:
        pass
    bench.evict()
    room, blocks = host.room, kv.available
    assert bench.place("other", list(range(50, 78)), POOL, max_tokens=20)
    needed = blocks - kv.available
    bench.router(Cancel(RequestId("other"), 1, FinishReason.CANCELLED))
    others = kv.promise(b"", 0)
    assert others is not None and kv.available == blocks
    while kv.available > needed + spare:
        assert kv.grow(others, 1)
    assert bench.place("a", prompt, POOL, max_tokens=20)
    request = bench.request("a")
    assert request.state is state
    # Four blocks of the first group, and the last three of them in a window of ten tokens.
    assert room - host.room == (7 if state is RequestState.LOADING else 0)
    assert request.lease.cached_tokens == (16 if state is RequestState.LOADING else 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_what_was_copied_for_a_request_is_loaded_whatever_it_costs(swapped: bool) -> None:
    bench, prompt = GroupedTiers(preemption="swap" if swapped else "auto", local_chunk_tokens=1), list(range(22))
    assert bench.place("a", prompt, POOL, max_tokens=20)
    handoff = bench.asked().handoff
    bench.offer(handoff, 0, bench.wanted())
    bench.name_token(handoff)
    request, costs = bench.request("a"), bench.scheduler.swapping.costs
    costs.store_s, costs.pool_s = 1_000.0, 0.001
    bench.scheduler.preemption.preempt([request], bench.now)
    stores = [command for command in bench.tiers.take_commands() if isinstance(command, Store)]
    assert len(stores) == swapped
    for store in stores:
        bench.tell(Stored(store.number, len(store.blocks), 0.1))
    bench.evict()
    bench.tiers.cost.host_s = 1_000.0
    bench.scheduler.plan(1.0)
    assert request.state is (RequestState.LOADING if swapped else RequestState.HANDOFF)


@pytest.mark.parametrize("here", [False, True])
def test_a_lease_that_was_exchanged_for_nothing_is_the_one_that_is_filled(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards blocks that others share against being written again. A preempted request comes back without a match,
    since a nearly full pool has no room for one that leaves enough to others; it exchanges its lease for one that goes
    on behind what a lower tier brings, for which there is no room either; and what it has then begins with cached
    blocks."""
    bench, head = GroupedTiers(preemption="swap", local_chunk_tokens=1), list(range(8))
    kv, prompt = bench.scheduler.kv, [*head, *range(20, 34)]
    assert bench.place("before", [*head, 50], max_tokens=1)
    while bench.step() is not None:
        pass
    assert bench.place("a", prompt, POOL, max_tokens=20)
    request, handoff = bench.request("a"), bench.asked().handoff
    bench.offer(handoff, 0, bench.wanted())
    bench.name_token(handoff)
    costs = bench.scheduler.swapping.costs
    costs.store_s, costs.pool_s = 0.001, 1_000.0
    if here:
        request.prefill.worker = NO_PREFILL
    bench.scheduler.preemption.preempt([request], bench.now)
    for store in [command for command in bench.tiers.take_commands() if isinstance(command, Store)]:
        bench.tell(Stored(store.number, len(store.blocks), 0.1))
    nodes = kv.cache.match(b"", head, 8).nodes
    kept = {node.block for node in nodes} | {block for node in nodes for block in node.windows or ()}
    for block in [block for _, line in list(kv.cache.shares.lines()) for block in list(line)]:
        if block in kept:  # the latest used: the others are driven out
            kv.cache.shares.let_go(b"", block)
    while kv.matched_tokens(b"", prompt, 21) > 8:
        kv._evict(b"")
    bench.tiers.take_commands()
    acquire, exchange, exchanged = kv.acquire, kv.exchange, list[tuple[int, int]]()

    def unmatched(namespace: bytes, tokens: list[int], *, match_limit: int, **more: Any) -> Lease | None:
        return acquire(namespace, tokens, match_limit=0, **more)

    def noted(lease: Lease, *more: Any) -> Lease:
        monkeypatch.setattr(kv, "acquire", lambda *given, **how: None if how["behind"] else acquire(*given, **how))
        other = exchange(lease, *more)
        exchanged.append((len(lease.path), other.cached_tokens))
        return other

    monkeypatch.setattr(kv, "acquire", unmatched)
    monkeypatch.setattr(kv, "exchange", noted)
    bench.scheduler.plan(1.0)
    assert exchanged == [(0, 8)], "it has come back as the docstring says"
    assert request.lease.cached_tokens == 8
    if here:
        assert request.known == 8
    else:
        assert request.have_blocks == 2 and bench.asked().have_tokens == 8
        targets = bench.scheduler.prefills.handoffs._targets(request)
        written = {rows.target for target in targets.values() for rows in target.rows}
        assert written and all(kv.pool.state(block) is BlockState.RESERVED for block in written)
