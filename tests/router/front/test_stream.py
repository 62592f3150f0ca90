"""What a stream keeps of what its reader has taken, and how a request is counted whose client left."""

import asyncio
import tracemalloc
from collections.abc import Sequence

import pytest

from access.limits import TenantLimits
from access.tenants import Tenant
from engine.types import TokenLogprobs
from router.front.api import Delta, Position, Started
from router.front.output import Output, OutputHistory
from router.front.parsers.choose import Parsing, parser_of
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


def adopted(stop: tuple[str, ...], parser: bool, had: int, *, events: bool = True) -> SampleStream:
    """The stream of a request of which another router had `had` tokens."""
    reasoning = parser_of(Parsing(reasoning="think")) if parser else None
    return SampleStream(
        Started("r", "m", 1),
        Output(ByteDetokenizer(), stop, reasoning),
        Timeline.adopted(1.0, had, 5.0),
        Counting(),
        asyncio.Event(),
        RouterJournal(),
        is_adopted=True,
        history=OutputHistory(events=events),
    )


@pytest.mark.parametrize("has_logprobs", [False, True])
@pytest.mark.parametrize("parser", [False, True])
@pytest.mark.parametrize("stop", [(), ("nt",), ("x",), ("wh", "é")], ids=str)
def test_what_another_router_had_is_given_again_event_by_event(
    stop: tuple[str, ...], parser: bool, has_logprobs: bool
) -> None:
    """Guards who reads on, or over HTTP by the number of the last event: taken in at once, it is in the same pieces as
    token by token, at every position, also where the router that had taken it over dies in turn."""
    ids = list("<think>wént</think> a want é wh".encode())
    told = [TokenLogprobs(token, -0.1 * token, ((token, -0.1 * token),)) for token in ids] if has_logprobs else []
    one_by_one, at_once, without = (adopted(stop, parser, len(ids), events=at < 2) for at in range(3))
    kept = [one_by_one.tokens([token], 5.0, told[at : at + 1]) for at, token in enumerate(ids)]
    assert at_once.replayed(ids, 5.0, told) == without.replayed(ids, 5.0, told) == kept[-1]
    for stream in (at_once, without):
        assert (stream.ids, stream.text) == (one_by_one.ids, one_by_one.text)
        assert stream.output.reasoning_tokens == one_by_one.output.reasoning_tokens
        assert stream._timeline.gaps_s == one_by_one._timeline.gaps_s
    # A part at a first router after the one that died, which dies as well; all of it, and more, at a second.
    for router in range(2):
        begin = read_again(at_once, Position())
        assert begin == read_again(one_by_one, Position())
        text_bytes = 0
        for at, delta in enumerate(begin, 1):
            text_bytes += len(delta.text.encode())
            behind = Position(sum(len(one.token_ids) for one in begin[:at]), text_bytes)
            assert read_again(at_once, behind) == begin[at:]
        if not router and kept[-1] is None:
            for stream in (one_by_one, at_once):
                stream.tokens([33, 34], 6.0)
                stream.tokens([35], 7.0)
    assert at_once._timeline.gaps_s == one_by_one._timeline.gaps_s
    again = adopted(stop, parser, len(at_once.ids))
    again.replayed(at_once.ids, 8.0)
    assert (again.ids, again.text) == (at_once.ids, at_once.text)


def test_what_another_router_had_is_charged_at_once() -> None:
    stream = adopted((), parser=False, had=3)
    limits = TenantLimits(lambda name: Tenant(tokens_per_s=1.0, burst_tokens=100), 1.0)
    stream._admission, stream._is_charged = limits.take_over("a", 3, 0.0), True
    stream.replayed([97, 98, 99], 5.0)
    assert limits._usage["a"].bucket.level == 100
    stream.tokens([100], 5.0)
    assert limits._usage["a"].bucket.level == 99
