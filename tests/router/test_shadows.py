"""Policies that do not act: they are counted, and whatever becomes of them is nobody else's business."""

import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from router import background
from router.core.decisions import Decision, RecordedPolicy, RepeatablePolicy
from router.core.policies import POLICIES, make_policy
from router.core.policy import Choice, DecodeView, Demand, PrefillView
from router.shadows import ShadowPolicy
from telemetry.router_metrics import RouterMetrics
from tests.router.core.made_decisions import ask, made
from tests.telemetry.pages import samples


class Tally:
    """What shadows were counted as."""

    def __init__(self) -> None:
        self.what: Counter[str] = Counter()
        self.costs_s: list[float] = []

    def __call__(self, policy: str, what: str, cost_s: float) -> None:
        self.what[what] += 1
        self.costs_s.append(cost_s)


class Odd(RepeatablePolicy):
    """A policy that waits, or fails, before it chooses."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        super().__init__("least-cost", 0)
        self._gate = gate
        self.asked = 0

    def choose(
        self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        self.asked += 1
        if self._gate is None:
            raise ZeroDivisionError("odd")
        self._gate.wait(30.0)
        return super().choose(demand, prefills, decodes)


def test_shadows_change_no_choice_of_the_policy_that_acts() -> None:
    """Guards live traffic: with the same seed, and shadows that draw lots too, the same pairs."""
    for name in POLICIES:
        tally = Tally()
        shadows = [ShadowPolicy(RepeatablePolicy(other, 3), tally) for other in POLICIES]
        acting = RecordedPolicy(name, 3, [shadow.put for shadow in shadows])
        assert ask(acting, 100) == ask(make_policy(name, 3), 100)
        for shadow in shadows:
            shadow.close(10.0)
        assert tally.what["same"] + tally.what["other"] == 100 * len(POLICIES)
        assert tally.what["other"] and tally.what["same"] >= 100, "it agrees with itself"


def test_what_a_shadow_would_have_cost_is_counted() -> None:
    """Guards the two figures by which a policy is judged before it acts."""
    metrics, tally = RouterMetrics("m", shadows=("random",)), Tally()
    for counted in (metrics.shadowed, tally):
        shadow = ShadowPolicy(RepeatablePolicy("random", 1), counted)
        for decision in made("power-of-two", 100):
            shadow.put(decision)
        shadow.close(10.0)
    seen = samples(metrics.render())

    def count(what: str) -> float:
        return seen["headrace_router_shadow_decisions_total", (("policy", "random"), ("what", what))]

    assert {what: count(what) for what in ("same", "other")} == dict(tally.what)
    assert count("missed") == count("failed") == 0
    for way, sign in (("dearer", 1), ("cheaper", -1)):
        cost_s = seen["headrace_router_shadow_cost_seconds_total", (("policy", "random"), ("way", way))]
        assert cost_s == pytest.approx(sum(max(0.0, sign * cost) for cost in tally.costs_s)) and cost_s > 0


def test_a_shadow_that_fails_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the log and the requests against a policy that raises for each of them."""
    tally, policy = Tally(), Odd()
    shadow = ShadowPolicy(policy, tally)
    assert ask(RecordedPolicy("least-cost", 0, [shadow.put]), 50) == ask(make_policy("least-cost", 0), 50)
    shadow.close(10.0)
    for decision in made(times=5):
        shadow.put(decision)
    assert policy.asked == 1 and tally.what == Counter(failed=1)
    assert len([record for record in caplog.records if "not asked again" in record.message]) == 1


def test_a_shadow_that_is_slow_misses_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests against a shadow that hangs, and memory against what waits for it."""
    tally, gate = Tally(), threading.Event()
    shadow = ShadowPolicy(Odd(gate), tally)
    monkeypatch.setattr(background, "MOST_WAITING", 1000)
    decisions: list[Decision] = made(times=1000)
    begin_s = time.monotonic()
    for decision in decisions:
        shadow.put(decision)
    assert time.monotonic() - begin_s < 1.0 and tally.what["missed"] > 400
    gate.set()
    shadow.close(10.0)
    assert sum(tally.what.values()) == len(decisions)
