"""Who gives way to whom, and by which way it comes back. That every token is the same with and without it, and that no
order of arrival freezes a worker: tests/integration/test_preemption_fake.py and test_swap_fake.py; with faults in
tests/sim."""

import pytest

from decode_worker.scheduler.preemption import order
from decode_worker.scheduler.request import RequestState
from decode_worker.scheduler.swapping import Swapping
from engine.kv.manager import Lease
from engine.messages import Cancel, Ended, Refused
from engine.plan import NEWEST
from engine.types import BeamParams, FinishReason, RequestId
from tests.decode_worker.scheduler.bench import POOL, Fetching


def _prompt(number: int, length: int = 6) -> list[int]:
    return list(range(20 * number, 20 * number + length))


def _running(*asks: tuple[str, str, int], **config: object) -> Fetching:
    """Requests (name, group, priority) that all run, in a pool with room for more."""
    bench = Fetching(64, growth_tokens=4, **config)
    for name, group, priority in asks:
        prompt = _prompt(ord(group or name) - ord("a"))
        assert bench.place(name, prompt, max_tokens=60, group=group, priority=priority)
    bench.step()
    bench.step()
    return bench


def test_higher_priority_then_older_samples_together() -> None:
    bench = _running(("a", "", 0), ("b", "g", 0), ("c", "", 0), ("d", "", 1), ("e", "g", 0))
    ranked = sorted(bench.scheduler._requests.values(), key=order)
    assert [r.record.request for r in ranked] == ["d", "a", "b", "e", "c"]


def _victims(bench: Fetching, wants: str) -> list[str]:
    chosen = bench.scheduler.preemption.victims(bench.request(wants))
    return [request.record.request for request in chosen]


def test_the_last_gives_way_and_samples_of_another_prompt_all_at_once() -> None:
    """Guards cases 3 and 4: one fork's blocks alone free little."""
    bench = _running(("a", "", 0), ("b", "g", 0), ("c", "g", 0))
    assert _victims(bench, "a") == ["b", "c"]
    assert _victims(bench, "b") == ["c"], "its own sample alone"


def test_the_last_of_all_gives_way_itself_and_who_is_alone_waits() -> None:
    """Guards cases 1 and 2: nobody older is disturbed, and who has nobody beside it never stops itself."""
    bench = _running(("a", "", 0), ("b", "", 0))
    assert _victims(bench, "b") == ["b"]
    alone = _running(("a", "", 0))
    assert _victims(alone, "a") == []


def test_a_request_in_a_handoff_is_passed_over() -> None:
    """Guards case 2: its blocks are still written to."""
    bench = _running(("a", "", 0), ("b", "", 0))
    bench.place("c", _prompt(30), POOL)
    assert _victims(bench, "a") == ["b"]
    assert _victims(bench, "b") == [], "only a handoff stands behind it: it waits for that"


def test_who_waits_for_the_prompt_of_one_that_gives_way_gives_way_with_it() -> None:
    bench = _running(("a", "", 0))
    assert bench.place("b", _prompt(30), max_tokens=60)
    assert bench.place("c", _prompt(30), max_tokens=60, fork_of="b", priority=1)
    assert _victims(bench, "a") == ["b", "c"], "though it comes before all"
    bench.scheduler.preemption.preempt([bench.request(name) for name in "bc"], 0.0)
    bench.scheduler.check()


def test_who_stands_in_line_bars_those_behind_it() -> None:
    """Guards the line: new requests would take the room that it waits for."""
    bench = _running(("a", "", 0), ("b", "", 1))
    bench.scheduler.preemption.preempt([bench.request("b")], 0.0)
    assert not bench.place("c", _prompt(31), priority=1) and bench.of(Refused)
    assert bench.place("d", _prompt(31), priority=2)


@pytest.mark.parametrize(
    ("few", "prefill", "way", "state"),
    [
        (64, POOL, "here", RequestState.LOCAL),
        (7, POOL, "here", RequestState.LOCAL),
        (6, POOL, "pool", RequestState.HANDOFF),
        (1, POOL, "pool", RequestState.HANDOFF),
        (1, None, "here", RequestState.LOCAL),
    ],
)
def test_kv_comes_back_from_the_pool_unless_little_is_missing(
    few: int, prefill: object, way: str, state: RequestState
) -> None:
    """Guards cases 4 and 5 of the ways back."""
    bench = Fetching(32, growth_tokens=4, local_chunk_tokens=few)
    assert bench.place("a", _prompt(1), POOL)
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    request = bench.request("a")
    if prefill is None:
        request.prefill.worker = type(POOL)("", "")
    bench.scheduler.preemption.preempt([request], 0.0)
    lease = bench.scheduler.kv.acquire(b"", [], match_limit=0, room_tokens=32 * 4)
    assert lease is not None
    bench.scheduler.kv.release(lease)
    assert request.state is RequestState.PREEMPTED and not request.lease.blocks
    bench.scheduler.plan(1.0)
    assert request.preempted is not None
    assert (request.preempted.way, request.preempted.lost_tokens) == (way, 6)
    assert request.state is state


def test_samples_come_back_with_one_fetch_of_their_prompt() -> None:
    """Guards case 2 of the ways back: what they share is fetched once."""
    bench = Fetching(32, growth_tokens=4, local_chunk_tokens=1)
    assert bench.place("a", _prompt(1), POOL, group="g")
    assert bench.place("b", _prompt(1), POOL, fork_of="a", group="g")
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    bench.step()
    bench.scheduler.preemption.preempt([bench.request("a"), bench.request("b")], 0.0)
    lease = bench.scheduler.kv.acquire(b"", [], match_limit=0, room_tokens=32 * 4)
    assert lease is not None
    bench.scheduler.kv.release(lease)
    bench.step()
    assert bench.request("a").state is RequestState.HANDOFF
    assert bench.request("b").state is RequestState.FORKING
    again = bench.asked().handoff
    assert again.attempt == 1, "a handoff of its own"
    bench.land(again)
    bench.name_token(again)
    while bench.request("b").state is not RequestState.RUNNING:
        bench.step()
    assert bench.scheduler.swapping.ways == {"pool": 1, "shared": 1}


def test_who_gives_way_keeps_its_place_and_nothing_else() -> None:
    """Guards blocks that a preempted request would still hold, and what it had computed: it is found again."""
    bench = _running(("a", "", 0))
    request = bench.request("a")
    bench.now = 7.0
    bench.scheduler.preemption.preempt([request], bench.now)
    assert request.state is RequestState.PREEMPTED and bench.scheduler.preemption.line == [request]
    assert (request.arrived, request.known, request.have_blocks) == (False, 0, 0)
    assert (request.lease.blocks, request.lease.promised) == ([], 0)
    assert dict(bench.scheduler.preemption.preempted) == {"running": 1}
    assert bench.pool == {"free": 62, "cached": 2}
    tokens = request.tokens
    assert len(tokens) == 8 and bench.scheduler.kv.matched_tokens(b"", tokens, 8) == 7, "to the token"
    assert request.clock.stage == "decode_queue"
    assert request.clock.seconds == {
        "prefill_queue": 1.0, "prefill_run": 0.0, "migrate": 0.0, "prefill": 0.0, "decode_queue": 1.0, "decode_run": 5.0
    }


def test_who_is_preempted_while_its_prompt_is_computed_has_waited_for_that() -> None:
    """Guards the account of a request's time: what went into its prefill is not waiting for a row."""
    bench = Fetching(local_chunk_tokens=4)
    assert bench.place("a", _prompt(1, 10))
    bench.step()
    request = bench.request("a")
    assert request.known == 4
    bench.now = 3.0
    bench.scheduler.preemption.preempt([request], bench.now)
    assert dict(bench.scheduler.preemption.preempted) == {"local": 1}
    assert request.clock.seconds["prefill_run"] == 2.0 and request.clock.stage == "decode_queue"
    assert bench.scheduler.kv.matched_tokens(b"", request.tokens, 10) == 4, "and no more was computed"


def test_who_comes_back_finds_what_nobody_needed() -> None:
    """Guards work that is done twice, and what comes back as less than it was: the rows of a partly filled block."""
    bench = _running(("a", "", 0))
    request = bench.request("a")
    tokens = len(request.tokens)
    bench.now = 5.0
    bench.scheduler.preemption.preempt([request], bench.now)
    bench.now = 8.0
    bench.scheduler.preemption.resume(bench.now)
    assert request.state is RequestState.LOCAL and request.known == tokens - 1
    assert request.preempted is not None
    assert (request.preempted.way, request.preempted.lost_tokens) == ("here", 0)
    assert request.have_blocks == 1
    assert bench.scheduler.swapping.costs.lost_share == pytest.approx(0.8), "none of them, where all were feared lost"
    prefill = request.prefill
    assert (prefill.since, prefill.attempt, prefill.tries) == (8.0, 1, 0)
    assert request.clock.stage == "prefill" and request.clock.seconds["decode_queue"] == 1.0 + 3.0
    # Again before it decodes: it is out since the first time.
    bench.scheduler.preemption.preempt([request], 9.0)
    assert request.preempted.since == 5.0
    while request.preempted is not None:
        bench.step()
    (resumed,) = bench.scheduler.swapping.take_resumed()
    assert (resumed.way, resumed.seconds, resumed.lost_tokens) == ("here", bench.now - 5.0, 0)
    assert not bench.scheduler.swapping.take_resumed()


def test_who_comes_back_leaves_those_that_run_a_block_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a request that comes back to give way again at once: room that the others want next was free for long."""
    bench = _running(("a", "", 1), ("b", "", 1), ("c", "", 0))
    request, kv = bench.request("c"), bench.scheduler.kv
    bench.scheduler.preemption.preempt([request], bench.now)
    needs = kv.blocks_for(len(request.tokens) + 4)
    held = kv.promise(b"", kv.available - needs - 1)
    assert held is not None
    asked, match = [], kv.cache.match
    monkeypatch.setattr(kv.cache, "match", lambda *given, **more: asked.append(given) or match(*given, **more))
    for _ in range(5):
        bench.scheduler.preemption.resume(bench.now)
        assert request.state is RequestState.PREEMPTED
    assert 0 < len(asked) <= 3, "it is looked for once, however long it is, until there is more room"
    kv.release(held)
    held = kv.promise(b"", kv.available - needs - 2)
    assert held is not None
    bench.scheduler.preemption.resume(bench.now)
    assert request.state is RequestState.LOCAL


def test_fetches_wait_for_each_other_and_what_is_computed_here_does_not() -> None:
    """Guards the limit of handoffs, and the room of a request that only waits for it."""
    bench = Fetching(64, growth_tokens=4, max_handoffs=1, preemption="recompute", local_chunk_tokens=1)
    for name, prefill in (("a", POOL), ("b", type(POOL)("", ""))):
        assert bench.place(name, _prompt(ord(name) - ord("a")), prefill, max_tokens=20, priority=int(name == "b"))
        if prefill is POOL:
            handoff = bench.asked().handoff
            bench.land(handoff)
            bench.name_token(handoff)
    for _ in range(8):
        bench.step()
    a, b = bench.request("a"), bench.request("b")
    bench.scheduler.preemption.preempt([b], 9.0)
    bench.scheduler.preemption.preempt([a], 9.0)
    lease = bench.scheduler.kv.acquire(b"", [], match_limit=0, room_tokens=64 * 4)
    assert lease is not None
    bench.scheduler.kv.release(lease)
    assert bench.scheduler.preemption.line == [b, a]
    assert bench.place("c", _prompt(30), POOL, priority=2)
    bench.scheduler.preemption.resume(9.0)
    assert b.state is RequestState.LOCAL and a.state is RequestState.PREEMPTED
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    bench.scheduler.preemption.resume(9.0)
    assert a.state is RequestState.HANDOFF and bench.pool["reserved"] == len(a.lease.blocks)


def test_who_waits_for_a_handoff_to_end_is_matched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every step beside a long prompt that comes back when as many handoffs are open as may be."""
    bench = Fetching(64, growth_tokens=4, max_handoffs=1, preemption="recompute", local_chunk_tokens=1)
    for name in "ab":
        assert bench.place(name, _prompt(ord(name) - ord("a")), POOL, max_tokens=40, priority=int(name == "b"))
        handoff = bench.asked().handoff
        bench.land(handoff)
        bench.name_token(handoff)
    bench.step()
    request, kv = bench.request("a"), bench.scheduler.kv
    bench.scheduler.preemption.preempt([request], bench.now)
    while kv.cache.idle:
        kv._evict(b"")
    assert bench.place("c", _prompt(30), POOL, priority=2)
    matched, matches = kv.matched_tokens, list[int]()
    monkeypatch.setattr(kv, "matched_tokens", lambda *about: matches.append(1) or matched(*about))
    for _ in range(5):
        bench.step()
    assert request.state is RequestState.PREEMPTED and len(matches) == 1
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    bench.step()
    assert request.state is RequestState.HANDOFF and len(matches) == 2
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    bench.scheduler.preemption.preempt([request], bench.now)
    bench.step()
    assert len(matches) == 3, "it is looked for anew when it waits the next time"


def test_who_was_preempted_stands_behind_nobody() -> None:
    """Guards case 1: the last that runs gives way, though another one waits in line already."""
    bench = _running(("a", "", 0), ("b", "", 0), ("c", "", 0))
    bench.scheduler.preemption.preempt([bench.request("c")], bench.now)
    assert _victims(bench, "b") == ["b"]
    assert _victims(bench, "a") == ["b"]


def test_requests_without_a_group_are_no_group() -> None:
    bench = _running(("a", "g", 0), ("b", "", 0), ("c", "", 0))
    assert _victims(bench, "a") == ["c"], "and only the last"


def test_samples_that_are_fetched_or_wait_are_taken_once_or_not_at_all() -> None:
    """Guards case 4: blocks that a handoff still writes to, and a fork that stands in line twice."""
    bench = _running(("a", "", 0), ("b", "g", 0))
    assert bench.place("c", _prompt(40), POOL, group="g")
    assert _victims(bench, "a") == ["b"]
    other = Fetching(64, growth_tokens=4, local_chunk_tokens=4)
    for name, group, fork_of in (("a", "", None), ("b", "g", None), ("c", "g", "b")):
        assert other.place(name, _prompt(len(group), 12), group=group, fork_of=fork_of)
    assert _victims(other, "a") == ["b", "c"]


def test_a_preempted_request_that_is_cancelled_is_gone_from_the_line() -> None:
    bench = _running(("a", "", 0), ("b", "", 0))
    bench.scheduler.preemption.preempt([bench.request("b")], bench.now)
    bench.router(Cancel(RequestId("b"), 1, FinishReason.CANCELLED))
    assert bench.of(Ended) and not bench.scheduler.preemption.line
    assert bench.place("c", _prompt(31)), "and bars nobody any more"


@pytest.mark.parametrize(("steps", "promised"), [(1, 2), (2, 3)])
def test_a_sample_that_comes_back_is_promised_room_for_its_own_tokens(steps: int, promised: int) -> None:
    """Guards both bounds: 6 prompt tokens, the output so far and 4 more, less the block that it shares."""
    bench = Fetching(32, growth_tokens=4, local_chunk_tokens=1)
    assert bench.place("a", _prompt(1), POOL, group="g", max_tokens=20)
    assert bench.place("b", _prompt(1), POOL, fork_of="a", group="g", max_tokens=20)
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    while bench.request("b").output_tokens < steps + 1:
        bench.step()
    bench.scheduler.preemption.preempt([bench.request("a"), bench.request("b")], 0.0)
    _evict(bench)
    bench.scheduler.plan(bench.now)
    fork = bench.request("b")
    assert fork.state is RequestState.FORKING and len(fork.tokens) == 7 + steps
    assert fork.lease.promised == promised


def _evict(bench: Fetching, spared: int = 0) -> None:
    """Take all blocks but `spared` for a moment."""
    kv = bench.scheduler.kv
    lease = kv.acquire(b"", [], match_limit=0, room_tokens=4 * (kv.available - spared))
    assert lease is not None
    kv.release(lease)


def _fetched(prompt: list[int], **config: object) -> Fetching:
    """Request `a`, fetched from the pool, preempted with one output token."""
    bench = Fetching(32, growth_tokens=4, **config)
    assert bench.place("a", prompt, POOL, max_tokens=20)
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    bench.scheduler.preemption.preempt([bench.request("a")], 0.0)
    return bench


@pytest.mark.parametrize(("evicted", "few", "way"), [(0, 1, "here"), (1, 3, "here"), (1, 2, "pool")])
def test_what_is_here_still_is_not_asked_for(evicted: int, few: int, way: str) -> None:
    """Guards the border between a chunk and a handoff. Of seven tokens the newest is missing, or the last three."""
    bench = _fetched(_prompt(1), local_chunk_tokens=few)
    _evict(bench, spared=2 - evicted)
    bench.scheduler.plan(1.0)
    request = bench.request("a")
    assert request.preempted is not None
    assert (request.preempted.way, request.preempted.lost_tokens) == (way, 2 * evicted)
    lost = 2 * evicted / 6
    assert bench.scheduler.swapping.costs.lost_share == pytest.approx(1.0 + NEWEST * (lost - 1.0))


@pytest.mark.parametrize(("group", "other"), [("", ""), ("g", ""), ("g", "h")])
def test_only_a_sample_of_the_same_request_is_waited_for(group: str, other: str) -> None:
    """Guards a request that waits for the prompt of a stranger, which may be cancelled, or preempted, at any time."""
    bench = Fetching(32, growth_tokens=4, local_chunk_tokens=1)
    assert bench.place("a", _prompt(1), POOL, group=group, max_tokens=20)
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    bench.scheduler.preemption.preempt([bench.request("a")], 0.0)
    _evict(bench)
    assert bench.place("b", _prompt(1), POOL, group=other, max_tokens=20, priority=1)
    assert bench.request("b").state is RequestState.HANDOFF
    bench.scheduler.plan(1.0)
    assert bench.request("a").state is RequestState.HANDOFF


def _wanting(bench: Fetching, name: str) -> None:
    """Step until the request wants a block that it is not promised, in a pool that has none left."""
    batch, kv = bench.scheduler.batch, bench.scheduler.kv
    while not any(short for _, short in batch.wants(bench.request(name))):
        bench.step()
    assert kv.promise(b"", kv.available) is not None


@pytest.mark.parametrize(
    ("freeing", "preempted", "waiting"), [(0, "bc", ""), (1, "c", "a"), (2, "c", "ab"), (3, "", "abc")]
)
def test_blocks_that_copies_are_about_to_free_are_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, freeing: int, preempted: str, waiting: str
) -> None:
    """Guards requests that give way for blocks which are about to be there, and two that wait for the same one."""
    bench = _running(("a", "", 0), ("b", "", 0), ("c", "", 0))
    _wanting(bench, "a")
    monkeypatch.setattr(Swapping, "freeing", property(lambda self: freeing))
    kv, held = bench.scheduler.kv, []
    release = kv.release

    def releasing(lease: Lease) -> None:
        """Leave only one block to others of what a request gives back."""
        release(lease)
        held.append(kv.promise(b"", kv.available - 1))

    monkeypatch.setattr(kv, "release", releasing)
    assert bench.scheduler.preemption.make_room(bench.now) == bool(preempted)
    states = {name: bench.request(name).state for name in "abc"}
    assert [n for n in "abc" if states[n] is RequestState.PREEMPTED] == list(preempted)
    running = [n for n in "abc" if states[n] is RequestState.RUNNING]
    assert [n for n in running if any(short for _, short in bench.scheduler.batch.wants(bench.request(n)))] == list(
        waiting
    )


def test_as_many_give_way_as_are_needed() -> None:
    """Guards a search that would miss its step though others behind it had room to give: each of them has little."""
    bench = Fetching(32, growth_tokens=4, max_batch=8)
    assert bench.place("a", _prompt(1, 8), beams=BeamParams(width=4, answers=1), max_tokens=20)
    for name in "bc":
        assert bench.place(name, [ord(name), 1], max_tokens=30)
    kv, batch = bench.scheduler.kv, bench.scheduler.batch
    for step in range(2):
        plan, _ = bench.scheduler.plan(float(step))
        assert plan is not None
        drawn = [tuple((7 + n, -0.1 * n) for n in range(8)) if row.candidates else 1 for row in plan.rows if row.draw]
        bench.scheduler.complete(plan, drawn, float(step))
    short = sum(more for _, more in batch.wants(bench.request("a")))
    assert short > 2 and kv.promise(b"", kv.available) is not None
    assert bench.scheduler.preemption.make_room(3.0)
    assert [request.record.request for request in bench.scheduler.preemption.line] == ["b", "c"]
    assert not any(more for _, more in batch.wants(bench.request("a")))


def test_who_came_back_as_a_sample_keeps_the_account_of_when_it_first_came() -> None:
    """Guards the account: what of the prompt was cached is what the client's request found, not what came later."""
    bench = Fetching(32, growth_tokens=4, local_chunk_tokens=1)
    assert bench.place("a", _prompt(1), POOL, group="g") and bench.place("b", _prompt(1), POOL, fork_of="a", group="g")
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    bench.step()
    bench.scheduler.preemption.preempt([bench.request("a"), bench.request("b")], 0.0)
    _evict(bench)
    bench.scheduler.plan(1.0)
    heir = bench.request("b")
    assert heir.state is RequestState.FORKING and heir.origin.decode_cached_tokens == 5
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert heir.state is RequestState.HANDOFF and heir.origin.decode_cached_tokens == 5
