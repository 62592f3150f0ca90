"""Requests that have ended for their clients while their blocks are still on the way. What ends by a lost router is
tried in test_orphans.py, who takes the place of an ended parent in test_forks.py, ends at every moment in tests/sim and
tests/integration/test_swap_ends.py."""

import pytest

from decode_worker.scheduler import endings
from decode_worker.scheduler.events import FromPeer, PeerDown, PeerUp, RouterLost
from engine.messages import Cancel, Ended, Fault, FirstToken, Handoff, PeerAddress, Place, PrefillFailed, Stop, Tokens
from engine.types import FinishReason, RequestId, RequestRecord, TokenLogprobs
from tests.decode_worker.scheduler.bench import HERE, POOL, Fetching, P
from tests.decode_worker.scheduler.leaving.test_departures import LINK, ME, PROMPT, SOURCE, A, Bench


def test_blocks_of_an_answer_that_has_ended_are_not_waited_for_beyond_its_deadline() -> None:
    """Guards reserved blocks whose sender is silent for ever: the request is over, nobody looks at its time."""
    bench = Bench()
    record = RequestRecord(
        request=A,
        tokens=list(PROMPT),
        prompt_tokens=len(PROMPT),
        max_tokens=1,
        seed=0,
        remaining_s=3.0,
    )
    address = PeerAddress("prefill-0", "p:1")
    bench.tell(PeerUp(SOURCE, address, "shm", 4))
    bench.router(Place(record=record, placement=1, prefill=address))
    handoff = Handoff(A, 1, 0, ME, SOURCE)
    bench.tell(
        FromPeer(
            SOURCE,
            FirstToken(handoff=handoff, token=5, chunks=1, queue_s=0.0, run_s=0.0, cached_tokens=0),
        )
    )
    assert bench.of(Ended) and bench.pool["reserved"] > 0
    bench.step()
    bench.step()
    assert bench.pool["reserved"] > 0 and not bench.of(Stop), "given up before its time"
    bench.step()
    assert bench.of(Stop) == [Stop(handoff)]
    assert "reserved" not in bench.pool and bench.scheduler.is_idle


def test_tokens_that_were_forced_have_no_log_probabilities() -> None:
    """Guards a client's list: of a run some tokens were drawn, with theirs, and the rest come without."""
    bench = Fetching()
    assert bench.place("a", [1, 2, 3], max_tokens=20, logprobs=1, context=b"x")
    bench.step()
    request = bench.request("a")
    drawn = TokenLogprobs(50, -0.5, ())
    before = len(request.logprobs)
    bench._do(bench.scheduler.endings.follow(request, [drawn, 51, 52], 1.0))
    told = bench.last(Tokens)
    assert isinstance(told, Tokens) and told.ids == [50, 51, 52] and told.logprobs == [drawn]
    assert len(request.logprobs) == before + 1


def _five(monkeypatch: pytest.MonkeyPatch, blocks: int = 64, **config: object) -> Fetching:
    """Five requests of three blocks each that run, of which a turn lets one go."""
    monkeypatch.setattr(endings, "MAX_FREED_BLOCKS", 1)
    bench = Fetching(blocks, growth_tokens=4, **config)
    for at, name in enumerate("abcde"):
        assert bench.place(name, list(range(20 * at, 20 * at + 10)), max_tokens=40)
    bench.step()
    bench.step()
    return bench


def test_of_many_that_end_at_once_the_blocks_go_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards all streams against the turn in which a router goes to which many long requests belong: they end at once,
    and have no row in the next step."""
    bench = _five(monkeypatch)
    held = bench.pool["active"]
    bench.tell(RouterLost(LINK))
    assert len(bench.of(Ended)) == 5 and not bench.scheduler._requests
    each = held // 5
    for left in (4, 3, 2, 1):
        assert bench.pool["active"] == left * each and not bench.scheduler.is_idle and bench.scheduler.has_put_off
        assert bench.step() is None
    assert "active" not in bench.pool and bench.scheduler.is_idle and not bench.scheduler.has_put_off
    assert bench.scheduler.kv.matched_tokens(b"", list(range(80, 90)), 10) == 10, "what was computed is cached"


def test_nobody_gives_way_while_blocks_of_the_ended_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards streams against being preempted for room that is about to be there: no more is let go than they want."""
    bench = _five(monkeypatch, blocks=21, preemption="recompute")
    for name in "cde":
        bench.router(Cancel(RequestId(name), 1, FinishReason.CANCELLED))
    assert bench.scheduler.has_put_off
    kv = bench.scheduler.kv
    taken = kv.promise(b"", kv.available)
    assert taken is not None and kv.available == 0
    monkeypatch.setattr(endings.Endings, "_let_go", lambda self, now: [])
    had = len(bench.scheduler.endings._ended)
    for _ in range(6):
        bench.step()
    assert had == 2 and not bench.scheduler.preemption.preempted
    assert len(bench.request("a").tokens) > 16, "both have grown"
    while bench.scheduler.endings._ended:
        bench.step()
    kv.release(taken)


def test_nobody_is_refused_while_blocks_of_the_ended_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the next request, which a router sends as soon as it hears of an end: it was refused, and the worker asked
    for nothing more until its next report."""
    bench = _five(monkeypatch, blocks=21)
    for name in "abcd":
        bench.router(Cancel(RequestId(name), 1, FinishReason.CANCELLED))
    assert len(bench.scheduler.endings._ended) == 3
    assert bench.scheduler.kv.available < bench.scheduler.kv.blocks_for(44)
    assert bench.place("f", list(range(200, 240)), max_tokens=4)
    bench.scheduler.check()


def test_whose_blocks_are_still_held_hears_no_more_of_its_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards blocks that would be let go twice: by what a peer says late, or by a time that is over."""
    bench = _five(monkeypatch)
    assert bench.place("x", list(range(200, 210)), POOL, max_tokens=1, remaining_s=5.0)
    handoff = bench.asked().handoff
    bench.name_token(handoff)
    for name in "ab":
        bench.router(Cancel(RequestId(name), 1, FinishReason.CANCELLED))
    bench.land(handoff)
    ended = bench.scheduler.endings._ended
    assert [r.record.request for r in ended] == ["b", "x"]
    monkeypatch.setattr(endings.Endings, "_let_go", lambda self, now: [])
    bench.tell(FromPeer(P, PrefillFailed(handoff, Fault("UNAVAILABLE", "late"))))
    bench.now = 10.0
    bench.step()
    bench.tell(PeerDown(POOL, P, "gone"))
    assert [r.record.request for r in ended] == ["b", "x"]
    monkeypatch.undo()
    bench.step()
    bench.step()
    assert not ended


def test_who_waits_for_a_prompt_begins_when_its_parent_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a sample whose parent has ended in a turn with many others: it takes that one's place a little later."""
    bench = _five(monkeypatch)
    assert bench.place("x", list(range(200, 210)), POOL)
    assert bench.place("y", list(range(200, 210)), POOL, fork_of="x")
    for name in "abx":
        bench.router(Cancel(RequestId(name), 1, FinishReason.CANCELLED))
    assert bench.asked().handoff.request == "x"
    bench.step()
    bench.step()
    assert bench.asked().handoff.request == "y" and bench.scheduler.prefills.forks.inherited == 1
    assert bench.place("z", [7, 8], HERE)
