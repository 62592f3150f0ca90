"""The routing benchmark with caches below the device, and with several routers."""

from dataclasses import replace

import pytest

from benchmarks.routing import bounds
from benchmarks.routing.cluster import RoutingFaults, SimulatedCluster
from benchmarks.routing.lower_tiers import TierShape
from benchmarks.routing.runs import RoutingCase, at_load, cached_at_best, run, workload
from benchmarks.routing.workers import ClusterShape, Speeds
from benchmarks.routing.workloads import BLOCK, PromptTurn, Visit, in_order
from router.core.policies import make_policy

TIERS = TierShape(host_blocks=200, disk_blocks=800)
SMALL = ClusterShape(prefill=2, decode=2, prefill_blocks=100, decode_blocks=2000)
CASE = RoutingCase("chat", 500, 1, 0.6, "least-cost", SMALL)


def prompt(*blocks: int) -> tuple[PromptTurn, ...]:
    return (PromptTurn(blocks, len(blocks) * BLOCK, 1),)


def test_what_left_the_device_comes_back_in_the_time_of_its_tier() -> None:
    """Guards the clock of loads: of three prompts in a cache of one, the first has gone to host memory meanwhile."""
    speeds = Speeds(0.1, 0.01, 0.001, 0.5, 0.0, 0.0)
    tiers = TierShape(host_blocks=16, host_block_s=0.02)
    shape = ClusterShape(prefill=1, decode=1, prefill_blocks=4, speeds=speeds, latency_s=0.0, tiers=tiers)
    cluster = SimulatedCluster(shape, lambda: make_policy("least-cost", 0))
    visits = [
        Visit(at_s, prompt(*blocks))
        for at_s, blocks in ((0.0, (1, 2, 3, 4)), (9.0, (5, 6, 7, 8)), (18.0, (1, 2, 3, 4)))
    ]
    outcome = cluster.run(visits)
    cold_s = 0.1 + 4 * BLOCK * 0.01 + 0.001
    # The last token of a prompt is always computed, and tiers have whole blocks only.
    assert outcome.ttft_s == [
        pytest.approx(cold_s),
        pytest.approx(cold_s),
        pytest.approx(3 * 0.02 + 0.1 + BLOCK * 0.01 + 0.001),
    ]
    assert outcome.hit_tokens == 3 * BLOCK and outcome.loaded_blocks == {"host": 3, "disk": 0}
    without = SimulatedCluster(replace(shape, tiers=TierShape()), lambda: make_policy("least-cost", 0)).run(visits)
    assert without.hit_tokens == 0 and without.loaded_blocks == {}


def test_tiers_find_what_the_device_has_lost_and_no_more_than_was_there() -> None:
    """Guards that routers are told of evictions only when a block is in no tier any more, and of the tiers' size."""
    case = replace(CASE, shape=replace(SMALL, tiers=TIERS))
    turns = list(in_order(workload(case.source, case.requests, case.seed)))
    cluster = SimulatedCluster(case.shape, lambda: make_policy("least-cost", 0))
    outcome = cluster.run(at_load(workload(case.source, case.requests, case.seed), case.load, case.shape))
    for worker in cluster.prefills.values():
        assert worker.lower is not None and not worker.line.waiting
        worker.kv.check()
        worker.lower.fetches.check()
        assert cluster.router.index.held_blocks(worker.name) > SMALL.prefill_blocks, "tiers are not believed in"
    assert len(outcome.ttft_s) == len(turns) and outcome.failed == 0
    assert min(outcome.loaded_blocks.values()) > 0, "a tier was not used"
    hits, device = (made.hit_tokens / made.prompt_tokens for made in (outcome, run(CASE)))
    assert device + 0.1 < hits <= bounds.infinite(turns)
    assert cached_at_best(outcome, case.shape) == bounds.lru(outcome.came, 2 * (100 + 200 + 800))


def test_each_of_several_routers_places_its_share() -> None:
    cluster = SimulatedCluster(replace(SMALL, routers=3), lambda: make_policy("least-cost", 0))
    sessions = workload("cold", 90, 1)
    outcome = cluster.run(at_load(sessions, 0.5, SMALL))
    assert len(outcome.ttft_s) == 90 and outcome.failed == 0
    placed = [router.placed for router in cluster.routers]
    assert [len(one) for one in placed] == [30, 30, 30] and len(set.union(*placed)) == 90
    assert not any(router.unplaced for router in cluster.routers)


def test_routers_learn_from_workers_what_the_others_did() -> None:
    """Guards the hits of several routers: a chat's turns reach them in turn, and each knows only what it is told."""
    shape = replace(SMALL, prefill=4, prefill_blocks=400)

    def hits(routers: int, is_told: bool = True) -> float:
        faults = RoutingFaults(is_told=is_told)
        outcome = run(replace(CASE, shape=replace(shape, routers=routers), faults=faults))
        return outcome.hit_tokens / outcome.prompt_tokens

    one, four, deaf = hits(1), hits(4), hits(4, is_told=False)
    assert four > one - 0.02 and deaf < one - 0.05


def test_a_burst_over_several_routers_is_computed_once() -> None:
    """Guards cold prefixes that several routers are asked for at once: each had them computed on a worker of its own,
    as nobody knew what was on its way (0.92 of one router's hits here)."""
    shape = replace(SMALL, prefill=4, prefill_blocks=400)
    hits = {}
    for routers in (1, 4):
        outcome = run(RoutingCase("bursts", 300, 1, 0.5, "least-cost", replace(shape, routers=routers)))
        hits[routers] = outcome.hit_tokens / outcome.prompt_tokens
    assert hits[4] > 0.95 * hits[1]


def test_one_of_two_routers_is_restarted() -> None:
    case = replace(CASE, shape=replace(SMALL, routers=2), faults=RoutingFaults(restart_at=0.5))
    outcome = run(case)
    assert outcome.restarted_s is not None and outcome.failed == 0
    assert len(outcome.ttft_s) == len(list(in_order(workload(case.source, case.requests, case.seed))))
