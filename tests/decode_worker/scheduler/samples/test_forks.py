"""Samples of one prompt: who waits for whom, what is promised, and who takes the place of a parent that is gone. With a
device in tests/integration/test_samples_fake.py, and with every fault in tests/sim."""

from decode_worker.scheduler.request import RequestState
from engine.messages import Cancel
from engine.types import FinishReason, RequestId
from tests.decode_worker.scheduler.bench import POOL, Fetching

PROMPT = list(range(10))


def _three() -> Fetching:
    """A prompt of ten tokens that is being fetched, and two more samples of it."""
    bench = Fetching()
    assert bench.place("a", PROMPT, POOL, group="g")
    assert bench.place("b", PROMPT, POOL, fork_of="a", group="g")
    assert bench.place("c", PROMPT, POOL, fork_of="b", group="g")
    return bench


def test_forks_wait_for_the_prompt_and_share_its_whole_blocks() -> None:
    """Guards the prompt's single journey, and the copy of its boundary block."""
    bench = _three()
    forks = bench.scheduler.prefills.forks
    assert [r.record.request for r in forks.waiting(bench.request("a"))] == ["b", "c"]
    # Of ten prompt tokens and eight of its own, two whole blocks are shared.
    assert all(bench.request(n).lease.promised == 3 for n in "bc")
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    assert not forks.waiting(bench.request("a")) and forks.forked == 2
    blocks = [bench.request(n).lease.blocks for n in "abc"]
    assert blocks[0][:2] == blocks[1][:2] == blocks[2][:2]
    assert len({block[2] for block in blocks}) == 3
    assert all(bench.request(n).state is RequestState.LOCAL for n in "bc")
    plan = bench.step()
    assert plan is not None and [row.start for row in plan.rows] == [10, 9, 9]


def test_the_first_that_waits_takes_the_place_of_a_parent_that_is_gone() -> None:
    """Guards the others: they wait for the heir, in their order, and none for a request that is no more."""
    bench = _three()
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    forks = bench.scheduler.prefills.forks
    heir = bench.request("b")
    assert heir.state is RequestState.HANDOFF and bench.asked().handoff.request == "b"
    assert [r.record.request for r in forks.waiting(heir)] == ["c"] and forks.inherited == 1


def test_who_cannot_share_is_a_request_like_any() -> None:
    """Guards tenants, and the room that a fork takes over from its parent."""
    bench = Fetching()
    assert bench.place("a", PROMPT, POOL)
    for name, prompt, more in (
        ("b", PROMPT, {"namespace": b"other"}),
        ("c", [*PROMPT[:9], 77], {}),
        ("d", PROMPT, {"max_tokens": 9}),
    ):
        assert bench.place(name, prompt, POOL, fork_of="a", **more)
        assert bench.request(name).state is RequestState.HANDOFF
