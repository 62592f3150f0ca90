"""The endings alone: what a worker's last word means to the client, and what an account says after losses and moves.

Tried elsewhere too: every end in every state in test_core.py, ends after losses in test_recovery.py, after moves in
leaving/test_moves.py, of beam searches in tests/router/front/test_beams.py.
"""

import msgspec
import pytest

from engine.messages import Fault, RequestStats
from engine.types import Beam, BeamParams, FinishReason
from router.core.call import Call, State
from router.core.endings import DEADLINE, complete, ending, unreported
from router.core.events import Complete, Fail
from tests.router.bench import ended
from tests.router.core.parts import request_record

BAD = Fault("RESOURCE_EXHAUSTED", "the pool is too small")


def running(*emitted: int, state: State = State.RUNNING, **record: object) -> Call:
    call = Call(request_record(**record), 1, None, state)  # type: ignore[arg-type]
    call.emitted.extend(emitted)
    call.decode, call.prefill = "d0", "p0"
    return call


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_good_end_that_agrees_is_believed(reason: FinishReason) -> None:
    call = running(1, 2)
    call.believed_prefill_tokens = 16
    end = ending(call, ended(reason=reason, output_tokens=2, prefill_cached_tokens=32))
    assert isinstance(end, Complete) and (end.request, end.reason, end.expected_tokens) == ("a", reason, 16)
    assert (end.stats.output_tokens, end.stats.prefill_cached_tokens, end.beams) == (2, 32, ())


@pytest.mark.parametrize("state", [State.OFFERED, State.RUNNING])
def test_a_good_end_that_contradicts_is_our_fault(state: State) -> None:
    """Guards against tokens that were lost on the way and an answer with status OK."""
    end = ending(running(1, state=state), ended(output_tokens=2 if state is State.RUNNING else 1))
    assert isinstance(end, Fail) and (end.fault.code, end.outcome) == ("INTERNAL", FinishReason.ERROR)
    assert ("counts 2 output tokens, 1 arrived" in end.fault.message) == (state is State.RUNNING)


@pytest.mark.parametrize(("found", "good"), [(2, True), (1, False)])
def test_a_beam_search_ends_with_its_answers(found: int, good: bool) -> None:
    """Guards its client: no token came before, so that these are all there is."""
    beams = [Beam([1, 2], -0.5, FinishReason.STOP)] * found
    record = msgspec.structs.replace(ended(output_tokens=4), beams=beams)
    end = ending(running(beams=BeamParams(width=2, answers=2)), record)
    if good:
        assert isinstance(end, Complete) and end.beams == tuple(beams)
    else:
        assert isinstance(end, Fail) and "found 1 answers of 2" in end.fault.message


@pytest.mark.parametrize(
    ("reason", "fault", "code", "outcome"),
    [
        (FinishReason.ERROR, BAD, BAD.code, FinishReason.ERROR),
        (FinishReason.STOP, BAD, BAD.code, FinishReason.ERROR),
        (FinishReason.LENGTH, BAD, BAD.code, FinishReason.ERROR),
        (FinishReason.CANCELLED, None, "INTERNAL", FinishReason.CANCELLED),
        (FinishReason.DEADLINE, None, DEADLINE.code, FinishReason.DEADLINE),
        (FinishReason.DEADLINE, BAD, DEADLINE.code, FinishReason.DEADLINE),
    ],
)
def test_a_bad_end_is_told_with_its_reason(
    reason: FinishReason, fault: Fault | None, code: str, outcome: FinishReason
) -> None:
    """Guards the caller's message, and the metrics: a request that failed has not stopped well."""
    end = ending(running(1), ended(reason=reason, fault=fault, output_tokens=1))
    assert isinstance(end, Fail) and (end.fault.code, end.outcome) == (code, outcome)


def test_a_found_stop_string_wins() -> None:
    """Guards the count: the worker went on until it was told, its client did not."""
    late = ended(reason=FinishReason.ERROR, fault=BAD, output_tokens=5)
    end = ending(running(1, 2, state=State.FINISHING), late)
    assert isinstance(end, Complete) and (end.reason, end.stats.output_tokens) == (FinishReason.STOP, 2)


def test_after_a_loss_only_what_nobody_computed_is_cached() -> None:
    """Guards bills and hit rates against a prompt that this request computed itself, twice."""
    call = running(1)
    call.believed_prefill_tokens, call.cached_tokens_bound = 32, 16
    end = complete(call, FinishReason.STOP, RequestStats(prefill_cached_tokens=40))
    assert (end.expected_tokens, end.stats.prefill_cached_tokens) == (16, 16)
    end = complete(call, FinishReason.STOP, RequestStats(prefill_cached_tokens=8))
    assert end.stats.prefill_cached_tokens == 8


def test_after_a_move_the_account_covers_both_workers() -> None:
    call = running(1)
    call.earlier = RequestStats(prefill_cached_tokens=8, migrated_blocks=3)
    end = complete(call, FinishReason.STOP, RequestStats(prefill_cached_tokens=39, migrated_blocks=2))
    assert (end.stats.prefill_cached_tokens, end.stats.migrated_blocks) == (8, 5)


def test_the_account_of_a_worker_that_gave_none() -> None:
    stats = unreported(running(1, 2, 3))
    assert stats == RequestStats(prompt_tokens=40, output_tokens=3, prefill_worker="p0", decode_worker="d0")
