"""Preemption with the fake model: whatever arrives in whatever order, in a pool too small for all, every token is the
one that an undisturbed run would have, and nobody waits for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.scheduler.events import FromRouter
from decode_worker.scheduler.preemption import Preemption
from decode_worker.scheduler.request import Request
from engine.messages import Finish
from engine.types import FinishReason
from fakes.colocated import LINK, Colocated
from tests.integration.crowd import (
    ASKED,
    CROWD,
    LAYOUT,
    finish,
    prompt_of,
    record_of,
    samples_beside_another,
    serve,
    small_cluster,
    wanted,
)
from tests.integration.fake_device import fake_device
from worker.config import DecodeConfig


@pytest.mark.parametrize("local_chunk_tokens", [1, 64])
def test_tokens_are_the_same_with_and_without_preemption(local_chunk_tokens: int) -> None:
    """Guards every way back: on the prefill pool, computed here, and what is still cached of either."""
    records = [record_of(f"r{i}", prompt_of(i, 5 + 3 * i), 20) for i in range(4)]
    cluster = small_cluster(12, local_chunk_tokens=local_chunk_tokens)
    answers = [cluster.submit(record) for record in records]
    finish(cluster, answers)
    assert [answer.tokens for answer in answers] == [wanted(record) for record in records]
    preemption, swapping = cluster.decode.preemption, cluster.decode.swapping
    assert preemption.preempted.total() >= 3
    assert swapping.ways["here" if local_chunk_tokens > 1 else "pool"] >= 2
    assert sum(one.lost_tokens for one in cluster.decode.swapping.resumed) > 0
    reserved = small_cluster(12, preemption="off")
    answers = [reserved.submit(record) for record in records]
    finish(reserved, answers)
    assert [answer.tokens for answer in answers] == [wanted(record) for record in records]
    assert not reserved.decode.preemption.preempted


def test_the_newest_of_the_lowest_priority_gives_way() -> None:
    """Guards the order: an urgent request that comes last keeps its blocks, and so does the oldest."""
    cluster = small_cluster(14)
    victims: list[str] = []
    preempt = cluster.decode.preemption.preempt

    def noted(requests: list[Request], now: float) -> None:
        victims.extend(request.record.request for request in requests)
        preempt(requests, now)

    cluster.decode.preemption.preempt = noted  # type: ignore[method-assign]
    answers = [
        cluster.submit(record_of("old", prompt_of(1, 6), 20)),
        cluster.submit(record_of("new", prompt_of(2, 6), 20)),
        cluster.submit(record_of("urgent", prompt_of(3, 6), 20, priority=1)),
    ]
    finish(cluster, answers)
    assert set(victims) == {"new"}
    assert all(answer.tokens == wanted(answer.record) for answer in answers)


def test_samples_give_way_together_and_share_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards groups: to take one fork's blocks alone frees little; afterwards the prompt is fetched once."""
    together: list[set[str]] = []
    preempt = Preemption.preempt

    def noted(self: Preemption, victims: list[Request], now: float) -> None:
        together.append({request.record.request for request in victims})
        preempt(self, victims, now)

    monkeypatch.setattr(Preemption, "preempt", noted)
    cluster = small_cluster(18, local_chunk_tokens=1)
    answers = samples_beside_another(cluster)
    finish(cluster, answers)
    assert {"s0", "s1", "s2"} in together, together
    assert not any("first" in victims for victims in together)
    assert all(answer.tokens == wanted(answer.record) for answer in answers)
    assert cluster.decode.swapping.ways["shared"] >= 1


def test_what_can_never_fit_is_refused_at_once() -> None:
    """Guards the bound that everything else rests on: alone in the pool, whoever was taken can finish."""
    cluster = small_cluster(10)
    fits = cluster.submit(record_of("fits", prompt_of(1, 20), 20))
    large = cluster.submit(record_of("large", prompt_of(2, 20), 21))
    finish(cluster, [fits, large])
    assert large.ended is not None and large.ended.reason is FinishReason.REJECTED
    assert large.ended.fault is not None and large.ended.fault.code == "OUT_OF_RANGE"
    assert fits.tokens == wanted(fits.record)


def test_a_request_that_has_outgrown_the_prefill_pool_comes_back_here() -> None:
    """Guards the answer: its tokens so far are too long a prompt for any prefill worker, which is nobody's fault."""
    cluster = Colocated(
        fake_device(LAYOUT, 4),
        fake_device(LAYOUT, 14),
        decode_config=DecodeConfig(growth_tokens=4, local_chunk_tokens=1),
        check=True,
    )
    answers = [cluster.submit(record_of(f"r{i}", prompt_of(i, 10), 40)) for i in range(2)]
    finish(cluster, answers)
    assert [answer.tokens for answer in answers] == [wanted(answer.record) for answer in answers]
    assert cluster.decode.swapping.ways["pool"] and cluster.decode.batch.recomputed_tokens > 16


def test_a_preempted_request_ends_by_its_router() -> None:
    """Guards the line: a stop string that is found late ends a request that has no blocks."""
    cluster = small_cluster(12)
    answers = [cluster.submit(record_of(f"r{i}", prompt_of(i, 8), 24)) for i in range(3)]
    while not cluster.decode.preemption.line:
        assert cluster.turn()
    victim = cluster.decode.preemption.line[0].record.request
    cluster._engines[1].receive([FromRouter(LINK, Finish(victim, 1, 1))])
    ended = cluster.answers[victim].ended
    assert ended is not None and ended.reason is FinishReason.STOP and ended.stats.output_tokens == 1
    finish(cluster, answers)


@settings(max_examples=60, deadline=None)
@given(ASKED, st.integers(12, 18), st.sampled_from((1, 6, 64)), st.integers(1, 4))
def test_no_arrival_order_freezes_a_worker(
    asked: list[tuple[int, int, int, int, int, int]], blocks: int, chunk: int, slots: int
) -> None:
    """Whoever comes when, with whatever priority, in a pool that holds any of them alone."""
    serve(asked, blocks, chunk, slots)


def test_without_anybody_giving_way_the_same_worker_freezes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail."""
    assert serve(CROWD, 14, 6, 4).decode.preemption.preempted.total() > 2
    monkeypatch.setattr(Preemption, "victims", lambda *args: [])
    with pytest.raises(AssertionError, match="frozen"):
        serve(CROWD, 14, 6, 4)


def test_who_gave_way_holds_no_slots() -> None:
    """Guards a utilization above all there is: blocks that were given away still counted as filled."""
    cluster = small_cluster(12)
    shared = prompt_of(9, 2 * LAYOUT.block_size + 1)
    first = cluster.submit(record_of("first", shared, 1))
    while first.ended is None:
        cluster.turn()
    prompts = [[*shared, *prompt_of(i, 3 * i)] for i in range(4)]
    answers = [cluster.submit(record_of(f"r{i}", prompt, 20)) for i, prompt in enumerate(prompts)]
    waited = 0
    while any(answer.ended is None for answer in answers):
        cluster.turn()
        live, held = cluster.decode.slots
        assert 0 <= live <= held
        for request in cluster.decode.preemption.line:
            assert not request.lease.blocks and not request.have_blocks and not request.known
            waited += 1
    assert waited > 0
    finish(cluster, answers)
