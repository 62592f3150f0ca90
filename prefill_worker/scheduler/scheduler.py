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

from collections.abc import Sequence

from engine import identity
from engine.kv.fetches import Fetches
from engine.kv.manager import KVCacheManager
from engine.kv.tier_io import DiskHung, Loaded, Spilled, TierEvent
from engine.messages import (
    Fault,
    FirstToken,
    Handoff,
    Landed,
    PrefillFailed,
    StartPrefill,
    Stop,
)
from engine.plan import banned_tokens, refusal
from engine.step import Drawn, Row, StepPlan
from engine.types import Incarnation
from prefill_worker.config import PrefillConfig
from prefill_worker.scheduler.job import Job, JobState
from prefill_worker.scheduler.line import Line
from transfer.handoff.commands import (
    Broken,
    Command,
    Emit,
    FromReader,
    Leave,
    Posted,
    ReaderDead,
    ReaderEvent,
    ReaderLost,
    ReaderUp,
    Sent,
    Settled,
)
from transfer.handoff.sender import KVSender, outgoing

GIVEN_UP = "the prefill worker is leaving, and gives up what it has not begun"

Event = ReaderEvent | Posted | Sent | Leave | TierEvent


class PrefillScheduler:
    """Mutable state, all of it: `_jobs`, those of the step under way, `_peers`, `leaving`, what is counted, and what
    `kv`, `sender`, `fetches` and the line own. Owner: the engine thread."""

    def __init__(
        self,
        config: PrefillConfig,
        kv: KVCacheManager,
        sender: KVSender,
        *,
        fingerprint: str,
        vocab: int,
        context_tokens: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.kv = kv
        self.sender = sender
        self.fetches = None if kv.tiers is None else Fetches(kv, kv.tiers)
        self._line = Line(config, kv, self.fetches, context_tokens)
        self._config = config
        self._fingerprint = fingerprint
        self._vocab = vocab
        self._context_tokens = context_tokens
        self._stop_ids = stop_ids
        self._jobs: dict[Handoff, Job] = {}
        self._peers: dict[Incarnation, bool] = {}
        self._stepping: list[Job] = []
        self._steps = 0
        self._planned_at = 0.0
        self.leaving = False
        self._let_go: list[float] = []

    # what there is to do

    @property
    def waiting_requests(self) -> int:
        return len(self._line.waiting)

    @property
    def running_requests(self) -> int:
        return len(self._line.running)

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens asked for and not computed; waiting prompts count in full."""
        return self._line.backlog_tokens

    @property
    def slots(self) -> tuple[int, int]:
        """Token slots that leases hold: those with a token's KV in them, and all."""
        jobs = [job for job in self._jobs.values() if job.lease is not None]
        held = sum(len(job.lease.blocks) for job in jobs if job.lease is not None)
        return sum(job.computed for job in jobs), held * self.kv.block_size

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody."""
        return not self._jobs

    def take_quarantined(self) -> list[float]:
        """Since when blocks were quarantined that were let go since the last call: one time per handoff."""
        taken, self._let_go = self._let_go, []
        return taken

    # events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns what the shell must do. Nothing else changes the state, but `plan`, `complete`."""
        match event:
            case FromReader(peer, StartPrefill() as message):
                return self._start(peer, message, now)
            case FromReader(_, Landed() as message):
                return self._settle(self.sender.landed(message))
            case FromReader(_, Stop() as message):
                return self._stop(message)
            case Posted():
                return self._settle(self.sender.posted(event.handoff, event.seq, event.digests))
            case Sent():
                return self._settle(self.sender.sent(event.handoff, event.seq, event.error))
            case ReaderUp():
                return self._peer_up(event)
            case ReaderLost(peer):
                return self._peer_lost(peer, now)
            case ReaderDead(peer):
                return self._settle(self.sender.peer_dead(peer))
            case Leave():
                return self._leave()
            case Loaded() | Spilled() | DiskHung():
                assert self.fetches is not None
                self.fetches.handle(event)
                return []
        raise TypeError(f"not an event: {event!r}")

    def tick(self, now: float) -> list[Command]:
        """Give up jobs whose time is over."""
        commands: list[Command] = []
        for job in list(self._line):
            if now >= job.deadline:
                commands += self._fail(job, "DEADLINE_EXCEEDED", "the request's time is over")
        return commands

    def _leave(self) -> list[Command]:
        """Give up what has not begun: another worker does it sooner."""
        self.leaving = True
        commands: list[Command] = []
        for job in list(self._line.waiting):
            commands += self._fail(job, "UNAVAILABLE", GIVEN_UP)
        return commands

    def _peer_up(self, event: ReaderUp) -> list[Command]:
        """Whatever is still kept for the peer, and not by its own account, it will never read again."""
        self._peers[event.peer] = event.reads_remotely
        commands: list[Command] = []
        for handoff in self.sender.unclaimed(event.peer, event.unfinished):
            commands += self._stop(Stop(handoff))
        return commands

    def _start(self, peer: Incarnation, message: StartPrefill, now: float) -> list[Command]:
        handoff, record = message.handoff, message.record
        if handoff in self._jobs:
            return []  # every verb is idempotent on its handoff's name
        fault = self._refusal(message)
        if fault is not None:
            return [Emit(peer, PrefillFailed(handoff, fault))]
        deadline = float("inf") if record.remaining_s is None else now + record.remaining_s
        job = Job(handoff, peer, record, message.have_tokens, arrived=now, deadline=deadline)
        self._jobs[handoff] = job
        self._line.waiting.append(job)
        self.sender.open(handoff, self._peers[peer])
        return []

    def _refusal(self, message: StartPrefill) -> Fault | None:
        record = message.record
        if self.leaving:
            return Fault("UNAVAILABLE", "the prefill worker is leaving")
        fault = refusal(record, self._vocab, self._context_tokens)
        if fault is not None:
            return fault
        if self.kv.blocks_for(len(record.tokens)) > self.kv.pool.total:
            return Fault("OUT_OF_RANGE", "the prompt does not fit the prefill worker's pool", "prompt")
        if not 0 <= message.have_tokens < len(record.tokens):
            return Fault("INTERNAL", f"the decode side cannot have {message.have_tokens} tokens")
        if len(self._line.waiting) >= self._config.max_waiting:
            return Fault("RESOURCE_EXHAUSTED", "the prefill worker's line is full")
        return None

    def _stop(self, message: Stop) -> list[Command]:
        job = self._jobs.get(message.handoff)
        if job is not None:
            self._line.retire(job)
        return self._settle(self.sender.stop(message))

    def _fail(self, job: Job, code: str, message: str) -> list[Command]:
        """Give the job up and say so; the receiver's `Stop` settles what it may still be reading."""
        self._line.retire(job)
        commands: list[Command] = [Emit(job.peer, PrefillFailed(job.handoff, Fault(code, message)))]
        if self.sender.is_open(job.handoff):
            commands += self._settle(self.sender.close(job.handoff))
        return commands

    def _peer_lost(self, peer: Incarnation, now: float) -> list[Command]:
        self._peers.pop(peer, None)
        for job in [job for job in self._jobs.values() if job.peer == peer]:
            self._line.retire(job)
        commands = self._settle(self.sender.peer_lost(peer))
        for job in self._jobs.values():
            if job.peer == peer and job.lease is not None:
                self.kv.quarantine(job.lease)
                job.quarantined = now if job.quarantined is None else job.quarantined
        return commands

    def _settle(self, commands: list[Command]) -> list[Command]:
        """What the sender says of a handoff is acted on here, where the leases are; the rest goes to the shell."""
        rest: list[Command] = []
        for command in commands:
            match command:
                case Settled(handoff):
                    job = self._jobs.pop(handoff)
                    self._line.retire(job)
                    if job.quarantined is not None:
                        self._let_go.append(job.quarantined)
                    if job.lease is not None:
                        self.kv.release(job.lease)
                case Broken(handoff, why):
                    why = f"KV blocks could not be sent: {why}"
                    rest += self._fail(self._jobs[handoff], "UNAVAILABLE", why)
                case _:
                    rest.append(command)
        return rest

    # steps

    def plan(self, now: float) -> tuple[StepPlan | None, list[Command]]:
        """The next step (None: nothing to compute), and offers of prefixes that need no computing."""
        commands = [command for job in self._line.admit(now) for command in self._offer(job)]
        if not self._line.running:
            return None, commands
        self._stepping = []
        rows, copies = [], []
        for job, share in self._line.shares(now):
            if share == 0:
                continue
            assert job.lease is not None
            if job.started is None:
                job.started = now
                copies += job.lease.copies
            end = job.computed + share
            tokens, record = job.record.tokens, job.record
            output = len(tokens) - record.prompt_tokens
            rows.append(
                Row(
                    request=record.request,
                    record=record,
                    tokens=tokens,
                    start=job.computed,
                    end=end,
                    blocks=job.lease.blocks,
                    draw=end == len(tokens),
                    banned=banned_tokens(record, output, self._stop_ids),
                )
            )
            job.computed = end
            self._stepping.append(job)
        self._steps += 1
        self._planned_at = now
        return StepPlan(tuple(rows), tuple(copies), self._steps), commands

    def complete(self, plan: StepPlan, drawn: Sequence[Drawn], now: float) -> list[Command]:
        """The step has run: index and offer what it finished; a job whose token was drawn is done computing."""
        commands: list[Command] = []
        self._line.order.ran(plan.computed_tokens, now - self._planned_at)
        tokens = iter(drawn)
        for row, job in zip(plan.rows, self._stepping, strict=True):
            assert job.lease is not None
            self.kv.copied(job.lease)
            self.kv.commit(job.lease, job.record.tokens[: row.end], tail=row.draw)
            commands += self._offer(job)
            if row.draw:
                token = next(tokens)
                assert isinstance(token, int)
                commands += self._finish(job, token, now)
        return commands

    def _offer(self, job: Job) -> list[Command]:
        """Offer the blocks that are complete and not offered yet; the last one of a prompt may be partly filled."""
        assert job.lease is not None
        size, total = self.kv.block_size, len(job.record.tokens)
        ready = self.kv.blocks_for(total) if job.computed == total else job.computed // size
        if ready <= job.offered_blocks:
            return []
        if job.identities is None:
            root = identity.root(job.record.namespace, self._fingerprint)
            job.identities = identity.blocks(root, job.record.tokens, size)
        blocks = outgoing(
            self.kv, job.lease, job.identities, total, job.offered_blocks, ready
        )
        job.offered_blocks = ready
        job.chunks += 1
        return self._settle(self.sender.offer(job.handoff, blocks))

    def _finish(self, job: Job, token: int, now: float) -> list[Command]:
        self._line.retire(job)
        started = job.arrived if job.started is None else job.started
        first = FirstToken(
            handoff=job.handoff,
            token=token,
            chunks=job.chunks,
            queue_s=started - job.arrived,
            run_s=now - started,
            cached_tokens=min(job.cached_tokens, job.record.prompt_tokens),
        )
        return [Emit(job.peer, first), *self._settle(self.sender.close(job.handoff))]

    def check(self) -> None:
        """Recompute the invariants."""
        self.kv.check()
        self.sender.check()
        if self.fetches is not None:
            self.fetches.check()
        self._line.check()
        sending = sum(job.state is JobState.SENDING for job in self._jobs.values())
        assert len(self._jobs) == len(list(self._line)) + sending

    def __repr__(self) -> str:
        return (
            f"PrefillScheduler({self.waiting_requests} waiting, {self.running_requests} running, "
            f"{len(self._jobs)} jobs, {self.kv!r})"
        )
