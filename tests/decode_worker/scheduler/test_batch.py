"""What a step holds: rows, chunks, and who waits for either. Beam rows are tried in test_beams.py, what the rows
compute in tests/integration/test_colocated_fake.py, and every order of events in tests/sim."""

from tests.decode_worker.scheduler.bench import Fetching


def _prompt(number: int, length: int = 8) -> list[int]:
    return list(range(100 * number, 100 * number + length))


def test_a_step_has_rows_for_so_many_and_the_others_wait_in_their_order() -> None:
    bench = Fetching(max_batch=2)
    for number, name in enumerate("abc", 1):
        assert bench.place(name, _prompt(number))
    bench.step()
    batch = bench.scheduler.batch
    assert [r.record.request for r in batch.local] == ["c"], "the first two are prefilled"
    for _ in range(2):
        bench.step()
        assert [r.record.request for r in batch.running] == ["a", "b"]
    assert [r.record.request for r in batch.ready] == ["c"], "prefilled beside them, as a step always has room for one"


def test_prompts_that_are_computed_here_share_a_budget_beside_the_running() -> None:
    """Guards inter-token latency: a long prompt computed at once would hold up who is decoding."""
    bench = Fetching(local_chunk_tokens=6)
    bench.place("a", _prompt(1, 4))
    bench.step()
    bench.place("b", _prompt(2, 20))
    sizes = []
    for _ in range(4):
        plan = bench.step()
        assert plan is not None
        sizes.append({row.request: row.end - row.start for row in plan.rows})
    assert sizes == [{"a": 1, "b": 6}, {"a": 1, "b": 6}, {"a": 1, "b": 6}, {"a": 1, "b": 2}]
    assert bench.scheduler.batch.prefilled_tokens == 24


def test_who_has_no_block_for_its_next_token_has_no_row() -> None:
    """Guards against a step that writes beyond its blocks: the row comes back with the room."""
    bench = Fetching(5, growth_tokens=4, preemption="recompute")
    bench.place("a", _prompt(1, 7), max_tokens=9)
    bench.step()
    lease = bench.scheduler.kv.acquire(b"", [], match_limit=0, room_tokens=8)
    assert lease is not None and not bench.scheduler.kv.available
    while (plan := bench.step()) is not None:
        assert len(plan.rows) == 1
    assert len(bench.request("a").tokens) == 13, "twelve rows are in three blocks, a thirteenth is not"
    bench.scheduler.kv.release(lease)
    plan = bench.step()
    assert plan is not None and plan.rows[0].end == 13
