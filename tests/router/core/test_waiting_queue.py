"""The waiting queue alone: who is offered next, what an offer says, and who waits aside.

Tried elsewhere too: refusals and full queues in test_core.py, the turn after a loss in test_recovery.py, samples in
test_call_table.py, requests of an earlier router in leaving/test_adoption.py, any order in test_core_machine.py.
"""

import pytest

from engine.messages import Accepted, Orphan, Place, Refused, TenantsTold, Tokens
from engine.types import FinishReason, Incarnation, RequestId, TokenLogprobs
from router.core.call import Call, State
from router.core.core import MOST_OVERDUE
from router.core.ejection import CONSECUTIVE
from router.core.events import ClientLeft, Command, Fail, Lost, Submit, TellWorker, Tick, WorkerSaid
from router.core.fair_share import MOST_PASSED
from router.core.policy import Choice
from router.core.waiting_queue import ASIDE_S, FEWEST_DEPARTURES, MOST_AT_ONCE, MOST_OPEN_OFFERS, MOST_TRIED
from tests.router.bench import Bench, ended, is_told
from tests.router.core.parts import Parts, request_record
from tests.router.fake_cluster import load


def offered(commands: list[Command]) -> list[str]:
    return [c.record.record.request for c in commands if is_told(c, Place)]


def advance(parts: Parts, now: float = 0.0) -> list[str]:
    """Who is offered now."""
    parts.queue.advance(now, parts.out)
    parts.queue.check()
    return offered(parts.take())


def test_nobody_overtakes_the_head() -> None:
    """Guards large requests, which would starve behind small ones that always fit."""
    parts = Parts()
    for name, tokens in (("a", 20), ("b", 100), ("c", 20)):
        parts.wait(name, tokens=tokens, max_tokens=8)
    assert advance(parts) == [], "no worker is there"
    parts.join("d0", blocks=8)
    assert advance(parts) == ["a"]
    parts.table.forget(parts.table.calls[RequestId("a")], parts.out)
    assert advance(parts) == ["b"]
    parts.table.forget(parts.table.calls[RequestId("b")], parts.out)
    assert advance(parts) == ["c"]


def test_who_comes_back_has_its_old_turn() -> None:
    """Guards a running request, which would wait behind all that came since; and its next offer from old beliefs."""
    parts = Parts()
    parts.join("d0")
    parts.join("p0")
    first = parts.run("a")
    first.yielding = True
    worker = parts.registry.get("d0")
    assert worker is not None
    worker.refused = True
    parts.wait("b")
    parts.take()
    parts.queue.rejoin(first)
    assert (first.state, first.decode, first.prefill, first.yielding) == (State.WAITING, "", "", False)
    assert first.decode_life is None and first.prefill_life is None and not worker.own
    assert advance(parts) == []
    parts.report("d0")
    assert advance(parts) == ["a", "b"]


def test_what_an_offer_says() -> None:
    """Guards names: no placement that some worker may know. A deadline goes as a duration, none if it is over."""
    parts = Parts()
    parts.join("d0")
    parts.join("p0")
    call = parts.wait("a", deadline_s=12.0)
    call.highest, call.losses = 7, 2
    parts.queue.advance(4.0, parts.out)
    (told,) = parts.take()
    assert is_told(told, Place) and (told.worker, told.record.prefill.name, told.reason) == ("d0", "p0", "load")
    assert (told.record.placement, told.record.losses, told.record.record.remaining_s) == (8, 2, 8.0)
    assert call.record.remaining_s is None and (call.decode, call.prefill) == ("d0", "p0")
    parts.queue.rejoin(call)
    assert advance(parts, 10.5) == [], "nobody has reported lately"
    parts.report("d0", 10.5)
    assert advance(parts, 12.0) == [], "its time is over"
    parts.queue.advance(10.5, parts.out)
    (told,) = parts.take()
    assert is_told(told, Place) and (told.record.placement, told.record.record.remaining_s) == (9, 1.5)


@pytest.mark.parametrize(
    ("case", "reason"),
    [("cold", "load"), ("warm", "affinity"), ("alone", "load"), ("left alone", "fallback"), ("sample", "pinned")],
)
def test_why_it_goes_there(case: str, reason: str) -> None:
    """Guards the operator's figures of how placements come about."""
    parts = Parts()
    home = parts.join("d0")
    if case != "alone":
        parts.join("p0")
    if case == "left alone":
        parts.registry.leave("p0", 0.0)
    if case == "sample":
        parts.run("first", group="g")
        parts.take()
    call = parts.wait("a", group="g", sample_index=1)
    if case == "warm":
        parts.index.insert("d0", call.chain(home.key))
    parts.queue.advance(0.0, parts.out)
    (told,) = parts.take()
    assert isinstance(told, TellWorker) and told.reason == reason
    assert isinstance(told.record, Place) and told.record.fork_of == ("first" if case == "sample" else None)


def test_what_was_yielded_is_no_sample_beside_others() -> None:
    """Guards the KV of a request that moves: it comes from the worker that keeps it, not from another sample's."""
    parts = Parts()
    source = parts.join("d0")
    parts.join("d1")
    parts.report("d0", leaving=True)
    parts.run("first", group="g")
    moving = parts.wait("a", group="g", sample_index=1)
    moving.source = source.life
    parts.take()
    parts.queue.advance(0.0, parts.out)
    (told,) = parts.take()
    assert is_told(told, Place) and told.reason == "pinned"
    assert (told.worker, told.record.fork_of, told.record.prefill.name) == ("d1", None, "d0")


def test_a_head_too_large_for_all_is_refused() -> None:
    """Guards those behind it: it came while nobody was known, and would wait for ever."""
    parts = Parts()
    parts.wait("a", tokens=100)
    parts.wait("b")
    parts.join("d0", blocks=4)
    parts.queue.advance(0.0, parts.out)
    failed, told = parts.take()
    assert isinstance(failed, Fail) and failed.request == "a" and failed.fault.code == "OUT_OF_RANGE"
    assert failed.outcome is FinishReason.REJECTED
    assert offered([told]) == ["b"] and list(parts.table.calls) == ["b"]


def test_what_is_over_is_passed_by() -> None:
    """Guards against an offer of a request that was cancelled while it waited, or whose name was given anew."""
    parts = Parts()
    gone = parts.wait("a")
    parts.table.forget(gone, parts.out)
    parts.wait("b")
    again = parts.wait("a")
    parts.join("d0")
    assert advance(parts) == ["b", "a"] and again.state is State.OFFERED


def test_an_adopted_request_waits_aside_until_all_is_known() -> None:
    """Guards against a second copy of a request while a worker may still report that it runs it; others go on."""
    parts = Parts(settle_s=5.0)
    parts.join("d0")
    orphan = Orphan(record=request_record("a"), placement=3, prefill="", tokens=[], age_s=0.0)
    parts.adoptions.adopt("d0", orphan, 0.0, parts.out)
    parts.queue.rejoin(parts.table.calls[RequestId("a")])
    parts.wait("b")
    assert advance(parts) == ["b"]
    parts.queue.answered(2.0, parts.out)
    assert advance(parts, 4.9) == []
    assert list(parts.queue._departures) == [2.0], "the line has moved, and is not empty"
    assert advance(parts, 5.0) == ["a"]
    assert not parts.queue._departures
    assert advance(parts, 5.0) == []


def test_the_check_finds_who_waits_outside() -> None:
    parts = Parts()
    parts.table.open(request_record("a"), None)
    with pytest.raises(AssertionError, match="outside of the queue"):
        parts.queue.check()


def test_what_a_tenant_has_had_counts_until_nobody_waits() -> None:
    """Guards the shares: who was served is behind while any waits, one put aside among them; then all are even."""
    parts = Parts(settle_s=5.0)
    orphan = Orphan(record=request_record("o"), placement=3, prefill="", tokens=[], age_s=0.0)
    parts.join("d0", blocks=512)
    parts.adoptions.adopt("d0", orphan, 0.0, parts.out)
    parts.queue.rejoin(parts.table.calls[RequestId("o")])
    assert advance(parts) == []
    parts.wait("a", tenant="a", tokens=4000, namespace=b"a")
    assert advance(parts) == ["a"]
    worker = parts.registry.get("d0")
    assert worker is not None
    worker.refused = True
    parts.wait("b", tenant="b", namespace=b"b")
    parts.wait("a2", tenant="a", namespace=b"a", priority=9)
    parts.index.insert("d0", parts.table.calls[RequestId("a2")].chain(worker.key))
    worker.refused = False
    assert advance(parts) == ["b", "a2"], "one is put aside, so what was served counts"
    assert advance(parts, 5.0) == ["o"]
    parts.wait("a3", tenant="a", namespace=b"a")
    parts.wait("b2", tenant="b", namespace=b"b")
    assert advance(parts, 5.0) == ["a3", "b2"], "nobody waited"


def test_what_was_served_while_nobody_waited_counts_no_more() -> None:
    """Guards a tenant that had a quiet cluster to itself: beside others it would wait until they have had as much."""
    parts = Parts()
    worker = parts.join("d0", blocks=512)
    parts.wait("a", tenant="a", tokens=4000, namespace=b"a")
    assert advance(parts) == ["a"]
    worker.refused = True
    parts.wait("a2", tenant="a", namespace=b"a")
    parts.wait("b", tenant="b", namespace=b"b")
    worker.refused = False
    assert advance(parts) == ["a2", "b"]


def test_the_time_to_settle_begins_with_the_first_that_is_put_aside() -> None:
    parts = Parts(settle_s=5.0)
    assert advance(parts) == []
    assert not parts.adoptions.is_settled(100.0) and parts.adoptions.is_settled(105.0)


def test_a_tenant_that_comes_late_begins_where_the_others_are() -> None:
    """Guards those who waited: a tenant saves nothing up by asking for nothing."""
    parts = Parts()
    parts.join("d0", blocks=512)
    home = parts.registry.get("d0")
    assert home is not None
    for name in "abc":
        parts.wait(name, tenant="busy", tokens=3000, namespace=name.encode())
    assert advance(parts) == ["a", "b"]
    parts.wait("late", tenant="late", tokens=3000, namespace=b"l")
    parts.wait("d", tenant="busy", tokens=3000, namespace=b"d")
    for call in list(parts.table.calls.values()):
        if call.state is State.OFFERED:
            parts.table.share.began(call.record.request)
            parts.table.forget(call, parts.out)
    assert advance(parts) == ["c", "late"], "the one that came first, of two that have had as much"


def test_the_line_does_not_stand_behind_one_that_only_an_ejected_worker_can_hold() -> None:
    """Guards against idle workers, before which all wait for the probe of the one that is large enough for the head."""
    parts = Parts()
    large = parts.join("d0", blocks=1000)
    for name in ("d1", "d2"):
        parts.join(name, blocks=10)
    parts.offer("held", tokens=3000)
    assert large.own and "held" in large.own
    for _ in range(CONSECUTIVE):
        parts.registry.failed(large.life, 0.0)
    assert parts.registry.ejections.is_ejected(large.life)
    parts.take()
    parts.wait("large", tokens=2000)
    for number in range(3):
        parts.wait(f"tiny{number}", tokens=8, max_tokens=8)
    assert advance(parts) == ["large", "tiny0", "tiny1", "tiny2"]
    assert set(large.own) == {"held", "large"}, "who fits elsewhere goes elsewhere"


def tenants(parts: Parts, count: int) -> None:
    for number in range(count):
        parts.wait(f"w{number}", tenant=f"t{number}", tokens=160, namespace=b"%d" % number)


def test_nobody_asks_what_is_cached_before_some_worker_may_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the cost of a report, of which many come: eight heads, and all workers for each."""
    parts, walks = Parts(), list[str]()
    workers = [parts.join(f"d{number}") for number in range(3)]
    parts.join("p0")
    tenants(parts, 8)
    depths = parts.index.depths
    monkeypatch.setattr(parts.index, "depths", lambda chain: (walks.append("walk"), depths(chain))[1])
    for worker in workers:
        worker.refused = True
    assert advance(parts) == [] and walks == []
    parts.report("d1")
    assert advance(parts) and walks


def test_what_is_cached_of_a_head_is_one_walk_however_many_workers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, asked = Parts(), list[str]()
    for number in range(4):
        parts.join(f"p{number}", blocks=4096)
        parts.join(f"d{number}", blocks=4096)
    call = parts.wait("a", tokens=160)
    assert parts.placer.cached_tokens(call) == 0
    key = ("f", 16)
    parts.index.insert("p2", call.chain(key)[:3])
    parts.index.insert("d1", call.chain(key)[:5])
    monkeypatch.setattr(type(parts.registry), "takers", lambda *_: asked.append("takers") or [])
    assert parts.placer.cached_tokens(call) == 5 * 16 and asked == []


def test_room_elsewhere_is_looked_for_in_views_that_are_kept() -> None:
    parts = Parts()
    for number in range(3):
        parts.join(f"d{number}", blocks=4096)
    call = parts.run("a")
    home = parts.registry.get(call.decode)
    assert home is not None and parts.placer.has_room_elsewhere(call, home, 0, 0.0)
    others = [w for w in parts.registry.role("decode") if w is not home]
    views = [w.decode_view for w in others]
    assert any(views) and parts.placer.has_room_elsewhere(call, home, 4096, 0.0) is False
    kept = [w.decode_view for w in others]
    assert parts.placer.has_room_elsewhere(call, home, 4096, 0.0) is False
    assert all(w.decode_view is view for w, view in zip(others, kept, strict=True))


@pytest.mark.parametrize("told", [False, True])
def test_an_offer_behind_a_loss_says_what_the_client_was_told_of_its_tokens(told: bool) -> None:
    """Guards a client that comes back to another router: of the tokens before the loss it would get none."""
    parts = Parts()
    parts.join("d0")
    call = parts.wait("a", context=b"x")
    said = [TokenLogprobs(7, -0.5, ())]
    call.emit([7], said if told else [])
    parts.queue.advance(0.0, parts.out)
    (place,) = [c.record for c in parts.take() if is_told(c, Place)]
    assert list(place.record.emitted_logprobs) == (said if told else [])


def test_a_line_is_waited_for_at_the_speed_of_its_last_departures() -> None:
    parts = Parts()
    for name in "abc":
        parts.wait(name)
    parts.queue.advance(0.0, parts.out)
    for number in range(12):
        wait_s = 0.0 if number < FEWEST_DEPARTURES else 3 * (20.0 - 0.0) / number
        assert parts.queue.wait_s("", 1.0, 0, 20.0) == pytest.approx(wait_s)
        parts.queue._departures.append(float(number))


def test_how_fast_a_line_moves_is_known_while_others_wait_at_other_routers() -> None:
    """Guards deadlines: a short line of several is empty again and again, and until eight more had left it, no wait was
    predicted."""
    parts = Parts()
    parts.join("d0")
    for number, waits in ((1, True), (2, False)):
        told = TenantsTold(number, {}, "router-1", Incarnation(7), {"b": (0.0, waits, waits)})
        assert parts.table.share.heard(told, 0.0)
        parts.wait(f"a{number}")
        assert advance(parts) == [f"a{number}"]
        parts.queue.answered(float(number), parts.out)
        assert len(parts.queue._departures) == waits


def test_a_line_that_nobody_stands_in_is_not_a_slow_one() -> None:
    """Guards a tenant that comes now and then to a router of its own, while others wait at theirs: its requests were
    taken at once, four seconds apart, so that of three together the last was to wait for eight seconds."""
    parts = Parts()
    others = TenantsTold(1, {}, "router-1", Incarnation(7), {"b": (0.0, True, True)})
    assert parts.table.share.heard(others, 0.0)
    worker = parts.join("d0")
    for number in range(FEWEST_DEPARTURES):
        now, worker.refused = 4.0 * number, True
        parts.wait(f"a{number}")
        assert advance(parts, now) == []
        parts.report("d0", now + 0.5)
        assert advance(parts, now + 0.5) == [f"a{number}"]
        parts.queue.answered(now + 0.5, parts.out)
    for name in "xyz":
        parts.wait(name)
    worker.refused = True
    assert advance(parts, 90.0) == []
    assert parts.queue.wait_s("", 1.0, 0, 90.5) == pytest.approx(3 * 0.5)


def test_a_line_that_all_were_sent_away_from_is_not_a_slow_one() -> None:
    """Guards deadlines after all decode workers were lost: the time in which nobody waited, as all had been told that
    nobody is there, counted as a line's that did not move."""
    bench = Bench(blocks=4, prefills=0, unplaceable_s=1.0)
    for number in range(FEWEST_DEPARTURES + 6):
        bench.submit(RequestId(f"r{number}"))
    for number in range(FEWEST_DEPARTURES):
        bench.now += 0.1
        bench.accept(RequestId(f"r{number}"))
        bench.hear(load())
        bench.hear(ended(RequestId(f"r{number}")))
    assert bench.router._queue.wait_s("", 1.0, 0, bench.now) > 0.0
    bench.do(Lost("d0"))
    for bench.now in (2.0, 4.0, 100.0):
        bench.do(Tick())
    assert not bench.router.waiting
    for name in "xyz":
        bench.submit(RequestId(name))
    assert bench.router._queue.wait_s("", 1.0, 0, bench.now) == 0.0


def test_who_bears_the_name_of_one_that_came_back_has_its_own_turn() -> None:
    """Guards the line against a request that is cancelled while it waits again, whose name is then given anew."""
    parts = Parts()
    parts.join("d0")
    first = parts.run("a")
    worker = parts.registry.get("d0")
    assert worker is not None
    worker.refused = True
    parts.queue.rejoin(first)
    parts.table.forget(first, parts.out)
    parts.wait("b")
    again = parts.wait("a")
    parts.take()
    parts.report("d0")
    assert advance(parts) == ["b", "a"] and again.state is State.OFFERED


def test_a_flood_that_a_worker_refuses_does_not_stand_before_all_others() -> None:
    """Guards a tenant that comes late where blocks are plenty, and workers refuse for another reason: all that waited
    had been offered at once, and came back before all lines."""
    bench = Bench(blocks=100_000)
    out = [c for number in range(100) for c in bench.do(Submit(request_record(f"f{number}"), tenant="flood"))]
    asked = [RequestId(name) for name in offered(out)]
    assert len(asked) == MOST_OPEN_OFFERS and bench.router.waiting == 100 - MOST_OPEN_OFFERS
    assert offered(bench.accept(asked[0])) == [f"f{MOST_OPEN_OFFERS}"], "as soon as one is answered"
    bench.do(Submit(request_record("late"), tenant="late"))
    for request in (*asked[1:], RequestId(f"f{MOST_OPEN_OFFERS}")):
        assert offered(bench.hear(Refused(request, 1, 5))) == []
    back = offered(bench.hear(load(6, blocks=100_000)))
    assert len(back) == MOST_OPEN_OFFERS and "late" not in back, "the oldest first"
    following = [name for request in back for name in offered(bench.accept(RequestId(request), 2))]
    assert "late" in following[: 1 + MOST_PASSED], "as if nobody had been refused"


def test_what_is_overdue_is_not_placed_while_others_are_ended() -> None:
    """Guards a worker from requests whose deadline is over: a tick ends some of a crowd, and the line moved up."""
    bench = Bench(blocks=100_000, deadline_margin=0.0)
    count = MOST_OVERDUE + MOST_OPEN_OFFERS + 9
    for number in range(count):
        bench.do(Submit(request_record(f"r{number}"), deadline_s=1.0))
    bench.now = 2.0
    out = bench.do(Tick())
    assert sum(isinstance(c, Fail) for c in out) == MOST_OVERDUE and not offered(out)
    out = bench.do(Tick())
    assert sum(isinstance(c, Fail) for c in out) == count - MOST_OVERDUE and not offered(out)


def test_offers_that_are_open_hold_up_nobody_that_came_back_and_no_other_worker() -> None:
    bench = Bench(blocks=100_000)
    for number in range(40):
        bench.do(Submit(request_record(f"a{number}")))
    assert bench.router.waiting == 40 - MOST_OPEN_OFFERS
    assert len(offered(bench.join("d1", "decode", 1, 100_000))) == MOST_OPEN_OFFERS, "as many for each worker"
    (again,) = offered(bench.do(Lost("d1")))[:1]
    assert again == f"a{MOST_OPEN_OFFERS}", "it has had its turn"


def asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whom all workers are compared for, from now on."""
    names: list[str] = []
    choose = bench.router._placer.choose

    def counting(call: Call, now: float) -> Choice | None:
        names.append(call.record.request)
        return choose(call, now)

    monkeypatch.setattr(bench.router._placer, "choose", counting)
    return names


def test_a_full_workers_report_is_no_walk_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the event loop further: a long prompt has many blocks to look for, also where there is room for none."""
    bench = Bench(blocks=16)
    bench.hear(load(active=16, blocks=16))
    bench.do(Submit(request_record("a", 40)))
    walks: list[int] = []
    monkeypatch.setattr(bench.router.index, "depths", lambda chain: walks.append(len(chain)) or {})
    bench.hear(load(active=16, blocks=16))
    assert not walks
    bench.hear(load(active=4, blocks=16))
    assert walks


def test_a_full_workers_report_does_not_have_all_others_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the event loop while anybody waits: hundreds of workers report twenty times a second each."""
    bench = Bench(decodes=3, blocks=16)
    for name in ("d0", "d1", "d2"):
        bench.hear(load(active=14, blocks=16), name)
    bench.do(Submit(request_record("a", 40, 8)))
    names = asked(bench, monkeypatch)
    for name in ("d0", "d1", "d2", "p0"):
        bench.hear(load(active=14, blocks=16), name)
    assert names == []
    bench.do(Tick())
    assert names == ["a"], "what else has changed is seen then"
    assert offered(bench.hear(load(active=4, blocks=16), "d1")) == ["a"]


def test_who_comes_back_is_tried_before_who_was_stuck() -> None:
    """Guards the victims of a worker: they waited for the next tick, as whoever was first then had no room."""
    parts = Parts()
    parts.join("d0", blocks=16)
    call = parts.run("small", tokens=20, max_tokens=8)
    parts.take()
    parts.report("d0", active=10, blocks=16)
    parts.wait("big", tokens=200, max_tokens=8)
    assert advance(parts) == []
    parts.queue.rejoin(call)
    parts.report("d0", active=12, blocks=16)
    parts.queue.reported("d0", 0.0, parts.out)
    assert offered(parts.take()) == ["small"]


def test_a_crowd_that_comes_and_goes_has_no_worker_compared_for_those_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the event loop in an overload: each arrival and each client that left had all workers compared for the
    first in line."""
    bench = Bench(blocks=16)
    bench.hear(load(active=14, blocks=16))
    bench.do(Submit(request_record("a0", 40, 8), tenant="a"))
    names = asked(bench, monkeypatch)
    for number in range(1, 4):
        bench.do(Submit(request_record(f"a{number}", 40, 8), tenant="a"))
    bench.do(ClientLeft(RequestId("a2")))
    assert names == []
    bench.do(Submit(request_record("b0", 40, 8), tenant="b"))
    assert names == ["a0"], "it might have been its turn"
    bench.do(Submit(request_record("a4", 40, 8, priority=1), tenant="a"))
    assert names == ["a0", "b0"]
    bench.do(ClientLeft(RequestId("a4")))
    assert names == ["a0", "b0"]
    bench.do(ClientLeft(RequestId("b0")))
    assert names == ["a0", "b0", "a0"], "another one is the first"
    assert "a0" in offered(bench.hear(load(active=4, blocks=16)))


def test_a_sample_waits_for_room_for_what_it_does_not_share() -> None:
    """Guards it from the next tick: its worker's report shows room for it alone beside another sample."""
    bench = Bench(blocks=16)
    bench.do(Submit(request_record("first", 160, 16, group="g")))
    bench.accept(RequestId("first"))
    bench.hear(load(active=16, blocks=16))
    assert bench.do(Submit(request_record("second", 160, 16, group="g", sample_index=1))) == []
    assert offered(bench.hear(load(active=12, blocks=16))) == ["second"]


def test_a_lost_workers_requests_are_placed_in_several_events() -> None:
    """Guards the event loop: all that a large worker had were placed again at once."""
    bench = Bench(blocks=10_000)
    running = 2 * MOST_AT_ONCE + 7
    for number in range(running):
        bench.do(Submit(request_record(f"r{number}")))
        bench.accept(RequestId(f"r{number}"))
    bench.join("d1", "decode", 1, 10_000)
    back = offered(bench.do(Lost("d0")))
    assert len(back) == MOST_AT_ONCE
    for request in back:
        back += offered(bench.accept(RequestId(request), 2, "d1"))
    assert len(back) == len(set(back)) == running, "the answer to an offer goes on"


@pytest.mark.parametrize("is_new", [True, False])
def test_the_line_does_not_stand_behind_one_that_only_a_leaving_worker_could_hold(is_new: bool) -> None:
    """Guards all tenants of a cluster whose largest worker drains, for as long as that takes: the others were idle."""
    parts = Parts()
    large = parts.join("d0", blocks=200)
    if not is_new:
        call = parts.run("large", tokens=2000)
        parts.queue.rejoin(call)
        parts.take()
    parts.join("d1", blocks=10)
    parts.report("d0", leaving=True, blocks=200)
    if is_new:
        parts.wait("large", tokens=2000)
    for number in range(3):
        parts.wait(f"tiny{number}", tokens=8, max_tokens=8)
    assert advance(parts) == ["tiny0", "tiny1", "tiny2"]
    parts.wait("late", tokens=8, max_tokens=8)
    assert advance(parts, ASIDE_S) == ["late"], "it is tried again, and passed again"
    parts.report("d0", blocks=200)
    assert advance(parts, ASIDE_S) == ["large"] and "large" in large.own, "as soon as the worker takes requests again"
    parts.table.forget(parts.table.calls[RequestId("large")], parts.out)
    assert not parts.queue._passed and not parts.queue._back


def with_a_leaving_worker(max_waiting: int = 256) -> Bench:
    """A small worker, and a large one that takes nobody, as it leaves."""
    bench = Bench(decodes=0, prefills=0, max_waiting=max_waiting)
    bench.join("d0", "decode", 1, 64)
    bench.join("d1", "decode", 1, 8)
    bench.hear(load(leaving=True), "d0")
    return bench


def test_a_line_that_is_full_of_those_put_aside_refuses_the_last() -> None:
    """Guards the line that is empty then, of which the last was asked for: the router failed on the request."""
    bench = with_a_leaving_worker(max_waiting=2)
    for name in ("a", "b"):
        assert bench.do(Submit(request_record(name, 400))) == []
    (end,) = bench.do(Submit(request_record("c", 400)))
    assert isinstance(end, Fail) and (end.request, end.fault.code, end.refusal) == ("c", "RESOURCE_EXHAUSTED", "full")
    assert end.retry_after_s and bench.router.waiting == 2


def test_a_flood_that_is_put_aside_leaves_the_line_to_others() -> None:
    bench = with_a_leaving_worker(max_waiting=4)
    for number in range(4):
        bench.do(Submit(request_record(f"f{number}", 400), tenant="flood"))
    assert offered(bench.do(Submit(request_record("busy", 100, 8), tenant="busy"))) == ["busy"]
    bench.hear(Accepted(RequestId("busy"), 1, 0), "d1")
    bench.hear(load(active=8, blocks=8), "d1")
    (end,) = bench.do(Submit(request_record("polite", 40, 8), tenant="polite"))
    assert isinstance(end, Fail) and end.request == "f3" and bench.router.waiting == 4


def test_those_put_aside_are_tried_again_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the event loop: hundreds of them were placed anew in one event, four times a second."""
    bench = with_a_leaving_worker()
    for number in range(100):
        bench.do(Submit(request_record(f"r{number}", 400), tenant=f"t{number % 3}"))
    tried = asked(bench, monkeypatch)
    periods = 20
    for _ in range(5 * periods):
        bench.now += ASIDE_S / 5
        bench.hear(load(leaving=True), "d0")
        for event in (WorkerSaid("d1", load(blocks=8)), Tick()):
            before, passed = len(tried), bench.router._queue._passed
            bench.do(event)
            assert len(tried) - before <= MOST_TRIED
            assert len(tried) > before or bench.router._queue._passed is passed, "nothing was due"
    assert len(tried) <= MOST_TRIED * periods and len(set(tried)) == 100, "each has its turn"
    tried.clear()
    back = offered(bench.hear(load(blocks=64), "d0"))
    assert len(tried) > 1 and back, "all are due as soon as the worker takes requests again"


def test_what_only_a_leaving_worker_could_hold_is_refused_once_that_has_gone() -> None:
    parts = Parts()
    parts.join("d0", blocks=200)
    parts.join("d1", blocks=10)
    parts.report("d0", leaving=True, blocks=200)
    parts.wait("large", tokens=2000)
    assert advance(parts) == []
    parts.registry.leave("d0", 1.0)
    parts.queue.advance(2.0, parts.out)
    (failed,) = parts.take()
    assert isinstance(failed, Fail) and failed.fault.code == "OUT_OF_RANGE"


def test_a_request_of_a_lost_worker_waits_for_its_return() -> None:
    """Guards an answer that is being written where one worker is larger than all others: that it was lost, and started
    again two seconds later, ended it as if it had been too long."""
    bench = Bench(blocks=16)
    bench.join("big", "decode", 1, 400)
    bench.hear(load(blocks=400), "big")
    out = bench.do(Submit(request_record("long", 40, 2000)))
    assert [command.worker for command in out if is_told(command, Place)] == ["big"]
    bench.hear(Accepted(RequestId("long"), 1, 0), "big")
    bench.hear(Tokens(RequestId("long"), 1, 0, [5, 6]), "big")
    assert not [command for command in bench.do(Lost("big")) if isinstance(command, Fail)]
    assert offered(bench.do(Submit(request_record("short")))) == ["short"], "and nobody waits behind it"
    assert not bench.do(Submit(request_record("other", 40, 2000))), "so does one that comes meanwhile"
    bench.now = 2.0
    assert set(offered(bench.join("big", "decode", 2, 400))) == {"long", "other"}
    bench.do(Lost("big"))
    bench.now = 13.0
    told = [*bench.hear(load(blocks=16)), *bench.do(Tick())]
    fails = [command for command in told if isinstance(command, Fail)]
    said = {command.request: (command.fault.code, command.outcome) for command in fails}
    assert said == {
        "long": ("UNAVAILABLE", FinishReason.ERROR),
        "other": ("OUT_OF_RANGE", FinishReason.REJECTED),
    }


def test_a_worker_that_hangs_does_not_hold_up_the_others() -> None:
    """Guards a cluster of two: what the one left unanswered was counted as if the other had been asked too often."""
    bench = Bench(blocks=100_000)

    def served(number: int) -> bool:
        """Whether `d1` was offered it, and takes it."""
        asked = [c.worker for c in bench.do(Submit(request_record(f"r{number}"))) if is_told(c, Place)]
        if "d1" in asked:
            bench.accept(RequestId(f"r{number}"), 1, "d1")
        return "d1" in asked

    assert not any(served(number) for number in range(MOST_OPEN_OFFERS))
    assert len(bench.router._table.open_offers) == MOST_OPEN_OFFERS, "the one there was hangs"
    bench.now = 11.0
    bench.join("d1", "decode", 1, 100_000)
    bench.hear(load(blocks=100_000), "d1")
    assert all(served(number) for number in range(100, 140)) and bench.router.waiting == 0
