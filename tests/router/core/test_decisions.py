"""Decisions are whole: what a record holds is all that its choice depends on."""

from hashlib import sha256
from random import Random

import msgspec
import pytest

from router.core.call import State
from router.core.decisions import (
    VERSION,
    CountedDraws,
    Decision,
    RecordedPolicy,
    RepeatablePolicy,
    compare,
    make_placer,
)
from router.core.policies import POLICIES, make_policy
from router.core.policy import DecodeView, PrefillView
from tests.router.core.made_decisions import DEMAND, ask, made
from tests.router.core.parts import Parts


def test_draws_are_those_of_the_seed_and_can_be_taken_up_anywhere() -> None:
    """Guards the shortest way to write a generator's state down: a kind of draw whose words are miscounted."""
    plain, counted = Random(9), CountedDraws(9)
    states = []
    for _ in range(30):
        states.append(counted.words)
        for draw in (
            lambda r: r.choice(range(5)),
            lambda r: r.sample(range(40), 2),
            lambda r: r.random(),
            lambda r: r.getrandbits(70),
            lambda r: r.uniform(0, 1),
        ):
            assert draw(counted) == draw(plain)  # type: ignore[no-untyped-call]
    again, late = CountedDraws(9), CountedDraws(9)
    again.skip_to(states[20])
    late.skip_to(counted.words)
    assert [late.random() for _ in range(5)] == [plain.random() for _ in range(5)]
    with pytest.raises(ValueError, match="already"):
        late.skip_to(3)


@pytest.mark.parametrize("name", POLICIES)
def test_a_recorded_policy_chooses_as_a_plain_one(name: str) -> None:
    """Guards what is recorded against the recording: the same seed, the same pairs."""
    heard: list[Decision] = []
    assert ask(RecordedPolicy(name, 3, [heard.append]), 200) == ask(make_policy(name, 3), 200)
    assert [(d.number, d.request, d.at_s) for d in heard[:2]] == [(1, "r0", 0.0), (2, "r1", 1 / 3)]


@pytest.mark.parametrize("name", POLICIES)
def test_each_decision_can_be_repeated_alone(name: str) -> None:
    """Guards the state in a record: a policy that has a counter or a generator which it does not hold."""
    decisions = made(name, 200)
    Random(1).shuffle(decisions)
    one = RepeatablePolicy(name, 99)
    for decision in decisions:
        for policy in (one, RepeatablePolicy(name, 0)):
            policy.resume(decision.before)
            assert policy.choose(decision.demand, decision.prefills, decision.decodes) == decision.choice


def test_lots_and_turns_are_part_of_the_state() -> None:
    """Guards the test above: there is something to forget."""
    by_lot, in_turn = made("least-cost", 200), made("round-robin", 200)
    assert 0 < by_lot[-1].before.drawn_words < 2000 and in_turn[-1].before.memory != ("", "")


def test_the_placer_says_for_whom_it_asks() -> None:
    """Guards records that name another request, or none: every way in which a policy is asked."""
    heard: list[Decision] = []
    parts = Parts()
    parts.join("p0")
    parts.join("d0")
    placer = make_placer(RecordedPolicy("least-cost", 0, [heard.append]), parts.registry, parts.index)
    first, second = parts.wait("first"), parts.wait("second")
    choice = placer.choose(first, 1.0)
    assert choice is not None
    first.move(State.OFFERED)
    parts.view.offered(first, choice)
    assert placer.beside(second, first, 2.0) is not None
    assert placer.choose_prefill(first, 3.0) is not None
    assert [(d.request, d.at_s) for d in heard] == [("first", 1.0), ("second", 2.0), ("first", 3.0)]
    assert type(make_placer(make_policy("random", 0), parts.registry, parts.index)) is not type(placer)


def test_another_choice_is_compared_by_its_predicted_cost() -> None:
    """Guards the sign: above zero the other policy loses."""
    for decision in made("least-cost", 50):
        prefills, decodes = list(decision.prefills), list(decision.decodes)
        assert compare(decision, decision.choice) == (True, 0.0)
        other = make_policy("random", 1).choose(DEMAND, prefills, decodes)
        found = compare(decision, other)
        assert found.cost_s >= -2e-6
        assert decision.choice is not None and other is not None
        assert found.same == ((other.prefill, other.decode) == (decision.choice.prefill, decision.choice.decode))
    assert compare(decision, None) == (False, 0.0)
    assert compare(msgspec.structs.replace(decision, choice=None), None) == (True, 0.0)


def test_a_decision_says_how_many_workers_it_looked_at() -> None:
    decision = made("least-cost", 3)[0]
    assert decision.views == len({view.name for view in (*decision.prefills, *decision.decodes)}) > 1


def test_what_policies_choose_changes_with_the_version_alone() -> None:
    """Guards a log against a program of the same version that chooses otherwise, and calls it damaged. If this fails as
    intended, `decisions.VERSION` is another one, and so are these."""
    random = Random(9)
    differs = {of: [random.random() < 0.05 for _ in range(of)] for of in (1, 5, 72)}
    told = sha256()
    for name in sorted(POLICIES):
        policy = make_policy(name, 4)
        for of, some in differs.items():
            prefills = [PrefillView(f"p{n}", 16 * some[n], 40 * some[-n], 0.01, 0) for n in range(of)]
            decodes = [DecodeView(f"d{n}", 2 * some[n], 9, 64, 0.05, {}, some[-n], s_per_row=0.001) for n in range(of)]
            for _ in range(9):
                demand = msgspec.structs.replace(DEMAND, prompt_tokens=random.randrange(17, 99))
                choice = policy.choose(demand, prefills, decodes)
                assert choice is not None
                told.update(f"{choice.prefill.name} {choice.decode.name} {choice.cost.total_s:.9f}\n".encode())
    assert (VERSION, told.hexdigest()[:16]) == (6, "d20224dca83cd003")
