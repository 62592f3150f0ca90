"""How a request is counted that its client did not see through."""

import asyncio

import pytest

from router.front.api import Started
from router.front.output import Output
from router.front.stream import SampleStream
from router.front.timing import Timeline
from router.status.journal import RouterJournal
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteDetokenizer


class Counting(NullObserver):
    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def request(
        self,
        outcome: str,
        ttft_s: float | None,
        itl_s: list[float],
        e2e_s: float,
        stages: dict[str, float],
    ) -> None:
        self.outcomes.append(outcome)


@pytest.mark.parametrize(
    ("left_s", "outcome"), [(5.0, "cancelled"), (9.995, "deadline"), (10.2, "deadline")]
)
def test_whoever_is_too_late_did_not_cancel(left_s: float, outcome: str) -> None:
    """Guards the failure rate: gRPC ends a call at its deadline before we look, and that is no client's wish."""
    counting = Counting()
    stream = SampleStream(
        Started("r", "m", 1),
        Output(ByteDetokenizer(), ()),
        Timeline(0.0),
        counting,
        asyncio.Event(),
        RouterJournal(),
        deadline_s=10.0,
    )
    stream.left(left_s)
    stream.left(left_s + 1.0)
    assert counting.outcomes == [outcome]
