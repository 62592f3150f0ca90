"""Who is taken, with how much room, and who is told no. What becomes of a request whose room was too little is tried in
tests/integration/test_preemption_fake.py; orders of arrival, with faults, in tests/sim."""

import pytest

from engine.messages import Ended, Refused
from engine.types import BeamParams, FinishReason
from tests.decode_worker.scheduler.bench import HERE, POOL, Fetching

PROMPT = list(range(10))


def test_a_request_is_taken_with_room_to_grow_and_no_more() -> None:
    """Guards both bounds: promised too much, few are taken; too little, everybody is preempted at once."""
    bench = Fetching(growth_tokens=6)
    assert bench.place("a", PROMPT, max_tokens=100)
    lease = bench.request("a").lease
    assert (len(lease.blocks), lease.promised) == (3, 1), "10 + 6 tokens are 4 blocks"
    off = Fetching(growth_tokens=6, preemption="off")
    assert off.place("a", PROMPT, max_tokens=100)
    assert off.request("a").lease.promised == 25, "10 + 100 tokens are 28 blocks"


def test_without_room_the_answer_is_no_with_what_is_wanted() -> None:
    bench = Fetching(6, growth_tokens=4)
    assert bench.place("a", PROMPT, max_tokens=10)
    assert not bench.place("b", list(range(50, 60)), max_tokens=10)
    refused = bench.last(Refused)
    assert isinstance(refused, Refused) and refused.blocks_needed == 4


@pytest.mark.parametrize("what", ["pool", "width"])
def test_what_can_never_be_served_is_rejected(what: str) -> None:
    """Guards the router's line: a refused request would be offered again for ever."""
    bench = Fetching(6 if what == "pool" else 32, max_batch=2)
    beams = BeamParams(width=3, answers=1) if what == "width" else None
    assert not bench.place("a", PROMPT, max_tokens=15 if what == "pool" else 4, beams=beams)
    ended = bench.last(Ended)
    assert isinstance(ended, Ended) and ended.reason is FinishReason.REJECTED
    assert ended.fault is not None
    assert ended.fault.field == {"pool": "max_tokens", "width": "beam_width"}[what]


def test_no_more_is_fetched_at_one_time_than_the_config_says() -> None:
    bench = Fetching(max_handoffs=1)
    assert bench.place("a", PROMPT, POOL) and not bench.place("b", list(range(50, 60)), POOL)


def test_a_request_placed_again_ends_where_it_was_and_the_same_placement_is_said_once() -> None:
    """Guards against two lives of one request, and one that a repeated message takes twice."""
    bench = Fetching()
    assert bench.place("a", PROMPT, HERE)
    assert not bench.place("a", PROMPT, HERE), "told nothing: it is under way"
    first = bench.request("a")
    assert bench.place("a", PROMPT, HERE, placement=2)
    ended = bench.last(Ended)
    assert isinstance(ended, Ended) and (ended.placement, ended.reason) == (1, FinishReason.CANCELLED)
    assert first.lease.released and bench.request("a") is not first


def test_samples_are_as_old_as_the_first_of_their_group() -> None:
    """Guards the order of preemption: a late sample of an old prompt gives way to nobody younger than its first."""
    bench = Fetching()
    for name, group in (("a0", "a"), ("b", ""), ("a1", "a")):
        assert bench.place(name, PROMPT, group=group)
    ages = {name: bench.request(name).age for name in ("a0", "b", "a1")}
    assert ages == {"a0": (1, 1), "b": (2, 2), "a1": (1, 3)}
