"""What decode workers take computing and swapping to cost, and which of the two they then choose. The copies themselves
are tried in tests/integration/test_swap_fake.py and test_swap_ends.py, the figures in
tests/telemetry/test_swap_metrics.py, all of it with faults in tests/sim."""

import pytest

from decode_worker.scheduler.events import FromPeer
from decode_worker.scheduler.swapping import KVCosts
from engine.kv.tiers.cost import FADING
from engine.messages import BlockOffer, FirstToken, Handoff, Offer
from engine.plan import NEWEST
from engine.types import BlockId, RequestId
from tests.decode_worker.scheduler.test_accounts import PEER, TOKENS, Handing, P
from transfer.handoff.commands import Received

ANOTHER = RequestId("another")


def _told(handoff: Handoff, chunks: int) -> FromPeer:
    first = FirstToken(
        handoff=handoff, token=9, chunks=chunks, queue_s=0.0, run_s=0.0, cached_tokens=0
    )
    return FromPeer(P, first)


def test_a_failed_attempt_is_paid_for_by_all_tokens_that_were_asked_for() -> None:
    """Guards the price of a token: all the time divided by what the last attempt still lacked, a third of it."""
    bench = Handing()
    handoff = bench.begin()
    for at in (0, 1):
        offer = BlockOffer(BlockId(at), 1, at, (4, 2)[at], 0)
        bench.do(FromPeer(P, Offer(handoff, at, [offer])))
    bench.do(Received(handoff, 0, "", 0.1, 1))
    bench.now = 2.0
    again = bench._asked(bench.do(Received(handoff, 1, "its bytes are others", 0.1, 0)))
    bench.do(FromPeer(P, Offer(again, 0, [BlockOffer(BlockId(1), 1, 1, 2, 0)])))
    bench.now = 3.0
    bench.do(Received(again, 0, "", 0.1, 1))
    bench.do(_told(again, 1))
    assert bench.outcomes()[-1][0] == "ok"
    assert bench.scheduler.swapping.costs.pool_s == pytest.approx(3.0 / TOKENS)


def test_a_prompt_that_is_nearly_all_cached_says_nothing_of_what_a_token_costs() -> None:
    """Guards the price: asking for two tokens takes as long as asking for many, a hit would make all of them dear."""
    bench = Handing()
    handoff = bench.begin()
    bench.send(handoff)
    bench.now = 0.6
    bench.do(_told(handoff, 1))
    costs = bench.scheduler.swapping.costs
    assert costs.pool_s == pytest.approx(0.1)
    bench.place(1, name=ANOTHER, prefill=PEER)
    request = bench.scheduler._requests[ANOTHER]
    assert request.prefill.handoff is not None and request.have_blocks == 1
    bench.do(FromPeer(P, Offer(request.prefill.handoff, 0, [BlockOffer(BlockId(1), 1, 1, 2, 0)])))
    bench.do(Received(request.prefill.handoff, 0, "", 0.1, 1))
    bench.now = 1.2
    bench.do(_told(request.prefill.handoff, 1))
    assert request.prefill.first is not None and request.arrived
    assert costs.pool_s == pytest.approx(0.1)


def test_means_are_of_what_was_measured_and_a_few_tokens_are_no_measurement() -> None:
    costs = KVCosts(block_size=4)
    assert costs.tokens_per_s(here=True) == costs.tokens_per_s(here=False) == 1.0
    costs.fetched(3, 9.0)
    costs.computed(3, 9.0)
    assert (costs.pool_s, costs.here_s) == (0.0, 0.0)
    costs.fetched(10, 1.0)
    assert costs.tokens_per_s(here=True) == costs.tokens_per_s(here=False) == 10.0
    costs.computed(10, 2.0)
    assert (costs.tokens_per_s(here=True), costs.tokens_per_s(here=False)) == (5.0, 10.0)
    costs.fetched(10, 2.0)
    assert costs.pool_s == pytest.approx(0.1 + NEWEST * 0.1)


def test_the_cheaper_is_chosen_and_a_refused_swap_fades() -> None:
    """Forty tokens at 0.1 s, of which half are lost: 2 s. Ten blocks: all are copied out, half of them back."""
    costs = KVCosts(block_size=4)
    assert costs.is_swap_cheaper(40, 10, 0.0, here=False), "what was never measured is tried"
    costs.fetched(10, 1.0)
    costs.stored(2, 0.2)
    costs.lost_share = 0.5
    assert costs.is_swap_cheaper(40, 10, 0.2, here=False)
    assert costs.predicted == pytest.approx({"recompute": 2.0, "swap": 10 * 0.1 + 0.5 * 10 * 0.2})
    assert not costs.is_swap_cheaper(40, 10, 0.3, here=False)
    assert costs.store_s == pytest.approx(0.1 * (1 - FADING))
    assert costs.is_swap_cheaper(40, 0, 0.3, here=False), "what host memory has already is not copied again"
    refused = 0
    while not costs.is_swap_cheaper(40, 10, 0.3, here=False):
        refused += 1
    assert refused == 34, "0.98 ** 35 of a second and 1.5 s are less than 2 s"


def test_a_block_of_tokens_is_a_measurement() -> None:
    costs = Handing().scheduler.swapping.costs
    costs.fetched(3, 9.0)
    assert costs.pool_s == 0.0
    costs.fetched(4, 1.0)
    costs.computed(3, 9.0)
    assert (costs.pool_s, costs.here_s) == (0.25, 0.0)
    costs.computed(4, 2.0)
    assert costs.here_s == 0.5 and costs.predicted == {"recompute": 0.0, "swap": 0.0}, "nothing was predicted yet"


def test_what_was_never_measured_is_free_and_what_was_measured_once_stands_for_both() -> None:
    """Guards the choice on a worker that has computed here alone, or not at all."""
    costs = KVCosts(block_size=4)
    costs.stored(1, 0.5)
    assert not costs.is_swap_cheaper(40, 10, 0.0, here=False) and costs.predicted["recompute"] == 0.0
    costs.computed(10, 1.0)
    assert costs.tokens_per_s(here=False) == 10.0
    costs.is_swap_cheaper(40, 10, 0.0, here=False)
    assert costs.predicted["recompute"] == pytest.approx(4.0)


@pytest.mark.parametrize(("tokens", "lost", "share"), [(1, 1, 1.0), (1, 0, 1 - NEWEST), (0, 0, 1 - NEWEST)])
def test_the_share_that_is_lost_is_one_of_all_tokens(tokens: int, lost: int, share: float) -> None:
    costs = KVCosts(block_size=4)
    costs.resumed(tokens, lost)
    assert costs.lost_share == pytest.approx(share)
