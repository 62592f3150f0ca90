"""Prompts that wait for tokens on their way into the cache: from a lower tier, or from a prompt that is being
computed."""

from typing import Any

import pytest

from engine.kv.groups import LayerGroup
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import Loaded, TierLoad
from engine.kv.tiers.cost import TierCost
from engine.kv.tiers.tiers import Tiers
from engine.messages import Stop
from engine.types import Constraint, ConstraintKind, Incarnation
from prefill_worker.scheduler import line
from prefill_worker.scheduler.line import LOOK_AHEAD
from tests.prefill_worker.scheduler.test_scheduler import PEER, S_PER_TOKEN, Bench
from transfer.handoff.commands import FromReader, ReaderUp


def _computed(bench: Bench) -> int:
    """Run to the end; returns how many tokens were computed."""
    total = 0
    while (plan := bench.step()) is not None:
        total += plan.computed_tokens
    return total


def _prompt(shared: int, own: int, name: int) -> list[int]:
    return [*range(shared), *(5_000 + 1_000 * name + n for n in range(own))]


@pytest.mark.parametrize("shared", [16, 17, 100, 300, 304])
def test_prompts_that_come_together_compute_a_common_prefix_once(shared: int) -> None:
    """Guards eight copies of one system prompt, computed side by side because none of them was cached when they
    came."""
    bench = Bench()
    for n in range(1, 9):
        bench.start(f"r{n}", _prompt(shared, 20, n))
    assert _computed(bench) == shared + 8 * 20
    assert len(bench.first_at) == 8


def test_prompts_that_come_while_the_first_is_computed_wait_for_it_too() -> None:
    bench = Bench(chunk_tokens=64)
    bench.start("first", _prompt(300, 20, 1))
    first = bench.step()
    assert first is not None and first.computed_tokens == 64
    bench.start("second", _prompt(300, 20, 2))
    bench.start("third", _prompt(40, 20, 3))
    assert 0 <= _computed(bench) - (320 - 64 + 20 + 20) < 16, "less than a block is computed twice"
    assert bench.first_at["third"] < bench.first_at["first"], "it waited only until the first was past what they share"


def test_what_is_less_than_a_block_is_not_waited_for() -> None:
    """Guards prompts that all begin with the same template and would go one by one."""
    bench = Bench()
    for n in range(1, 5):
        bench.start(f"r{n}", _prompt(9, 20, n))
    plan = bench.step()
    assert plan is not None and len(plan.rows) == 4


@pytest.mark.parametrize(("length", "rows"), [(16, 2), (17, 1)])
def test_a_block_is_waited_for_if_something_is_left_behind_it(length: int, rows: int) -> None:
    """Guards both sides of the border: the last token is computed by each of them, whatever is cached."""
    bench = Bench()
    for n in (1, 2):
        bench.start(f"r{n}", _prompt(length, 0, 1))
    plan = bench.step()
    assert plan is not None and len(plan.rows) == rows


def test_the_same_tokens_behind_another_beginning_are_not_waited_for() -> None:
    """Guards a prompt that would wait for blocks that are never its own."""
    bench = Bench(chunk_tokens=64)
    begins, middle = _prompt(0, 32, 1), _prompt(0, 40, 2)
    bench.start("known", begins)
    bench.run()
    bench.start("other", [*_prompt(0, 32, 3), *middle])
    bench.step()
    bench.start("mine", [*begins, *middle])
    plan = bench.step()
    assert plan is not None and {row.request for row in plan.rows} == {"other", "mine"}


def test_the_first_in_line_has_the_step_and_the_second_what_is_left() -> None:
    """Guards the order of those that run, which changes as they wait: it is asked anew for each step."""
    bench = Bench(chunk_tokens=64, fairness_tokens_per_s=0.0)
    known = _prompt(0, 160, 1)
    bench.start("known", known)
    bench.run()
    bench.start("early", _prompt(0, 40, 2))
    bench.start("hit", [*known, *_prompt(0, 40, 3)])
    plan = bench.step()
    assert plan is not None
    assert [(row.request, row.end - row.start) for row in plan.rows] == [("hit", 40), ("early", 24)]


def test_another_tenants_prompt_is_not_waited_for() -> None:
    """Guards a probe that learns from its time to the first token what others ask."""
    bench = Bench(chunk_tokens=1000)
    for n, space in enumerate((b"a", b"b"), 1):
        bench.start(f"r{n}", _prompt(300, 20, n), namespace=space)
    plan = bench.step()
    assert plan is not None and plan.computed_tokens == 2 * 320


def test_who_waits_for_a_prompt_that_is_given_up_goes_on_alone() -> None:
    bench = Bench(chunk_tokens=64)
    bench.start("first", _prompt(300, 20, 1), remaining_s=0.2)
    bench.start("second", _prompt(300, 20, 2))
    computed = _computed(bench)
    assert "first" not in bench.first_at and "second" in bench.first_at
    assert computed == 320, "and begins with what the first had computed"


def test_who_waits_for_its_constraint_is_passed_over() -> None:
    """Guards a step that waits for a grammar, or draws a first token without one."""
    bench, ready = Bench(), list[bool]()
    scheduler: Any = bench.scheduler
    scheduler._compiled = scheduler.line._compiled = lambda _: bool(ready)
    bench.start("held to one", _prompt(0, 40, 1), constraint=Constraint(ConstraintKind.REGEX, "a+"))
    bench.start("free", _prompt(0, 30, 2))
    plan = bench.step()
    assert plan is not None and [row.request for row in plan.rows] == ["free"]
    assert bench.step() is None and [job.handoff.request for job in bench.scheduler.line.waiting] == ["held to one"]
    ready.append(True)
    plan = bench.step()
    assert plan is not None and [row.request for row in plan.rows] == ["held to one"]


def test_a_late_prompt_does_not_overtake_one_that_is_held_back() -> None:
    """λ and the context bound how long anybody is overtaken (`prefill_worker.scheduler.order`), also while he waits for
    others."""
    bench = Bench(chunk_tokens=64, fairness_tokens_per_s=100_000.0)
    bench.start("first", _prompt(600, 20, 1))
    bench.step()
    bench.start("held", _prompt(600, 20, 2))
    bench.step()
    bench.start("late", [9, 9, 9])
    bench.run()
    assert bench.first_at["held"] <= bench.first_at["late"]


class TieredBench(Bench):
    """A bench with 64 blocks of host memory below 24 of the device. Loads end when the test says so."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)
        self.tiers = Tiers(64, 4096)
        scheduler: Any = self.scheduler
        kv = KVCacheManager(24, 16, "m", self.tiers)
        scheduler.__init__(
            scheduler._config,
            kv,
            fingerprint="m",
            vocab=50_000,
            context_tokens=8192,
            stop_ids=frozenset(),
        )
        scheduler.handle(ReaderUp(Incarnation(7), True), 0.0)
        self.loads: list[TierLoad] = []
        self.start("old", _prompt(160, 17, 1))
        self.run()
        self.start("new", _prompt(0, 384, 2))
        self.run()
        assert self.scheduler.kv.matched_tokens(b"", _prompt(160, 1, 1), 160) == 0, "it has left the device"

    def step(self) -> Any:
        plan = super().step()
        self.loads += [c for c in self.tiers.take_commands() if isinstance(c, TierLoad)]
        return plan

    def loaded(self, seconds: float = 0.001) -> None:
        load = self.loads.pop()
        self.tell(Loaded(load.number, len(load.targets), seconds, 0.0))


def test_a_prefix_in_a_lower_tier_is_fetched_while_its_request_waits_and_others_go_on() -> None:
    bench = TieredBench()
    bench.start("back", _prompt(160, 17, 1))
    bench.start("other", _prompt(0, 30, 3))
    plan = bench.step()
    assert plan is not None and [row.request for row in plan.rows] == ["other"]
    assert len(bench.loads) == 1 and len(bench.loads[0].targets) == 11
    assert bench.step() is None
    bench.loaded()
    assert _computed(bench) == 1, "all but the last token came from the tier"


def test_nobody_waits_longer_for_a_load_than_computing_would_have_taken() -> None:
    """Guards a disk that hangs: the load keeps its blocks, the prompt is computed."""
    bench = TieredBench()
    began = bench.now
    bench.start("back", _prompt(160, 17, 1))
    assert bench.step() is None and bench.loads
    bench.now = began + 0.9 * 176 * S_PER_TOKEN
    assert bench.step() is None, "it waits"
    (job,) = bench.scheduler.line.waiting
    assert job.held_until == pytest.approx(began + 176 * S_PER_TOKEN)
    bench.now = job.held_until
    plan = bench.step()
    assert plan is not None and bench.pool["reserved"] == 11, "what the load may still write to is nobody else's"
    bench.run()
    bench.loaded()
    bench.run()
    assert bench.pool["reserved"] == bench.pool["active"] == 0


def test_a_load_that_takes_longer_than_computing_is_not_begun() -> None:
    bench = TieredBench()
    bench.tiers.cost.measured(1, 1.1 * 16 * S_PER_TOKEN, 0, 0.0)
    bench.start("back", _prompt(160, 17, 1))
    assert _computed(bench) == 177 and not bench.loads and bench.tiers.counts.refused


def test_two_prompts_wait_for_one_load() -> None:
    bench = TieredBench()
    bench.start("one", _prompt(160, 17, 1))
    bench.start("two", _prompt(160, 17, 1))
    assert bench.step() is None and len(bench.loads) == 1
    bench.loaded()
    assert _computed(bench) == 2


def test_as_many_blocks_are_loaded_as_save_time() -> None:
    """A slow disk is worth it only for what brings faster blocks behind it into reach."""
    cost = TierCost()
    cost.measured(1, 0.1, 1, 3.0)
    assert cost.worthwhile([False, False, True], compute_s=1.0) == 2
    assert cost.worthwhile([True, False, False, False], compute_s=1.0) == 4
    assert cost.worthwhile([True, False], compute_s=1.0) == 0
    assert cost.worthwhile([], compute_s=1.0) == 0


def test_a_tier_that_was_slow_is_tried_again() -> None:
    cost = TierCost()
    cost.measured(0, 0.0, 1, 3.0)
    refusals = 0
    while not cost.worthwhile([True], compute_s=1.0):
        refusals += 1
    assert 40 < refusals < 80


def test_the_backlog_is_what_is_left_to_compute() -> None:
    """Guards a router's queues: prompts that wait were reported in full, hot prefixes as often as they were asked."""
    bench = Bench(chunk_tokens=64)
    line = bench.scheduler.line
    bench.start("first", _prompt(304, 20, 1))
    assert line.backlog_tokens == 324
    bench.start("second", _prompt(304, 30, 2))
    assert line.backlog_tokens == 324 + 30, "the first one computes what they share"
    bench.start("third", _prompt(100, 40, 3))
    assert line.backlog_tokens == 324 + 30 + 44, "to the whole block"
    bench.step()
    assert line.backlog_tokens == 324 - 64 + 30 + 44
    while bench.step() is not None:
        pass
    assert line.backlog_tokens == 0
    bench.start("fourth", _prompt(304, 20, 4))
    assert line.backlog_tokens == 20, "what is cached is not computed again"
    line.check()


@pytest.mark.parametrize(("second", "own"), [(_prompt(0, 48, 2), 48), ([*_prompt(0, 32, 1), 7, 8, 9], 3)])
def test_what_another_one_computes_is_left_out_to_the_block(second: list[int], own: int) -> None:
    """Guards the figure of a prompt that begins otherwise, and of one that goes on where all of another one ends."""
    bench = Bench()
    bench.start("first", _prompt(0, 32, 1))
    bench.start("second", second)
    assert bench.scheduler.line.backlog_tokens == 32 + own


def test_the_backlog_leaves_out_what_a_tier_gives_back() -> None:
    """Guards a router's queues: whoever waits for a load, or for its turn to be loaded for, was reported in full."""
    bench = TieredBench(chunk_tokens=64)
    line = bench.scheduler.line
    bench.start("other", _prompt(0, 150, 3))
    bench.start("back", [*_prompt(160, 0, 1), *_prompt(0, 100, 4)])
    bench.start("same", [*_prompt(160, 0, 1), *_prompt(0, 90, 5)])
    assert line.backlog_tokens == 150 + 100 + 90 and not bench.loads, "nothing has been asked for yet"
    assert bench.step() is not None and len(bench.loads) == 1
    assert line.backlog_tokens == 150 - 64 + 100 + 90
    bench.loaded()
    plan = bench.step()
    assert plan is not None and [row.request for row in plan.rows] == ["other"]
    assert line.backlog_tokens == 150 - 128 + 100 + 90
    line.check()


def _behind_a_long_one() -> TieredBench:
    """A prompt waits for its load, and for its turn behind a long one."""
    bench = TieredBench(chunk_tokens=64)
    bench.start("other", _prompt(0, 200, 3))
    bench.start("back", [*_prompt(160, 0, 1), *_prompt(0, 100, 4)])
    bench.step()
    assert bench.scheduler.line.backlog_tokens == 200 - 64 + 100 and len(bench.loads) == 1
    return bench


@pytest.mark.parametrize(("whole", "again"), [(0, 160), (3, 112), (9, 16), (10, 0)])
def test_what_a_load_did_not_bring_is_computed_after_all(whole: int, again: int) -> None:
    """Guards a queue that looks short where what was torn is computed."""
    bench = _behind_a_long_one()
    load = bench.loads.pop()
    bench.tell(Loaded(load.number, whole, 0.001, 0.0))
    bench.step()
    assert bench.scheduler.line.backlog_tokens == 200 - 128 + 100 + again
    bench.scheduler.line.check()


def test_what_is_not_waited_for_any_longer_is_computed_after_all() -> None:
    """Guards a disk that hangs: its prompt is computed when its turn comes."""
    bench = _behind_a_long_one()
    bench.now += 260 * S_PER_TOKEN
    bench.step()
    assert bench.scheduler.line.backlog_tokens == 200 - 128 + 260
    bench.scheduler.line.check()


def test_what_is_computed_sooner_than_loaded_counts() -> None:
    """Guards both sums against each other: what is not fetched is computed."""
    bench = TieredBench(chunk_tokens=64)
    bench.tiers.cost.measured(1, 1.1 * 16 * S_PER_TOKEN, 0, 0.0)
    host_s = bench.tiers.cost.host_s
    bench.start("back", _prompt(160, 17, 1))
    assert bench.scheduler.line.backlog_tokens == 177
    assert bench.tiers.cost.host_s == host_s and not bench.tiers.counts.refused, "to reckon with it is no refusal"


def test_what_is_not_to_be_loaded_any_more_counts_however_far_back_its_prompt_stands() -> None:
    """Guards a queue that looks short until its prompts are among the first: of those behind them nobody asked again
    what a lower tier gives back."""
    bench = TieredBench(chunk_tokens=16)
    bench.start("other", _prompt(0, 200, 3))
    bench.step()
    for number in range(LOOK_AHEAD):
        bench.start(f"r{number}", _prompt(0, 200, 4 + number))
    for number in (1, 2):
        bench.start(f"back{number}", [*_prompt(160, 0, 1), *_prompt(0, 100, 8 + number)])
    assert bench.scheduler.line.backlog_tokens == 200 - 16 + LOOK_AHEAD * 200 + 100 + 100
    bench.tiers.cost.measured(1, 1.1 * 16 * S_PER_TOKEN, 0, 0.0)
    for _ in range(3):
        bench.step()
    assert not bench.loads, "they stand behind all others"
    assert bench.scheduler.line.backlog_tokens == 200 - 64 + LOOK_AHEAD * 200 + 260 + 100
    bench.scheduler.line.check()


def test_a_prompt_of_which_all_tokens_are_scored_is_computed_whatever_a_tier_has() -> None:
    bench = TieredBench(chunk_tokens=64)
    bench.start("scored", _prompt(160, 17, 1), prompt_logprobs=0)
    assert bench.scheduler.line.backlog_tokens == 177


def test_a_worker_is_not_idle_while_a_load_writes_to_its_blocks() -> None:
    """Guards a process that ends under a load: whoever it was for has been given up."""
    bench = TieredBench()
    back = bench.start("back", _prompt(160, 17, 1))
    assert bench.step() is None and bench.loads
    bench.tell(FromReader(PEER, Stop(back)))
    assert not bench.scheduler.line.waiting and not bench.scheduler.is_idle
    bench.loaded()
    assert bench.scheduler.is_idle


def test_the_backlog_of_one_that_is_given_up() -> None:
    """Guards the figure where the prompt that another one waited for will never be computed."""
    bench = Bench(chunk_tokens=64)
    line = bench.scheduler.line
    first = bench.start("first", _prompt(304, 20, 1))
    bench.step()
    bench.start("second", _prompt(304, 30, 2))
    bench.start("third", _prompt(304, 30, 2))
    bench.tell(FromReader(PEER, Stop(first)))
    assert line.backlog_tokens <= 2 * 30
    bench.step()
    assert line.backlog_tokens >= 304 - 64 - 64, "who takes its place is running, and counts in full"
    line.check()


def test_a_prompt_that_ends_with_its_last_block_has_the_one_before_fetched() -> None:
    """Guards the first token, which is drawn from a computed row."""
    bench = TieredBench()
    bench.start("back", _prompt(160, 17, 1)[:176])
    bench.step()
    assert len(bench.loads[0].targets) == 10


@pytest.mark.parametrize("comes", ["first", "last"])
def test_the_first_in_line_are_fetched_for(comes: str) -> None:
    """Guards the room that fetches take: it is for those that run next, not for those that wait longest to run."""
    bench = TieredBench()
    names = [f"r{number}" for number in range(4)]
    for name in ["back", *names] if comes == "first" else [*names, "back"]:
        bench.start(name, _prompt(160, 17, 1) if name == "back" else _prompt(0, 30, 3 + int(name[-1])))
        bench.now += 0.01
    bench.step()
    assert bool(bench.loads) == (comes == "first")


def test_who_waits_for_nothing_is_held_back_for_nothing() -> None:
    bench = TieredBench()
    bench.start("other", _prompt(0, 30, 3))
    bench.scheduler.line._fetch([(job, 0) for job in bench.scheduler.line.waiting], bench.now)
    (job,) = bench.scheduler.line.waiting
    assert job.fetch is None and job.held_until is None


def _evicted(bench: TieredBench) -> None:
    kv = bench.scheduler.kv
    lease = kv.acquire(b"", [], match_limit=0, room_tokens=16 * kv.available)
    assert lease is not None
    kv.release(lease)
    bench.tiers.take_commands()


@pytest.mark.parametrize(("waited", "loads"), [(0.5, 1), (1.0, 0)])
def test_what_was_fetched_and_lost_again_is_fetched_again_in_time(waited: float, loads: int) -> None:
    """Guards a prompt that is held back for what is gone, and loads for one that waits for nothing any more."""
    bench = TieredBench()
    began = bench.now
    bench.start("back", _prompt(160, 17, 1))
    assert bench.step() is None
    bench.loaded()
    _evicted(bench)
    (job,) = bench.scheduler.line.waiting
    assert job.held_until is not None
    bench.now = began + waited * (job.held_until - began) if waited < 1 else job.held_until
    bench.step()
    assert len(bench.loads) == loads
    assert bool(bench.scheduler.line.waiting) == bool(loads)


def test_whose_fetch_is_over_is_not_held_back_though_others_came_before_it() -> None:
    """Guards a prompt that nobody looks up any more: four hits came, and are the first in line."""
    bench = TieredBench(fairness_tokens_per_s=0.0, chunk_tokens=1024)
    bench.start("back", _prompt(160, 17, 1))
    assert bench.step() is None
    bench.loaded()
    (job,) = bench.scheduler.line.waiting
    assert job.fetch is not None and job.fetch.is_over
    held = bench.scheduler.line._is_held(job, 176, bench.now)
    assert not held


@pytest.mark.parametrize("groups", [(), (LayerGroup((0,)), LayerGroup((1,), 40))])
def test_what_is_cached_of_those_that_wait_is_not_walked_in_every_step(
    groups: tuple[LayerGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards those that run beside a line of long prompts: each plan went over all that is cached of some of them, to
    see what lower tiers have behind it."""
    bench = Bench(chunk_tokens=64)
    scheduler: Any = bench.scheduler
    kv = KVCacheManager(1000, 16, "m", Tiers(64, 4096), groups, 2 * 64 + 2)
    scheduler.__init__(
        scheduler._config, kv, fingerprint="m", vocab=50_000, context_tokens=8192, stop_ids=frozenset()
    )
    scheduler.handle(ReaderUp(PEER, True), 0.0)
    bench.start("known", _prompt(3200, 0, 1))
    bench.run()
    bench.start("long", _prompt(0, 3200, 2))
    bench.step()
    for n in range(3, 11):
        bench.start(f"r{n}", _prompt(3200, 1700, n))
    bench.step()
    assert [scheduler.line._matched(job) for job in scheduler.line.waiting] == [3200] * 8
    looked_up, pack = list[int](), kv.cache._pack

    def counted(*tokens: int) -> bytes:
        looked_up.append(len(tokens))
        return pack(*tokens)

    monkeypatch.setattr(kv.cache, "_pack", counted)
    plan = bench.step()
    assert plan is not None and len(plan.rows) == 1 and len(scheduler.line.waiting) == 8
    assert len(looked_up) < 50, "one prompt has 200 blocks in the cache"


def test_a_crowd_with_long_cached_prompts_is_let_in_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards who runs beside a crowd that has waited for one long prefix: to lease and offer all of it, for each of
    them, in one step takes seconds. Nobody is overtaken, and one whose prompt alone is longer is let in too."""
    monkeypatch.setattr(line, "MAX_ADMITTED_BLOCKS", 100)
    bench = Bench(fairness_tokens_per_s=1000.0)
    bench.start("first", _prompt(640, 20, 1))
    bench.run()
    for n in range(2, 10):
        bench.now += 0.001
        bench.start(f"r{n}", _prompt(640, 20, n))
    bench.start("longer", _prompt(0, 1700, 10))
    steps = []
    while (plan := bench.step()) is not None:
        steps.append([row.request for row in plan.rows])
    assert steps[:3] == [["r2", "r3", "r4"], ["r5", "r6", "r7"], ["r8", "r9", "longer"]]
    assert "longer" in bench.first_at and not bench.scheduler.line.waiting
