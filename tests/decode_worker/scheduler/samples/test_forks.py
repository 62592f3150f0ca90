"""Samples of one prompt: who waits for whom, what is promised, and who takes the place of a parent that is gone. With a
device in tests/integration/test_samples_fake.py, and with every fault in tests/sim."""

import msgspec
import pytest

from decode_worker.scheduler.events import PeerDown, RouterLost
from decode_worker.scheduler.request import RequestState
from decode_worker.scheduler.samples import forks as forks_module
from engine.messages import Cancel, Ended, NeedPrefill, Place, UsePrefill, Yield, Yielded
from engine.types import FinishReason, RequestId
from tests.decode_worker.scheduler.bench import HERE, POOL, Fetching, P, record_of
from tests.decode_worker.scheduler.leaving.test_departures import LINK
from transfer.handoff.commands import Leave

PROMPT = list(range(10))


def _three() -> Fetching:
    """A prompt of ten tokens that is being fetched, and two more samples of it."""
    bench = Fetching()
    assert bench.place("a", PROMPT, POOL, group="g")
    assert bench.place("b", PROMPT, POOL, fork_of="a", group="g")
    assert bench.place("c", PROMPT, POOL, fork_of="b", group="g")
    return bench


def test_forks_wait_for_the_prompt_and_share_its_whole_blocks() -> None:
    """Guards the prompt's single journey, and the copy of its boundary block."""
    bench = _three()
    forks = bench.scheduler.prefills.forks
    assert [r.record.request for r in forks.waiting(bench.request("a"))] == ["b", "c"]
    # Of ten prompt tokens and eight of its own, two whole blocks are shared.
    assert all(bench.request(n).lease.promised == 3 for n in "bc")
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    assert not forks.waiting(bench.request("a")) and forks.forked == 2
    blocks = [bench.request(n).lease.blocks for n in "abc"]
    assert blocks[0][:2] == blocks[1][:2] == blocks[2][:2]
    assert len({block[2] for block in blocks}) == 3
    assert all(bench.request(n).state is RequestState.LOCAL for n in "bc")
    plan = bench.step()
    assert plan is not None and [row.start for row in plan.rows] == [10, 9, 9]


def test_the_first_that_waits_takes_the_place_of_a_parent_that_is_gone() -> None:
    """Guards the others: they wait for the heir, in their order, and none for a request that is no more."""
    bench = _three()
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    forks = bench.scheduler.prefills.forks
    heir = bench.request("b")
    assert heir.state is RequestState.HANDOFF and bench.asked().handoff.request == "b"
    assert [r.record.request for r in forks.waiting(heir)] == ["c"] and forks.inherited == 1
    assert heir.lease.blocks and bench.request("c").state is RequestState.FORKING
    bench.router(Cancel(RequestId("b"), 1, FinishReason.CANCELLED))
    bench.router(Cancel(RequestId("c"), 1, FinishReason.CANCELLED))
    assert bench.pool == {"free": 32}, "nobody is left, and nothing is held"


def test_a_prompt_of_one_token_is_inherited_like_any() -> None:
    """Guards a fork that would be given the head of a lease whose blocks have not landed: it shares no token at all."""
    bench = Fetching()
    assert bench.place("a", [5], POOL) and bench.place("b", [5], POOL, fork_of="a")
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert bench.scheduler.prefills.forks.inherited == 1
    assert bench.request("b").state is RequestState.HANDOFF and bench.asked().handoff.request == "b"


def test_an_heir_has_no_more_of_its_prompt_cached_than_there_is() -> None:
    """Guards the account of a sample that goes on here with output of its own, which an older answer has too."""
    bench = Fetching()
    assert bench.place("z", PROMPT[:6], HERE, max_tokens=6)
    while bench.step() is not None:
        pass
    assert bench.place("a", PROMPT[:6], POOL)
    record = msgspec.structs.replace(record_of("b", [*PROMPT[:6], 1, 2, 3, 4]), prompt_tokens=6)
    bench.router(Place(record=record, placement=1, prefill=POOL, fork_of=RequestId("a")))
    heir = bench.request("b")
    assert heir.state is RequestState.FORKING
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert (heir.have_blocks, heir.origin.decode_cached_tokens) == (2, 6)


def test_a_sample_whose_parents_prompt_is_here_begins_at_once() -> None:
    """Guards a fork that would wait for a prompt that has long been there."""
    bench = Fetching()
    assert bench.place("a", PROMPT, HERE, max_tokens=20)
    bench.step()
    for state, name in ((RequestState.READY, "b"), (RequestState.RUNNING, "c")):
        assert bench.request("a").state is state
        assert bench.place(name, PROMPT, POOL, fork_of="a", max_tokens=20)
        fork = bench.request(name)
        assert fork.state is RequestState.LOCAL and fork.known == 9
        bench.step()
    assert bench.request("c").origin.prefilled_by == "decode-0", "its last token was computed here"


def test_an_heir_begins_with_what_is_cached_by_then() -> None:
    """Guards the account, and blocks that would be fetched though they are here: an older answer has the prompt's."""
    bench = Fetching(local_chunk_tokens=4)
    assert bench.place("a", PROMPT, POOL) and bench.place("b", PROMPT, POOL, fork_of="a")
    assert bench.place("z", [*PROMPT[:8], 99, 98], HERE, max_tokens=1)
    while "z" in bench.scheduler._requests:
        bench.step()
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    heir = bench.request("b")
    assert (heir.have_blocks, heir.origin.decode_cached_tokens) == (2, 8)
    assert bench.asked().have_tokens == 8 and heir.prefill.asked_tokens == 2


def test_an_heir_without_room_stands_in_line_with_those_that_wait_for_it() -> None:
    """Guards a fork whose promise is less than a whole prompt's room: others took the parent's before it."""
    bench = Fetching(10, growth_tokens=4, preemption="recompute")
    bench.place("a", PROMPT, POOL)
    for name in "bc":
        assert bench.place(name, PROMPT, POOL, fork_of="a")
    parent, kv = bench.request("a"), bench.scheduler.kv
    taken: list[object] = []
    release = kv.release

    def taking(lease: object) -> None:
        release(lease)  # type: ignore[arg-type]
        if not taken and lease is parent.lease:
            taken.append(kv.promise(b"", kv.available))

    kv.release = taking  # type: ignore[method-assign, assignment]
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert taken
    assert [r.record.request for r in bench.scheduler.preemption.line] == ["b", "c"]
    assert dict(bench.scheduler.preemption.preempted) == {"forking": 2}
    assert not bench.scheduler.prefills.forks.waiting(bench.request("b"))


def test_forks_of_a_parent_that_ends_with_its_prompt_share_before_it_is_gone() -> None:
    """Guards a prompt that would be computed again: its parent's only token was the last."""
    bench = Fetching()
    assert bench.place("a", PROMPT, POOL, max_tokens=1) and bench.place("b", PROMPT, POOL, fork_of="a", max_tokens=1)
    handoff = bench.asked().handoff
    bench.name_token(handoff)
    assert "a" not in bench.scheduler._requests
    bench.land(handoff)
    fork = bench.request("b")
    assert fork.state is RequestState.LOCAL and fork.known == 9
    assert bench.scheduler.prefills.forks.inherited == 0


def test_forks_wait_with_a_parent_that_is_prefilled_elsewhere_or_here() -> None:
    """Guards both ways on of a parent whose worker is lost: its forks begin when its prompt is here, however."""
    bench = _three()
    bench.tell(PeerDown(POOL, P, "gone"))
    assert bench.of(NeedPrefill)
    bench.router(UsePrefill(RequestId("a"), 1, None))
    assert bench.request("a").state is RequestState.LOCAL
    assert all(bench.request(name).state is RequestState.FORKING for name in "bc")
    bench.step()
    assert all(bench.request(name).state is RequestState.LOCAL for name in "bc")
    assert bench.request("b").origin.prefill_cached_tokens == 9
    assert bench.request("b").have_blocks == 2


def test_who_cannot_share_is_a_request_like_any() -> None:
    """Guards tenants, and the room that a fork takes over from its parent."""
    bench = Fetching()
    assert bench.place("a", PROMPT, POOL)
    for name, prompt, more in (
        ("b", PROMPT, {"namespace": b"other"}),
        ("c", [*PROMPT[:9], 77], {}),
        ("d", PROMPT, {"max_tokens": 9}),
        ("e", PROMPT[:8], {}),
    ):
        assert bench.place(name, prompt, POOL, fork_of="a", **more)
        assert bench.request(name).state is RequestState.HANDOFF


def test_a_fork_waits_for_its_own_parent() -> None:
    """Guards two prompts that are waited for at the same time."""
    bench = _three()
    other = list(range(50, 60))
    assert bench.place("x", other, POOL) and bench.place("y", other, POOL, fork_of="x")
    waiting = bench.scheduler.prefills.forks.waiting
    assert [r.record.request for r in waiting(bench.request("x"))] == ["y"]
    assert [r.record.request for r in waiting(bench.request("a"))] == ["b", "c"]


@pytest.mark.parametrize(("chunk", "recovered", "shared"), [(8, False, 0), (9, False, 1), (9, True, 0), (10, True, 2)])
def test_forks_of_a_parent_that_is_cut_short_share_what_is_computed_if_it_is_all(
    chunk: int, recovered: bool, shared: int
) -> None:
    """Guards wrong tokens: a fork that shares a row which nobody has computed. Of ten prompt tokens a new sample shares
    nine, one that goes on with output of its own all ten."""
    bench = Fetching(local_chunk_tokens=chunk)
    assert bench.place("a", PROMPT, HERE) and bench.place("b", PROMPT, HERE, fork_of="a")
    if recovered:
        record = msgspec.structs.replace(record_of("c", [*PROMPT, 70, 71]), prompt_tokens=10)
        bench.router(Place(record=record, placement=1, prefill=HERE, fork_of=RequestId("a")))
        assert bench.request("c").state is RequestState.FORKING
    bench.step()
    parent = bench.request("a")
    if chunk == 10:
        assert bench.request("c").origin.prefill_cached_tokens == 0, "its prompt was prefilled before"
    else:
        assert parent.known == chunk
        bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    forks = bench.scheduler.prefills.forks
    assert (forks.forked, forks.inherited) == (shared, int(not shared))


def test_a_row_that_is_still_to_be_computed_is_not_indexed_for_a_fork() -> None:
    """Guards wrong tokens: the parent's newest token fills a block, and its row comes with the next step."""
    bench = Fetching()
    prompt = list(range(11))
    assert bench.place("a", prompt, HERE)
    bench.step()
    parent = bench.request("a")
    assert len(parent.tokens) == 12 and parent.known == 11
    assert bench.place("b", prompt, HERE, fork_of="a")
    assert bench.request("b").state is RequestState.LOCAL
    assert bench.scheduler.kv.matched_tokens(b"", parent.tokens, 12) == 8


def _many(monkeypatch: pytest.MonkeyPatch, samples: int = 5, max_tokens: int = 20, **config: object) -> Fetching:
    """Samples of one prompt that is here, of which one begins in each turn: the second one has."""
    monkeypatch.setattr(forks_module, "MAX_FORKED_BLOCKS", 1)
    bench = Fetching(128, **config)  # type: ignore[arg-type]
    assert bench.place("a", PROMPT, HERE, max_tokens=max_tokens, group="g")
    for name in "bcdefgh"[: samples - 1]:
        assert bench.place(name, PROMPT, HERE, fork_of="a", max_tokens=max_tokens, group="g")
    bench.step()
    return bench


def _waiting(bench: Fetching) -> str:
    return "".join(name for name, r in sorted(bench.scheduler._requests.items()) if r.state is RequestState.FORKING)


def test_of_many_samples_a_few_begin_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards all streams against the turn in which a long prompt is here that many samples wait for. A late one begins
    with its prompt, whatever its parent has written behind that meanwhile."""
    bench = _many(monkeypatch)
    forks = bench.scheduler.prefills.forks
    assert _waiting(bench) == "cde" and forks.forked == 1 and bench.scheduler.has_put_off
    assert bench.place("f", PROMPT, HERE, fork_of="a", max_tokens=20)
    for left in ("def", "ef", "f", ""):
        bench.step()
        assert _waiting(bench) == left
    assert forks.forked == 5 and forks.inherited == 0 and not bench.scheduler.has_put_off
    parent, last = bench.request("a"), bench.request("f")
    assert len(parent.tokens) > 12, "it has filled the block that both begin in"
    assert last.lease.blocks[:2] == parent.lease.blocks[:2] and last.lease.blocks[2] != parent.lease.blocks[2]


def test_a_parent_that_ends_keeps_its_blocks_until_all_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards samples that would compute, or wait for, a prompt that is here."""
    bench = _many(monkeypatch)
    lease = bench.request("a").lease
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert "a" not in bench.scheduler._requests and not lease.released
    for left in ("de", "e", ""):
        assert not lease.released
        bench.step()
        assert _waiting(bench) == left
    forks = bench.scheduler.prefills.forks
    assert lease.released and forks.forked == 4 and forks.inherited == 0


def test_nothing_is_held_when_all_end_while_some_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _many(monkeypatch)
    bench.tell(RouterLost(LINK))
    assert bench.scheduler.is_idle and not bench.scheduler.has_put_off
    assert set(bench.pool) == {"free", "cached"}
    assert bench.scheduler.kv.available == 128


def test_a_parent_departs_when_all_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards samples that would wait for a request that goes on elsewhere."""
    bench = _many(monkeypatch, samples=4)
    bench.tell(Leave(30.0))
    bench.router(Yield(RequestId("a"), 1))
    for left, has_left in (("d", False), ("", True)):
        bench.step()
        assert _waiting(bench) == left and bool(bench.of(Yielded)) == has_left


def test_samples_that_wait_give_way_with_a_parent_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards samples that would wait for a parent without blocks; all come back, and are answered."""
    bench = _many(monkeypatch, preemption="recompute")
    bench.step()
    assert bench.request("a").state is RequestState.RUNNING and _waiting(bench) == "de"
    assert bench.place("z", list(range(40, 46)), HERE, priority=1)
    preemption = bench.scheduler.preemption
    victims = preemption.victims(bench.request("z"))
    assert sorted(r.record.request for r in victims) == ["a", "b", "c", "d", "e"]
    preemption.preempt(victims, bench.now)
    assert not bench.scheduler.has_put_off
    bench.scheduler.check()
    for _ in range(40):
        bench.step()
    assert bench.scheduler.is_idle and len(bench.of(Ended)) == 6


def test_who_gives_way_itself_takes_those_along_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a sample of higher priority than its parent: nobody stands behind that one."""
    monkeypatch.setattr(forks_module, "MAX_FORKED_BLOCKS", 1)
    bench = Fetching(64, preemption="recompute")
    assert bench.place("a", PROMPT, HERE, max_tokens=20)
    for name in "bc":
        assert bench.place(name, PROMPT, HERE, fork_of="a", max_tokens=20, priority=1)
    bench.step()
    assert _waiting(bench) == "c"
    parent = bench.request("a")
    assert [r.record.request for r in bench.scheduler.preemption.victims(parent)] == ["a", "c"]
