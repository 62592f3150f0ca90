"""Routing policies: the cost is the documented sum, and ties do not pile up on one worker. What the cost is made of,
and who can be chosen at all, is tried in test_placement.py; how long a choice takes, in benchmarks/decision.py."""

import time
from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from router.core.policies import POLICIES, make_policy, settings
from router.core.policy import (
    MANY_PAIRS,
    SHORTLIST,
    Cost,
    DecodeView,
    Demand,
    LeastCost,
    PrefillView,
    _Cheapest,
    _shorten,
    cost,
)

DEMAND = Demand(prompt_tokens=100, prompt_blocks=7, blocks=10, most_blocks=10)


def prefill(name: str = "p", cached: int = 0, queue: int = 0, outstanding: int = 0) -> PrefillView:
    return PrefillView(name, cached, queue, 0.01, outstanding)


def decode(name: str = "d", cached: int = 0, used: int = 0, outstanding: int = 0) -> DecodeView:
    return DecodeView(name, cached, used, 64, 0.05, {"p": 0.002}, outstanding)


def test_cost_is_the_sum_of_its_terms() -> None:
    """Guards the formula of the design, unit by unit."""
    priced = cost(DEMAND, prefill(cached=60, queue=30), decode(cached=2, used=32))
    assert priced == Cost(0.3, 0.4, 0.01, 0.025, 0.0)
    assert priced.total_s == pytest.approx(0.735)


def test_fitted_coefficients_are_part_of_every_term() -> None:
    """Guards the terms one by one: how late prompts are, how much of a move is waited for, what rows add."""
    reader = msgspec.structs.replace(prefill(cached=60, queue=30), delay=2.0)
    home = msgspec.structs.replace(
        decode(cached=2, used=32, outstanding=9), rows=4, alone_s=0.01, s_per_row=0.001, exposure=(0.5, 0.25)
    )
    demand = msgspec.structs.replace(DEMAND, answer_tokens=10.0)
    assert cost(demand, reader, home) == Cost(0.6, 0.8, 0.005, pytest.approx(0.025 + 10 * (0.01 + 2 * 0.001 * 9)), 0.0)
    fewer = msgspec.structs.replace(home, outstanding=0)
    assert cost(demand, reader, fewer).pressure_s == pytest.approx(0.025 + 10 * (0.01 + 2 * 0.001 * 4))
    far = msgspec.structs.replace(reader, host=1)
    assert cost(demand, far, home).move_s == pytest.approx(0.0025)


def test_what_lower_tiers_give_back_is_waited_for_as_far_as_the_line_does_not_take_as_long() -> None:
    """Guards a block on disk against the price of one on the device: it is loaded while others are computed; the decode
    worker loads before it asks for the rest, and once where it reads the prompt itself."""
    reader = msgspec.structs.replace(prefill(cached=60, queue=30), passed_tokens=10)
    for load_s, waited_s in ((0.0, 0.0), (0.2, 0.0), (0.25, 0.05), (2.0, 1.8)):
        priced = cost(DEMAND, msgspec.structs.replace(reader, load_s=load_s), decode())
        assert priced.load_s == pytest.approx(waited_s) and priced.queue_s == pytest.approx(0.2)
        assert priced.total_s == pytest.approx(cost(DEMAND, reader, decode()).total_s + waited_s)
    home = msgspec.structs.replace(decode(), load_s=0.5)
    assert cost(DEMAND, reader, home).load_s == 0.5
    local = msgspec.structs.replace(prefill("d", cached=60), load_s=0.5)
    assert cost(DEMAND, local, home).load_s == 0.5
    near, far = decode("near"), msgspec.structs.replace(decode("far"), load_s=0.001)
    assert {LeastCost(Random(n)).choose(DEMAND, [prefill()], [far, near]).decode.name for n in range(9)} == {"near"}


def test_a_way_that_nobody_has_gone_costs_what_others_of_its_kind_do() -> None:
    home = msgspec.structs.replace(decode(), unmeasured_s_per_block=(0.004, 0.04))
    other = prefill("other")
    assert cost(DEMAND, other, home).move_s == pytest.approx(7 * 0.004)
    assert cost(DEMAND, msgspec.structs.replace(other, host=1), home).move_s == pytest.approx(7 * 0.04)


def test_who_reads_beside_rows_holds_them_up() -> None:
    """Guards the streams of a decode worker: what it reads itself, each of its rows waits for."""
    reader = prefill("d", cached=50, queue=10)
    home = msgspec.structs.replace(decode(), local=reader)
    assert cost(DEMAND, reader, home).others_s == 0.0
    assert cost(DEMAND, reader, msgspec.structs.replace(home, rows=3)).others_s == pytest.approx(3 * 0.5)
    assert cost(DEMAND, prefill(), msgspec.structs.replace(home, rows=3)).others_s == 0.0


def test_the_time_that_others_lose_counts_too() -> None:
    """Guards caches that lose each other's hits: an idle worker is sooner for this request, and dearer for all."""
    idle = msgspec.structs.replace(prefill("idle"), delaying_tokens=50)
    home = prefill("home", cached=50, queue=80)
    assert cost(DEMAND, idle, decode()).others_s == pytest.approx(0.5)
    choice = LeastCost(Random(0)).choose(DEMAND, [idle, home], [decode()])
    assert choice is not None and choice.prefill.name == "home"


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


def test_the_search_leaves_out_nothing_that_could_be_cheaper() -> None:
    """Guards the order in which pairs are gone through, and where that ends: against every pair, priced by the formula;
    decode workers that read prompts themselves among them."""
    random = Random(11)
    policy = LeastCost(Random(0))
    for _ in range(400):
        prefills = [
            msgspec.structs.replace(
                prefill(f"p{i}", cached=random.randrange(100), queue=random.choice((0, 0, 30, 300))),
                delay=random.choice((1.0, 0.3, 4.0)),
                host=random.randrange(2),
            )
            for i in range(random.randrange(7))
        ]
        decodes = []
        for i in range(random.randrange(1, 7)):
            ways = {f"p{j}": random.choice((0.0005, 0.002, 0.03)) for j in range(6) if random.random() < 0.7}
            local = prefill(f"d{i}", cached=random.randrange(100), queue=random.choice((0, 80)))
            fitted = {
                "rows": random.randrange(4),
                "alone_s": random.choice((0.0, 0.01)),
                "s_per_row": random.choice((0.0, 0.001)),
                "host": random.randrange(2),
                "unmeasured_s_per_block": random.choice(((0.0, 0.0), (0.0001, 0.03), (0.004, 0.0005))),
                "exposure": random.choice(((1.0, 1.0), (0.2, 3.0), (2.0, 0.1))),
            }
            view = DecodeView(
                f"d{i}",
                random.randrange(7),
                random.choice((0, 32)),
                64,
                0.05,
                ways,
                random.randrange(3),
                min(ways.values(), default=0.0),
                random.choice((None, local)),
            )
            decodes.append(msgspec.structs.replace(view, **fitted))
        pairs = [(p, d) for p in prefills for d in decodes] + [(d.local, d) for d in decodes if d.local is not None]
        choice = policy.choose(DEMAND, prefills, decodes)
        if not pairs:
            assert choice is None
            continue
        assert choice is not None and (choice.prefill, choice.decode) in pairs
        assert choice.cost.total_s == pytest.approx(min(cost(DEMAND, *pair).total_s for pair in pairs), abs=2e-6)


def test_a_worker_that_reads_the_prompt_itself_moves_nothing() -> None:
    alone = msgspec.structs.replace(decode(), local=prefill("d", cached=32, queue=10))
    assert cost(DEMAND, prefill("d", cached=32, queue=10), alone).move_s == 0.0
    choice = LeastCost(Random(0)).choose(DEMAND, [prefill(queue=20)], [alone])
    assert choice is not None and (choice.prefill.name, choice.decode.name) == ("d", "d")
    choice = LeastCost(Random(0)).choose(DEMAND, [prefill(cached=99)], [alone])
    assert choice is not None and choice.prefill.name == "p"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_do_with_one_pool(name: str) -> None:
    """Guards a cluster without prefill workers: whoever is chosen to read the prompt also goes on with it."""
    policy = make_policy(name, 3)
    for count in (1, 2, 5):
        views = [
            msgspec.structs.replace(decode(f"d{n}"), local=prefill(f"d{n}", cached=10 * n, outstanding=n))
            for n in range(count)
        ]
        for _ in range(20):
            choice = policy.choose(DEMAND, [], views)
            assert choice is not None and choice.prefill.name == choice.decode.name
            assert choice.prefill == choice.decode.local


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"least-cost"}))
def test_the_simpler_policies_know_of_no_local_prefill(name: str) -> None:
    view = msgspec.structs.replace(decode(), local=prefill("d", cached=99))
    choice = make_policy(name, 0).choose(DEMAND, [prefill(queue=1000)], [view])
    assert choice is not None and choice.prefill.name == "p"


@pytest.mark.parametrize("readers", [63, 64])
def test_who_holds_the_conversation_is_on_the_shortlist(readers: int) -> None:
    """Guards local prefill in large clusters: what a worker would compute itself has no part in what is left out."""
    demand = Demand(1000, 63, 70, 70)
    prefills = [PrefillView(f"p{n}", 0, 0, 0.001, 0) for n in range(readers)]
    decodes = [
        DecodeView(f"d{n}", 0, 0, 1000, 0.01, {}, 0, 0.0, PrefillView(f"d{n}", 0, 0, 0.001, 0)) for n in range(65)
    ]
    decodes[40] = DecodeView("holder", 62, 500, 1000, 0.01, {}, 8, 0.0, PrefillView("holder", 992, 10, 0.001, 8))
    choice = LeastCost(Random(0)).choose(demand, prefills, decodes)
    assert choice is not None and (choice.prefill.name, choice.decode.name) == ("holder", "holder")


def test_a_thousand_workers_are_decided_on_in_milliseconds_and_ties_are_drawn() -> None:
    """Guards a decision whose time grows with the pairs: 262,144 of them took 148 ms."""
    policy = LeastCost(Random(0))
    prefills = [prefill(f"p{n}") for n in range(512)]
    ways = {view.name: 0.001 for view in prefills}
    decodes = [
        msgspec.structs.replace(decode(f"d{n}"), s_per_block=ways, least_s_per_block=0.001) for n in range(512)
    ]
    holder = prefill("holder", cached=90)
    choice = policy.choose(DEMAND, [*prefills, holder], decodes)
    assert choice is not None and choice.prefill.name == "holder"
    began_s = time.process_time()
    chosen = [policy.choose(DEMAND, prefills, decodes) for _ in range(20)]
    assert (time.process_time() - began_s) / 20 < 0.05
    assert len({choice.decode.name for choice in chosen if choice is not None}) > 10


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_among_those_that_it_is_given(name: str) -> None:
    policy = make_policy(name, 3)
    assert policy.choose(DEMAND, [], [decode()]) is None
    assert policy.choose(DEMAND, [prefill()], []) is None
    for count in (1, 2, 5):
        prefills, decodes = [prefill(f"p{n}") for n in range(count)], [decode(f"d{n}") for n in range(count)]
        for _ in range(20):
            choice = policy.choose(DEMAND, prefills, decodes)
            assert choice is not None and choice.prefill in prefills and choice.decode in decodes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("affinity-threshold", ("holder", "free")),
        ("prefill-tokens", ("short", "empty")),
        ("least-loaded", ("free", "free")),
        ("round-robin", ("free", "empty")),
    ],
)
def test_the_simpler_policies_look_at_what_they_say(name: str, expected: tuple[str, str]) -> None:
    """Guards the baselines that figures are compared with. Rounds go by name."""
    prefills = [
        prefill("holder", cached=31, queue=200, outstanding=60),
        prefill("short", cached=0, queue=10, outstanding=5),
        prefill("free", cached=0, queue=300),
    ]
    decodes = [decode("free", used=50), decode("empty", used=2, outstanding=3)]
    choice = make_policy(name, 0).choose(DEMAND, prefills, decodes)
    assert choice is not None and (choice.prefill.name, choice.decode.name) == expected


@pytest.mark.parametrize(("cached", "ahead", "expected"), [(30, 1, "other"), (31, 64, "holder"), (31, 65, "other")])
def test_the_threshold_gives_affinity_up(cached: int, ahead: int, expected: str) -> None:
    """Guards the two ends of the classic rule: too short a prefix, and too much load."""
    views = [prefill("holder", cached=cached, outstanding=ahead), prefill("other", outstanding=0)]
    choice = make_policy("affinity-threshold", 0).choose(DEMAND, views, [decode()])
    assert choice is not None
    assert choice.prefill.name == expected


@pytest.mark.parametrize(("tokens", "expected"), [(103, "holder"), (104, "other")])
def test_the_threshold_is_a_share_of_the_prompt(tokens: int, expected: str) -> None:
    views = [prefill("holder", cached=31, outstanding=1), prefill("other")]
    demand = msgspec.structs.replace(DEMAND, prompt_tokens=tokens)
    choice = make_policy("affinity-threshold", 0).choose(demand, views, [decode()])
    assert choice is not None and choice.prefill.name == expected


@pytest.mark.parametrize(("ahead", "expected"), [(195, "holder"), (196, "other")])
def test_the_threshold_is_one_of_proportion_too(ahead: int, expected: str) -> None:
    """Guards affinity among workers that all have much to do: 65 requests more are little beside 130."""
    views = [prefill("holder", cached=31, outstanding=ahead), prefill("other", outstanding=130)]
    choice = make_policy("affinity-threshold", 0).choose(DEMAND, views, [decode()])
    assert choice is not None and choice.prefill.name == expected


def test_costs_that_differ_by_less_than_a_microsecond_are_ties() -> None:
    """Guards a pool whose speeds differ in the last bits: all would go to one worker."""
    quick = msgspec.structs.replace(prefill("quick"), s_per_token=0.01)
    slow = msgspec.structs.replace(prefill("slow"), s_per_token=0.01 + 1e-11)
    policy, drawn = LeastCost(Random(1)), set()
    for _ in range(40):
        choice = policy.choose(DEMAND, [quick, slow], [decode()])
        assert choice is not None
        drawn.add(choice.prefill.name)
    assert drawn == {"quick", "slow"}


def test_a_worker_that_reads_itself_has_its_work_twice_over_where_costs_are_equal() -> None:
    """Guards pairs that cost the same against one that has more work than it says: its requests are on both sides."""
    demand, policy = msgspec.structs.replace(DEMAND, prompt_blocks=0), LeastCost(Random(1))
    for beside, expected in ((1, {"d"}), (2, {"d", "p"}), (3, {"p"})):
        local = msgspec.structs.replace(decode("d", outstanding=beside), local=prefill("d", outstanding=beside))
        pairs = ([prefill("p", outstanding=2)], [local, decode("e", outstanding=2)])
        drawn = set()
        for _ in range(40):
            choice = policy.choose(demand, *pairs)
            assert choice is not None
            drawn.add(choice.prefill.name)
        assert drawn == expected


@pytest.mark.parametrize("name", POLICIES)
def test_where_nobody_reads_prompts_there_is_no_choice(name: str) -> None:
    assert make_policy(name, 0).choose(DEMAND, [], [decode()]) is None


def test_of_two_drawn_the_less_loaded_is_taken() -> None:
    """Guards power-of-two against being least-loaded: the least loaded is drawn in two of four draws."""
    policy = make_policy("power-of-two", 1)
    views = [prefill(f"p{n}", outstanding=n) for n in range(4)]
    drawn: Counter[str] = Counter()
    for _ in range(400):
        choice = policy.choose(DEMAND, views, [decode()])
        assert choice is not None
        drawn[choice.prefill.name] += 1
    assert drawn["p3"] == 0 and 150 < drawn["p0"] < 250 and drawn["p1"] > drawn["p2"] > 0


def test_of_two_decode_workers_drawn_the_less_loaded_is_taken() -> None:
    policy, drawn = make_policy("power-of-two", 1), Counter[str]()
    views = [decode(f"d{n}", outstanding=n) for n in range(4)]
    for _ in range(400):
        choice = policy.choose(DEMAND, [prefill()], views)
        assert choice is not None
        drawn[choice.decode.name] += 1
    assert drawn["d3"] == 0 and 150 < drawn["d0"] < 250 and drawn["d1"] > drawn["d2"] > 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_policys_constants_are_those_that_its_choices_rest_on(name: str) -> None:
    """Guards a recording of decisions, which is made again with the constants that it names."""
    own = {
        "least-cost": {"many_pairs", "shortlist"},
        "affinity-threshold": {"affinity_share", "most_more", "most_times"},
    }
    assert settings(name).keys() == {"assumed_s_per_token", "assumed_s_per_block", *own.get(name, ())}
    assert all(settings(name).values())


@pytest.mark.parametrize(("cached", "computed"), [(97, 3), (98, 2), (99, 1), (100, 1), (120, 1)])
def test_at_least_one_token_is_computed(cached: int, computed: int) -> None:
    assert cost(DEMAND, prefill(cached=cached), decode()).compute_s == pytest.approx(computed * 0.01)


@pytest.mark.parametrize(("more", "queue", "is_drawn"), [(0, 0, False), (1, 0, True), (1, 1, False)])
def test_lots_are_drawn_only_where_some_that_tie_are_left_out(more: int, queue: int, is_drawn: bool) -> None:
    """Guards decisions that can be made again: nothing is drawn as long as all pairs are compared, or where those that
    are left out cost more."""
    random = Random(3)
    policy, before = LeastCost(random), random.getstate()
    readers = [prefill(f"p{n}", queue=queue * n, outstanding=n) for n in range(64 + more)]
    decodes = [decode(f"d{n}", used=n % 64) for n in range(MANY_PAIRS // 64)]
    assert policy.choose(DEMAND, readers, decodes) is not None
    assert (random.getstate() != before) == is_drawn


def test_those_that_tie_are_left_out_by_lot_and_no_cheaper_one_is() -> None:
    cheap = [(1.0, at) for at in range(SHORTLIST - 4)]
    alike = [(2.0, at) for at in range(100, 140)]
    kept = set[int]()
    for seed in range(50):
        items = [*cheap, *alike, (3.0, 200)]
        _shorten(Random(seed), items)
        assert len(items) == SHORTLIST and items[:-4] == cheap and all(cost_s == 2.0 for cost_s, _ in items[-4:])
        assert len(set(items)) == SHORTLIST
        kept |= {at for _, at in items[-4:]}
    assert len(kept) == len(alike)


@pytest.mark.parametrize("seed", range(8))
def test_who_has_the_blocks_itself_waits_for_no_move_though_it_has_measured_none(seed: int) -> None:
    """Guards a worker that is also asked to read: its own blocks lie where they are, and another's must come."""
    sides = [msgspec.structs.replace(decode(name), s_per_block={}) for name in ("d", "e")]
    choice = LeastCost(Random(seed)).choose(DEMAND, [prefill("d")], sides)
    assert choice is not None and (choice.prefill.name, choice.decode.name, choice.cost.move_s) == ("d", "d", 0.0)


def test_readers_that_cannot_be_the_cheapest_are_not_looked_at() -> None:
    """Guards a decision's time where workers differ: behind the first that costs too much, all cost as much or more."""

    class Looked(list[PrefillView]):
        count = 0

        def __getitem__(self, at: object) -> object:  # type: ignore[override]
            self.count += 1
            return super().__getitem__(at)  # type: ignore[index]

    views = Looked(prefill(f"p{n}", queue=10 * n) for n in range(50))
    found = _Cheapest(1)
    readers = [(0.1 * n, n) for n in range(50)]
    found.add_row(views, readers, decode(), (2, 0.0, 0.004), 0)
    assert found.ties == [1] and views.count <= 2


@pytest.mark.parametrize("readers", [0, 3])
def test_decode_workers_that_cannot_be_the_cheapest_are_not_looked_at(
    readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a decision's time where there are many of them: all cost more than the cheapest with any reader."""
    looked, add_row = list[str](), _Cheapest.add_row

    def counted(self: _Cheapest, prefills: Any, of: Any, home: DecodeView, *more: Any) -> None:
        looked.append(home.name)
        add_row(self, prefills, of, home, *more)

    monkeypatch.setattr(_Cheapest, "add_row", counted)
    homes = [msgspec.structs.replace(decode(f"d{n}"), alone_s=0.01 * n) for n in (3, 1, 2)]
    demand = msgspec.structs.replace(DEMAND, answer_tokens=10.0)
    choice = LeastCost(Random(0)).choose(demand, [prefill(f"p{n}") for n in range(readers)], homes)
    assert looked == (["d1"] if readers else [])
    assert (choice is not None and choice.decode.name == "d1") == bool(readers)


def test_round_robin_takes_decode_workers_in_turn_too() -> None:
    policy = make_policy("round-robin", 0)
    choices = [policy.choose(DEMAND, [prefill()], [decode(name) for name in "abc"]) for _ in range(4)]
    assert [choice.decode.name for choice in choices if choice is not None] == ["a", "b", "c", "a"]
