"""Decides what a prefill worker computes next, and when the blocks of a prompt may be let go. Pure.

A job is one prompt asked for by one decode worker:

    WAITING --acquire--> RUNNING --last chunk--> SENDING --settled--> gone
    WAITING, RUNNING --stop, peer lost, deadline--> gone, or SENDING until settled
    WAITING --the worker is to leave--> gone: its decode worker asks the router for another

Who runs next, and how a step is shared, is the business of `prefill_worker.scheduler.line`. Every chunk's finished
blocks are offered at once, all layers together, while the next chunk computes; a cached prefix is offered before
anything is computed. The lease is released when the sender says that nobody can still read the blocks.
A step is run by `engine/runner.py`.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.commands import DiskHung, Loaded, Spilled, Stored, TierEvent
from engine.kv.tiers.fetches import Fetches
from engine.messages import Fault, Handoff, PrefillFailed, StartPrefill
from engine.plan import CompiledConstraint, refusal, row_of
from engine.step import DeadEnd, Drawn, StepPlan, run_of
from engine.types import DrawnToken, Incarnation, TokenLogprobs
from prefill_worker.scheduler.line import Line
from prefill_worker.scheduler.order import Job, JobState
from transfer.handoff.commands import Command, Emit, Leave, Posted, ReaderEvent, Sent
from transfer.handoff.source import HandoffSource
from worker.config import PrefillConfig

GIVEN_UP = "the prefill worker is leaving, and gives up what it has not begun"

Event = ReaderEvent | Posted | Sent | Leave | TierEvent


class _Planned(NamedTuple):
    """A step that was planned and has not ended."""

    jobs: list[Job]
    leases: list[Lease]
    tokens: int
    planned_at: float


class PrefillScheduler:
    """Mutable state, all of it: the steps under way, `leaving`, what is counted, and what `kv`, `source`, `fetches` and
    the line own. Owner: the engine thread."""

    def __init__(
        self,
        config: PrefillConfig,
        kv: KVCacheManager,
        *,
        fingerprint: str,
        vocab: int,
        context_tokens: int,
        stop_ids: frozenset[int],
        compiled: CompiledConstraint | None = None,
        adapters: frozenset[str] = frozenset(),
    ) -> None:
        self.kv = kv
        self.source: HandoffSource[Job] = HandoffSource(kv, fingerprint, self)
        self.sender = self.source.sender
        self.fetches = None if kv.tiers is None else Fetches(kv, kv.tiers)
        self.line = Line(config, kv, self.fetches, context_tokens, compiled)
        self._config = config
        self._vocab = vocab
        self._context_tokens = context_tokens
        self._compiled = compiled
        self._adapters = adapters
        self._stop_ids = stop_ids
        self._under_way: deque[_Planned] = deque()
        self._steps = 0
        self._ended_at = 0.0
        self.leaving = False
        self.hit_tokens = 0
        """Prompt tokens that were in the cache, since whoever counts them set it to zero."""

    # what there is to do

    @property
    def waiting_requests(self) -> int:
        return len(self.line.waiting)

    @property
    def running_requests(self) -> int:
        return len(self.line.running)

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that are still to be computed, those of the steps under way included: the worker is busy with
        them until they end, and who comes next waits for them."""
        return self.line.backlog_tokens + sum(step.tokens for step in self._under_way)

    @property
    def slots(self) -> tuple[int, int]:
        """Token slots that leases hold: those with a token's KV in them, and all."""
        jobs = self.source.items
        held = sum(len(job.lease.blocks) for job in jobs if job.lease is not None)
        return sum(job.computed for job in jobs), held * self.kv.block_size

    @property
    def is_idle(self) -> bool:
        """True when it holds nothing for anybody, and no load writes to its blocks."""
        return not (self.source.items or self.fetches)

    # events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns what the shell must do. The state changes here, by `plan`,
        `complete` and `tick`; what is counted, the shell takes."""
        match event:
            case Leave():
                return self._leave()
            case Loaded() | Spilled() | DiskHung():
                assert self.fetches is not None
                self.fetches.handle(event)
                return []
            case Stored():
                raise TypeError(f"not an event: {event!r}")
        return self.source.handle(event, now)

    def tick(self, now: float) -> list[Command]:
        """Give up jobs whose time is over."""
        why = Fault("DEADLINE_EXCEEDED", "the request's time is over")
        late = [job for job in self.line if now >= job.deadline]
        return [command for job in late for command in self.source.fail(job.handoff, why)]

    def _leave(self) -> list[Command]:
        """Give up what has not begun: another worker does it sooner."""
        self.leaving = True
        why, waiting = Fault("UNAVAILABLE", GIVEN_UP), list(self.line.waiting)
        return [command for job in waiting for command in self.source.fail(job.handoff, why)]

    # what the source asks for

    def start(self, peer: Incarnation, message: StartPrefill, now: float) -> list[Command]:
        handoff, record = message.handoff, message.record
        fault = self._refusal(message)
        if fault is not None:
            return [Emit(peer, PrefillFailed(handoff, fault))]
        deadline = float("inf") if record.remaining_s is None else now + record.remaining_s
        job = Job(handoff, record, arrived=now, deadline=deadline)
        self.line.enter(job)
        self.source.open(peer, message, job)
        return []

    def _refusal(self, message: StartPrefill) -> Fault | None:
        record = message.record
        if self.leaving:
            return Fault("UNAVAILABLE", "the prefill worker is leaving")
        fault = refusal(record, self._vocab, self._context_tokens, self._compiled, self._adapters)
        if fault is not None:
            return fault
        if self.kv.pool_blocks_for(len(record.tokens)) > self.kv.pool.total:
            return Fault("OUT_OF_RANGE", "the prompt does not fit the prefill worker's pool", "prompt")
        if not 0 <= message.have_tokens < len(record.tokens):
            return Fault("INTERNAL", f"the decode side cannot have {message.have_tokens} tokens")
        if len(self.line.waiting) >= self._config.max_waiting:
            return Fault("RESOURCE_EXHAUSTED", "the prefill worker's line is full")
        return None

    def unwanted(self, job: Job) -> None:
        self.line.retire(job)

    def reader_lost(self, job: Job, now: float) -> None:
        assert job.lease is not None, "nothing was offered that could be read"
        self.kv.quarantine(job.lease)
        job.quarantined = now if job.quarantined is None else job.quarantined

    def settled(self, job: Job, handoff: Handoff) -> None:
        self.line.retire(job)
        if job.quarantined is not None:
            self.source.quarantined_since.append(job.quarantined)
        if job.lease is not None:
            self.kv.release(job.lease)

    # steps

    def plan(self, now: float) -> tuple[StepPlan | None, list[Command]]:
        """Return the next step (None: nothing to compute), and offers of prefixes that need no computing. It may be
        called again before `complete`: the next step goes on behind the one that is under way."""
        commands = [command for job in self.line.admit(now) for command in self._offer(job, job.computed)]
        rows, copies, jobs = [], [], list[Job]()
        for job, share in self.line.shares(now):
            if share == 0:
                continue
            assert job.lease is not None
            if job.started is None:
                job.started = now
                copies += job.lease.copies
            end = job.computed + share
            lease, tokens = job.lease, job.record.tokens
            self.kv.reach(lease, job.computed, end)
            own = job.computed, end, lease.blocks, self._stop_ids
            rows.append(row_of(job.record, tokens, *own, windows=lease.windows))
            job.computed = end
            jobs.append(job)
        if not rows:
            return None, commands
        self._steps += 1
        leases = [job.lease for job in jobs if job.lease is not None]
        step = _Planned(jobs, leases, sum(row.end - row.start for row in rows), now)
        self.kv.launched(step.leases)
        self._under_way.append(step)
        is_scored = any([row.scored for row in rows])
        return StepPlan(tuple(rows), tuple(copies), self._steps, is_scored), commands

    def scored(self, plan: StepPlan, scores: Sequence[Sequence[TokenLogprobs]]) -> None:
        """Keep what the oldest step under way says of the tokens of prompts."""
        said = iter(scores)
        for row, job in zip(plan.rows, self._under_way[0].jobs, strict=True):
            if row.scored:
                job.scores += next(said)

    def complete(self, plan: StepPlan, drawn: Sequence[Drawn], now: float) -> list[Command]:
        """Index and offer what the oldest step under way has finished; a job whose token was drawn is done computing.
        One that was retired meanwhile is nobody's any more."""
        commands: list[Command] = []
        step = self._under_way.popleft()
        self.line.order.ran(plan.computed_tokens, now - max(step.planned_at, self._ended_at))
        self._ended_at = now
        for row, job in zip(plan.rows, step.jobs, strict=True):
            assert job.lease is not None
            # First of all: one that was given up meanwhile lets go of its blocks when the step has ended.
            self.kv.copied(job.lease)
            self.kv.commit(job.lease, job.record.tokens[: row.end], tail=row.draw)
        self.kv.ended(step.leases)
        tokens = iter(drawn)
        for row, job in zip(plan.rows, step.jobs, strict=True):
            assert job.lease is not None
            token = next(tokens) if row.draw else None
            if job.state is not JobState.RUNNING:
                continue
            commands += self._offer(job, row.end)
            self.kv.slide(job.lease, row.end)
            if isinstance(token, DeadEnd):
                commands += self.source.fail(job.handoff, Fault(token.code, token.message, "constraint"))
            elif row.draw:
                assert token is not None and not isinstance(token, tuple)
                commands += self._finish(job, run_of(token), now)
        return commands

    def _offer(self, job: Job, known_tokens: int) -> list[Command]:
        assert job.lease is not None
        return self.source.offer(job.handoff, job.lease, known_tokens)

    def _finish(self, job: Job, drawn: Sequence[DrawnToken], now: float) -> list[Command]:
        self.line.retire(job)
        started = job.started
        assert started is not None
        cached_tokens = min(job.cached_tokens, job.record.prompt_tokens)
        self.hit_tokens += cached_tokens
        queue_s, run_s = started - job.arrived, now - started
        return self.source.finish(
            job.handoff, drawn, queue_s=queue_s, run_s=run_s, cached_tokens=cached_tokens, scores=job.scores
        )

    def check(self) -> None:
        """Recompute the invariants."""
        self.kv.check()
        self.check_requests()

    def check_requests(self) -> None:
        """Do so but for the blocks."""
        self.source.check()
        if self.fetches is not None:
            self.fetches.check()
        self.line.check()
        jobs = self.source.items
        sending = sum(job.state is JobState.SENDING for job in jobs)
        assert len(jobs) == len(list(self.line)) + sending

    def __repr__(self) -> str:
        return (
            f"PrefillScheduler({self.waiting_requests} waiting, {self.running_requests} running, "
            f"{len(self.source.items)} jobs, {self.kv!r})"
        )
