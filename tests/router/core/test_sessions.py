"""Where a named conversation goes on, whose names are whose, and what becomes of a pin when its workers go."""

import pytest

from engine.messages import Fault, Place, Refused
from engine.types import FinishReason, Incarnation, RequestId, RequestRecord
from router.config import RouterConfig
from router.core import sessions
from router.core.core import Router
from router.core.decisions import Decision, RecordedPolicy, RepeatablePolicy
from router.core.events import Command, Lost, Submit, TellWorker
from router.core.sessions import Pin, Sessions
from tests.router.bench import Bench, ended, is_told
from tests.router.fake_cluster import load

HERE = Pin(None, ("d0", Incarnation(1)))
THERE = Pin(("p0", Incarnation(1)), ("d1", Incarnation(1)))


def test_one_tenants_names_are_not_anothers() -> None:
    known = Sessions(60.0)
    known.note(("a", "chat"), HERE, 0.0)
    known.note(("b", "chat"), THERE, 0.0)
    assert known.find(("a", "chat"), 1.0) == HERE and known.find(("b", "chat"), 1.0) == THERE
    assert known.find(("c", "chat"), 1.0) is None and known.find(None, 1.0) is None
    known.note(None, HERE, 1.0)
    assert len(known) == 2


def test_a_session_is_forgotten_when_it_is_not_used() -> None:
    known = Sessions(60.0)
    known.note(("a", "old"), HERE, 0.0)
    known.note(("a", "used"), HERE, 0.0)
    known.note(("a", "used"), THERE, 50.0)
    assert known.find(("a", "old"), 59.9) == HERE and known.find(("a", "used"), 70.0) == THERE
    assert known.find(("a", "old"), 60.0) is None and len(known) == 1
    known.note(("b", "new"), HERE, 200.0)
    assert len(known) == 1, "what nobody asks for goes as others come"


def test_who_names_many_drives_out_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards one tenant's pins, and the table's size, against another that names a new session each time."""
    monkeypatch.setattr(sessions, "MAX_PER_TENANT", 3)
    known = Sessions(60.0)
    known.note(("small", "chat"), HERE, 0.0)
    for number in range(100):
        known.note(("flood", str(number)), THERE, 1.0)
    assert known.find(("small", "chat"), 2.0) == HERE and len(known) == 4
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 5)
    for number in range(100):
        known.note((f"t{number}", "chat"), THERE, 3.0)
    assert len(known) == 5 and repr(known) == "Sessions(5 of 5 tenants)"


def test_what_goes_first_was_used_longest_ago_and_not_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a long conversation against many short ones: of one tenant, and of all of them."""
    monkeypatch.setattr(sessions, "MAX_PER_TENANT", 3)
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 5)
    known = Sessions(60.0)
    for number in range(20):
        known.note(("a", "long"), HERE, 1.0)
        known.note(("a", f"short {number}"), THERE, 1.0)
        assert known.find(("a", "long"), 1.0) == HERE
        known.note((f"tenant {number}", "chat"), THERE, 1.0)
    assert known.find(("a", "long"), 2.0) == HERE and known.find(("a", "short 17"), 2.0) is None
    assert known.find(("tenant 19", "chat"), 2.0) == THERE and known.find(("tenant 17", "chat"), 2.0) is None
    known.note(("b", "long"), HERE, 100.0)
    known.note(("b", "long"), HERE, 100.0)
    assert len(known) == 3, "with each, one that is past its time"


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


class Conversation:
    """A bench whose prompts share nothing, so that only a pin leads anywhere."""

    def __init__(self, **bench: int) -> None:
        self.bench = Bench(**bench)  # type: ignore[arg-type]
        self.asked = 0

    def ask(self, session: str = "chat", tenant: str = "t", tokens: int = 40) -> tuple[str, str, str]:
        """Ask, and be accepted: prefill worker, decode worker, and why."""
        self.asked += 1
        (place,) = self.submit(session, tenant, tokens)
        assert isinstance(place, TellWorker) and isinstance(place.record, Place)
        self.bench.accept(place.record.record.request, place.record.placement, place.worker)
        return place.record.prefill.name, place.worker, place.reason

    def submit(self, session: str = "chat", tenant: str = "t", tokens: int = 40) -> list[Command]:
        request = RequestId(f"r{self.asked}")
        ids = [self.asked] * tokens
        record = RequestRecord(request=request, tokens=ids, prompt_tokens=tokens, max_tokens=8, seed=1)
        return self.bench.do(Submit(record, tenant=tenant, session=(tenant, session) if session else None))

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
