"""The hub's error barriers: what the router's own code does wrong to one request stays with it."""

from collections.abc import Sequence
from random import Random

import pytest

from engine.messages import Accepted, Cancel, Fault, PeerAddress, Place, Refused, RouterRecord
from engine.types import FinishReason, RequestId
from router.config import RouterConfig
from router.core.core import Router
from router.core.events import Submit
from router.core.policy import Choice, DecodeView, Demand, LeastCost, PrefillView
from router.hub import Hub
from router.status.observer import NullObserver
from tests.router.bench import A, B, Bench
from tests.router.core.parts import request_record
from tests.router.fake_cluster import load, worker_info

FAULT = Fault("INTERNAL", "the router failed on this request")
BAD_TOKENS = 41


class FaultyPolicy(LeastCost):
    """Cannot place prompts of so many tokens."""

    def choose(
        self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        if demand.prompt_tokens == BAD_TOKENS:
            raise ZeroDivisionError("division by zero")
        return super().choose(demand, prefills, decodes)


class Answer:
    """A client's side that notes how its request has failed."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def offered(self, now: float) -> None: ...

    def failed(self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float) -> None:
        self.faults.append(fault)


class Guarded:
    """A hub whose router has a faulty policy; `sent` is what workers are told."""

    def __init__(self, decodes: int = 1) -> None:
        self.bench = Bench(decodes=decodes)
        self.bench.router = Router(RouterConfig(), FaultyPolicy(Random(0)))
        self.hub = Hub(self.bench.router, lambda: self.bench.now, NullObserver())
        self.sent: list[tuple[str, RouterRecord]] = []
        self.hub.connect(lambda worker, record: self.sent.append((worker, record)))
        self.answers: dict[str, Answer] = {}

    def submit(self, name: str, tokens: int) -> None:
        self.answers[name] = answer = Answer()
        self.hub.submit(Submit(request_record(name, tokens)), answer)  # type: ignore[arg-type]

    def placed(self) -> list[str]:
        """Who was offered to a worker since this was asked last."""
        placed = [record.record.request for _, record in self.sent if isinstance(record, Place)]
        self.sent.clear()
        return placed


@pytest.mark.parametrize("how", ["submitted", "ticked", "reported"])
def test_what_cannot_be_placed_fails_alone(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the router, which one placement that raises has ended at its next tick, and the line behind it."""
    rig = Guarded()
    if how == "submitted":
        rig.bench.join("d0", "decode", 1)
    for name, tokens in (("a", 40), ("bad", BAD_TOKENS), ("b", 40)):
        rig.submit(name, tokens)
    if how != "submitted":
        info = worker_info("d0", "decode")  # it is known, but nobody has moved up yet
        rig.hub.core.registry.join(PeerAddress("d0", "d0:1"), info, 0.0)
        rig.hub.core.index.add("d0", info.blocks)
    if how == "ticked":
        rig.hub.tick()
    elif how == "reported":
        rig.hub.heard("d0", [load()])
    assert rig.placed() == ["a", "b"]
    assert [rig.answers[name].faults for name in ("a", "bad", "b")] == [[], [FAULT], []]
    (line,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert vars(line)["request"] == "bad" and line.getMessage() == "a request could not be placed"
    assert line.exc_info is not None and line.exc_info[0] is ZeroDivisionError
    rig.hub.tick()
    rig.bench.router.check()
    rig.hub.heard("d0", [Accepted(A, 1, 0), Accepted(B, 1, 0)])
    assert rig.bench.router.open == 2 and rig.placed() == []


def test_what_fails_while_it_is_offered_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker that would go on with a request which nobody knows, and whoever waits behind it."""
    rig = Guarded()
    rig.bench.join("d0", "decode", 1)
    believed = rig.bench.router.index.insert
    monkeypatch.setattr(rig.bench.router.index, "insert", _raises)
    rig.bench.join("p0", "prefill", 1)
    rig.submit("a", 40)
    monkeypatch.setattr(rig.bench.router.index, "insert", believed)
    assert rig.answers["a"].faults == [FAULT]
    assert rig.sent == [("d0", Cancel(A, 1, FinishReason.CANCELLED))]
    rig.sent.clear()
    rig.bench.router.check()
    rig.hub.heard("d0", [Refused(A, 1, 0)])
    rig.submit("b", 40)
    assert rig.bench.router.open == 1 and rig.placed() == ["b"]


def test_a_fault_of_nobodys_request_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a broken invariant, which ends the router and no request that happens to be next."""
    rig = Guarded()
    rig.submit("a", 40)
    monkeypatch.setattr(rig.bench.router.registry, "live", _raises)
    with pytest.raises(AssertionError, match="broken"):
        rig.hub.tick()
    assert rig.answers["a"].faults == []


def test_what_cannot_be_taken_in_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a request that raised on its way in: it stood in the table for ever, and its client waited."""
    rig = Guarded()
    monkeypatch.setattr(rig.bench.router._admission, "refusal", _raises)
    rig.submit("a", 40)
    assert rig.answers["a"].faults == [FAULT] and rig.bench.router.open == 0
    (line,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert vars(line)["request"] == RequestId("a") and line.exc_info is not None
    rig.bench.router.check()


def _raises(*_: object) -> object:
    raise AssertionError("broken")
