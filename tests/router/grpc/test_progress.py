"""What a client has of a resumable stream, and when it comes back. Against a real router, over connections that are
cut, it is tried in tests/router/front/test_resume.py and, with several samples, in test_samples.py."""

import pytest

from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.api import ApiError, Delta, Finished, Position, Started
from router.grpc.progress import PAUSE_S, RECONNECT_S, Progress

CUT = ApiError("UNAVAILABLE", "cut")


def finished(sample: int) -> Finished:
    return Finished(
        reason=FinishReason.STOP,
        prompt_tokens=1,
        output_tokens=1,
        cached_tokens=0,
        stats=RequestStats(),
        ttft_s=0.1,
        itl_mean_s=0.1,
        itl_p99_s=0.1,
        e2e_s=0.1,
        sample=sample,
    )


def begun(samples: int = 1) -> Progress:
    progress = Progress()
    assert progress.take(Started("r", "m", 1, "t", samples=samples))
    return progress


def test_what_a_client_comes_back_for() -> None:
    """Guards against retries of a request that the server has ended, and against retries without end."""
    broken, ended = ApiError("UNAVAILABLE", "cut"), ApiError("UNAVAILABLE", "two workers were lost")
    progress = Progress()
    with pytest.raises(ApiError, match="cut"):
        progress.pause_s(broken, False, 0.0)
    assert progress.take(Started("r", "m", 1, "t"))
    assert progress.take(Delta("é", (1, 2)))
    assert (progress.token, progress.positions) == ("t", [Position(2, 2)])
    assert progress.pause_s(broken, False, 0.0) < progress.pause_s(broken, False, 0.1)
    assert not progress.take(Started("r", "m", 1, "t"))
    progress.pause_s(broken, False, 10.0)
    progress.pause_s(ApiError("CANCELLED", "later"), False, 10.0 + RECONNECT_S)
    with pytest.raises(ApiError, match="cut"):
        progress.pause_s(broken, False, 11.0 + RECONNECT_S)
    with pytest.raises(ApiError, match="cut"):
        progress.pause_s(ApiError("NOT_FOUND", "who?"), True, 12.0)
    assert progress.is_over
    fresh = Progress()
    fresh.take(Started("r", "m", 1, "t"))
    with pytest.raises(ApiError, match="two workers"):
        fresh.pause_s(ended, True, 0.0)


def test_positions_are_counted_by_sample_in_tokens_and_bytes() -> None:
    """Guards against a stream that goes on at the wrong place: characters are not bytes, and samples not each other."""
    progress = begun(samples=2)
    for delta in Delta("é", (1,)), Delta("", (2,)), Delta("ab", (3, 4), 1):
        assert progress.take(delta)
    assert progress.positions == [Position(2, 2), Position(2, 2)]
    progress.take(Started("r", "m", 1, "t", samples=2))
    assert progress.positions == [Position(2, 2), Position(2, 2)], "coming back begins nothing anew"
    with pytest.raises(ApiError) as caught:
        progress.take(Delta("x", (1,), 2))
    assert caught.value.code == "INTERNAL"


def test_it_is_over_when_every_sample_is_and_no_end_is_told_twice() -> None:
    """Guards against a client that leaves after its first sample, and one that sees an end again on its return."""
    progress = begun(samples=2)
    assert progress.take(finished(1)) and not progress.is_over
    assert not progress.take(finished(1)) and not progress.is_over
    assert progress.take(finished(0)) and progress.is_over


def test_pauses_grow_up_to_a_bound_and_shrink_when_something_comes() -> None:
    """Guards against a storm of attempts at a router that is down, and slow returns after a short cut."""
    progress = begun()
    pauses = [progress.pause_s(CUT, False, 0.0) for _ in range(9)]
    assert pauses[:3] == [PAUSE_S[0], 2 * PAUSE_S[0], 4 * PAUSE_S[0]] and pauses[-1] == PAUSE_S[1]
    progress.take(Delta("x", (1,)))
    assert progress.pause_s(CUT, False, RECONNECT_S + 1.0) == PAUSE_S[0], "a later cut has its own time"


def test_a_deadline_is_no_cut() -> None:
    """Guards against a client that comes back for a request whose time is over."""
    late = ApiError("DEADLINE_EXCEEDED", "late")
    with pytest.raises(ApiError, match="late"):
        begun().pause_s(late, False, 0.0)
