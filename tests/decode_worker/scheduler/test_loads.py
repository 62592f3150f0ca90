"""What a request has out of a lower tier, and how it gets the rest, with a tier thread that does what a test says. With
a device and real copies in tests/integration/test_tiers_fake.py and test_swap_fake.py, with faults in tests/sim."""

import msgspec
import pytest

from decode_worker.scheduler.holding import NEVER
from decode_worker.scheduler.request import Request, RequestState
from engine.kv.tiers.commands import Loaded, Store, Stored, TierCommand, TierLoad
from engine.kv.tiers.tiers import Tiers
from engine.messages import Cancel, PeerAddress, Place, StartPrefill
from engine.types import FinishReason, RequestId
from tests.decode_worker.scheduler.bench import HERE, POOL, Fetching, record_of

PROMPT = list(range(11))


class Tiered(Fetching):
    """A bench above a host tier, with blocks of four tokens."""

    def __init__(self, **config: object) -> None:
        self.tiers = Tiers(64, 4096)
        super().__init__(tiers=self.tiers, **config)

    def commands(self, kind: type[TierCommand]) -> list[TierCommand]:
        return [command for command in self.tiers.take_commands() if isinstance(command, kind)]

    def evict(self, spared: int = 0) -> None:
        """Take all blocks but `spared` of the device for a moment: what was cached in them goes down."""
        kv = self.scheduler.kv
        lease = kv.acquire(b"", [], match_limit=0, room_tokens=4 * (kv.available - spared))
        assert lease is not None
        kv.release(lease)
        self.tiers.take_commands()

    def answered(self, prompt: list[int], max_tokens: int = 1) -> None:
        """Compute an answer here, whose whole blocks are in the tier alone after that."""
        assert self.place("before", prompt, max_tokens=max_tokens)
        while self.step() is not None:
            pass
        self.evict()

    def load(self) -> TierLoad:
        (load,) = self.commands(TierLoad)
        assert isinstance(load, TierLoad)
        return load

    def loaded(self, load: TierLoad, blocks: int) -> None:
        self.tell(Loaded(load.number, blocks, 0.1, 0.0))

    def swapped(self, prompt: list[int], prefill: PeerAddress = POOL) -> TierLoad:
        """Request `a` with one output token, preempted, swapped and about to be back: the load of its blocks."""
        assert self.place("a", prompt, prefill, max_tokens=20)
        if prefill is POOL:
            handoff = self.asked().handoff
            self.land(handoff)
            self.name_token(handoff)
        else:
            while self.request("a").state is not RequestState.READY:
                self.step()
        assert self.request("a").output_tokens == 1
        self.scheduler.preemption.preempt([self.request("a")], self.now)
        (store,) = self.commands(Store)
        assert isinstance(store, Store)
        self.tell(Stored(store.number, len(store.blocks), 0.1))
        self.evict()
        self.scheduler.plan(self.now)
        assert self.request("a").state is RequestState.LOADING
        assert self.pool["reserved"] == len(self.request("a").lease.blocks), "the tier thread writes to them"
        return self.load()


@pytest.mark.parametrize(("length", "blocks"), [(8, 1), (9, 2), (11, 2)])
def test_whole_blocks_are_loaded_and_the_rest_is_asked_for(length: int, blocks: int) -> None:
    """Guards the first token, which is drawn from a computed row, and work of the prefill pool that is done twice."""
    bench = Tiered()
    bench.answered(PROMPT)
    assert bench.place("a", PROMPT[:length], POOL)
    request, load = bench.request("a"), bench.load()
    assert request.state is RequestState.LOADING and not bench.of(StartPrefill)
    assert len(load.places) == blocks and list(load.targets) == request.lease.blocks[:blocks]
    bench.loaded(load, blocks)
    assert request.state is RequestState.HANDOFF and bench.asked().have_tokens == 4 * blocks
    assert request.prefill.asked_tokens == length - 4 * blocks
    assert request.origin.decode_cached_tokens == 4 * blocks


def test_what_could_not_be_loaded_is_had_as_if_there_were_no_tier() -> None:
    bench = Tiered()
    bench.answered(PROMPT)
    assert bench.place("a", PROMPT)
    bench.loaded(bench.load(), 1)
    request = bench.request("a")
    assert request.state is RequestState.LOCAL and request.known == 4
    assert request.origin.prefill_cached_tokens == 4


def test_loaded_output_is_no_cached_prompt() -> None:
    """Guards the account of an answer that goes on here: what another worker had drawn was never its prompt."""
    bench = Tiered()
    bench.answered(PROMPT[:6], max_tokens=6)
    record = msgspec.structs.replace(record_of("a", [*PROMPT[:6], 1, 2, 3, 4]), prompt_tokens=6)
    bench.router(Place(record=record, placement=1, prefill=HERE))
    bench.loaded(bench.load(), 2)
    assert bench.request("a").origin.decode_cached_tokens == 6


@pytest.mark.parametrize(("host_s", "is_loaded"), [(0.39, True), (0.41, False)])
@pytest.mark.parametrize("prefill", [HERE, POOL])
def test_a_block_is_loaded_where_that_is_sooner_than_computing_it(
    prefill: PeerAddress, host_s: float, is_loaded: bool
) -> None:
    """A block of four tokens at 0.1 s each: on the pool, or here, whichever would compute it."""
    bench = Tiered()
    bench.answered(PROMPT)
    costs = bench.scheduler.swapping.costs
    costs.pool_s, costs.here_s = (0.1, 9.0) if prefill is POOL else (9.0, 0.1)
    bench.tiers.cost.host_s = host_s
    assert bench.place("a", PROMPT, prefill)
    assert (bench.request("a").state is RequestState.LOADING) == is_loaded


def test_what_was_copied_for_a_request_is_loaded_whatever_it_costs() -> None:
    """Guards copies that were paid for when it gave way, and room in host memory that nothing would ever empty."""
    bench = Tiered(preemption="swap", local_chunk_tokens=1)
    bench.tiers.cost.host_s = 1_000.0
    bench.scheduler.swapping.costs.pool_s = 0.001
    assert len(bench.swapped(PROMPT).places) == 2


def test_a_swapped_request_computes_the_end_of_its_last_block_here() -> None:
    """Guards a prefill pool that would compute the whole prompt for the few tokens of no whole block."""
    bench = Tiered(preemption="swap", local_chunk_tokens=1)
    load = bench.swapped(PROMPT)
    request = bench.request("a")
    assert len(request.tokens) == 12
    bench.loaded(load, 2)
    assert request.state is RequestState.LOCAL and request.known == 8
    assert request.preempted is not None and request.preempted.way == "swap"
    assert request.origin.decode_cached_tokens == 0, "the prompt was not cached here when it came"
    while request.preempted is not None:
        bench.step()
    assert bench.scheduler.swapping.ways == {"swap": 1} and bench.scheduler.swapping.fallbacks["lost"] == 0
    assert request.origin.prefilled_by == POOL.name, "whoever prefilled it first"


@pytest.mark.parametrize(
    ("prefill", "chunk_tokens", "way", "state"),
    [
        (POOL, 8, "here", RequestState.LOCAL),
        (POOL, 7, "pool", RequestState.HANDOFF),
        (HERE, 7, "here", RequestState.LOCAL),
    ],
)
def test_of_a_swap_that_is_lost_in_part_the_rest_is_computed(
    prefill: PeerAddress, chunk_tokens: int, way: str, state: RequestState
) -> None:
    """Eight of twelve tokens are missing: computed here in a chunk, or where there is nobody else."""
    bench = Tiered(preemption="swap", local_chunk_tokens=chunk_tokens)
    load = bench.swapped(PROMPT, prefill)
    bench.loaded(load, 1)
    request = bench.request("a")
    assert request.preempted is not None
    assert (request.preempted.way, request.state) == (way, state)
    assert bench.scheduler.swapping.fallbacks["lost"] == 1
    if state is RequestState.HANDOFF:
        assert bench.asked().have_tokens == 4


def test_who_is_cancelled_while_it_is_loaded_keeps_its_blocks_until_the_load_has_ended() -> None:
    """Guards blocks that are somebody else's while the tier thread still writes to them."""
    bench = Tiered()
    bench.answered(PROMPT)
    assert bench.place("a", PROMPT, POOL)
    load = bench.load()
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert bench.pool["reserved"] == 3
    bench.loaded(load, 2)
    assert bench.pool == {"free": 32} and bench.scheduler.is_idle


@pytest.mark.parametrize(("chunk_tokens", "state"), [(8, RequestState.LOCAL), (7, RequestState.LOADING)])
def test_what_a_chunk_computes_is_not_looked_up(chunk_tokens: int, state: RequestState) -> None:
    """Guards a copy for what a step computes anyway: eight of twelve tokens were evicted, and are in the tier."""
    bench = Tiered(preemption="auto", local_chunk_tokens=chunk_tokens)
    costs = bench.scheduler.swapping.costs
    costs.store_s, costs.pool_s = 1_000.0, 0.1
    assert bench.place("a", PROMPT, POOL, max_tokens=20)
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    request = bench.request("a")
    bench.scheduler.preemption.preempt([request], bench.now)
    assert request.stash is None, "to swap it would be dear"
    bench.evict(spared=1)
    bench.scheduler.plan(bench.now)
    assert request.state is state


def test_a_swapped_request_whose_blocks_are_all_here_still_loads_nothing() -> None:
    """Guards a handoff, or a load, for the tokens of less than a block: four of twelve, the newest among them."""
    bench = Tiered(preemption="swap", local_chunk_tokens=1)
    assert bench.place("a", PROMPT, POOL, max_tokens=20)
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    request = bench.request("a")
    bench.scheduler.preemption.preempt([request], bench.now)
    (store,) = bench.commands(Store)
    assert isinstance(store, Store)
    bench.tell(Stored(store.number, 2, 0.1))
    bench.evict(spared=2)
    bench.scheduler.plan(bench.now)
    assert request.state is RequestState.LOCAL and request.known == 8
    assert request.preempted is not None and request.preempted.way == "here"


def test_a_worker_is_not_idle_while_a_copy_of_its_blocks_is_under_way() -> None:
    """Guards a worker that ends with a copy which still reads its memory."""
    bench = Tiered(preemption="swap")
    assert bench.place("a", PROMPT, max_tokens=20)
    bench.step()
    bench.scheduler.preemption.preempt([bench.request("a")], bench.now)
    (store,) = bench.commands(Store)
    assert isinstance(store, Store)
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert not bench.scheduler.is_idle
    bench.tell(Stored(store.number, len(store.blocks), 0.1))
    assert bench.scheduler.is_idle


def _fetched(bench: Fetching, prompt: list[int] = PROMPT, prefill: PeerAddress = POOL) -> Request:
    """Request `a`, ready with one output token."""
    assert bench.place("a", prompt, prefill, max_tokens=20)
    if prefill is POOL:
        handoff = bench.asked().handoff
        bench.land(handoff)
        bench.name_token(handoff)
    else:
        bench.step()
    assert bench.request("a").output_tokens == 1
    return bench.request("a")


def test_copies_are_counted_both_ways() -> None:
    bench = Tiered(preemption="swap", local_chunk_tokens=1)
    swapping = bench.scheduler.swapping
    assert swapping.copied == Fetching().scheduler.swapping.copied == {"out": (0, 0.0), "in": (0, 0.0)}
    bench.loaded(bench.swapped(PROMPT), 2)
    assert swapping.copied == {"out": (2, 0.1), "in": (2, 0.1)}
    assert swapping.choices == {"swap": 1} and swapping.under_way == swapping.freeing == 0
    assert swapping.costs.store_s == 0.05, "a block"


def test_without_a_tier_nothing_is_copied_or_waited_for() -> None:
    bench = Fetching()
    bench.scheduler.preemption.preempt([_fetched(bench)], bench.now)
    swapping = bench.scheduler.swapping
    assert swapping.choices == {"recompute": 1} and (swapping.under_way, swapping.freeing) == (0, 0)


@pytest.mark.parametrize(("length", "choices"), [(3, {}), (4, {"swap": 1})])
def test_a_request_without_a_whole_block_has_nothing_to_copy(length: int, choices: dict[str, int]) -> None:
    """Guards the count of swaps that failed: nothing was tried."""
    bench = Tiered(preemption="swap")
    request = _fetched(bench, PROMPT[:length])
    bench.scheduler.preemption.preempt([request], bench.now)
    assert bench.scheduler.swapping.choices == choices and not +bench.scheduler.swapping.fallbacks
    assert (request.stash is not None) == bool(choices)


@pytest.mark.parametrize(("mode", "choice"), [("recompute", "recompute"), ("swap", "swap")])
@pytest.mark.parametrize("store_s", [0.0, 1_000.0])
def test_who_is_told_what_to_do_does_not_ask_what_it_costs(mode: str, choice: str, store_s: float) -> None:
    bench = Tiered(preemption=mode)
    costs = bench.scheduler.swapping.costs
    costs.store_s, costs.pool_s = store_s, 0.1
    request = _fetched(bench)
    bench.scheduler.preemption.preempt([request], bench.now)
    assert bench.scheduler.swapping.choices == {choice: 1} and (request.stash is not None) == (choice == "swap")


@pytest.mark.parametrize("prefill", [HERE, POOL])
@pytest.mark.parametrize("dear", [HERE, POOL])
def test_a_request_is_swapped_where_whoever_would_compute_it_is_slow(prefill: PeerAddress, dear: PeerAddress) -> None:
    """Guards the choice: a prompt of the pool is computed by the pool again, one that was computed here, here."""
    bench = Tiered(preemption="auto")
    request = _fetched(bench, prefill=prefill)
    costs = bench.scheduler.swapping.costs
    costs.store_s = 1.0
    costs.pool_s, costs.here_s = (100.0, 0.001) if dear is POOL else (0.001, 100.0)
    bench.scheduler.preemption.preempt([request], bench.now)
    assert bench.scheduler.swapping.choices == {"swap" if prefill is dear else "recompute": 1}


def test_what_is_more_than_a_block_is_asked_for() -> None:
    """Guards the border between a chunk and a handoff: five of nine tokens are missing, one more than a block."""
    bench = Tiered(preemption="swap", local_chunk_tokens=1)
    load = bench.swapped(PROMPT[:8])
    bench.loaded(load, 1)
    assert bench.request("a").state is RequestState.HANDOFF and bench.asked().have_tokens == 4


def test_a_swap_whose_copy_failed_is_counted_once_and_measures_nothing() -> None:
    bench = Tiered(preemption="swap", local_chunk_tokens=1)
    request = _fetched(bench)
    bench.scheduler.preemption.preempt([request], bench.now)
    (store,) = bench.commands(Store)
    assert isinstance(store, Store)
    bench.tell(Stored(store.number, 0, 9.0, "it failed"))
    swapping = bench.scheduler.swapping
    assert request.stash is None and swapping.fallbacks["failed"] == 1 and swapping.costs.store_s == 0.0


@pytest.mark.parametrize(("spared", "state"), [(2, RequestState.LOADING), (3, RequestState.LOCAL)])
def test_what_was_swapped_is_loaded_where_more_than_a_block_is_missing(spared: int, state: RequestState) -> None:
    """Guards both sides of the border: of thirteen tokens five are missing, the newest among them, or it alone."""
    bench = Tiered(preemption="swap", local_chunk_tokens=1)
    request = _fetched(bench, list(range(12)))
    bench.scheduler.preemption.preempt([request], bench.now)
    (store,) = bench.commands(Store)
    assert isinstance(store, Store)
    bench.tell(Stored(store.number, 3, 0.1))
    bench.evict(spared=spared)
    bench.scheduler.plan(bench.now)
    assert request.state is state


@pytest.mark.parametrize("ended", [False, True])
def test_a_step_waits_for_who_is_about_to_be_loaded_and_not_for_who_has_ended(ended: bool) -> None:
    """Guards rows that join a step late by as much as it takes, and streams that wait for nobody: a request that was
    cancelled keeps its blocks until its load has ended."""
    bench = Tiered(itl_target_ms=50.0)
    bench.answered(PROMPT)
    assert bench.place("b", [50 + n for n in range(8)], max_tokens=40)
    for _ in range(3):
        assert bench.step() is not None
    batch = bench.scheduler.batch
    batch.lasted(0.01)
    assert bench.place("a", PROMPT, POOL, max_tokens=9)
    request = bench.request("a")
    assert request.state is RequestState.LOADING
    if ended:
        bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
        assert request.state is RequestState.ENDING and len(bench.scheduler.prefills) == 1
    plan, _ = bench.scheduler.plan(bench.now)
    assert (plan is None) is (not ended) and (batch.hold.due < NEVER) is (not ended)


def test_what_loads_are_held_against_is_told() -> None:
    """Guards the router's belief of what is loaded: neither figure is in any other part of a report."""
    bench = Tiered()
    prefills = bench.scheduler.prefills
    assert prefills.s_per_spared_token == {"here": 1.0, "pool": 1.0}, "slow, so that a tier is tried"
    prefills.swapping.costs.pool_s, prefills.swapping.costs.here_s = 0.5, 0.25
    assert prefills.s_per_spared_token == {"here": 0.25, "pool": 0.5}
    assert Fetching().scheduler.prefills.s_per_spared_token == {}
