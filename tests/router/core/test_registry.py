"""The registry alone: who takes requests, what each is known to hold, which life is whose.

Tried elsewhere too: under every event in test_core.py and test_core_machine.py, under silence and new lives in
test_escalation.py, by the simulator's cuts and freezes (tests/sim).
"""

import sys
from types import FrameType

import msgspec
import pytest

from engine.messages import PeerAddress
from engine.types import Incarnation, RequestId
from router.core import registry as registry_module
from router.core.ejection import CONSECUTIVE
from tests.router.core.parts import Parts
from tests.router.fake_cluster import load, worker_info

A, B = RequestId("a"), RequestId("b")


def test_a_dispatch_counts_until_a_report_that_saw_it() -> None:
    """Guards a pool that would be filled twice: a report from before the acceptance knows nothing of the request."""
    parts = Parts()
    worker = parts.join("d0")
    parts.registry.dispatched("d0", A, 30, 4)
    assert (worker.queue_tokens, worker.used_blocks) == (30, 4)
    parts.report("d0", active=10, waiting_tokens=5)
    assert (worker.queue_tokens, worker.used_blocks) == (35, 14), "not accepted by then"
    parts.registry.accepted("d0", A)
    assert worker.used_blocks == 14, "accepted, but not reported"
    parts.registry.dispatched("d0", B, 1, 1)
    parts.report("d0", active=14)
    assert (worker.queue_tokens, worker.used_blocks) == (1, 15)
    parts.registry.released("d0", B)
    assert worker.used_blocks == 14 and list(worker.own) == [A]


def test_what_ends_is_room_before_the_next_report() -> None:
    """Guards who waits for a full pool: its room was seen a report later, and what was counted is taken off once."""
    parts = Parts()
    worker = parts.join("d0")
    for request in (A, B):
        parts.registry.dispatched("d0", request, 0, 4)
        parts.registry.accepted("d0", request)
    parts.registry.released("d0", A)
    assert worker.used_blocks == 4, "no report has counted it"
    parts.report("d0", active=2, promised_blocks=2)
    assert worker.used_blocks == 4
    parts.registry.released("d0", B)
    worker.check()
    assert worker.used_blocks == 0
    parts.report("d0", active=1)
    worker.check()
    assert worker.used_blocks == 1


def test_what_no_eviction_frees_or_is_promised_is_used() -> None:
    """Guards a full pool against offers: what is kept for those who run is given to nobody else."""
    parts = Parts()
    worker = parts.join("d0")
    report = msgspec.structs.replace(load(active=1), reserved_blocks=2, quarantined_blocks=4, cached_blocks=8)
    parts.registry.report("d0", report, 0.0)
    assert worker.used_blocks == 7, "one of an earlier release says nothing of promises"
    parts.report("d0", active=7, promised_blocks=16)
    assert worker.used_blocks == 23


def test_who_takes_requests() -> None:
    """Guards against requests for the silent and the leaving, who is alive nevertheless."""
    parts = Parts(worker_silent_s=10.0)
    for name in ("d0", "d1", "d2", "p0"):
        parts.join(name)
    parts.report("d1", 5.0)
    parts.report("d2", 5.0, leaving=True)
    registry = parts.registry
    assert [w.name for w in registry.role("decode")] == ["d0", "d1", "d2"]
    assert [w.name for w in registry.live("decode", 10.0)] == ["d0", "d1", "d2"]
    assert [w.name for w in registry.live("decode", 10.1)] == ["d1", "d2"]
    assert [w.name for w in registry.takers("decode", 10.1)] == ["d1"]
    registry.forgive(20.0)
    assert [w.name for w in registry.live("decode", 30.0)] == ["d0", "d1", "d2"]


def test_it_is_counted_whenever_a_worker_begins_to_take_requests() -> None:
    """Guards those who wait for that: the word that one leaves no more, or is heard again, and no other report."""
    parts = Parts(worker_silent_s=10.0)
    registry, counts = parts.registry, [0]

    def counted() -> bool:
        counts.append(registry.openings)
        return counts[-1] == counts[-2] + 1

    parts.join("d0")
    assert counted()
    parts.report("d0", 5.0)
    parts.report("d0", 6.0, leaving=True)
    parts.report("d0", 7.0, leaving=True)
    assert not counted()
    parts.report("d0", 8.0)
    assert counted()
    parts.report("d0", 18.0)
    assert not counted(), "it was not silent for longer than it may be"
    parts.report("d0", 28.5)
    assert counted()
    registry.forgive(60.0)
    assert counted()


def test_one_ejected_worker_does_not_make_the_choice_slower() -> None:
    """Guards a decision among many workers, of which one is ejected: each worker was compared, field by field, with all
    that are sound. Counted in lines that are run, of which a comparison by fields has several."""

    def lines(count: int) -> int:
        parts = Parts()
        for at in range(count):
            parts.join(f"d{at}")
        for _ in range(CONSECUTIVE):
            parts.registry.failed(parts.registry.role("decode")[0].life, 0.0)
        seen = 0

        def trace(frame: FrameType, event: str, arg: object) -> object:
            nonlocal seen
            seen += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            taken = parts.registry.takers("decode", 0.5)
        finally:
            sys.settrace(before)
        assert len(taken) == count - 1 and parts.registry.ejections, "one is ejected"
        return seen

    assert lines(200) < 1.2 * 4 * lines(50)


def test_a_report_ends_a_refusal() -> None:
    """Guards a worker that said no once and would never be asked again."""
    parts = Parts()
    worker = parts.join("d0")
    worker.refused = True
    parts.report("d0", 3.0)
    assert not worker.refused and worker.seen_s == 3.0
    parts.report("d9")  # whoever is not connected has nothing to say


def test_only_a_new_life_begins_with_an_empty_cache() -> None:
    """Guards beliefs about caches: a broken stream leaves them, another process and a worker taken away do not."""
    registry = Parts().registry
    peer, info = PeerAddress("d0", "d0:1"), worker_info("d0", "decode", 1)
    assert registry.join(peer, info, 0.0)
    registry.leave("d0", 0.0)
    assert registry.get("d0") is None
    assert not registry.join(peer, info, 0.0)
    assert registry.join(peer, worker_info("d0", "decode", 2), 0.0)
    registry.leave("d0", 0.0)
    registry.forget("d0")
    assert registry.join(peer, worker_info("d0", "decode", 2), 0.0)


def test_lives_connected_and_only_named() -> None:
    """Guards verdicts: each falls on the last life of a name, met or told of, and on no former one."""
    parts = Parts()
    parts.join("d0", 11)
    registry = parts.registry
    registry.named([("d0", Incarnation(10)), ("d1", Incarnation(12))])
    first, second = ("d0", Incarnation(11)), ("d1", Incarnation(12))
    assert sorted(registry.lives()) == [first, second]
    assert registry.is_connected(first) and not registry.is_connected(("d0", Incarnation(10)))
    assert registry.has_met(first) and not registry.has_met(second) and not registry.has_met(("d0", Incarnation(10)))
    registry.leave("d0", 0.0)
    assert registry.has_met(first) and not registry.is_connected(first)
    registry.forget("d0")
    registry.forget("d1")
    assert registry.lives() == []


def test_an_announced_end_is_remembered_for_that_life() -> None:
    """Guards a request against blame for a worker that left, also once it is taken away; and a successor's crash."""
    parts = Parts()
    parts.join("d0", 11)
    parts.report("d0", leaving=True)
    parts.registry.leave("d0", 0.0)
    parts.registry.forget("d0")
    assert parts.registry.was_leaving(("d0", Incarnation(11)))
    assert not parts.registry.was_leaving(("d0", Incarnation(21)))


def test_announced_ends_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the memory of a router whose workers come and go under new names: the latest ends are remembered."""
    monkeypatch.setattr(registry_module, "KEPT_ENDS", 3)
    parts = Parts()
    for number in range(9):
        name = f"d{number}"
        parts.join(name, 11)
        parts.report(name, leaving=True)
        parts.registry.leave(name, 0.0)
        parts.registry.forget(name)
    known = [number for number in range(9) if parts.registry.was_leaving((f"d{number}", Incarnation(11)))]
    assert known == [6, 7, 8] and len(parts.registry._left) == 3


@pytest.mark.parametrize(("model", "arithmetic", "differs"), [("f", "x", True), ("f", "", False), ("g", "x", False)])
def test_other_arithmetic_of_the_same_model_is_noticed(model: str, arithmetic: str, differs: bool) -> None:
    parts = Parts()
    parts.join("d0")
    newcomer = msgspec.structs.replace(worker_info("d1", "decode", 1, fingerprint=model), arithmetic=arithmetic)
    assert [info.name for info in parts.registry.computing_otherwise(newcomer)] == (["d0"] if differs else [])


def test_a_yes_to_what_is_not_there_any_more_changes_nothing() -> None:
    """Guards the router: a worker's answer may cross with the end of its request."""
    parts = Parts()
    worker = parts.join("d0")
    for name in ("d0", "d9"):
        parts.registry.accepted(name, RequestId("gone"))
        parts.registry.released(name, RequestId("gone"))
    assert not worker.own


def test_a_failure_of_one_that_is_gone_or_of_its_former_life_ejects_nobody() -> None:
    parts = Parts()
    worker = parts.join("d0")
    parts.join("d1")
    for life in (("nobody", worker.life[1]), ("d0", Incarnation(999))):
        assert all(parts.registry.failed(life, 0.0) is None for _ in range(2 * CONSECUTIVE))
    assert [w.name for w in parts.registry.takers("decode", 0.0)] == ["d0", "d1"]


def test_the_kinds_of_workers_are_those_that_are_connected() -> None:
    """Guards what is looked up for each prompt: once for each kind, and for none that has gone."""
    parts = Parts()
    parts.join("d0")
    parts.join("d1", block_size=24)
    parts.join("d2", block_size=24)
    assert parts.registry.keys == (("f", 16), ("f", 24))
    parts.registry.leave("d1", 0.0)
    assert parts.registry.keys == (("f", 16), ("f", 24))
    parts.registry.leave("d2", 0.0)
    assert parts.registry.keys == (("f", 16),)


def test_of_a_worker_that_was_taken_away_no_figure_is_left() -> None:
    """Guards prices against the speed of who is gone, which would be part of every median."""
    parts = Parts()
    parts.join("p0")
    parts.report("p0", s_per_token=0.5)
    assert parts.registry.fitted.usual_s_per_token == 0.5
    parts.registry.leave("p0", 0.0)
    parts.registry.forget("p0")
    assert parts.registry.fitted.usual_s_per_token == 0.0


def test_a_worker_that_comes_back_in_another_role_is_in_that_one_alone() -> None:
    """Guards a pool against one who has left it: a decode worker would be asked to prefill, and the other way round."""
    parts = Parts()
    for name in ("p0", "d0", "x"):
        parts.join(name)
    registry = parts.registry
    assert [w.name for w in registry.role("decode")] == ["d0", "x"]
    registry.join(PeerAddress("x", "x:1"), worker_info("x", "prefill", 2), 0.0)
    assert [[w.name for w in registry.role(role)] for role in ("prefill", "decode")] == [["p0", "x"], ["d0"]]
    assert [w.name for w in registry.takers("prefill", 0.0)] == ["p0", "x"]
    registry.join(PeerAddress("x", "x:1"), worker_info("x", "decode", 3), 0.0)
    assert [[w.name for w in registry.role(role)] for role in ("prefill", "decode")] == [["p0"], ["d0", "x"]]
    registry.leave("x", 0.0)
    assert [w.name for w in registry.live("decode", 0.0)] == ["d0"]


def test_what_a_report_has_counted_is_not_taken_back_when_it_is_sent_again() -> None:
    """Guards a worker's queue, and its room, against a request that is offered to it twice: they would shrink."""
    parts = Parts()
    worker = parts.join("d0")
    parts.registry.dispatched("d0", A, 30, 4)
    parts.registry.accepted("d0", A)
    parts.report("d0", active=4, waiting_tokens=30)
    assert (worker.queue_tokens, worker.used_blocks) == (30, 4)
    parts.registry.dispatched("d0", A, 10, 1)
    assert (worker.queue_tokens, worker.used_blocks) == (40, 5)
    parts.registry.dispatched("d0", A, 20, 2)
    assert (worker.queue_tokens, worker.used_blocks) == (50, 6), "no report has counted the one before"
