"""The open loop: when requests come, that nothing holds them back, what their times count from; and chats in it."""

import math
from collections import Counter
from io import StringIO
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest
from rich.console import Console

from cluster.bench.driver import Level, LoadGenerator, LoadPlan
from cluster.bench.report import LoadReport, print_report
from cluster.bench.stats import Sample
from cluster.bench.workloads import Kind, LoadSession, LoadTurn, Workload, arrivals, check_burstiness, sessions
from tests.benchmarks.scripted import OneAtATime, in_virtual_time, plan

CHAT = Workload(kind=Kind.CHAT, input_tokens=3, output_tokens=2, turns=4, think_s=5.0)


def at_load(target: OneAtATime, load_plan: LoadPlan, load: float) -> Level:
    return in_virtual_time(LoadGenerator(target, load_plan).at_load(load, load_plan.requests))


def opened(target: OneAtATime, made: list[LoadSession]) -> list[Sample]:
    return in_virtual_time(LoadGenerator(target, plan()).open(made))


def single(*begins_s: float) -> list[LoadSession]:
    return [LoadSession(at_s, (LoadTurn(((1, 2),), 1),)) for at_s in begins_s]


def test_poisson_arrivals_are_poisson() -> None:
    """Guards against even, or otherwise predictable, arrivals under the name of Poisson: queues look short."""
    times = arrivals(20_000, 8.0, 1.0, Random(1))
    assert times[-1] == pytest.approx(20_000 / 8.0) and times == sorted(times)
    gaps = [b - a for a, b in pairwise(times)]
    for mean_gaps in (0.5, 1.0, 3.0):
        assert fmean(gap > mean_gaps / 8.0 for gap in gaps) == pytest.approx(math.exp(-mean_gaps), abs=0.012)
    together = fmean((a - 1 / 8) * (b - 1 / 8) for a, b in pairwise(gaps)) * 64
    assert abs(together) < 0.03, "a gap tells nothing of the next one"
    counts = Counter(int(at) for at in times)
    each = [counts[second] for second in range(2_500)]
    assert pstdev(each) ** 2 / fmean(each) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0, 1e6])
def test_burstiness_is_the_shape_of_the_gaps(shape: float) -> None:
    """The deviation of gamma gaps, in means, is one over the root of their shape."""
    times = arrivals(20_000, 8.0, shape, Random(2))
    gaps = [b - a for a, b in pairwise(times)]
    assert pstdev(gaps) * 8.0 == pytest.approx(shape**-0.5, rel=0.05)
    assert times[-1] == pytest.approx(20_000 / 8.0)


def test_arrivals_come_from_their_seed() -> None:
    assert arrivals(9, 1.0, 1.0, Random(5)) == arrivals(9, 1.0, 1.0, Random(5)) != arrivals(9, 1.0, 1.0, Random(6))
    for wrong in (0.0, -1.0, 1e7, math.nan):
        with pytest.raises(ValueError, match="burstiness"):
            check_burstiness(wrong)


def test_no_request_waits_for_another() -> None:
    """Guards the open loop itself: a server that takes a minute for each answer gets all requests at their times."""
    server = OneAtATime(service_s=60.0)
    begins_s = [0.0, 0.5, 0.5, 3.0, 59.0]
    opened(server, single(*begins_s))
    assert server.sent_s == pytest.approx(begins_s)
    assert server.most == len(begins_s)


def test_the_rate_is_kept_whatever_is_outstanding() -> None:
    server = OneAtATime(service_s=10.0)
    level = at_load(server, plan(requests=200), 4.0)
    assert server.sent_s[-1] == pytest.approx(50.0)
    assert server.most > 190
    assert (level.rate_per_s, level.concurrency, level.name) == (4.0, None, "4/s")
    assert level.summary.requests_per_s == pytest.approx(0.1, rel=0.01), "of what came, not of what was asked"


def test_times_count_from_when_a_request_was_due() -> None:
    """Guards against coordinated omission: the client was busy for a second, in which three requests were due. Their
    times count from then, and the report says that the client was late."""
    server = OneAtATime(service_s=0.01, busy_s={0: 1.0})
    samples = opened(server, single(0.1, 0.2, 0.3, 5.0))
    assert server.sent_s == pytest.approx([0.1, 1.1, 1.1, 5.0])
    assert [sample.late_s for sample in samples] == pytest.approx([0.0, 0.9, 0.8, 0.0])
    assert [sample.ttft_s for sample in samples] == pytest.approx([1.01, 0.92, 0.83, 0.01])
    assert [sample.e2e_s for sample in samples] == pytest.approx([1.01, 0.92, 0.83, 0.01])


def test_a_chat_s_question_counts_from_when_its_pause_was_over() -> None:
    """The client was busy for a second with another request when it was due."""
    server = OneAtATime(service_s=0.01, busy_s={1: 1.0})
    chat = LoadSession(0.0, (LoadTurn(((1,),), 1), LoadTurn(((2,),), 1, think_s=0.2)))
    _, asked, _ = opened(server, [chat, *single(0.1)])
    assert server.sent_s == pytest.approx([0.0, 0.1, 1.1])
    assert (asked.late_s, asked.ttft_s) == pytest.approx((0.89, 0.91))


def test_a_late_client_is_told_of() -> None:
    busy = at_load(OneAtATime(0.01, busy_s=dict.fromkeys(range(100), 0.5)), plan(), 10.0)
    assert busy.summary.late_s is not None and busy.summary.late_s.p99 > 10
    assert "at 10/s: the client itself was late" in printed(busy)
    free = at_load(OneAtATime(0.01), plan(), 10.0)
    assert free.summary.late_s is not None and free.summary.late_s.p99 < 1e-6
    assert "client late" in printed(free) and "itself" not in printed(free)
    closed = in_virtual_time(LoadGenerator(OneAtATime(0.01), plan()).at_once(4))
    assert closed.summary.late_s is None and "client" not in printed(closed)


def test_the_server_s_address_is_told_as_it_is() -> None:
    """Guards a host that is an IPv6 address: in brackets, it is markup to rich."""
    closed = in_virtual_time(LoadGenerator(OneAtATime(0.01), plan()).at_once(4))
    assert "grpc [fd00:a::1]:50051" in printed(closed, address="[fd00:a::1]:50051")


def printed(level: Level, **changed: object) -> str:
    console = Console(file=StringIO(), width=100)
    print_report(LoadReport(plan(**changed), {"cpu": "any", "cores": 2}, [level]), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_turn_s_prompt_holds_what_was_really_answered() -> None:
    """Guards against chats whose histories are made up: they would meet nothing in a decode worker's cache."""
    server = OneAtATime(service_s=0.5, gap_s=0.25)
    level = at_load(server, plan(workload=CHAT, requests=4), 1.0)
    assert (level.summary.requests, level.summary.failed) == (4, 0)
    prompts = [call.prompt for call in server.calls]
    for place in range(1, 4):
        assert prompts[place][:-3] == prompts[place - 1] + server.answers[place - 1]
    assert [len(prompt) for prompt in prompts] == [3, 8, 13, 18]
    assert len({tuple(prompt[-3:]) for prompt in prompts}) == 4, "questions are new"


def test_users_think_between_an_answer_and_the_next_question() -> None:
    """Pauses are exponential, begin with the answer's end, and count neither as lateness nor in any time."""
    server = OneAtATime(service_s=0.0, gap_s=1.0)
    made = in_virtual_time(_played(server, 400))
    thought = [sent - ended for sent, ended in zip(server.sent_s[1:], server.ended_s, strict=False)]
    drawn = [turn.think_s for session in made for turn in session.turns[1:]]
    within = [pause for place, pause in enumerate(thought) if (place + 1) % 4]
    assert within == pytest.approx(drawn)
    assert fmean(drawn) == pytest.approx(5.0, rel=0.1) and pstdev(drawn) == pytest.approx(5.0, rel=0.1)


async def _played(server: OneAtATime, chats: int) -> list[LoadSession]:
    """Play chats one after the other, so that each request follows the one before in the server's books."""
    made = sessions(CHAT, [0.0] * chats, "s")
    samples = await LoadGenerator(server, plan(workload=CHAT)).closed(made, 1)
    assert all(sample.e2e_s == pytest.approx(1.0) for sample in samples)
    assert {sample.late_s for sample in samples[::4]} == {None}
    assert max(sample.late_s or 0.0 for sample in samples) < 1e-6
    return made


def test_chats_begin_at_the_rate_of_their_requests() -> None:
    """Guards a rate that would be four times what it says: it is of requests, and a chat has four."""
    server = OneAtATime(service_s=0.0)
    level = at_load(server, plan(workload=CHAT, requests=399), 8.0)
    assert level.summary.requests == 400
    firsts = [at for at, call in zip(server.sent_s, server.calls, strict=True) if len(call.prompt) == 3]
    assert len(firsts) == 100 and firsts[-1] == pytest.approx(50.0)


def test_after_a_failed_turn_the_rest_of_the_chat_fails_unsent() -> None:
    """Guards an overloaded server's figures, which would leave out the requests that its refusals prevented."""
    server = OneAtATime(service_s=0.0, refuses=(1,))
    level = at_load(server, plan(workload=CHAT, requests=4), 1.0)
    assert len(server.calls) == 2
    assert level.summary.errors == {"RESOURCE_EXHAUSTED": 1, "NOT_SENT": 2}
    assert (level.summary.requests, level.summary.failed) == (4, 3)


def test_a_chat_needs_token_ids() -> None:
    level = at_load(OneAtATime(service_s=0.0, has_ids=False), plan(workload=CHAT, requests=4), 1.0)
    assert level.summary.errors == {"NO_TOKEN_IDS": 3}


def test_chats_may_share_system_prompts() -> None:
    shared = Workload(kind=Kind.CHAT, input_tokens=3, output_tokens=2, turns=2, prefix_tokens=8, groups=2)
    server = OneAtATime(service_s=0.0)
    at_load(server, plan(workload=shared, requests=20), 1.0)
    assert len({tuple(call.prompt[:8]) for call in server.calls}) == 2
