"""One request's state: the table of moves, and what the next placement is told. Who moves it, and when, is tried in the
tests of the parts beside this one; any order of events in test_core_machine.py and tests/sim."""

from array import array

import pytest

from engine.identity import chain, root
from engine.messages import RequestStats
from engine.types import TokenLogprobs
from router.core.call import Call, State
from tests.router.core.parts import request_record

WAITING, OFFERED, RUNNING, FINISHING, CLOSING = State
LEGAL = {
    (WAITING, OFFERED),
    (OFFERED, WAITING),
    (OFFERED, RUNNING),
    (OFFERED, CLOSING),
    (RUNNING, WAITING),
    (RUNNING, FINISHING),
    (RUNNING, CLOSING),
    (FINISHING, CLOSING),
}
"""The picture at the head of router/core/call.py, as pairs."""


@pytest.mark.parametrize("old", State)
@pytest.mark.parametrize("new", State)
def test_only_the_moves_of_the_picture_are_legal(old: State, new: State) -> None:
    """Guards against a client that is answered twice: a broken order of events must end loudly, and change nothing."""
    call = Call(request_record(), turn=1, deadline_s=None, state=old)
    if (old, new) in LEGAL:
        call.move(new)
        assert call.state is new
    else:
        with pytest.raises(AssertionError, match=f"a: {old.name} -> {new.name}"):
            call.move(new)
        assert call.state is old


def test_the_next_placement_goes_on_behind_what_the_client_has() -> None:
    """Guards against tokens that are sampled twice, or history that is told twice, after a second loss."""
    call = Call(request_record(tokens=3), turn=1, deadline_s=None)
    for emitted, tokens in ([7, 8], [0, 1, 2, 7, 8]), ([9], [0, 1, 2, 7, 8, 9]):
        call.emitted.extend(emitted)
        call.rewrite()
        assert call.record.tokens == call.tokens == tokens
        assert call.record.prompt_tokens == 3


def test_a_chain_is_of_the_tokens_as_they_are_now() -> None:
    """Guards against a rewritten record that is looked for by its old blocks, or by another kind of worker's."""
    call = Call(request_record(tokens=4), turn=1, deadline_s=None)
    for tokens in [0, 1, 2, 3], [0, 1, 2, 3, 7, 8]:
        for model, block_size in ("f", 2), ("f", 4), ("g", 2):
            assert call.chain((model, block_size)) == chain(root(b"", model), tokens, block_size)
        call.emitted = array("I", [7, 8])
        call.rewrite()


def test_after_losses_no_more_is_called_cached_than_at_the_first_placement() -> None:
    """Guards the account: what was computed for this request before its worker was lost was not cached for it."""
    call = Call(request_record(tokens=8), turn=1, deadline_s=None)
    for believed, bound in (16, 8), (4, 4), (6, 4):
        call.believed_prefill_tokens = believed
        call.rewrite()
        assert call.cached_tokens_bound == bound


def test_a_move_keeps_what_its_worker_has_told() -> None:
    """Guards against the router's guess where the worker that yielded the request has said what was cached."""
    call = Call(request_record(tokens=8), turn=1, deadline_s=None, believed_prefill_tokens=6, emitted=array("I", [5]))
    stats = RequestStats(prefill_cached_tokens=2, output_tokens=1)
    call.moved(stats)
    assert (call.earlier, call.cached_tokens_bound) == (stats, 2)
    assert call.record.tokens == [*range(8), 5]


def test_a_chain_is_computed_once() -> None:
    """Guards placements of long prompts: every worker of a kind is asked for the same identities."""
    call = Call(request_record(tokens=64), turn=1, deadline_s=None)
    assert call.chain(("f", 16)) is call.chain(("f", 16))


@pytest.mark.parametrize("context", [b"", b"x"])
def test_what_another_router_may_be_told_is_kept(context: bytes) -> None:
    """Guards log probabilities of an answer that is resumed: they were those of the tokens before the loss; and memory,
    where nobody will ever ask."""
    call = Call(request_record(context=context), turn=1, deadline_s=None)
    said = [TokenLogprobs(7, -0.5, ()), TokenLogprobs(8, -1.5, ())]
    call.emit([7, 8], said)
    call.emit([9], [])
    assert call.emitted.tolist() == [7, 8, 9]
    assert list(call.logprobs.part(0)) == (said if context else [])


@pytest.mark.parametrize("emitted", [[], [7]])
def test_a_prompts_log_probabilities_are_told_once(emitted: list[int]) -> None:
    """Guards the prompt's, which came with the first token: asked for again they would be computed again; and one that
    was lost before its first token, which still wants them."""
    call = Call(request_record(prompt_logprobs=2), turn=1, deadline_s=None, emitted=array("I", emitted))
    call.rewrite()
    assert call.record.prompt_logprobs == (None if emitted else 2)
