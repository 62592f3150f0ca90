"""What a router remembers of its requests for the report on splitting: bounded, and nothing of their content."""

import pytest

from engine.messages import RequestStats
from engine.types import FinishReason, RequestId
from router.core.ejection import CONSECUTIVE
from router.status.journal import RouterJournal
from router.status.traffic import KEPT_SHAPES, RequestShape, RequestSummary, Traffic, traffic
from tests.router.core.parts import Parts

STATS = RequestStats(
    prompt_tokens=100,
    output_tokens=4,
    prefill_cached_tokens=32,
    decode_cached_tokens=48,
    prefill_worker="p0",
    decode_worker="d0",
)
STAGES = {"prefill_queue": 0.1, "prefill_run": 0.2, "migrate": 0.05}


def summary(outcome: FinishReason = FinishReason.LENGTH, stats: RequestStats | None = STATS) -> RequestSummary:
    return RequestSummary(
        request=RequestId("a"),
        outcome=outcome,
        at_s=10.0,
        e2e_s=2.0,
        ttft_s=0.5,
        gaps_s=[0.1, 0.3],
        stages=STAGES,
        stats=stats,
    )


def test_the_shape_of_a_request() -> None:
    journal = RouterJournal()
    journal.ended(summary())
    assert journal.traffic.shapes == [
        RequestShape(
            arrived_s=8.0,
            prompt_tokens=100,
            output_tokens=4,
            prefill_cached_tokens=32,
            decode_cached_tokens=48,
            ttft_s=0.5,
            itl_s=pytest.approx(0.2),
            queue_s=0.1,
            prefill_s=0.2,
            migrate_s=0.05,
            is_local=False,
        )
    ]


def test_only_good_ends_with_an_account_count_and_only_so_many() -> None:
    """Guards the report against requests that were cut off, and the router against growing."""
    journal = RouterJournal()
    journal.ended(summary(FinishReason.CANCELLED))
    journal.ended(summary(FinishReason.ERROR))
    journal.ended(summary(stats=None))
    assert journal.traffic.shapes == []
    for _ in range(KEPT_SHAPES + 5):
        journal.ended(summary(FinishReason.STOP))
    assert len(journal.traffic.shapes) == KEPT_SHAPES


@pytest.mark.parametrize(("worker", "is_local"), [("", True), ("d0", True), ("p0", False)])
def test_who_read_the_prompt(worker: str, is_local: bool) -> None:
    journal = RouterJournal()
    journal.ended(summary(stats=RequestStats(prefill_worker=worker, decode_worker="d0", output_tokens=1)))
    assert journal.traffic.shapes[0].is_local is is_local


def test_speeds_are_those_that_prices_are_made_of() -> None:
    """Guards a report of workers that left: only those count that take requests now."""
    parts = Parts()
    for name in ("p0", "p1", "d0", "d1"):
        parts.join(name)
    parts.report("p0", s_per_token=0.002)
    parts.report("p1", s_per_token=0.004)
    parts.report("d0", s_per_token=0.064, running_requests=3)
    told = traffic([], parts.registry, "auto", 0.5, 0.05, 0.0)
    assert told == Traffic(
        prefill_workers=2,
        decode_workers=2,
        local_prefill="auto",
        s_per_token=pytest.approx(0.003),
        alone_s=0.064,
        s_per_row=0.001,
        slo_ttft_s=0.5,
        slo_itl_s=0.05,
    )
    parts.report("p1", leaving=True)
    assert traffic([], parts.registry, "never", 0.5, 0.05, 0.0).prefill_workers == 1


def test_an_ejected_worker_is_part_of_the_arrangement() -> None:
    parts = Parts()
    lives = [parts.join(name).life for name in ("p0", "p1", "d0")]
    for _ in range(CONSECUTIVE):
        parts.registry.failed(lives[0], 0.0)
    assert [w.name for w in parts.registry.takers("prefill", 0.0)] == ["p1"]
    assert traffic([], parts.registry, "never", 0.5, 0.05, 0.0).prefill_workers == 2
