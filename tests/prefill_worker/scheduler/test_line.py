"""Prompts that wait for tokens on their way into the cache: from a lower tier, or from a prompt that is being
computed."""

from typing import Any

import pytest

from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import Loaded, TierLoad
from engine.kv.tiers.cost import TierCost
from engine.kv.tiers.tiers import Tiers
from engine.types import Incarnation
from tests.prefill_worker.scheduler.test_scheduler import S_PER_TOKEN, Bench
from transfer.handoff.commands import ReaderUp


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
    bench.now = began + 1.1 * 176 * S_PER_TOKEN
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
