"""What a stream keeps of what its reader has taken, and how a request is counted whose client left."""

import asyncio
import tracemalloc
from collections.abc import Sequence

import pytest

from router.front.api import Delta, Position, Started
from router.front.output import Output, OutputHistory
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
        itl_s: Sequence[float],
        e2e_s: float,
        stages: dict[str, float],
    ) -> None:
        self.outcomes.append(outcome)


def read_again(stream: SampleStream, at: Position) -> list[Delta]:
    """What a client gets that comes back, of what is there."""
    reader, got = stream.read(at), []
    while isinstance(event := reader.poll(), Delta):
        got.append(event)
    return got


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


@pytest.mark.parametrize(("history", "most_bytes"), [("none", 9), ("text", 16), ("events", 32)])
def test_what_was_taken_costs_a_few_bytes_a_token(history: str, most_bytes: int) -> None:
    """Guards the memory of long answers, of which a router may have ten thousand open: objects for each token took
    eight times as much. Of an answer that nobody reads again, only the time between two tokens is kept."""
    kept = None if history == "none" else OutputHistory(events=history == "events")
    stream = SampleStream(
        Started("r", "m", 1), Output(ByteDetokenizer(), ()), Timeline(0.0), Counting(), asyncio.Event(),
        RouterJournal(), history=kept,
    )  # fmt: skip
    stream.accepted(0.0)
    reader = stream.read()
    tokens, got = 20_000, 0
    tracemalloc.start()
    try:
        for at in range(tokens):
            stream.tokens([97 + at % 20], float(at))
            reader.look()
            delta = reader.poll()
            assert isinstance(delta, Delta)
            got += len(delta.token_ids)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got == tokens and used / tokens < most_bytes, used / tokens
    assert len(stream.text) == (0 if kept is None else tokens)
    if history == "events":
        behind = read_again(stream, Position(tokens - 2, tokens - 2))
        assert [delta.token_ids for delta in behind] == [(97 + at % 20,) for at in (tokens - 2, tokens - 1)]
