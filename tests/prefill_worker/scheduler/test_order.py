"""The order `matched_tokens + λ · waiting_seconds`: its worked example, and how long it can make anybody wait. What the
scheduler makes of it beside its chunks is tried in test_scheduler.py, what it costs and gains in
benchmarks/ablation.py."""

import msgspec
import pytest

from engine.messages import Handoff
from engine.types import Incarnation, RequestId, RequestRecord
from prefill_worker.scheduler.order import FIRST_SPEED, Job, Order
from tests.prefill_worker.scheduler.test_scheduler import Bench, _tokens

CONTEXT_TOKENS = 8192
"""The context of `Bench`, in tokens."""


@pytest.mark.parametrize(("fairness", "first"), [(357.0, "hit"), (358.0, "early")])
def test_1800_matched_after_a_tenth_of_a_second_against_50_after_five_cross_at_357(
    fairness: float, first: str
) -> None:
    """1800 + 0.1 λ = 50 + 5 λ at λ = 357.1 tokens per second."""
    bench = Bench(chunk_tokens=64, fairness_tokens_per_s=fairness)
    long, short = _tokens(1800, 1), _tokens(50, 2)
    for name, known in (("a", long), ("b", short)):
        bench.start(name, known)
        bench.run()
    begin = bench.now
    bench.start("early", [*short, *_tokens(400, 3)])
    bench.now = begin + 4.9
    bench.start("hit", [*long, *_tokens(400, 4)])
    bench.now = begin + 5.0
    plan = bench.step()
    assert plan is not None and [row.request for row in plan.rows] == [first]
    assert {row.start for row in plan.rows} == {1800 if first == "hit" else 50}


def _overtaken(fairness: float) -> tuple[list[float], int]:
    """Serve a prompt that nobody knows beside more hits than can be served. Returns how many seconds after it each one
    arrived that was answered before it, and how many hits there were."""
    bench = Bench(blocks=4000, chunk_tokens=128, fairness_tokens_per_s=fairness)
    known = _tokens(480, 1)
    bench.start("known", known)
    bench.run()
    began = bench.now
    bench.start("old", _tokens(600, 2))
    arrived = {}
    for number in range(60):
        for twin in range(2):
            name = f"{number}.{twin}"
            arrived[name] = bench.now - began
            bench.start(name, [*known, *_tokens(120, 10 + 2 * number + twin)])
        bench.step()
    bench.run()
    before = [at for name, at in arrived.items() if bench.first_at[name] < bench.first_at["old"]]
    return sorted(before), len(arrived)


@pytest.mark.parametrize("fairness", [1000.0, 2000.0, 8000.0])
def test_nobody_is_overtaken_by_those_who_come_more_than_a_context_later(fairness: float) -> None:
    """Guards starvation by cache hits. The bound is context / λ seconds."""
    before, _ = _overtaken(fairness)
    assert before and before[-1] <= CONTEXT_TOKENS / fairness


def test_without_fairness_hits_starve_a_miss() -> None:
    """The bound above can fail: at λ = 0 every one of the stream goes first."""
    before, arrived = _overtaken(0.0)
    assert len(before) == arrived


def test_nor_do_short_prompts_slip_past_those_who_wait_longer_than_that() -> None:
    """Guards those who wait behind a long prompt: one short prompt a step slips in beside it, and used to do so for as
    long as it ran. The bound is the same."""
    fairness = 8000.0
    bench = Bench(blocks=4000, chunk_tokens=128, fairness_tokens_per_s=fairness)
    bench.start("long", _tokens(4000, 1))
    bench.step()
    bench.start("old", _tokens(600, 2))
    began, arrived = bench.now, {}
    for number in range(60):
        arrived[f"s{number}"] = bench.now - began
        bench.start(f"s{number}", _tokens(60, 10 + number))
        bench.step()
    bench.run()
    before = [at for name, at in arrived.items() if bench.first_at[name] < bench.first_at["old"]]
    assert before and max(before) <= CONTEXT_TOKENS / fairness < max(arrived.values())


def test_a_second_of_waiting_is_worth_a_second_of_computing() -> None:
    """By default λ is the speed that the worker measures; until the first step it is a guess."""
    order = Order(None, CONTEXT_TOKENS)
    assert order.fairness == FIRST_SPEED
    for _ in range(60):
        order.ran(128, 0.25)
    assert order.fairness == pytest.approx(512.0, rel=1e-3)
    order.ran(0, 1.0)
    order.ran(128, 0.0)
    assert order.fairness == pytest.approx(512.0, rel=1e-3)
    assert Order(0.0, CONTEXT_TOKENS).fairness == 0.0


def _job(remaining: int) -> Job:
    record = RequestRecord(request=RequestId("r"), tokens=[1] * 200, prompt_tokens=200, max_tokens=1, seed=0)
    job = Job(Handoff(record.request, 1, 0, Incarnation(1), Incarnation(2)), record, 0.0, float("inf"))
    job.computed = 200 - remaining
    return job


@pytest.mark.parametrize(
    ("uncached_tokens", "running", "slips_in"),
    [
        (50, (100,), True),
        (51, (100,), False),
        (16, (100, 16), True),
        (17, (100, 16), False),
        (10, (12, 100, 10), True),
        (10, (13, 100, 10), False),
        (8, (100, 16), True),
        (33, (100, 66), True),
        (34, (100, 66), False),
        (8, (15, 15), False),
    ],
)
def test_those_of_at_most_half_the_length_slip_in_as_far_as_they_fit(
    uncached_tokens: int, running: tuple[int, ...], slips_in: bool
) -> None:
    """They have 32 tokens of a step. Of 16 tokens two fit; one alone is as long as it may be, and who is half as long
    as that goes before it too."""
    assert Order.slips_in(uncached_tokens, running, 32) == slips_in


def test_a_step_of_one_token_is_measured_too() -> None:
    order = Order(None, CONTEXT_TOKENS)
    order.ran(1, 0.5)
    assert order.speed == 2.0


@pytest.mark.parametrize(("later_s", "in_time"), [(CONTEXT_TOKENS, True), (CONTEXT_TOKENS + 1, False)])
def test_a_context_later_is_just_in_time(later_s: int, in_time: bool) -> None:
    """At λ = 1, the context's tokens are as many seconds."""
    order = Bench(fairness_tokens_per_s=1.0).scheduler.line.order
    early, late = _job(100), _job(100)
    late.arrived = early.arrived + later_s
    assert order.is_in_time(late, [early]) == in_time


def test_of_a_prompt_that_is_scored_nothing_is_found_cached() -> None:
    """Guards log probabilities of a prompt, which are of what is computed; of others the last token is."""
    job = _job(200)
    assert job.match_limit == 199
    job.record = msgspec.structs.replace(job.record, prompt_logprobs=0)
    assert job.match_limit == 0
