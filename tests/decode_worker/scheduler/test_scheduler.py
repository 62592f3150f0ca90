"""The scheduler as its shell sees it: events in, commands out, and what a worker says when it holds nothing. Its parts
have tests of their own beside this one; all of it together is what tests/sim and tests/integration try."""

import pytest

from engine.messages import Cancel, Ended, Finish, Tokens
from engine.types import FinishReason, RequestId
from tests.decode_worker.scheduler.bench import POOL, Fetching

PROMPT = list(range(10))
A = RequestId("a")


def test_what_is_no_event_ends_the_worker() -> None:
    """Guards against an event that is swallowed."""
    bench = Fetching()
    with pytest.raises(TypeError, match="not an event"):
        bench.scheduler.handle(object(), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", [1, 2])
def test_a_cancel_is_always_answered(placement: int) -> None:
    """Guards the router's CLOSING: it waits for the word that nothing is held here any more."""
    bench = Fetching()
    bench.place("a", PROMPT)
    bench.router(Cancel(A, placement, FinishReason.CANCELLED))
    ended = bench.last(Ended)
    assert isinstance(ended, Ended) and ended.placement == placement
    assert (A in bench.scheduler._requests) == (placement == 2), "another placement's word ends nothing"


def test_a_stop_string_cuts_the_answer_and_ends_it() -> None:
    bench = Fetching()
    bench.place("a", PROMPT)
    for _ in range(4):
        bench.step()
    bench.router(Finish(A, 1, 2))
    ended = bench.last(Ended)
    assert isinstance(ended, Ended) and ended.reason is FinishReason.STOP
    assert ended.stats.output_tokens == 2 and bench.scheduler.is_idle


def test_a_prompt_whose_first_token_is_its_last_is_never_ready() -> None:
    """Guards against a request that ended in a step and joins the batch in the same: it would draw on."""
    bench = Fetching()
    bench.place("a", PROMPT, max_tokens=1)
    bench.step()
    assert bench.of(Ended) and not bench.scheduler.batch.ready and bench.scheduler.is_idle
    assert len(bench.of(Tokens)) == 1


def test_who_is_counted_as_waiting_or_running() -> None:
    bench = Fetching()
    bench.place("a", PROMPT)
    bench.place("b", PROMPT, POOL)
    assert (bench.scheduler.running_requests, bench.scheduler.waiting_requests) == (0, 2)
    bench.step()
    bench.step()
    assert (bench.scheduler.running_requests, bench.scheduler.waiting_requests) == (1, 1)
    assert not bench.scheduler.is_idle
