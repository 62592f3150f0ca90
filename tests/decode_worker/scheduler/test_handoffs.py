"""One handoff from the decode worker's side: what is kept of a failed attempt, when another is tried, and when none is.
Accounts of attempts are tried in test_accounts.py, blocks of unequal sizes and what is dropped in
tests/transfer/test_drops.py, and every fault at every step in tests/sim."""

from typing import Any

import pytest

from decode_worker.scheduler import handoffs
from decode_worker.scheduler.events import ConnectPeer, FromPeer, PeerDown, PeerUp, RouterLost
from decode_worker.scheduler.handoffs import MAX_ATTEMPTS
from decode_worker.scheduler.request import RequestState
from engine.messages import (
    BlockOffer,
    Cancel,
    Ended,
    Fault,
    FirstToken,
    NeedPrefill,
    Offer,
    PeerAddress,
    PrefillFailed,
    StartPrefill,
    Stop,
    Tokens,
    UsePrefill,
)
from engine.types import BlockId, FinishReason, Incarnation, RequestId, TokenLogprobs
from tests.decode_worker.scheduler.bench import POOL, Fetching, P
from tests.decode_worker.scheduler.leaving.test_departures import LINK
from transfer.handoff.commands import Received

PROMPT = list(range(10))
VOCAB = 1000


def test_a_peer_is_reached_before_it_is_asked_and_asked_again_in_its_next_life() -> None:
    """Guards names: a handoff with the incarnation that is gone would be dropped by the new one for ever."""
    bench = Fetching()
    other = PeerAddress("prefill-9", "p:9")
    commands = []
    carried = bench._do
    bench._do = lambda some: (commands.extend(some), carried(some))[1]  # type: ignore[method-assign, func-returns-value]
    assert bench.place("a", PROMPT, other)
    assert commands[-1] == ConnectPeer(other)
    assert bench.request("a").state is RequestState.CONNECTING
    bench.tell(PeerUp(Incarnation(77), other, "tcp", 4))
    assert bench.asked().handoff.prefill == 77
    bench.tell(PeerDown(other, Incarnation(77), "gone"))
    assert bench.request("a").state is RequestState.ASKING


def test_the_next_attempt_asks_only_for_what_has_not_landed() -> None:
    """Guards work that is done: whole blocks that were verified are neither sent nor computed again."""
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    first = bench.asked()
    for at, error in ((0, ""), (1, "its bytes are others")):
        bench.tell(FromPeer(P, Offer(first.handoff, at, [BlockOffer(BlockId(at), 1, at, 4, 0)])))
        bench.tell(Received(first.handoff, at, error, 0.1, 0 if error else 1))
    again = bench.asked()
    assert (first.have_tokens, again.have_tokens) == (0, 4)
    assert (first.handoff.attempt, again.handoff.attempt) == (0, 1)
    assert bench.of(Stop) == [Stop(first.handoff)]


def test_a_named_token_is_history_of_the_next_attempt() -> None:
    """Guards against a token that is drawn twice: the client has it, so the next prompt includes it."""
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    handoff = bench.asked().handoff
    bench.name_token(handoff, token=42)
    bench.land(handoff, "its bytes are others")
    assert bench.asked().record.tokens == [*PROMPT, 42]
    again = bench.asked().handoff
    bench.land(again)
    bench.name_token(again, token=43)
    assert bench.request("a").tokens == [*PROMPT, 42, 43]


def test_after_so_many_attempts_another_worker_is_asked_for() -> None:
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    for _ in range(MAX_ATTEMPTS):
        assert not bench.of(NeedPrefill)
        bench.land(bench.asked().handoff, "its bytes are others")
    assert bench.of(NeedPrefill) and bench.request("a").state is RequestState.ASKING


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("UNAVAILABLE", None),
        ("INVALID_ARGUMENT", FinishReason.ERROR),
        ("DEADLINE_EXCEEDED", FinishReason.DEADLINE),
    ],
)
def test_what_any_worker_would_answer_ends_the_request(
    code: str, reason: FinishReason | None
) -> None:
    """Guards the pool: what all would refuse would be tried with each of them."""
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    bench.tell(FromPeer(P, PrefillFailed(bench.asked().handoff, Fault(code, "why"))))
    ended = bench.of(Ended)
    assert [one.reason for one in ended if isinstance(one, Ended)] == ([reason] if reason else [])
    assert bool(bench.of(NeedPrefill)) == (reason is None)
    assert bench.of(Stop), "whatever becomes of it, that worker is told that nobody reads"


@pytest.mark.parametrize(
    ("code", "was_full"), [("RESOURCE_EXHAUSTED", True), ("OUT_OF_RANGE", True), ("UNAVAILABLE", False)]
)
def test_a_worker_with_a_full_line_or_a_small_pool_is_not_blamed(code: str, was_full: bool) -> None:
    """Guards a healthy worker against being ejected for its load or its size, and the router against a sick one that is
    taken for a busy one; and a prompt that others can read against being refused for the size of one pool."""
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    bench.tell(FromPeer(P, PrefillFailed(bench.asked().handoff, Fault(code, "why"))))
    (asked,) = bench.of(NeedPrefill)
    assert isinstance(asked, NeedPrefill) and (asked.failed, asked.was_full) == (POOL.name, was_full)


def test_late_words_of_a_handoff_change_nothing_and_are_counted() -> None:
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    handoff = bench.asked().handoff
    bench.name_token(handoff)
    bench.name_token(handoff)
    bench.land(handoff)
    bench.name_token(handoff)
    bench.tell(FromPeer(P, PrefillFailed(handoff, Fault("UNAVAILABLE", "late"))))
    assert bench.request("a").tokens == [*PROMPT, 9]
    assert dict(bench.scheduler.prefills.handoffs.dropped) == {
        "first token: duplicate": 1,
        "first token: unknown handoff": 1,
        "prefill failed: unknown handoff": 1,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": -5},
        {"token": VOCAB},
        {"more": [9, 1 << 32]},
        {"logprobs": TokenLogprobs(9, -0.5, ((9, -0.5), (1 << 32, -2.0)))},
        {"prompt_logprobs": [TokenLogprobs(-1, -0.5)]},
        {"cached_tokens": -1},
        {"cached_tokens": len(PROMPT) + 1},
        {"queue_s": -0.1},
        {"run_s": float("nan")},
        {"run_s": float("inf")},
    ],
    ids=str,
)
def test_who_names_a_first_token_that_cannot_be_has_failed(wrong: dict[str, Any]) -> None:
    """Guards the engine from a token that no step can look up, and all accounts from one that is no number: the request
    goes on with another worker."""
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    handoff = bench.asked().handoff
    sound = {"token": VOCAB - 1, "chunks": 1, "queue_s": 0.0, "run_s": 0.0, "cached_tokens": len(PROMPT)}
    bench.tell(FromPeer(P, FirstToken(handoff=handoff, **{**sound, **wrong})))
    assert bench.of(NeedPrefill) and not bench.of(Tokens)
    assert bench.request("a").tokens == PROMPT
    assert bench.scheduler.prefills.handoffs.dropped == {"first token: impossible": 1}
    bench.router(UsePrefill(RequestId("a"), 1, POOL))
    bench.tell(FromPeer(P, FirstToken(handoff=bench.asked().handoff, **sound)))
    assert bench.request("a").tokens == [*PROMPT, VOCAB - 1]


def test_what_was_forced_behind_a_first_token_is_computed_before_it_counts() -> None:
    """Guards an answer that goes on from what nobody has computed: of a first token and those that follow from it, only
    the prompt has landed."""
    bench = Fetching()
    bench.place("a", PROMPT, POOL)
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff, token=42, more=[43, 44])
    request = bench.request("a")
    assert request.tokens == [*PROMPT, 42, 43, 44] and request.known == len(PROMPT)
    plan = bench.step()
    assert plan is not None
    (row,) = plan.rows
    assert (row.start, row.end) == (len(PROMPT), len(PROMPT) + 3)


OTHER, Q = PeerAddress("prefill-9", "p:9"), Incarnation(77)


def _connecting(monkeypatch: pytest.MonkeyPatch, names: str) -> Fetching:
    """Prompts of three blocks each that wait for one peer, of which a turn begins two."""
    monkeypatch.setattr(handoffs, "MAX_BEGUN_BLOCKS", 4)
    bench = Fetching(64)
    for name in names:
        assert bench.place(name, PROMPT, OTHER)
    return bench


def _asked(bench: Fetching) -> str:
    return "".join(one.handoff.request for one in bench.of(StartPrefill) if isinstance(one, StartPrefill))


def test_of_those_that_wait_for_a_peer_a_few_begin_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards all streams against the turn in which a peer comes up that many long prompts wait for; and the last of
    those prompts: nothing more arrives."""
    bench = _connecting(monkeypatch, "abcde")
    bench.tell(PeerUp(Q, OTHER, "shm", 4))
    assert _asked(bench) == "ab" and bench.scheduler.has_put_off
    bench.router(Cancel(RequestId("c"), 1, FinishReason.CANCELLED))
    bench.step()
    assert _asked(bench) == "abde" and not bench.scheduler.has_put_off
    bench.step()
    assert _asked(bench) == "abde"


def test_a_turn_begins_as_many_however_many_peers_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _connecting(monkeypatch, "ab")
    for name in "cd":
        assert bench.place(name, PROMPT, PeerAddress("prefill-8", "p:8"))
    bench.tell(PeerUp(Q, OTHER, "shm", 4))
    bench.tell(PeerUp(Incarnation(78), PeerAddress("prefill-8", "p:8"), "shm", 4))
    assert _asked(bench) == "ab"
    bench.step()
    assert _asked(bench) == "abcd"


def test_who_was_put_off_is_asked_about_when_the_peer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a prompt that would wait for ever: its peer has been reached, and is gone before it was begun. The loss
    names one of the addresses by which that peer was known."""
    alias = PeerAddress("prefill-9", "p:99")
    bench = _connecting(monkeypatch, "abc")
    assert bench.place("d", PROMPT, alias)
    bench.tell(PeerUp(Q, OTHER, "shm", 4))
    bench.tell(PeerUp(Q, alias, "shm", 4))
    bench.tell(PeerDown(OTHER, Q, "gone"))
    assert [bench.request(name).state for name in "abcd"] == [RequestState.ASKING] * 4
    assert not bench.scheduler.has_put_off


def test_who_was_put_off_goes_on_with_the_next_life_of_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _connecting(monkeypatch, "abc")
    bench.tell(PeerUp(Q, OTHER, "shm", 4))
    bench.tell(PeerUp(Incarnation(79), OTHER, "shm", 4))
    bench.tell(PeerDown(OTHER, Q, "an older life"))
    assert [bench.request(name).state for name in "abc"] == [RequestState.HANDOFF] * 2 + [RequestState.CONNECTING]
    bench.step()
    assert bench.asked().handoff.request == "c" and bench.asked().handoff.prefill == 79


def test_who_was_put_off_ends_with_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _connecting(monkeypatch, "abcd")
    bench.tell(PeerUp(Q, OTHER, "shm", 4))
    bench.tell(RouterLost(LINK))
    assert bench.scheduler.is_idle and bench.pool == {"free": 64}
