"""Where a named conversation goes on, whose names are whose, and what becomes of a pin when its workers go."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import SESSIONS_TOLD, Fault, Orphan, Place, Refused, SessionTold, TenantsTold
from engine.types import FinishReason, Incarnation, RequestId, RequestRecord
from router.config import RouterConfig
from router.core import core, sessions
from router.core.core import Router
from router.core.decisions import Decision, RecordedPolicy, RepeatablePolicy
from router.core.events import Command, Lost, Owned, Submit, TellWorker, Tick
from router.core.sessions import FURTHEST, Pin, Session, Sessions
from tests.router.bench import Bench, ended, is_told
from tests.router.fake_cluster import load

HERE = Pin(None, ("d0", Incarnation(1)))
THERE = Pin(("p0", Incarnation(1)), ("d1", Incarnation(1)))


def named(tenant: str, name: str) -> Session:
    return Session(tenant.encode().ljust(16) + name.encode().ljust(16))


def test_one_tenants_names_are_not_anothers() -> None:
    known = Sessions(60.0)
    known.note(named("a", "chat"), HERE, 0.0)
    known.note(named("b", "chat"), THERE, 0.0)
    assert known.find(named("a", "chat"), 1.0) == HERE and known.find(named("b", "chat"), 1.0) == THERE
    assert known.find(named("c", "chat"), 1.0) is None and known.find(None, 1.0) is None
    assert len(known) == 2


def test_a_session_is_forgotten_when_it_is_not_used() -> None:
    known = Sessions(60.0)
    known.note(named("a", "old"), HERE, 0.0)
    known.note(named("a", "used"), HERE, 0.0)
    known.note(named("a", "used"), THERE, 50.0)
    assert known.find(named("a", "old"), 59.9) == HERE and known.find(named("a", "used"), 70.0) == THERE
    assert known.find(named("a", "old"), 60.0) is None and len(known) == 1
    known.note(named("b", "new"), HERE, 200.0)
    assert len(known) == 1, "what nobody asks for goes as others come"


def test_who_names_many_drives_out_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards one tenant's pins, and the table's size, against another that names a new session each time."""
    monkeypatch.setattr(sessions, "MAX_PER_TENANT", 3)
    known = Sessions(60.0)
    known.note(named("small", "chat"), HERE, 0.0)
    for number in range(100):
        known.note(named("flood", str(number)), THERE, 1.0)
    assert known.find(named("small", "chat"), 2.0) == HERE and len(known) == 4
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 5)
    for number in range(100):
        known.note(named(f"t{number}", "chat"), THERE, 3.0)
    assert len(known) == 5 and repr(known) == "Sessions(5 of 5 tenants)"


def test_what_goes_first_was_used_longest_ago_and_not_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a long conversation against many short ones: of one tenant, and of all of them."""
    monkeypatch.setattr(sessions, "MAX_PER_TENANT", 3)
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 5)
    known = Sessions(60.0)
    for number in range(20):
        known.note(named("a", "long"), HERE, 1.0)
        known.note(named("a", f"short {number}"), THERE, 1.0)
        assert known.find(named("a", "long"), 1.0) == HERE
        known.note(named(f"tenant {number}", "chat"), THERE, 1.0)
    assert known.find(named("a", "long"), 2.0) == HERE and known.find(named("a", "short 17"), 2.0) is None
    assert known.find(named("tenant 19", "chat"), 2.0) == THERE and known.find(named("tenant 17", "chat"), 2.0) is None
    known.note(named("b", "long"), HERE, 100.0)
    known.note(named("b", "long"), HERE, 100.0)
    assert len(known) == 3, "with each, one that is past its time"


@given(st.integers(0, 10**6))
def test_who_has_heard_the_same_words_has_the_same_pins(seed: int) -> None:
    """Guards several routers against two opinions of where a conversation is, whichever order the words came in, and
    however often; and the later of two turns that a router has seen against the earlier one."""
    lots, routers = Random(seed), [Sessions(60.0, life) for life in (5, 5, 900)]
    words = list[tuple[Session, Pin, int]]()
    for _ in range(12):
        at, name = lots.randrange(3), named("a", lots.choice("xy"))
        prefill, decode = (Incarnation(lots.randint(1, 3)) for _ in "pd")
        pin = Pin(lots.choice([None, ("p0", prefill)]), ("d0", decode))
        words.append((name, pin, routers[at].note(name, pin, 0.0)))
        assert routers[at].find(name, 0.0) == pin, "a turn that is taken here is the latest that is known here"
        if lots.random() < 0.5:
            session, told, turn = lots.choice(words)
            routers[lots.randrange(3)].told(session, told, turn, 0.0)
    for router in routers:
        for session, told, turn in lots.sample(words, len(words)):
            router.told(session, told, turn, 0.0)
    for name in (named("a", "x"), named("a", "y")):
        assert len({router.find(name, 0.0) for router in routers}) == 1


def test_what_no_router_would_say_of_a_session_changes_nothing() -> None:
    """Guards the table's memory against names of any length, its times against none at all, and the wire against a
    number that it cannot hold."""
    known = Sessions(60.0, 7)
    chat = named("a", "b")
    for session, turn in ((Session(b"long" * 9), 1), (Session(b""), 1), (chat, 8 + FURTHEST), (chat, -1)):
        known.told(session, HERE, turn, 0.0)
    known.told(chat, Pin(("p" * 257, Incarnation(1)), HERE.decode), 1, 0.0)
    for never in (float("nan"), float("-inf")):
        known.told(chat, HERE, 1, never)
    assert len(known) == 0 and known.note(chat, HERE, 0.0) == 8
    known.told(named("a", "c"), HERE, 8 + FURTHEST, 0.0)
    assert len(known) == 2, "so far ahead a router may be"


def test_what_is_told_of_long_ago_drives_out_nothing_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the pins of a router with no room for more, which one that has begun beside it tells what it has
    heard."""
    monkeypatch.setattr(sessions, "MAX_PER_TENANT", 2)
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    known = Sessions(60.0)
    known.note(named("a", "old"), HERE, 30.0)
    known.note(named("a", "new"), HERE, 50.0)
    known.told(named("a", "older"), THERE, 9, 29.0)
    assert known.find(named("a", "old"), 51.0) == HERE and known.find(named("a", "older"), 51.0) is None
    known.told(named("a", "newer"), THERE, 9, 31.0)
    assert known.find(named("a", "old"), 51.0) is None and known.find(named("a", "newer"), 51.0) == THERE
    known.told(named("b", "chat"), THERE, 9, 1.0)
    known.told(named("c", "chat"), THERE, 9, 49.0)
    assert known.find(named("b", "chat"), 51.0) == THERE and known.find(named("c", "chat"), 51.0) is None
    known.told(named("c", "chat"), THERE, 9, 50.0)
    assert known.find(named("c", "chat"), 51.0) == THERE and len(known) == 3


@pytest.mark.parametrize("policy", ["least-cost", "round-robin", "power-of-two"])
def test_decisions_about_sessions_and_ejected_workers_are_repeated_bit_for_bit(policy: str) -> None:
    """Guards the log of decisions: all that a pin and an ejection decide is in the views of each record."""
    seen = list[Decision]()
    talk = Conversation(decodes=0, prefills=0)
    talk.bench.router = Router(RouterConfig(), RecordedPolicy(policy, 7, [seen.append]))
    for number in range(4):
        talk.bench.join(f"d{number}", "decode", 1, 512)
        talk.bench.join(f"p{number}", "prefill", 1, 512)
    homes = {session: talk.ask(session)[1] for session in ("one", "two", "three")}
    for session in ("one", "two", "three"):
        assert talk.ask(session)[1:] == (homes[session], "session")
    for _ in range(3):
        talk.ask("one")
        broken = ended(RequestId(f"r{talk.asked}"), 1, FinishReason.ERROR, Fault("INTERNAL", ""))
        talk.bench.hear(broken, homes["one"])
    assert talk.bench.router.registry.ejections.is_ejected((homes["one"], Incarnation(1)))
    assert talk.ask("one")[1] != homes["one"]
    assert {len(decision.decodes) for decision in seen} == {1, 3, 4}, "a pin, an ejected worker, and neither"
    again = RepeatablePolicy(policy, 0)
    for decision in seen:
        again.resume(decision.before)
        assert again.choose(decision.demand, decision.prefills, decision.decodes) == decision.choice


def said(commands: list[Command]) -> list[tuple[str, SessionTold]]:
    found = [c for c in commands if isinstance(c, TellWorker)]
    return [(c.worker, c.record) for c in found if isinstance(c.record, SessionTold)]


@pytest.mark.parametrize("how", ["told", "lost", "of a worker that is gone here", "of another life"])
def test_another_router_goes_on_where_this_one_was(how: str) -> None:
    """Guards the pin of a client whose turns reach several routers."""
    one, two = (Conversation(decodes=3, prefills=3, blocks=512) for _ in "ab")
    one.ask(session="")
    prefill, decode, _ = one.ask()
    assert prefill != "p0" and decode != "d0", "not what another one would choose first"
    ((worker, told),) = one.told
    assert worker == decode and told.prefill == prefill
    if how == "of a worker that is gone here":
        two.bench.do(Lost(decode))
    elif how == "of another life":
        two.bench.join(decode, "decode", 2, 512)
        two.bench.join(prefill, "prefill", 2, 512)
    if how != "lost":
        two.bench.hear(told, worker)
    assert two.ask(tenant="other")[2] == "load", "its own conversation of that name"
    where = two.ask()
    if how == "told":
        assert where == (prefill, decode, "session")
    elif how == "of another life":
        # What has the pin's name speaks for itself: the decode worker has taken that turn in this life.
        assert where[1:] == (decode, "session")
    else:
        assert where[2] == "load"
    # Wherever it is now, it is there for both: the last turn counts.
    one.bench.hear(two.told[-1][1], two.told[-1][0])
    assert one.ask() == (*where[:2], "session")


def test_a_worker_of_the_release_before_is_told_of_no_session() -> None:
    """Guards its stream: a record of a kind that it does not know ends it."""
    talk = Conversation(blocks=512)
    worker = talk.bench.router.registry.get("d0")
    assert worker is not None
    worker.info = msgspec.structs.replace(worker.info, protocol=SESSIONS_TOLD - 1)
    talk.ask()
    assert not talk.told and talk.ask()[2] == "session"


def test_a_router_that_begins_is_told_where_conversations_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards conversations of a router that is started again beside others, by parts, for as long as they have left,
    and once."""
    monkeypatch.setattr(core, "PINS_AT_ONCE", 2)
    one, two = (Conversation(decodes=3, prefills=3, blocks=512, session_s=60) for _ in "ab")
    homes = {name: one.ask(name)[:2] for name in ("x", "y", "z")}
    one.bench.now = 50.0
    for worker in ("p0", "p1", "p2", "d0", "d1", "d2"):
        one.bench.hear(load(2), worker)
    begun = TenantsTold(1, {}, "router-1", Incarnation(9))
    assert not said(one.bench.hear(begun))
    words = [said(one.bench.do(Tick())) for _ in range(3)]
    assert [len(some) for some in words] == [2, 1, 0]
    one.bench.hear(TenantsTold(2, {}, "router-1", Incarnation(9)))
    assert not said(one.bench.do(Tick())), "it has been told"
    for worker, told in (word for some in words for word in some):
        assert told.age_s == 50.0
        two.bench.hear(told, worker)
    assert {name: two.ask(name) for name in ("x", "y")} == {name: (*homes[name], "session") for name in ("x", "y")}
    two.bench.now = 10.0
    for worker in ("p0", "p1", "p2", "d0", "d1", "d2"):
        two.bench.hear(load(3), worker)
    assert two.ask("z")[2] == "load", "its time was over when it had not been used for so long, anywhere"


def test_what_is_taken_over_notes_its_session() -> None:
    """Guards a conversation whose router died: its next turn went by price. Others have heard of that turn, and may
    have taken a later one."""
    chat = named("t", "chat")
    for known in (None, THERE):
        talk = Conversation(decodes=2, prefills=2, blocks=512)
        if known is not None:
            talk.bench.hear(SessionTold(chat, 1, *known.prefill or ()), known.decode[0])
        adopt(talk, "p1", "d1")
        assert not said(talk.bench.do(Owned(RequestId("old"), "t", 1.0, chat)))
        assert talk.ask() == (("p1", "d1", "session") if known is None else ("p0", "d1", "session"))
        assert not said(talk.bench.do(Owned(RequestId("unknown"), "t", 1.0, chat)))
    talk = Conversation(decodes=2, prefills=2, blocks=512)
    adopt(talk, "p1", "d1")
    talk.bench.do(Owned(RequestId("old"), "t", 1.0, chat))
    talk.bench.hear(SessionTold(chat, 1, "p0", Incarnation(1)), "d0")
    assert talk.ask() == ("p0", "d0", "session"), "what is said of it counts more"


def test_nothing_is_noted_of_a_reader_that_is_not_known_yet() -> None:
    """Guards a conversation against being read by its decode worker, there and at all other routers, since the stream
    to its prefill worker came up later."""
    talk = Conversation(decodes=2, prefills=0, blocks=512)
    adopt(talk, "p1", "d1")
    talk.bench.do(Owned(RequestId("old"), "t", 1.0, named("t", "chat")))
    assert len(talk.bench.router._sessions) == 0


def adopt(talk: "Conversation", prefill: str, decode: str) -> None:
    """Let a decode worker tell of a request of an earlier router, which `prefill` has read."""
    record = RequestRecord(request=RequestId("old"), tokens=[7] * 40, prompt_tokens=40, max_tokens=8, seed=1)
    talk.bench.hear(Orphan(record=record, placement=1, prefill=prefill, tokens=[], age_s=1.0), decode)


class Conversation:
    """A bench whose prompts share nothing, so that only a pin leads anywhere."""

    def __init__(self, **bench: int) -> None:
        self.bench = Bench(**bench)  # type: ignore[arg-type]
        self.asked = 0
        self.told: list[tuple[str, SessionTold]] = []
        """What other routers are told, and by way of whom."""

    def ask(self, session: str = "chat", tenant: str = "t", tokens: int = 40) -> tuple[str, str, str]:
        """Ask, and be accepted: prefill worker, decode worker, and why."""
        self.asked += 1
        (place,) = self.submit(session, tenant, tokens)
        assert isinstance(place, TellWorker) and isinstance(place.record, Place)
        self.told += said(self.bench.accept(place.record.record.request, place.record.placement, place.worker))
        return place.record.prefill.name, place.worker, place.reason

    def submit(self, session: str = "chat", tenant: str = "t", tokens: int = 40) -> list[Command]:
        request = RequestId(f"r{self.asked}")
        ids = [self.asked] * tokens
        record = RequestRecord(request=request, tokens=ids, prompt_tokens=tokens, max_tokens=8, seed=1)
        return self.bench.do(Submit(record, tenant=tenant, session=named(tenant, session) if session else None))

    def end(self, number: int) -> None:
        call = self.bench.router._calls[RequestId(f"r{number}")]
        self.bench.hear(ended(RequestId(f"r{number}"), call.placement), call.decode)


def test_a_conversation_goes_on_with_the_pair_that_served_it() -> None:
    talk = Conversation(decodes=3, prefills=3, blocks=512)
    prefill, decode, reason = talk.ask()
    assert reason == "load"
    assert [talk.ask() for _ in range(6)] == [(prefill, decode, "session")] * 6, "whatever the load there"
    others = [talk.ask(tenant="other") for _ in range(1)] + [talk.ask(session="") for _ in range(3)]
    assert all(reason == "load" for *_, reason in others) and decode not in {where for _, where, _ in others}


def test_without_room_it_goes_elsewhere_and_stays_there() -> None:
    """Guards the line: a pin that waited for room would hold up everybody behind it."""
    talk = Conversation(decodes=2, blocks=8)
    _, first, _ = talk.ask()
    assert talk.ask()[1] == first, "two fit"
    _, second, reason = talk.ask(tokens=60)
    assert second != first and reason == "load"
    talk.end(1)
    assert talk.ask()[1:] == (second, "session"), "there is room again where it was first, but it has moved"


def test_a_pin_ends_with_its_worker() -> None:
    talk = Conversation(decodes=2, prefills=2, blocks=512)
    prefill, decode, _ = talk.ask()
    talk.end(1)
    talk.bench.do(Lost(prefill))
    other, again, reason = talk.ask()
    assert other != prefill and (again, reason) == (decode, "session"), "the half that is there"
    talk.end(2)
    talk.bench.do(Lost(decode))
    _, elsewhere, reason = talk.ask()
    assert elsewhere != decode and reason == "load"
    talk.bench.join(decode, "decode", 2, 512)
    assert talk.ask()[1:] == (elsewhere, "session")
    talk.end(3)


def test_the_same_process_is_found_again_and_a_new_one_is_not() -> None:
    for life, reason in ((1, "session"), (2, "load")):
        talk = Conversation(decodes=2, blocks=512)
        _, decode, _ = talk.ask()
        talk.end(1)
        talk.bench.do(Lost(decode))
        talk.bench.join(decode, "decode", life, 512)
        assert talk.ask()[2] == reason


def test_a_worker_that_refused_or_leaves_is_not_waited_for() -> None:
    talk = Conversation(decodes=2, blocks=512)
    _, decode, _ = talk.ask()
    talk.asked += 1
    (place,) = talk.submit()
    assert is_told(place, Place)
    out = talk.bench.hear(Refused(RequestId("r2"), 1, 9), decode)
    (again,) = [command for command in out if is_told(command, Place)]
    assert getattr(again, "worker", "") != decode
    talk.bench.hear(load(1, leaving=True), decode)
    assert talk.ask(session="")[1] != decode and talk.ask()[1] != decode
