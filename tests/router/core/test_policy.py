"""Routing policies: the cost is the documented sum, and ties do not pile up on one worker. What the cost is made of,
and who can be chosen at all, is tried in test_placement.py; how long a choice takes, in benchmarks/routing.py."""

from collections import Counter
from random import Random

import pytest

from router.core.policy import Cost, DecodeView, Demand, LeastCost, PrefillView, cost, make_policy

DEMAND = Demand(prompt_tokens=100, prompt_blocks=7, blocks=10, most_blocks=10)


def prefill(name: str = "p", cached: int = 0, queue: int = 0, outstanding: int = 0) -> PrefillView:
    return PrefillView(name, cached, queue, 0.01, outstanding)


def decode(name: str = "d", cached: int = 0, used: int = 0, outstanding: int = 0) -> DecodeView:
    return DecodeView(name, cached, used, 64, 0.05, {"p": 0.002}, outstanding)


def test_cost_is_the_sum_of_its_terms() -> None:
    """Guards the formula of the design, unit by unit."""
    priced = cost(DEMAND, prefill(cached=60, queue=30), decode(cached=2, used=32))
    assert priced == Cost(0.3, 0.4, 0.01, 0.025)
    assert priced.total_s == pytest.approx(0.735)


def test_a_cached_prefix_is_traded_against_a_queue() -> None:
    """Guards against affinity that ignores load, and load that ignores affinity."""
    policy = LeastCost(Random(0))
    idle = prefill("idle")
    for queue, expected in ((40, "home"), (80, "idle")):
        home = prefill("home", cached=50, queue=queue)
        choice = policy.choose(DEMAND, [idle, home], [decode()])
        assert choice is not None and choice.prefill.name == expected


def test_ties_go_to_the_idle_then_by_lot() -> None:
    """Guards against the first worker of a list that gets every cold request."""
    policy = LeastCost(Random(0))
    busy, idle = prefill("a", outstanding=1), prefill("b")
    choice = policy.choose(DEMAND, [busy, idle], [decode()])
    assert choice is not None and choice.prefill.name == "b"
    drawn = Counter()
    for _ in range(200):
        choice = policy.choose(DEMAND, [prefill("a"), prefill("b")], [decode()])
        assert choice is not None
        drawn[choice.prefill.name] += 1
    assert min(drawn["a"], drawn["b"]) > 60


def test_round_robin_takes_turns_and_nobody_is_no_choice() -> None:
    """Guards the baseline: every worker in turn, also when one comes or goes."""
    policy = make_policy("round-robin", 0)
    names = []
    for pool in (["a", "b", "c"], ["a", "b", "c"], ["a", "c"], ["a", "b", "c"]):
        choice = policy.choose(DEMAND, [prefill(n) for n in pool], [decode()])
        assert choice is not None
        names.append(choice.prefill.name)
    assert names == ["a", "b", "c", "a"]
    assert policy.choose(DEMAND, [], [decode()]) is None
    assert make_policy("least-cost", 0).choose(DEMAND, [prefill()], []) is None
    with pytest.raises(ValueError, match="nonsense"):
        make_policy("nonsense", 0)


def test_least_cost_takes_the_pair_that_the_formula_says() -> None:
    """Guards the search, which adds up terms in another order than the formula does."""
    random = Random(3)
    policy = LeastCost(Random(0))
    for _ in range(50):
        prefills = [
            prefill(f"p{i}", cached=random.randrange(100), queue=random.randrange(500))
            for i in range(4)
        ]
        decodes = [
            DecodeView(
                f"d{i}",
                random.randrange(7),
                random.randrange(64),
                64,
                0.05,
                {f"p{j}": random.random() / 50 for j in range(3)},
                random.randrange(3),
            )
            for i in range(4)
        ]
        choice = policy.choose(DEMAND, prefills, decodes)
        assert choice is not None
        best_s = min(cost(DEMAND, p, d).total_s for p in prefills for d in decodes)
        assert choice.cost.total_s == pytest.approx(best_s, abs=2e-6)
