"""The life of a request: which moves are legal. That nothing else is tried, and each of them is, the simulator shows
(`tests/sim`); the table is printed in docs/handoff.md."""

from dataclasses import replace

import msgspec
import pytest

from decode_worker.scheduler.request import MOVES, Request, RequestState
from engine.packed_logprobs import PackedLogprobs
from engine.types import TokenLogprobs
from tests.decode_worker.scheduler.leaving.test_departures import A, Bench


def _request() -> Request:
    bench = Bench()
    bench.running(tokens=0)
    return bench.scheduler._requests[A]


@pytest.mark.parametrize("state", RequestState)
def test_only_moves_of_the_table_are_made(state: RequestState) -> None:
    """Guards the life cycle: a state that is set beside the table ends the worker, and says whose it was."""
    for to in RequestState:
        request = _request()
        request.state = state
        if to in MOVES[state]:
            request.move(to)
            assert request.state is to
        else:
            with pytest.raises(AssertionError, match=f"{state}, .* -> {to}$"):
                request.move(to)
            assert request.state is state


def test_log_probabilities_are_kept_for_who_may_come_for_them_and_no_longer_in_the_record() -> None:
    """Guards an answer that is resumed without those of its first tokens, or with them twice, and memory that holds
    those of requests that nobody can come back for."""
    said = [TokenLogprobs(5, -0.5), TokenLogprobs(6, -0.25)]
    plain = _request()
    plain.keep(said)
    assert len(plain.logprobs) == 0
    record = msgspec.structs.replace(plain.record, context=b"resumable", emitted_logprobs=(said[0],))
    resumable = replace(plain, record=record, logprobs=PackedLogprobs())
    resumable.keep(said[1:])
    assert resumable.logprobs.part(0) == tuple(said) and resumable.record.emitted_logprobs == ()


def test_every_state_is_reached_and_left() -> None:
    """From `new` every state is reached; from every state that is not the last, the last."""
    reached = {RequestState.NEW}
    while more := {to for state in reached for to in MOVES[state]} - reached:
        reached |= more
    assert reached == set(RequestState) == set(MOVES)
    for state in set(RequestState) - {RequestState.ENDING}:
        ends = {state}
        while RequestState.ENDING not in ends:
            more = {to for one in ends for to in MOVES[one]} - ends
            assert more, f"{state} never ends"
            ends |= more
