"""The ways in which a request's KV gets here, and when the blocks of one that ends may go. Loads out of tiers are tried
in tests/integration/test_tiers_fake.py and test_swap_ends.py, prices in test_swapping.py, all of it with faults in
tests/sim."""

import pytest

from decode_worker.scheduler.events import FromPeer, PeerDown
from decode_worker.scheduler.request import RequestState
from engine.messages import BlockOffer, Cancel, Ended, FirstToken, Handoff, Offer, PeerAddress, Stop, Tokens, UsePrefill
from engine.types import BlockId, FinishReason, RequestId, TokenLogprobs
from tests.decode_worker.scheduler.bench import HERE, POOL, Fetching, P
from transfer.handoff.commands import Received

PROMPT = list(range(10))
A = RequestId("a")


@pytest.mark.parametrize("first", ["blocks", "token"])
def test_a_request_is_ready_with_its_blocks_and_its_first_token(first: str) -> None:
    """Guards both orders: neither alone is enough, and the token is sent on at once."""
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    handoff = bench.asked().handoff
    steps = [lambda: bench.land(handoff), lambda: bench.name_token(handoff)]
    for step in steps if first == "blocks" else reversed(steps):
        assert bench.request("a").state is RequestState.HANDOFF
        step()
    assert bench.request("a").state is RequestState.READY
    assert [r.ids for r in bench.of(Tokens) if isinstance(r, Tokens)] == [[9]]
    assert bench.request("a").known == len(PROMPT)
    assert bench.scheduler.kv.matched_tokens(b"", PROMPT, 10) == 8, "others may share it"


@pytest.mark.parametrize("other", [True, False])
def test_without_its_worker_a_request_goes_on_with_another_or_here(other: bool) -> None:
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    bench.tell(PeerDown(POOL, P, "gone"))
    assert bench.request("a").state is RequestState.ASKING
    another = PeerAddress("prefill-1", "p:2")
    bench.router(UsePrefill(A, 1, another if other else None))
    assert bench.request("a").state is (RequestState.CONNECTING if other else RequestState.LOCAL)
    assert bench.request("a").prefill.worker == (another if other else HERE)
    late = bench.request("a").state
    bench.router(UsePrefill(A, 1, None))
    assert bench.request("a").state is late, "an answer is taken once"


def test_what_is_cached_of_a_prompt_that_is_computed_here_counts_as_a_hit() -> None:
    """Guards the share of hits that operators see of a pool without prefill workers."""
    bench = Fetching()
    batch = bench.scheduler.batch
    bench.place("a", PROMPT, max_tokens=1)
    bench.step()
    assert (batch.hit_tokens, batch.prefilled_tokens) == (0, 10)
    bench.place("b", [*PROMPT[:8], 98, 99], max_tokens=1)
    bench.step()
    assert (batch.hit_tokens, batch.prefilled_tokens) == (8, 12)


def test_what_has_landed_is_not_computed_again_here() -> None:
    """Guards the one place that says a prompt's KV is here: blocks writable, indexed, and known."""
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.tell(PeerDown(POOL, P, "gone"))
    bench.router(UsePrefill(A, 1, None))
    request = bench.request("a")
    assert (request.known, request.arrived) == (9, True), "its last token is computed for the next"
    assert "reserved" not in bench.pool
    assert bench.scheduler.kv.matched_tokens(b"", PROMPT, 10) == 8
    plan = bench.step()
    assert plan is not None and (plan.rows[0].start, plan.rows[0].end) == (9, 10)


@pytest.mark.parametrize("case", ["at once", "well", "cancelled", "abandoned while fenced"])
def test_blocks_of_a_request_that_ends_go_when_nothing_of_ours_writes_to_them(case: str) -> None:
    """Guards wrong answers with status OK: a block that is reused while a copy of ours still lands in it."""
    bench = Fetching()
    if case == "at once":
        bench.place("a", PROMPT)
        bench.step()
    else:
        bench.place("a", PROMPT, POOL, max_tokens=1 if case == "well" else 8)
    if case != "at once":
        handoff = bench.asked().handoff
        bench.tell(FromPeer(P, _offer(handoff)))
    if case == "well":
        bench.name_token(handoff)
    else:
        bench.router(Cancel(A, 1, FinishReason.CANCELLED))
    assert bench.of(Ended), "told at once"
    if case == "at once":
        assert bench.pool["free"] == 29 and bench.pool["cached"] == 3
        return
    assert bench.pool["reserved"] == 3 and not bench.of(Stop)
    error = "it failed" if case == "abandoned while fenced" else ""
    bench.tell(Received(handoff, 0, error, 0.1, 0 if error else 3))
    assert "reserved" not in bench.pool and bench.scheduler.is_idle
    assert bench.pool.get("cached", 0) == (3 if case == "well" else 0)
    assert bool(bench.of(Stop)) == (case != "well")


def _offer(handoff: Handoff) -> Offer:
    """All three blocks of the prompt."""
    offers = [BlockOffer(BlockId(at), 1, at, (4, 4, 2)[at], 0) for at in range(3)]
    return Offer(handoff, 0, offers)


def test_what_is_said_of_a_prompts_tokens_comes_with_the_first_token() -> None:
    """Guards log probabilities of a prompt that another worker has read, and a list of them that nobody asked for."""
    scores = [TokenLogprobs(token, -0.5) for token in PROMPT]
    for wanted in (1, None):
        bench = Fetching()
        assert bench.place("a", PROMPT, POOL, prompt_logprobs=wanted)
        handoff = bench.asked().handoff
        said = FirstToken(
            handoff=handoff, token=9, chunks=1, queue_s=0.0, run_s=0.0, cached_tokens=0, prompt_logprobs=scores
        )
        bench.tell(FromPeer(P, said))
        (told,) = bench.of(Tokens)
        assert isinstance(told, Tokens) and told.prompt_logprobs == (scores if wanted else [])
        assert not bench.request("a").scores, "they are told once, and not kept"
