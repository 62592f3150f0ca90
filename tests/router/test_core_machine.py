"""The router core against a worker that does anything its protocol allows, and much that it does not.

Whatever happens, every client gets exactly one end, and only its own tokens, in order, once.
"""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Finish,
    PeerAddress,
    Refused,
    RequestStats,
    Tokens,
)
from engine.types import FinishReason, RequestId, RequestRecord
from router.config import RouterConfig
from router.core import Router
from router.events import (
    Begin,
    Complete,
    Deliver,
    Event,
    Fail,
    Heard,
    Joined,
    Left,
    Lost,
    SendCancel,
    SendFinish,
    SendPlace,
    StopFound,
    Submit,
    Tick,
)
from router.policy import LeastCost
from tests.router.fake_cluster import load, worker_info

WORKERS = ("d0", "d1")
BLOCKS = 12


def token(request: str, index: int) -> int:
    """What a worker emits: the request and the position can be read off."""
    return int(request[1:]) * 1000 + index


class Job:
    """A placement as its worker knows it."""

    def __init__(self, place: SendPlace) -> None:
        self.worker = place.worker
        self.request = place.place.record.request
        self.placement = place.place.placement
        self.accepted = False
        self.sent = 0
        self.told: Cancel | Finish | None = None


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(RouterConfig(max_waiting=3), LeastCost(Random(1)))
        self.now = 0.0
        self.lives = dict.fromkeys(WORKERS, 0)
        self.up: set[str] = set()
        self.jobs: list[Job] = []
        self.minted = 0
        self.begun: set[str] = set()
        self.given: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}
        self.do(Joined(PeerAddress("p0", "p0:1"), worker_info("p0", "prefill")))
        for name in WORKERS:
            self.back(name)

    def do(self, event: Event) -> None:
        for command in self.router.handle(event, self.now):
            match command:
                case SendPlace():
                    assert command.worker in self.up
                    self.jobs.append(Job(command))
                case SendCancel():
                    self.tell(command.worker, command.cancel)
                case SendFinish():
                    self.tell(command.worker, command.finish)
                case Begin():
                    assert command.request not in self.begun and not self.ends[command.request]
                    self.begun.add(command.request)
                case Deliver():
                    assert not self.ends[command.request], "tokens after the end"
                    self.given[command.request] += command.ids
                case Complete() | Fail():
                    self.ends[command.request] += 1

    def tell(self, worker: str, record: Cancel | Finish) -> None:
        (job,) = [
            j
            for j in self.jobs
            if (j.worker, j.request, j.placement) == (worker, record.request, record.placement)
        ]
        job.told = record

    def back(self, name: str) -> None:
        self.lives[name] += 1
        self.up.add(name)
        peer = PeerAddress(name, f"{name}:1")
        self.do(Joined(peer, worker_info(name, "decode", self.lives[name], BLOCKS)))

    @rule(tokens=st.integers(1, 250), deadline=st.none() | st.integers(1, 5))
    def submit(self, tokens: int, deadline: int | None) -> None:
        request = RequestId(f"r{self.minted}")
        self.minted += 1
        self.given[request], self.ends[request] = [], 0
        record = RequestRecord(
            request=request, tokens=[1] * tokens, prompt_tokens=tokens, max_tokens=16, seed=0
        )
        deadline_s = None if deadline is None else self.now + deadline
        self.do(Submit(record, deadline_s))

    @precondition(lambda self: any(not j.accepted for j in self.jobs))
    @rule(data=st.data(), refuse=st.booleans())
    def answer(self, data: st.DataObject, refuse: bool) -> None:
        job = data.draw(st.sampled_from([j for j in self.jobs if not j.accepted]))
        if refuse and job.told is None:
            self.jobs.remove(job)
            self.do(Heard(job.worker, Refused(job.request, job.placement, 1)))
        else:
            job.accepted = True
            self.do(Heard(job.worker, Accepted(job.request, job.placement, 0)))

    @precondition(lambda self: any(j.accepted for j in self.jobs))
    @rule(data=st.data(), count=st.integers(1, 3), again=st.integers(0, 2), skew=st.integers(0, 2))
    def emit(self, data: st.DataObject, count: int, again: int, skew: int) -> None:
        """Tokens in order, repeating some; with a wrong placement where `skew` is 2."""
        job = data.draw(st.sampled_from([j for j in self.jobs if j.accepted]))
        start = max(job.sent - again, 0)
        ids = [token(job.request, i) for i in range(start, job.sent + count)]
        placement = job.placement
        if skew == 2:
            placement += 1
        else:
            job.sent += count
        self.do(Heard(job.worker, Tokens(job.request, placement, start, ids)))

    @precondition(lambda self: any(j.accepted for j in self.jobs))
    @rule(data=st.data())
    def emit_ahead(self, data: st.DataObject) -> None:
        """A token beyond the next: it must not be shown."""
        job = data.draw(st.sampled_from([j for j in self.jobs if j.accepted]))
        ahead = job.sent + 1
        ids = [token(job.request, ahead)]
        self.do(Heard(job.worker, Tokens(job.request, job.placement, ahead, ids)))

    @precondition(lambda self: any(j.accepted for j in self.jobs))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from([j for j in self.jobs if j.accepted]))
        self.jobs.remove(job)
        reason = FinishReason.STOP
        if isinstance(job.told, Cancel):
            reason = job.told.reason
        stats = RequestStats(output_tokens=job.sent)
        end = Ended(request=job.request, placement=job.placement, reason=reason, stats=stats)
        self.do(Heard(job.worker, end))

    @precondition(lambda self: self.minted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.do(Left(RequestId(f"r{data.draw(st.integers(0, self.minted - 1))}")))

    @precondition(lambda self: any(self.given.values()))
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(r for r, g in self.given.items() if g)))
        if not self.ends[request]:
            kept = data.draw(st.integers(1, len(self.given[request])))
            self.do(StopFound(RequestId(request), kept))

    @rule(name=st.sampled_from(WORKERS))
    def crash_or_return(self, name: str) -> None:
        if name in self.up:
            self.up.remove(name)
            self.jobs = [j for j in self.jobs if j.worker != name]
            self.do(Lost(name))
        else:
            self.back(name)

    @rule(name=st.sampled_from(WORKERS), active=st.integers(0, BLOCKS))
    def report(self, name: str, active: int) -> None:
        if name in self.up:
            self.do(Heard(name, load(active=active, blocks=BLOCKS)))

    @rule(seconds=st.integers(0, 2))
    def tick(self, seconds: int) -> None:
        self.now += seconds
        self.do(Heard("p0", load()))
        self.do(Tick())

    @invariant()
    def sound(self) -> None:
        self.router.check()
        assert self.router.waiting <= 3 + len(WORKERS) * BLOCKS
        for request, given in self.given.items():
            assert given == [token(request, i) for i in range(len(given))]
            assert self.ends[request] <= 1
            assert not given or request in self.begun

    def teardown(self) -> None:
        """Heal everything: all work must come to its end."""
        for name in WORKERS:
            if name not in self.up:
                self.back(name)
        for _ in range(4 * self.minted + 4):
            self.tick(0)
            for job in list(self.jobs):
                if not job.accepted:
                    job.accepted = True
                    self.do(Heard(job.worker, Accepted(job.request, job.placement, 0)))
                self.jobs.remove(job)
                reason = FinishReason.LENGTH
                if isinstance(job.told, Cancel):
                    reason = job.told.reason
                stats = RequestStats(output_tokens=job.sent)
                end = Ended(
                    request=job.request, placement=job.placement, reason=reason, stats=stats
                )
                self.do(Heard(job.worker, end))
            for name in WORKERS:
                self.report(name, 0)
        assert self.router.open == 0, repr(self.router)
        assert all(count == 1 for count in self.ends.values())


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
