"""The losses alone: what becomes of every request that a lost worker had, and who is blamed for it.

Tried elsewhere too: through the core in test_recovery.py and test_escalation.py, in any order in test_core_machine.py,
by crashes, cuts and freezes in the simulator (tests/sim) and on real processes (tests/chaos).
"""

import pytest

from engine.messages import RequestStats
from engine.types import FinishReason, Incarnation
from router.core import losses
from router.core.call import Call, Death, State
from router.core.escalation import Verdict
from router.core.events import Command, Complete, Condemn, DecodeLost, Fail, Poisonous
from router.core.losses import poisonous
from tests.router.core.parts import STOP_ID, Parts, request_record

D0 = ("d0", Incarnation(1))


def cluster(**config: object) -> Parts:
    """A decode worker and a prefill worker."""
    parts = Parts(**config)
    for name in ("d0", "p0"):
        parts.join(name)
    return parts


def lose(parts: Parts, name: str = "d0") -> list[Command]:
    parts.take()
    parts.losses.lost(name, 0.0, parts.out)
    parts.queue.check()
    parts.table.check()
    return parts.take()


def test_a_running_request_goes_on_behind_its_tokens() -> None:
    parts = cluster()
    call = parts.run("a", 7, 8)
    assert lose(parts) == [DecodeLost(call.record.request, "d0", 2)]
    assert call.state is State.WAITING and call.record.tokens == [*range(40), 7, 8]
    assert (call.losses, call.unheard, list(call.victims)) == (1, 0, [D0])
    assert parts.registry.get("d0") is None and lose(parts) == [], "it is told twice"


def test_an_offer_that_was_lost_unheard_is_no_blame() -> None:
    """Guards innocent requests of a router that was frozen itself: each broken stream takes one offer with it."""
    parts = cluster()
    call = parts.offer("a")
    assert lose(parts) == []
    assert (call.state, call.losses, call.unheard, call.victims) == (State.WAITING, 0, 1, {})
    assert call.missing == {D0: Death(0.0, "its stream broke", 1, 0, was_accepted=False)}
    parts.losses.back(D0, parts.out)
    assert not call.missing and not call.victims, "it was the router"


def test_an_offer_to_another_worker_is_none_of_its_business() -> None:
    """Guards a request on its way to one worker against blame for another."""
    parts = cluster()
    call = parts.offer("a")
    parts.join("d1")
    assert lose(parts, "d1") == [] and call.state is State.OFFERED and not call.missing and not call.unheard


@pytest.mark.parametrize(("emitted", "reason"), [((7, STOP_ID), "stop"), ((7, 8, 9), "length")])
def test_a_complete_answer_is_complete(emitted: tuple[int, ...], reason: str) -> None:
    parts = cluster()
    parts.run("a", *emitted, max_tokens=3)
    (done,) = lose(parts)
    assert isinstance(done, Complete) and done.reason is FinishReason(reason)
    assert (done.stats.output_tokens, done.stats.decode_worker) == (len(emitted), "d0") and not parts.table.calls


def test_a_found_stop_string_is_an_end_and_an_answered_client_is_silence() -> None:
    parts = cluster()
    parts.run("a", 7, 8).move(State.FINISHING)
    parts.run("b", 7, 8).move(State.CLOSING)
    (done,) = lose(parts)
    assert isinstance(done, Complete) and (done.request, done.reason) == ("a", FinishReason.STOP)
    assert done.stats == RequestStats(prompt_tokens=40, output_tokens=2, prefill_worker="p0", decode_worker="d0")
    assert not parts.table.calls


def test_a_request_is_given_up_after_so_many() -> None:
    parts = cluster(max_placements=1)
    parts.run("a", 7)
    (failed,) = lose(parts)
    assert isinstance(failed, Fail) and (failed.fault.code, failed.outcome) == ("UNAVAILABLE", FinishReason.ERROR)
    assert not parts.table.calls


def test_a_second_victim_makes_it_poisonous() -> None:
    """Guards the pool, and names the lost workers to the operator before its client is told."""
    parts = cluster()
    call = parts.run("a", 7)
    call.victims["p9", Incarnation(4)] = Death(-2.5, "given up: silent", 1, 0)
    del call.emitted[:]
    named, failed = lose(parts)
    told = "p9 (given up: silent; after 0 tokens, alone), 2.5 s later d0 (its stream broke; after 0 tokens, alone)"
    assert named == Poisonous(call.record.request, told) == poisonous(call)
    assert isinstance(failed, Fail) and failed.fault.message.endswith(f"held this request: {told}")
    assert failed.fault.message.startswith("refused as poisonous: 2 workers")


def test_an_announced_end_costs_nothing() -> None:
    """Guards the budget and the patience for losses against workers that leave as they said."""
    parts = cluster(max_placements=1, retry_reserve=0)
    call = parts.run("a", 7)
    parts.report("d0", leaving=True)
    assert [type(command) for command in lose(parts)] == [DecodeLost]
    assert (call.state, call.losses, call.victims) == (State.WAITING, 0, {})


def test_a_life_that_is_back_is_no_victim() -> None:
    """Guards a request against blame for a cut that is only seen when it is mended."""
    parts = cluster()
    call = parts.run("a", 7)
    parts.losses.lost("d0", 0.0, parts.out, back=D0)
    assert call.state is State.WAITING and call.losses == 1 and not call.victims


def test_who_was_held_back_for_a_life_that_is_back_is_offered_at_once() -> None:
    """Guards a request against the seconds that it would wait for news which has come."""
    parts = cluster()
    parts.join("d1")
    call = parts.offer("a")
    for _ in (0, 1):
        lose(parts, call.decode)
        parts.queue.advance(0.0, parts.out)
    assert call.state is State.WAITING and call.held_back_until_s is not None
    parts.losses.back(next(iter(call.missing)), parts.out)
    assert call.held_back_until_s is None and len(call.missing) == 1


def test_a_lost_prefill_worker_is_blamed_on_those_it_failed() -> None:
    """Guards the prefill pool against a prompt that kills it, and a request against a loss that did not concern it."""
    parts = cluster()
    struck, spared = parts.run("a"), parts.run("b")
    life = parts.registry.get("p0")
    assert life is not None
    struck.failed_prefills[life.life] = True
    assert lose(parts, "p0") == []
    assert list(struck.victims) == [life.life] and not spared.victims
    assert struck.state is State.RUNNING, "its decode worker asks for another one"


@pytest.mark.parametrize("case", ["its line was full", "another one has read the prompt"])
def test_who_did_not_ail_a_prefill_worker_is_not_blamed_when_that_is_lost(case: str) -> None:
    """Guards a request that decodes for long against the end, an hour later, of a worker that never had its prompt, or
    had it in vain: with its decode worker's it was refused as poisonous."""
    parts = cluster()
    call = parts.run("a", 7)
    life = parts.registry.get("p0")
    assert life is not None
    call.failed_prefills[life.life] = case != "its line was full"
    call.is_prefilled = case == "another one has read the prompt"
    assert lose(parts, "p0") == [] and not call.victims


def test_the_kv_that_it_kept_is_gone() -> None:
    """Guards a request that moves: its next placement must not be told to read from a dead worker."""
    parts = cluster()
    parts.join("d1")
    calls: list[Call] = []
    for name, source in (("a", "d0"), ("b", "d1")):
        worker = parts.registry.get(source)
        assert worker is not None
        calls.append(parts.wait(name))
        calls[-1].source = worker.life
        parts.table.moves(calls[-1])
    lose(parts)
    assert [call.source for call in calls] == [None, ("d1", Incarnation(1))]


def test_whoever_is_given_up_is_lost_at_once() -> None:
    """Guards requests on a hung worker, whose stream is still open: they go on before it is ended."""
    parts = cluster()
    call = parts.run("a", 7)
    parts.take()
    verdict = Verdict(*D0, "it hangs")
    parts.losses.give_up([verdict, Verdict("d9", Incarnation(9), "never met")], 0.0, parts.out)
    interrupted, condemned, other = parts.take()
    assert interrupted == DecodeLost(call.record.request, "d0", 1) and condemned == Condemn(verdict)
    assert isinstance(other, Condemn) and call.state is State.WAITING and parts.registry.get("d0") is None


def test_a_lost_worker_held_what_ran_on_it_or_was_prefilled_by_it() -> None:
    """Guards the record that spares a request of two losses: how many others the same worker took with it."""
    parts = cluster()
    for name in ("d1", "p1"):
        parts.join(name)
    here, there, offered = parts.run("a"), parts.run("b"), parts.offer("c")
    lives = {worker.name: worker.life for worker in parts.registry}
    for call, decode, prefill in ((here, "d0", "p0"), (there, "d1", "p1"), (offered, "d1", "p0")):
        call.decode, call.decode_life, call.prefill, call.prefill_life = decode, lives[decode], prefill, lives[prefill]
    third = parts.table.open(request_record("e"), None, State.RUNNING)
    third.decode, third.decode_life, third.prefill, third.prefill_life = "d1", lives["d1"], "p0", lives["p0"]
    third.emitted.append(7)
    for state in (State.RUNNING, State.FINISHING, State.CLOSING, State.WAITING):
        other = parts.table.open(request_record(f"f{state}"), None, state)
        other.decode, other.decode_life, other.prefill, other.prefill_life = "d0", lives["d0"], "p0", lives["p0"]
    here.failed_prefills[lives["p0"]] = True
    parts.losses.lost("p0", 0.0, parts.out)
    assert here.victims[lives["p0"]].held_requests == 2, "all others have a token, or another worker, or do not run"
    parts.losses.lost("d1", 0.0, parts.out)
    assert there.victims[lives["d1"]].held_requests == 3, "one was on its way there, and may be what took it"
    assert offered.missing[lives["d1"]].held_requests == 3


def test_a_death_counts_the_request_that_it_is_told_of() -> None:
    """Guards the operator's line: it had its token, and needed its prefill worker no more; and one lost before us."""
    parts = cluster()
    call = parts.run("a", 7)
    life = parts.registry.get("p0")
    assert life is not None
    call.failed_prefills[life.life] = True
    parts.losses.lost("p0", 1.0, parts.out)
    assert call.victims[life.life] == Death(1.0, "its stream broke", 1, 1)
    unknown = ("p9", Incarnation(9))
    parts.losses.blame(call, unknown, 3.0)
    assert call.victims[unknown] == Death(3.0, "it cannot be reached", 1, 1)


def test_so_many_lost_lives_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory against a cluster whose workers come and go for years."""
    monkeypatch.setattr(losses, "KEPT", 2)
    parts = Parts()
    call = parts.table.open(request_record("a"), None)
    for number in range(3):
        parts.join(f"d{number}")
        parts.losses.lost(f"d{number}", float(number), parts.out)
    for number in range(3):
        parts.losses.blame(call, (f"d{number}", Incarnation(1)), 9.0)
    assert [death.at_s for death in call.victims.values()] == [9.0, 1.0, 2.0]
