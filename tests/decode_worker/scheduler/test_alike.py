"""Prompts that begin alike are computed once here too: who waits, for how long, and what becomes of them."""

import random

import pytest

from decode_worker.scheduler.alike import _shared_blocks
from decode_worker.scheduler.request import RequestState
from engine.kv.groups import LayerGroup
from engine.messages import Cancel, Ended
from engine.step import StepPlan
from engine.types import FinishReason, RequestId
from tests.decode_worker.scheduler.bench import Fetching

SHARED = list(range(500, 520))


def chunks(plan: StepPlan | None) -> dict[str, tuple[int, int]]:
    return {} if plan is None else {row.request: (row.start, row.end) for row in plan.rows}


def test_a_burst_of_one_cold_beginning_computes_it_once() -> None:
    """Guards a cluster without prefill workers against computing the same system prompt for every request of a
    burst."""
    bench = Fetching(blocks=64, local_chunk_tokens=8)
    for name, own in (("a", 1), ("b", 2), ("c", 3)):
        assert bench.place(name, SHARED + [own] * 4)
    assert [chunks(bench.step()) for _ in range(2)] == [{"a": (0, 8)}, {"a": (8, 16)}]
    # 20 tokens are shared, five blocks; behind them each computes its own.
    assert chunks(bench.step()) == {"a": (16, 24)}
    assert chunks(bench.step()) == {"a": (24, 25), "b": (20, 24), "c": (20, 24)}
    batch = bench.scheduler.batch
    assert (batch.prefilled_tokens, batch.alike.saved_tokens) == (24 + 4 + 4, 40)
    assert bench.request("b").origin.prefill_cached_tokens == 20
    blocks = [bench.request(name).lease.blocks[:5] for name in "abc"]
    assert blocks[0] == blocks[1] == blocks[2], "held once"


def test_who_waits_goes_on_as_soon_as_the_other_is_past_what_they_share() -> None:
    """Guards a short prompt against waiting for all of a long one that begins like it."""
    bench = Fetching(blocks=64, local_chunk_tokens=8)
    bench.place("long", SHARED[:8] + [1] * 40)
    bench.place("short", SHARED[:8] + [2] * 3)
    assert chunks(bench.step()) == {"long": (0, 8)}
    assert "short" in chunks(bench.step())
    assert bench.request("short").prefill.local_from == 8


@pytest.mark.parametrize("groups", [(), (LayerGroup((0,)), LayerGroup((1,), 5))], ids=["alike", "grouped"])
def test_the_line_goes_on_when_the_first_is_cancelled(groups: tuple[LayerGroup, ...]) -> None:
    """Guards those that wait for one that is gone; what it had computed by then is not computed again."""
    bench = Fetching(blocks=64, local_chunk_tokens=8, groups=groups)
    for name in "abc":
        bench.place(name, [*SHARED, ord(name)])
    bench.step()
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert chunks(bench.step()) == {"b": (8, 16)}, "and the third waits for the second now"
    bench.step()
    assert chunks(bench.step()) == {"b": (21, 22), "c": (20, 21)}


def test_who_waits_in_line_is_in_the_queue() -> None:
    """Guards the table of stages: a prompt whose turn has not come wants another worker, not a quicker one."""
    bench = Fetching(blocks=64, local_chunk_tokens=8)
    bench.place("a", [1] * 32, max_tokens=1)
    bench.place("b", [2] * 32, max_tokens=1)
    while len(bench.of(Ended)) < 2:
        bench.step()
    first, second = (end.stats.stages for end in bench.of(Ended) if isinstance(end, Ended))
    assert second["prefill_queue"] >= first["prefill_run"] > 0 and second["prefill_run"] <= first["prefill_run"] + 1


def test_a_worker_takes_so_many_prompts_and_no_more() -> None:
    """Guards the router's line: prompts that wait here can go nowhere else, and come before those of other tenants."""
    bench = Fetching(blocks=400, max_handoffs=2, local_chunk_tokens=8)
    taken = [bench.place(f"r{number}", [number] * 8) for number in range(5)]
    assert taken == [True, True, False, False, False]
    for _ in range(4):
        bench.step()
    assert bench.place("later", [9] * 8)


def test_nothing_is_shared_between_tenants_or_in_the_middle_of_a_block() -> None:
    bench = Fetching(blocks=64, local_chunk_tokens=8)
    bench.place("a", SHARED)
    bench.place("other", SHARED, namespace=b"t")
    bench.place("part", SHARED[:3] + [1] * 9)
    plan = bench.step()
    assert not bench.scheduler.batch.alike._waits
    assert chunks(plan).keys() <= {"a", "other", "part"}
    bench.place("whole", SHARED)
    assert [r.record.request for r in bench.scheduler.batch.alike._waits] == ["whole"]
    assert bench.scheduler.batch.alike.missing_tokens(bench.request("whole")) == 4, "its last block"


def test_who_comes_late_takes_over_what_is_computed_by_then() -> None:
    """Guards against a second computation of what is only not in the cache yet, as its prompt goes on."""
    bench = Fetching(blocks=64, local_chunk_tokens=8)
    bench.place("a", SHARED + [1] * 40)
    bench.step()
    bench.place("b", SHARED[:8] + [2] * 4)
    assert chunks(bench.step()) == {"a": (8, 12), "b": (8, 12)}


def test_a_block_that_has_been_begun_is_not_given_away() -> None:
    """Guards the copy that a sample's first block may still await: its target would be somebody else's by then."""
    bench = Fetching(blocks=64, local_chunk_tokens=8)
    bench.place("a", SHARED)
    bench.place("b", [1, *SHARED])
    batch, request = bench.scheduler.batch, bench.request("b")
    request.tokens = list(bench.request("a").tokens)
    assert batch.alike._first(request, batch.local[:1]) is not None
    request.known = 2
    assert batch.alike._first(request, batch.local[:1]) is None


def test_of_several_that_begin_alike_the_one_with_most_is_waited_for() -> None:
    """Guards what two share beyond a third: it would be computed twice. Who wants log probabilities of its prompt
    computes all of it, and so waits for nobody."""
    bench = Fetching(blocks=64, local_chunk_tokens=8)
    bench.place("most", SHARED + [1] * 4)
    bench.place("less", SHARED[:8] + [2] * 4, prompt_logprobs=1)
    bench.place("c", SHARED + [3] * 4)
    alike = bench.scheduler.batch.alike
    assert {r.record.request: first.record.request for r, (first, _) in alike._waits.items()} == {"c": "most"}
    assert alike.missing_tokens(bench.request("c")) == 4


@pytest.mark.parametrize("size", [1, 4])
def test_as_many_whole_blocks_are_shared_as_are_the_same_but_for_our_last_token(size: int) -> None:
    """Guards the search by halves, at every length and every place where two prompts part."""
    for ours in range(1, 14):
        for theirs in range(1, 14):
            for same in range(min(ours, theirs) + 1):
                mine, other = [1] * ours, [1] * same + [2] * (theirs - same)
                shared = min(same, ours - 1) // size
                for known in range(4):
                    expected = shared if shared > known else 0
                    assert _shared_blocks(mine, other, known, size) == expected, (ours, theirs, same, known)


def test_no_order_of_events_leaves_anybody_waiting() -> None:
    """Guards against a request that waits for one that waits, or for one that was preempted, or has ended."""
    for seed in range(60):
        rng = random.Random(seed)
        sizes = {"local_chunk_tokens": rng.choice((4, 8)), "max_batch": rng.choice((2, 8))}
        bench = Fetching(blocks=24, growth_tokens=4, **sizes)
        placed: list[str] = []
        for number in range(40):
            name, act = f"r{number}", rng.random()
            if act < 0.4:
                prompt = SHARED[: rng.choice((0, 4, 8, 20))] + [rng.randrange(1, 3) for _ in range(rng.randrange(1, 9))]
                if bench.place(name, prompt, max_tokens=rng.randrange(1, 20)):
                    placed.append(name)
            elif act < 0.5 and placed:
                bench.router(Cancel(RequestId(rng.choice(placed)), 1, FinishReason.CANCELLED))
            else:
                bench.step()
        for _ in range(400):
            bench.step()
        ended = {record.request for record in bench.told if isinstance(record, Ended)}
        assert ended == set(placed), seed
        assert bench.scheduler.is_idle


def test_what_the_check_finds() -> None:
    bench = Fetching(blocks=64, local_chunk_tokens=8)
    bench.place("a", SHARED)
    bench.place("b", SHARED)
    batch = bench.scheduler.batch
    assert bench.request("b").state is RequestState.LOCAL
    batch.local.remove(bench.request("a"))
    try:
        batch.alike.check(batch.local)
    except AssertionError:
        return
    raise AssertionError("it waits for one that is not computed")


def test_who_leaves_ends_the_wait_of_its_own_and_of_nobody_else() -> None:
    """Guards two bursts: those that wait for the second prompt would compute it again when the first is gone."""
    bench = Fetching(blocks=96, local_chunk_tokens=8)
    other = [token + 100 for token in SHARED]
    for name, prompt in (("a", SHARED), ("x", other), ("b", SHARED), ("y", other)):
        assert bench.place(name, [*prompt, ord(name)])
    waits = bench.scheduler.batch.alike._waits
    assert {r.record.request: first.record.request for r, (first, _) in waits.items()} == {"b": "a", "y": "x"}
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert {r.record.request: shared for r, (_, shared) in waits.items()} == {"b": 0, "y": 20}
    assert "y" not in chunks(bench.step())


def test_who_waited_in_vain_looks_for_another_to_wait_for() -> None:
    """Guards a burst whose first is cancelled before it has computed anything: all others would compute the same."""
    bench = Fetching(blocks=64, local_chunk_tokens=8)
    for name in "abc":
        assert bench.place(name, [*SHARED, ord(name)])
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert [chunks(bench.step()) for _ in range(2)] == [{"b": (0, 8)}, {"b": (8, 16)}]
    assert bench.scheduler.batch.alike.saved_tokens == 0
    bench.step()
    assert "c" in chunks(bench.step()) and bench.scheduler.batch.alike.saved_tokens == 20
