"""Limits, how many requests kept them, and the search for the largest rate at which enough do, against servers whose
capacity is known."""

import math
from typing import Any

import pytest

from cluster.bench.driver import Level
from cluster.bench.goodput import SearchOutcome, search
from cluster.bench.search import RateSearch, SearchPlan, long_enough_s
from cluster.bench.slo import Slo, judge, parse_slo
from cluster.bench.stats import Sample
from cluster.bench.workloads import Kind, Workload
from tests.benchmarks.scripted import SHORT, OneAtATime, in_virtual_time, plan

EVEN = 1e6
"""A burstiness at which requests come evenly."""


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=0.5,itl=0.05", Slo(ttft_s=0.5, itl_s=0.05)),
        ("ttft=500ms", Slo(ttft_s=0.5)),
        ("e2e=2s, itl=1e1ms", Slo(e2e_s=2.0, itl_s=0.01)),
    ],
)
def test_limits_are_read(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft=-1", "ttft=-1 is not a time above zero"),
        ("ttft=0", "not a time above zero"),
        ("ttft=nan", "not a time above zero"),
        ("ttft=1e999", "not a time above zero"),
        ("ttft=5m", "not a time above zero"),
        ("ttft", "not a time above zero"),
        ("foo=1", "'foo=1' is not LIMIT=TIME with a limit of ttft, itl, e2e"),
        ("", "is not LIMIT=TIME"),
        ("ttft=1,ttft=2", "given twice"),
    ],
)
def test_other_limits_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_slo(text)


def test_a_request_must_keep_every_limit() -> None:
    """Guards attainment: the mean gap of each request counts, and what failed is in the denominator."""
    slo = Slo(ttft_s=0.5, itl_s=0.1, e2e_s=2.0)
    samples = [
        Sample(ttft_s=0.5, itl_s=[0.0, 0.2], e2e_s=2.0),
        Sample(ttft_s=0.1, e2e_s=0.1),
        Sample(ttft_s=0.6, itl_s=[0.1, 0.3], e2e_s=1.0),
        Sample(ttft_s=0.1, itl_s=[0.1], e2e_s=3.0),
        Sample(error="RESOURCE_EXHAUSTED"),
    ]
    found = judge(samples, 4.0, slo)
    assert (found.met, found.share, found.goodput_per_s) == (2, 0.4, 0.5)
    assert found.missed == {"ttft": 1, "itl": 1, "e2e": 1, "failed": 1}
    assert judge([], 0.0, slo).share == 0.0


def searched(server: OneAtATime, slo: Slo, begin: float, **fields: Any) -> tuple[list[Level], SearchOutcome]:
    settings: dict[str, Any] = {"attainment": 0.9, "tolerance": 0.1, "most": 1000.0, "probe_s": 30.0} | {
        name: fields.pop(name) for name in ("attainment", "tolerance", "most", "probe_s") if name in fields
    }
    wanted = plan(loads=(begin,), slo=slo, search=SearchPlan(**settings), **fields)
    return in_virtual_time(search(server, wanted, (), lambda level: None))


def within(outcome: SearchOutcome, tolerance: float = 0.1) -> tuple[float, float]:
    """The ends of the interval, which must be as close as was asked."""
    assert outcome.passed is not None and outcome.missed is not None and outcome.stopped == ""
    assert outcome.passed < outcome.missed <= outcome.passed * (1 + tolerance) * (1 + 1e-9)
    return outcome.passed, outcome.missed


@pytest.mark.parametrize("tolerance", [0.1, 0.02])
def test_the_capacity_of_a_server_is_found(tolerance: float) -> None:
    """Requests come evenly to a server that takes a tenth of a second for each: ten a second, and not one more."""
    probe_s = long_enough_s(Slo(ttft_s=0.5), 0.9, tolerance, SHORT)
    probes, outcome = searched(
        OneAtATime(0.1), Slo(ttft_s=0.5), 1.0, burstiness=EVEN, tolerance=tolerance, probe_s=probe_s
    )
    low, high = within(outcome, tolerance)
    assert low <= 10.0 * (1 + tolerance) and high > 10.0
    assert [probe.rate_per_s for probe in probes][:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert all(probe.summary.requests >= max(100, 30 * (probe.rate_per_s or 0)) for probe in probes)


def poisson_limit(service_s: float, wait_s: float, share: float) -> float:
    """The rate at which this share of Poisson arrivals waits at most `wait_s` for one server with a fixed service time
    (Erlang's formula for M/D/1)."""

    def kept(rate: float) -> float:
        total = 0.0
        for k in range(int(wait_s / service_s + 1e-9) + 1):
            load = rate * (wait_s - k * service_s)
            total += (-load) ** k / math.factorial(k) * math.exp(load)
        return (1 - rate * service_s) * total

    low, high = 0.0, 1 / service_s
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) >= share else (low, middle)
    return low


def test_poisson_arrivals_lower_it_as_queueing_theory_says() -> None:
    """Guards against arrivals that queue less than users do, and against times that leave queueing out."""
    limit = poisson_limit(0.1, 0.4, 0.9)
    assert 7.0 < limit < 9.0
    _, outcome = searched(OneAtATime(0.1), Slo(ttft_s=0.5), 1.0, requests=3000, tolerance=0.05)
    low, high = within(outcome, 0.05)
    assert low * 0.95 < limit < high * 1.05


def test_a_probe_is_long_enough_for_its_limits() -> None:
    """Guards against an answer far above the capacity: at half as much again, a limit of 20 s is broken after 40 s."""
    slow = Slo(ttft_s=20.0)
    server, probe_s = OneAtATime(0.1), long_enough_s(slow, 0.9, 0.1, SHORT)
    low, high = within(searched(server, slow, 4.0, burstiness=EVEN, probe_s=probe_s)[1])
    assert low <= 11.0 and high > 10.0
    assert within(searched(OneAtATime(0.1), slow, 4.0, burstiness=EVEN, probe_s=30.0)[1])[0] > 14.0
    assert long_enough_s(Slo(itl_s=1.0), 0.9, 0.1, SHORT) == 30.0
    chat = Workload(kind=Kind.CHAT, input_tokens=1, output_tokens=1, turns=5, think_s=10.0)
    assert long_enough_s(Slo(itl_s=1.0), 0.9, 0.1, chat) == 120.0


def test_none_is_found_where_the_lowest_rate_misses() -> None:
    probes, outcome = searched(OneAtATime(1.0), Slo(ttft_s=0.5), 2.0)
    assert (outcome.passed, outcome.missed, outcome.stopped) == (None, 2.0, "")
    assert [probe.slo and probe.slo.share for probe in probes] == [0.0]


def test_the_largest_rate_that_was_tried_is_no_limit() -> None:
    probes, outcome = searched(OneAtATime(0.0), Slo(ttft_s=0.5), 1.0, most=6.0)
    assert (outcome.passed, outcome.missed) == (6.0, None)
    assert [probe.rate_per_s for probe in probes] == [1.0, 2.0, 4.0, 6.0]


def test_refusals_miss_the_limits() -> None:
    """Guards against a server that looks good because it refuses what it could not do in time."""
    refusing = OneAtATime(0.0, refuses=range(0, 10**6, 5))
    probes, outcome = searched(refusing, Slo(ttft_s=0.5), 1.0)
    assert outcome.passed is None and probes[0].slo is not None
    assert (probes[0].slo.share, probes[0].slo.missed) == (0.8, {"failed": 20})
    assert searched(OneAtATime(0.0, refuses=range(0, 10**6, 5)), Slo(ttft_s=0.5), 1.0, attainment=0.8, most=1.0)[
        1
    ].passed == 1.0


def test_a_server_that_is_gone_ends_the_search() -> None:
    """Guards against rates that are called too high because nobody was there."""
    probes, outcome = searched(OneAtATime(0.01, refuses=range(200, 10**6)), Slo(ttft_s=0.5), 1.0)
    assert outcome.passed == 2.0 and len(probes) == 3
    assert outcome.stopped == "every request failed at 4/s: RESOURCE_EXHAUSTED: the line is full"


def test_each_probe_has_prompts_of_its_own() -> None:
    server = OneAtATime(0.0)
    probes, _ = searched(server, Slo(ttft_s=0.5), 1.0, most=4.0)
    assert len({str(call.prompt) for call in server.calls}) == len(server.calls) == 120 + 100 + 100 and len(probes) == 3


def test_the_search_doubles_then_bisects() -> None:
    rates = RateSearch(3.0, SearchPlan(attainment=0.9, tolerance=0.3, most=100.0, probe_s=1.0))
    tried = []
    while (load := rates.next_load()) is not None:
        tried.append(load)
        rates.record(load, load <= 17.0)
    assert tried == pytest.approx([3, 6, 12, 24, math.sqrt(12 * 24), math.sqrt(math.sqrt(288) * 24)])
    assert (rates.passed, rates.missed) == pytest.approx((16.97, 20.18), rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [{"attainment": 0.0}, {"attainment": 1.1}, {"tolerance": 0.0}, {"most": math.inf}, {"probe_s": math.nan}],
)
def test_searches_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    settings = {"attainment": 0.9, "tolerance": 0.1, "most": 10.0, "probe_s": 1.0} | wrong
    with pytest.raises(ValueError, match="must"):
        SearchPlan(**settings).check()
