"""The leases of a search's hypotheses. Answers are compared with an undisturbed search in
tests/integration/test_beams_fake.py and with transformers in tests/parity/test_beams.py; a worker that dies behind
every step is tried in tests/sim/test_every_step.py."""

import pytest

from decode_worker.scheduler.request import Request
from decode_worker.scheduler.samples.beams import Beams
from engine.kv.groups import GONE, LayerGroup
from engine.kv.manager import KVCacheManager
from engine.types import BeamParams
from tests.decode_worker.scheduler.bench import Fetching

PROMPT = list(range(6))


def _search() -> tuple[Fetching, Beams, Request]:
    """A search of width 2 whose prompt of six tokens is here."""
    bench = Fetching()
    bench.place("a", PROMPT, max_tokens=4, beams=BeamParams(width=2, answers=2))
    request = bench.request("a")
    plan, _ = bench.scheduler.plan(0.0)
    assert plan is not None
    bench.scheduler.complete(plan, [1], 0.0)
    beams = bench.scheduler.batch.beams
    bench.scheduler.batch.fill(0.0)
    return bench, beams, request


def test_two_from_one_parent_share_its_blocks_and_the_second_copies_the_boundary() -> None:
    bench, beams, request = _search()
    assert len(list(beams.rows(request))) == 1, "the prompt's last token is computed again"
    assert beams.complete(request, ((50, -0.1), (60, -0.2), (70, -3.0), (80, -4.0))) is None
    assert [short for _, short in beams.wants(request)] == [0, 1], "a block of its own, for the boundary"
    for lease, short in beams.wants(request):
        bench.scheduler.kv.grow(lease, short)
    beams.prepare(request)
    first, second = list(beams.rows(request))
    assert (first.tokens[-1], second.tokens[-1]) == (50, 60)
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]
    assert beams.copies(request) == [(first.blocks[1], second.blocks[1])] and beams.forked == 1
    bench.scheduler.check()


def test_a_hypothesis_without_children_lets_its_blocks_go_and_a_dropped_search_all_but_one_lease() -> None:
    """Guards blocks that nobody would release: `request.lease` is that of the best hypothesis, whichever that is."""
    bench, beams, request = _search()
    list(beams.rows(request))
    beams.complete(request, ((50, -0.1), (60, -0.2), (70, -3.0), (80, -4.0)))
    for lease, short in beams.wants(request):
        bench.scheduler.kv.grow(lease, short)
    beams.prepare(request)
    first, second = (one.lease for one in beams._live[request].hypotheses)
    list(beams.rows(request))
    # Both that live on come from the second one.
    beams.complete(request, ((51, -9.0), (52, -9.1), (53, -9.2), (54, -9.3)))
    beams.complete(request, ((61, -0.1), (62, -0.2), (63, -3.0), (64, -4.0)))
    assert first.released and request.lease is second
    leases = [one.lease for one in beams._live[request].hypotheses]
    beams.drop(request)
    assert [lease.released for lease in leases] == [False, True]


def _draw(bench: Fetching, *gains: float) -> None:
    """Run a step of a search, with two tokens for each hypothesis that are better than its others."""
    plan, _ = bench.scheduler.plan(0.0)
    assert plan is not None and len(plan.rows) == len(gains)
    drawn = [((50, gain), (60, gain - 0.1), (70, gain - 3.0), (80, gain - 4.0)) for gain in gains]
    bench.scheduler.complete(plan, drawn, 0.0)
    bench.scheduler.check()


def _one_by_one(monkeypatch: pytest.MonkeyPatch, length: int) -> int:
    """Return how many blocks are taken or let go one by one in steps whose hypotheses all come from the second one."""
    bench, counted = Fetching(256, local_chunk_tokens=256), list[object]()
    assert bench.place("a", list(range(length)), max_tokens=8, beams=BeamParams(width=2, answers=2))
    bench.complete(bench.plan(), 1)
    live, kv = bench.scheduler.batch.beams._live, bench.scheduler.kv
    retain, let_go = kv.pool.retain, kv._let_go
    monkeypatch.setattr(kv.pool, "retain", lambda block: (counted.append(block), retain(block)))
    monkeypatch.setattr(kv, "_let_go", lambda block: (counted.append(block), let_go(block)))
    _draw(bench, -0.1)
    request = bench.request("a")
    for _ in range(3):
        before = [one.tokens for one in live[request].hypotheses]
        _draw(bench, -9.0, -0.1)
        after = [one.tokens for one in live[request].hypotheses]
        assert after[0] is before[1] and after[1] is not before[0], "the first child goes on in its parent's list"
    assert request.tokens == list(range(length))
    return len(counted)


def test_what_hypotheses_share_is_held_and_let_go_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the steps of a search behind a long prompt, which each fork and each end would go through."""
    assert _one_by_one(monkeypatch, 202) == _one_by_one(monkeypatch, 6) > 0


@pytest.mark.parametrize("size", [1, 4])
def test_each_row_has_a_block_of_every_window_to_write_to(size: int) -> None:
    """Guards the row of a hypothesis' newest token where it begins a block, as each does in blocks of one token."""
    bench = Fetching(96, groups=(LayerGroup((0,)), LayerGroup((1,), 5)), local_chunk_tokens=8)
    kv = KVCacheManager(96, size, "m", None, bench.scheduler.kv.groups, ahead_tokens=8)
    assert bench.place("a", PROMPT, max_tokens=9, beams=BeamParams(width=2, answers=2))
    beams, request = Beams(kv, frozenset()), bench.request("a")
    lease = kv.acquire(b"", PROMPT, match_limit=0, room_tokens=len(PROMPT), grow_tokens=20)
    assert lease is not None
    request.lease = lease
    kv.reach(lease, 0, len(PROMPT))
    beams.begin(request)
    for step in range(4):
        for one, short in beams.wants(request):
            assert kv.grow(one, short)
        beams.prepare(request)
        rows = list(beams.rows(request))
        assert len(rows) == (2 if step else 1)
        for row in rows:
            assert row.windows[0][row.start // size] != GONE, (step, row.start)
        for at, _ in enumerate(rows):
            drawn = tuple((50 + 10 * step + 4 * at + n, -0.1 * (n + 1)) for n in range(4))
            assert beams.complete(request, drawn) is None
