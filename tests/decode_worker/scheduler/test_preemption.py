"""Who gives way to whom, and by which way it comes back. That every token is the same with and without it, and that no
order of arrival freezes a worker: tests/integration/test_preemption_fake.py and test_swap_fake.py; with faults in
tests/sim."""

import pytest

from decode_worker.scheduler.preemption import order
from decode_worker.scheduler.request import RequestState
from engine.messages import Refused
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
