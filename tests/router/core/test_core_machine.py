"""The router core against workers that do anything their protocol allows, and much that it does not.

Whatever happens, every client gets exactly one end, and only its own tokens, in order, once: also over the loss of its
workers, whose ghosts go on talking, and over moves off workers that leave. What a new placement is told to be history
is what the client has; whoever keeps the KV of a yielded request is told when it is not needed any more. Single events
are tried in test_core.py and in the tests of its parts, the core with real schedulers in tests/sim.
"""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Finish,
    NeedPrefill,
    Orphan,
    OrphansTold,
    PeerAddress,
    Place,
    Refused,
    Release,
    RequestStats,
    Tokens,
    UsePrefill,
    Yield,
    Yielded,
)
from engine.types import FinishReason, RequestId, RequestRecord
from router.config import RouterConfig
from router.core.core import Router
from router.core.events import (
    Adopt,
    Begin,
    ClientLeft,
    Complete,
    Connected,
    DecodeLost,
    Deliver,
    Event,
    Fail,
    Lost,
    Moved,
    StopFound,
    Submit,
    TellWorker,
    Tick,
    WorkerSaid,
    WorkersNamed,
)
from router.core.policy import LeastCost
from tests.router.fake_cluster import load, worker_info

WORKERS = ("d0", "d1", "d2")
PREFILLS = ("p0", "p1")
BLOCKS = 12
MAX_TOKENS = 16


def token(request: str, index: int) -> int:
    """What a worker emits: the request and the position can be read off."""
    return int(request[1:]) * 1000 + index


class Job:
    """A placement as its worker knows it."""

    def __init__(
        self, worker: str, record: RequestRecord, placement: int, prefill: str, sent: int
    ) -> None:
        self.worker = worker
        self.request = record.request
        self.placement = placement
        self.prefill = prefill
        self.accepted = False
        self.asked_to_yield = False
        self.sent = sent
        self.told: Cancel | Finish | None = None


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(RouterConfig(max_waiting=3), LeastCost(Random(1)), life=10)
        self.now = 0.0
        self.lives = dict.fromkeys(WORKERS, 0)
        self.up: set[str] = set()
        self.jobs: list[Job] = []
        self.ghosts: list[Job] = []
        self.interrupted: set[str] = set()
        self.leaving: set[str] = set()
        self.known_leaving: set[str] = set()
        self.kept: set[tuple[str, str, int]] = set()
        self.minted = 0
        self.begun: set[str] = set()
        self.given: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}
        self.lives |= dict.fromkeys(PREFILLS, 0)
        for name in PREFILLS + WORKERS:
            self.back(name)

    def do(self, event: Event) -> None:
        for command in self.router.handle(event, self.now):
            match command:
                case TellWorker(worker, Place()):
                    assert worker in self.up
                    self.placed(command)
                case TellWorker(worker, UsePrefill(request, placement, prefill)):
                    job = self.job(worker, request, placement)
                    job.prefill = prefill.name if prefill else ""
                    assert not job.prefill or job.prefill in self.up
                case TellWorker(worker, Cancel() | Finish() as told):
                    self.tell(worker, told)
                case TellWorker(worker, Yield(request, placement)):
                    job = self.job(worker, request, placement)
                    assert worker in self.leaving and job.accepted and not job.asked_to_yield
                    job.asked_to_yield = True
                case TellWorker(worker, Release(request, placement)):
                    self.kept.remove((worker, request, placement))
                case Moved():
                    self.interrupted.add(command.request)
                case Begin():
                    again = command.request in self.begun
                    assert again == (command.request in self.interrupted)
                    assert not self.ends[command.request]
                    self.begun.add(command.request)
                    self.interrupted.discard(command.request)
                case Adopt():
                    request = command.orphan.record.request
                    self.begun.add(request)
                    self.interrupted.discard(request)
                    self.given[request], self.ends[request] = list(command.orphan.tokens), 0
                case DecodeLost():
                    assert command.emitted_tokens == len(self.given[command.request])
                    self.interrupted.add(command.request)
                case Deliver():
                    assert not self.ends[command.request], "tokens after the end"
                    assert command.request not in self.interrupted, "tokens of a lost worker"
                    self.given[command.request] += command.ids
                case Fail(cause=Exception() as error):
                    raise error
                case Complete() | Fail():
                    self.ends[command.request] += 1

    def tell(self, worker: str, record: Cancel | Finish) -> None:
        self.job(worker, record.request, record.placement).told = record

    def job(self, worker: str, request: str, placement: int) -> Job:
        wanted = (worker, request, placement)
        (job,) = [j for j in self.jobs if (j.worker, j.request, j.placement) == wanted]
        return job

    def placed(self, command: TellWorker) -> None:
        """History is exactly what the client has, behind the unchanged prompt; nothing is placed that is complete."""
        record = command.record.record
        history = record.tokens[record.prompt_tokens :]
        assert history == self.given[record.request] and len(history) < record.max_tokens
        assert record.tokens[: record.prompt_tokens] == [1] * record.prompt_tokens
        assert not self.ends[record.request]
        assert all(
            job.placement < command.record.placement
            for job in self.jobs + self.ghosts
            if job.request == record.request
        )
        prefill = command.record.prefill.name
        assert prefill in self.up if prefill else not self.up & set(PREFILLS)
        place = command.record
        kept = {worker for worker, request, _ in self.kept if request == record.request}
        assert {prefill} == kept if kept else prefill not in WORKERS
        assert command.worker not in self.known_leaving
        self.jobs.append(Job(command.worker, record, place.placement, prefill, len(history)))

    def back(self, name: str) -> None:
        """Connected as a new process."""
        self.lives[name] += 1
        self.leaving.discard(name)
        self.up.add(name)
        self.connect(name)

    def connect(self, name: str) -> None:
        role = "prefill" if name in PREFILLS else "decode"
        blocks = 64 if name in PREFILLS else BLOCKS
        peer = PeerAddress(name, f"{name}:1")
        # One prefill worker has blocks of another size: its tree has other identities, the pairs are the same.
        size = 24 if name == PREFILLS[-1] else 16
        self.do(Connected(peer, worker_info(name, role, self.lives[name], blocks, size)))
        if name in self.leaving:
            self.report(name, 0)

    @rule(tokens=st.integers(1, 250), deadline=st.none() | st.integers(1, 5))
    def submit(self, tokens: int, deadline: int | None) -> None:
        request = RequestId(f"r{self.minted}")
        self.minted += 1
        self.given[request], self.ends[request] = [], 0
        record = RequestRecord(
            request=request, tokens=[1] * tokens, prompt_tokens=tokens, max_tokens=MAX_TOKENS, seed=0
        )
        deadline_s = None if deadline is None else self.now + deadline
        self.do(Submit(record, deadline_s))

    @rule(tokens=st.integers(1, 60), count=st.integers(1, MAX_TOKENS))
    def submit_and_run(self, tokens: int, count: int) -> None:
        """Straight to the middle of an answer, where a loss is worth most; perhaps to its last token."""
        self.submit(tokens, None)
        self.run_newest(count)

    @precondition(lambda self: self.jobs)
    @rule(count=st.integers(1, 3))
    def run_newest(self, count: int) -> None:
        """The newest placement, often one after a loss, is accepted and goes on."""
        job = self.jobs[-1] if self.jobs else None
        if job is None or job.told:
            return
        if not job.accepted:
            job.accepted = True
            self.do(WorkerSaid(job.worker, Accepted(job.request, job.placement, 0)))
        start = job.sent
        job.sent = min(start + count, MAX_TOKENS)
        ids = [token(job.request, i) for i in range(start, job.sent)]
        self.do(WorkerSaid(job.worker, Tokens(job.request, job.placement, start, ids)))

    @precondition(lambda self: any(not j.accepted for j in self.jobs))
    @rule(data=st.data(), refuse=st.booleans())
    def answer(self, data: st.DataObject, refuse: bool) -> None:
        job = data.draw(st.sampled_from([j for j in self.jobs if not j.accepted]))
        if refuse and job.told is None:
            self.jobs.remove(job)
            self.do(WorkerSaid(job.worker, Refused(job.request, job.placement, 1)))
        else:
            job.accepted = True
            self.do(WorkerSaid(job.worker, Accepted(job.request, job.placement, 0)))

    @precondition(lambda self: any(j.accepted for j in self.jobs))
    @rule(data=st.data(), count=st.integers(1, 3), again=st.integers(0, 2), skew=st.integers(0, 2))
    def emit(self, data: st.DataObject, count: int, again: int, skew: int) -> None:
        """Tokens in order, repeating some; with a wrong placement where `skew` is 2."""
        job = data.draw(st.sampled_from([j for j in self.jobs if j.accepted]))
        count = min(count, MAX_TOKENS - job.sent)
        start = max(job.sent - again, 0)
        ids = [token(job.request, i) for i in range(start, job.sent + count)]
        placement = job.placement
        if skew == 2:
            placement += 1
        else:
            job.sent += count
        self.do(WorkerSaid(job.worker, Tokens(job.request, placement, start, ids)))

    @precondition(lambda self: any(j.accepted for j in self.jobs))
    @rule(data=st.data())
    def emit_ahead(self, data: st.DataObject) -> None:
        """A token beyond the next: it must not be shown."""
        job = data.draw(st.sampled_from([j for j in self.jobs if j.accepted]))
        ahead = job.sent + 1
        ids = [token(job.request, ahead)]
        self.do(WorkerSaid(job.worker, Tokens(job.request, job.placement, ahead, ids)))

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
        self.do(WorkerSaid(job.worker, end))

    @precondition(lambda self: self.minted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.do(ClientLeft(RequestId(f"r{data.draw(st.integers(0, self.minted - 1))}")))

    @precondition(lambda self: any(self.given.values()))
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(r for r, g in self.given.items() if g)))
        if not self.ends[request]:
            kept = data.draw(st.integers(1, len(self.given[request])))
            self.do(StopFound(RequestId(request), kept))

    @rule(name=st.sampled_from(WORKERS + PREFILLS))
    def crash_or_return(self, name: str) -> None:
        if name in self.up:
            self.up.remove(name)
            self.bury(name)
            self.do(Lost(name))
        else:
            self.back(name)

    @rule(name=st.sampled_from(WORKERS), told=st.booleans())
    def cut_and_return(self, name: str, told: bool) -> None:
        """The stream breaks and the same process is there again; its loss may go unsaid."""
        if name in self.up:
            self.up.remove(name)
            self.bury(name)
            if told:
                self.do(Lost(name))
            self.up.add(name)
            self.connect(name)

    @precondition(lambda self: any(j.worker not in self.leaving for j in self.jobs))
    @rule(data=st.data())
    def leave_work(self, data: st.DataObject) -> None:
        """A worker with requests is asked to leave, and says so."""
        busy = sorted({j.worker for j in self.jobs} - self.leaving)
        name = data.draw(st.sampled_from(busy))
        self.leaving.add(name)
        self.report(name, 2)

    @precondition(lambda self: any(j.asked_to_yield and j.sent < MAX_TOKENS for j in self.jobs))
    @rule(data=st.data())
    def yield_one(self, data: st.DataObject) -> None:
        """A leaving worker yields a request; it may not have heard yet that the request is cancelled, or finished. One
        that has all its tokens it ends, in the frame of the last."""
        job = data.draw(st.sampled_from([j for j in self.jobs if j.asked_to_yield and j.sent < MAX_TOKENS]))
        self.jobs.remove(job)
        self.kept.add((job.worker, job.request, job.placement))
        stats = RequestStats(output_tokens=job.sent)
        yielded = Yielded(request=job.request, placement=job.placement, stats=stats)
        self.do(WorkerSaid(job.worker, yielded))

    def bury(self, name: str) -> None:
        self.known_leaving.discard(name)
        self.kept = {kept for kept in self.kept if kept[0] != name}
        self.ghosts += [j for j in self.jobs if j.worker == name]
        self.jobs = [j for j in self.jobs if j.worker != name]

    @precondition(lambda self: any(j.worker in self.up for j in self.ghosts))
    @rule(data=st.data(), what=st.sampled_from(["tokens", "ended", "accepted", "refused"]))
    def haunt(self, data: st.DataObject, what: str) -> None:
        """A worker that was given up speaks of what it had: nothing of it may be believed."""
        job = data.draw(st.sampled_from([j for j in self.ghosts if j.worker in self.up]))
        name, placement = job.request, job.placement
        record: Tokens | Ended | Accepted | Refused = Tokens(name, placement, job.sent, [666])
        if what == "ended":
            record = Ended(
                request=name,
                placement=placement,
                reason=FinishReason.STOP,
                stats=RequestStats(output_tokens=job.sent),
            )
        elif what == "accepted":
            record = Accepted(name, placement, 0)
        elif what == "refused":
            record = Refused(name, placement, 1)
        before = dict(self.ends)
        self.do(WorkerSaid(job.worker, record))
        assert self.ends == before

    @precondition(lambda self: any(j.accepted and j.prefill and not j.told for j in self.jobs))
    @rule(data=st.data())
    def need_prefill(self, data: st.DataObject) -> None:
        """A decode worker loses its prefill worker: it is answered at once, or told to stop."""
        asking = [j for j in self.jobs if j.accepted and j.prefill and not j.told]
        job = data.draw(st.sampled_from(asking))
        failed = job.prefill
        self.do(WorkerSaid(job.worker, NeedPrefill(job.request, job.placement, failed)))
        assert job.told or job.prefill != failed or failed in self.up

    @rule(
        name=st.sampled_from(WORKERS),
        placement=st.integers(1, 6),
        tokens=st.integers(0, MAX_TOKENS),
        again=st.booleans(),
        prefill=st.sampled_from(["", *PREFILLS, "p9"]),
    )
    def report_orphan(
        self, name: str, placement: int, tokens: int, again: bool, prefill: str
    ) -> None:
        """A worker has a request of an earlier router; `again`: one that was reported before, or was placed here."""
        if name not in self.up or (again and not self.minted):
            return
        if not again:
            self.minted += 1
        request = RequestId(f"r{self.minted - 1}")
        if any(j.request == request and j.placement == placement for j in self.jobs + self.ghosts):
            return
        record = RequestRecord(
            request=request, tokens=[1] * 20, prompt_tokens=20, max_tokens=MAX_TOKENS, seed=0, context=b"x"
        )
        job = Job(name, record, placement, prefill, tokens)
        job.accepted = True
        self.jobs.append(job)
        ids = [token(request, i) for i in range(tokens)]
        self.do(
            WorkerSaid(
                name,
                Orphan(record=record, placement=placement, prefill=prefill, tokens=ids, age_s=0.0),
            )
        )

    @rule(name=st.sampled_from(WORKERS), active=st.integers(0, BLOCKS))
    def report(self, name: str, active: int) -> None:
        if name in self.up:
            if name in self.leaving:
                self.known_leaving.add(name)
            report = load(active=active, blocks=BLOCKS)
            self.do(WorkerSaid(name, replace(report, leaving=name in self.leaving)))

    @rule(seconds=st.integers(0, 2))
    def tick(self, seconds: int) -> None:
        self.now += seconds
        for name in PREFILLS:
            self.do(WorkerSaid(name, load()))
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
        for name in sorted(self.leaving & self.up):
            self.crash_or_return(name)
        for name in PREFILLS + WORKERS:
            if name not in self.up:
                self.back(name)
        self.do(WorkersNamed(tuple(WORKERS)))
        for name in WORKERS:
            self.do(WorkerSaid(name, OrphansTold()))
        for _ in range(4 * self.minted + 4):
            self.tick(0)
            for job in list(self.jobs):
                if not job.accepted:
                    job.accepted = True
                    self.do(WorkerSaid(job.worker, Accepted(job.request, job.placement, 0)))
                self.jobs.remove(job)
                reason = FinishReason.LENGTH
                if isinstance(job.told, Cancel):
                    reason = job.told.reason
                stats = RequestStats(output_tokens=job.sent)
                end = Ended(
                    request=job.request, placement=job.placement, reason=reason, stats=stats
                )
                self.do(WorkerSaid(job.worker, end))
            for name in WORKERS:
                self.report(name, 0)
        assert self.router.open == 0, repr(self.router)
        assert all(count == 1 for count in self.ends.values())
        assert not self.kept, "KV is kept for nobody"


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True
)
