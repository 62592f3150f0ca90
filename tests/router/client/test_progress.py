"""What a client has of a resumable stream, and when it comes back. Against a real router, over connections that are
cut, it is tried in tests/router/front/test_resume.py and, with several samples, in test_samples.py."""

from random import Random

import pytest

from protos import headrace_pb2 as pb
from router.client.errors import ApiError
from router.client.progress import PAUSE_S, RECONNECT_S, RETRY_S, Progress, Retries

CUT = ApiError("UNAVAILABLE", "cut")


def started(samples: int = 1) -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.Started(request_id="r", resume_token="t", samples=samples))


def delta(text: str, ids: tuple[int, ...], sample: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=ids, sample=sample))


def finished(sample: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(finished=pb.Finished(sample=sample))


def at(index: int, text_bytes: int) -> pb.Position:
    return pb.Position(next_index=index, text_bytes=text_bytes)


def begun(samples: int = 1) -> Progress:
    progress = Progress()
    assert progress.take(started(samples))
    return progress


def test_what_a_client_comes_back_for() -> None:
    """Guards against retries of a request that the server has ended, and against retries without end."""
    broken, ended = ApiError("UNAVAILABLE", "cut"), ApiError("UNAVAILABLE", "two workers were lost")
    progress = Progress()
    with pytest.raises(ApiError, match="cut"):
        progress.pause_s(broken, False, 0.0)
    assert progress.take(started())
    assert progress.take(delta("é", (1, 2)))
    assert (progress.token, progress.positions) == ("t", [at(2, 2)])
    assert progress.pause_s(broken, False, 0.0) < progress.pause_s(broken, False, 0.1)
    assert not progress.take(started())
    progress.pause_s(broken, False, 10.0)
    progress.pause_s(ApiError("CANCELLED", "later"), False, 10.0 + RECONNECT_S)
    with pytest.raises(ApiError, match="cut"):
        progress.pause_s(broken, False, 11.0 + RECONNECT_S)
    with pytest.raises(ApiError, match="cut"):
        progress.pause_s(ApiError("NOT_FOUND", "who?"), True, 12.0)
    assert progress.is_over
    fresh = Progress()
    fresh.take(started())
    with pytest.raises(ApiError, match="two workers"):
        fresh.pause_s(ended, True, 0.0)


def test_positions_are_counted_by_sample_in_tokens_and_bytes() -> None:
    """Guards against a stream that goes on at the wrong place: characters are not bytes, and samples not each other."""
    progress = begun(samples=2)
    for event in delta("é", (1,)), delta("", (2,)), delta("ab", (3, 4), 1):
        assert progress.take(event)
    assert progress.positions == [at(2, 2), at(2, 2)]
    progress.take(started(2))
    assert progress.positions == [at(2, 2), at(2, 2)], "coming back begins nothing anew"
    with pytest.raises(ApiError) as caught:
        progress.take(delta("x", (1,), 2))
    assert caught.value.code == "INTERNAL"


def test_it_is_over_when_every_sample_is_and_no_end_is_told_twice() -> None:
    """Guards against a client that leaves after its first sample, and one that sees an end again on its return."""
    progress = begun(samples=2)
    assert progress.take(finished(1)) and not progress.is_over
    assert not progress.take(finished(1)) and not progress.is_over
    assert progress.take(finished(0)) and progress.is_over


def test_an_event_of_a_kind_that_it_does_not_know_ends_nothing() -> None:
    """Guards older clients against a newer server: such an event was taken for the end of the answer."""
    progress = Progress()
    assert progress.take(pb.GenerateResponse(started=pb.Started(samples=1, resume_token="t")))
    assert not progress.take(pb.GenerateResponse()) and not progress.is_over
    assert progress.take(pb.GenerateResponse(finished=pb.Finished())) and progress.is_over


def test_pauses_grow_up_to_a_bound_and_shrink_when_something_comes() -> None:
    """Guards against a storm of attempts at a router that is down, and slow returns after a short cut."""
    progress = begun()
    pauses = [progress.pause_s(CUT, False, 0.0) for _ in range(9)]
    assert pauses[:3] == [PAUSE_S[0], 2 * PAUSE_S[0], 4 * PAUSE_S[0]] and pauses[-1] == PAUSE_S[1]
    progress.take(delta("x", (1,)))
    assert progress.pause_s(CUT, False, RECONNECT_S + 1.0) == PAUSE_S[0], "a later cut has its own time"


def test_a_deadline_is_no_cut() -> None:
    """Guards against a client that comes back for a request whose time is over."""
    late = ApiError("DEADLINE_EXCEEDED", "late")
    with pytest.raises(ApiError, match="late"):
        begun().pause_s(late, False, 0.0)


# ---- asking again


def busy(retry_after_s: float | None) -> ApiError:
    return ApiError("RESOURCE_EXHAUSTED", "busy", retry_after_s=retry_after_s)


def test_a_busy_server_is_asked_again_when_it_says() -> None:
    """Guards against a storm at a server that has said when to come, and against clients who all come at once."""
    waits = {Retries(Random(seed)).pause_s(busy(2.0), 60.0) for seed in range(8)}
    assert len(waits) == 8 and all(wait is not None and 2.0 <= wait <= 2.5 for wait in waits)


def test_pauses_between_tries_grow_and_end_with_the_deadline() -> None:
    retries = Retries(Random(1))
    waits = [retries.pause_s(CUT, 60.0) for _ in range(10)]
    assert all(wait is not None for wait in waits)
    assert waits[0] < 2 * RETRY_S[0] and waits[-1] >= RETRY_S[1]  # type: ignore[operator]
    assert retries.pause_s(CUT, 4.9) is None, "the answer could not come in time"


@pytest.mark.parametrize(
    "error",
    [
        busy(None),
        *(ApiError(code, "no") for code in ("INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", "INTERNAL")),
    ],
)
def test_what_is_never_right_is_asked_once(error: ApiError) -> None:
    """Guards against retries that change nothing: a bad field, a message that is too large."""
    assert Retries(Random(1)).pause_s(error, 60.0) is None
