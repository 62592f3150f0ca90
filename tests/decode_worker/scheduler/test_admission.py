"""Who is taken, with how much room, and who is told no. What becomes of a request whose room was too little is tried in
tests/integration/test_preemption_fake.py; orders of arrival, with faults, in tests/sim."""

import msgspec
import pytest

from decode_worker.scheduler.request import RequestState
from engine.messages import Accepted, Cancel, Ended, PeerAddress, Place, Refused
from engine.types import BeamParams, FinishReason, RequestId
from tests.decode_worker.scheduler.bench import HERE, POOL, Fetching, record_of

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


def test_who_says_no_says_what_it_has() -> None:
    """Guards the router's belief: a prompt that was taken to be here until its worker said otherwise was offered again
    with every report."""
    bench = Fetching(6, growth_tokens=4)
    assert bench.place("a", PROMPT, POOL, max_tokens=10)
    for cached_tokens in (0, 8):
        assert not bench.place("b", [*PROMPT[:9], *range(50, 54)], POOL)
        refused = bench.last(Refused)
        assert isinstance(refused, Refused) and refused.cached_tokens == cached_tokens
        if not cached_tokens:
            handoff = bench.asked().handoff
            bench.land(handoff)
            bench.name_token(handoff)


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
    bench.router(Cancel(RequestId("a0"), 1, FinishReason.CANCELLED))
    for name, group in (("a2", "a"), ("c", "c")):
        assert bench.place(name, PROMPT, group=group)
    assert bench.request("a2").age == (1, 4), "the first is gone, and the second is as old as it was"
    assert bench.request("c").age == (5, 5)


def _rejected(bench: Fetching, prompt: list[int], **more: object) -> str:
    """Return the field for which a request is rejected; nothing if it is taken."""
    if bench.place("x", prompt, **more):  # type: ignore[arg-type]
        return ""
    ended = bench.last(Ended)
    assert isinstance(ended, Ended) and ended.fault is not None
    return ended.fault.field


@pytest.mark.parametrize(
    ("blocks", "prompt_tokens", "max_tokens", "width", "field"),
    [
        (4, 8, 8, None, ""),
        (3, 8, 8, None, "max_tokens"),
        (80, 100, 156, None, ""),
        (80, 100, 157, None, "max_tokens"),
        # One block of eight prompt tokens is shared for certain: the last token's row is each hypothesis' own.
        (7, 8, 8, 2, ""),
        (6, 8, 8, 2, "max_tokens"),
        (6, 9, 7, 2, ""),
        (5, 9, 7, 2, "max_tokens"),
    ],
)
def test_what_just_fits_the_pool_and_the_context_is_taken(
    blocks: int, prompt_tokens: int, max_tokens: int, width: int | None, field: str
) -> None:
    """Guards the borders: one block more would be promised and never found, one less is refused for nothing."""
    beams = None if width is None else BeamParams(width=width, answers=1)
    bench = Fetching(blocks, max_batch=2)
    assert _rejected(bench, [1] * prompt_tokens, max_tokens=max_tokens, beams=beams) == field


def test_a_record_that_is_unsound_is_rejected_for_what_is_wrong() -> None:
    assert _rejected(Fetching(), [1000]) == "token_ids", "the vocabulary has 1000"


@pytest.mark.parametrize(
    ("prompt_tokens", "growth_tokens", "max_tokens", "held", "promised"),
    [
        (10, 6, 100, 3, 1),
        (10, 7, 100, 3, 2),
        (8, 6, 100, 2, 2),
        (9, 7, 100, 3, 1),
        (10, 6, 2, 3, 0),
        (10, 1, 100, 3, 1),
    ],
)
def test_room_is_counted_to_the_token(
    prompt_tokens: int, growth_tokens: int, max_tokens: int, held: int, promised: int
) -> None:
    """Guards what is promised: for a lease, and in the answer to the router where there is no room for one."""
    bench = Fetching(growth_tokens=growth_tokens)
    assert bench.place("a", [1] * prompt_tokens, max_tokens=max_tokens)
    lease = bench.request("a").lease
    assert (len(lease.blocks), lease.promised) == (held, promised)
    assert bench.scheduler.kv.grow(lease, bench.scheduler.kv.available)
    assert not bench.place("b", [2] * prompt_tokens, max_tokens=max_tokens)
    refused = bench.last(Refused)
    assert isinstance(refused, Refused) and refused.blocks_needed == held + promised


@pytest.mark.parametrize(("growth_tokens", "promised"), [(6, 2), (7, 3)])
def test_a_fork_is_promised_what_it_does_not_share(growth_tokens: int, promised: int) -> None:
    """Two of the three blocks of ten tokens are shared, the third is its own."""
    bench = Fetching(growth_tokens=growth_tokens)
    for name, parent in (("a", None), ("b", "a")):
        assert bench.place(name, PROMPT, POOL, max_tokens=100, fork_of=parent)
    assert bench.request("b").lease.promised == promised
    accepted = bench.last(Accepted)
    assert isinstance(accepted, Accepted) and accepted.cached_tokens == 9
    assert bench.request("b").origin.decode_cached_tokens == 9


@pytest.mark.parametrize(("length", "cached_tokens"), [(8, 4), (9, 8), (10, 8)])
def test_what_is_cached_is_found_again_but_for_the_last_token(length: int, cached_tokens: int) -> None:
    """Guards the account that the client gets, and the first token: it is drawn from a row that is computed."""
    bench = Fetching()
    assert bench.place("a", PROMPT, max_tokens=1)
    bench.step()
    assert bench.place("b", PROMPT[:length])
    accepted = bench.last(Accepted)
    assert isinstance(accepted, Accepted) and accepted.cached_tokens == cached_tokens
    request = bench.request("b")
    assert (request.origin.decode_cached_tokens, request.have_blocks) == (cached_tokens, cached_tokens // 4)


def test_a_prompt_that_is_scored_is_computed_whole() -> None:
    """Guards log probabilities of a prompt: what is found in the cache would have none."""
    bench = Fetching()
    assert bench.place("a", PROMPT, max_tokens=1)
    bench.step()
    assert bench.place("b", PROMPT, prompt_logprobs=1)
    accepted = bench.last(Accepted)
    assert isinstance(accepted, Accepted) and accepted.cached_tokens == 0


def test_cached_tokens_of_an_answer_that_goes_on_are_those_of_its_prompt() -> None:
    """Guards the account: output that another worker had computed was never a part of the prompt."""
    bench = Fetching()
    assert bench.place("a", PROMPT[:6], max_tokens=6)
    while bench.step():
        pass
    record = msgspec.structs.replace(record_of("b", [*PROMPT[:6], 1, 2, 3, 4]), prompt_tokens=6)
    bench.router(Place(record=record, placement=1, prefill=PeerAddress("", "")))
    accepted = bench.last(Accepted)
    assert isinstance(accepted, Accepted) and accepted.cached_tokens == 8
    assert bench.request("b").origin.decode_cached_tokens == 6
    assert bench.request("b").origin.prefill_cached_tokens == 0, "nor is any of it prefilled for the first time"


def test_who_was_preempted_is_nobodys_parent() -> None:
    """Guards a sample that waits for a prompt whose blocks were taken away, while it comes before it in the line."""
    bench = Fetching()
    assert bench.place("a", PROMPT, max_tokens=20)
    bench.step()
    bench.scheduler.preemption.preempt([bench.request("a")], bench.now)
    assert bench.place("b", PROMPT, max_tokens=20, fork_of="a", priority=1)
    assert bench.request("b").state is RequestState.LOCAL
    assert not bench.scheduler.prefills.forks.waiting(bench.request("a"))


def test_a_tenants_share_of_the_cache_comes_with_its_requests() -> None:
    """Guards a tenant whose cache others would flush: it has the most of all, and half of the blocks are its own."""
    bench = Fetching(8)
    mine = list(range(14))
    assert bench.place("a", mine, namespace=b"t", cache_share=0.5, max_tokens=1)
    bench.step()
    for number in range(4):
        assert bench.place(f"b{number}", [50 + number] * 6, max_tokens=1, namespace=b"%d" % number)
        bench.step()
    assert bench.scheduler.kv.matched_tokens(b"t", mine, 14) == 14
