"""The workers of a simulated cluster: real lines and caches, steps that take as long as they are told to.

Prefill workers are the real line of prompts (`prefill_worker.scheduler.line`) over the real cache, decode workers the
real cache and batches that share their steps. Nothing reads a clock.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from benchmarks.routing.lower_tiers import NO_TIERS, SimulatedTiers, TierShape
from benchmarks.routing.workloads import BLOCK, TOKEN_SCALE, PromptTurn
from engine.identity import SHORT_BYTES
from engine.kv.manager import KVCacheManager, Lease
from engine.messages import (
    Accepted,
    CachedTold,
    DecodeRecord,
    Ended,
    Handoff,
    HeldRun,
    Load,
    Place,
    Refused,
    RequestStats,
    Tokens,
)
from engine.plan import TokenSpeed
from engine.types import FinishReason, Incarnation, RequestId, RequestRecord
from prefill_worker.scheduler.line import Line
from prefill_worker.scheduler.order import Job
from worker.config import PrefillConfig

REPORT_S = 0.05
MOVED_AT_ONCE = 32_768
FINGERPRINT = "f"
"""The model: what a worker says and what it names its blocks by must be the same, or no eviction is understood."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """An 8B model on a card of 80 GB, about: seconds, per token of here (TOKEN_SCALE of the model) or per block."""

    prefill_step_s: float = 0.004
    prefill_token_s: float = TOKEN_SCALE / 14_000
    move_block_s: float = 0.0008
    decode_step_s: float = 0.008
    decode_row_s: float = 0.00004
    decode_block_s: float = 0.000_001
    """Per block of context that a step reads."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    prefill: int = 4
    decode: int = 4
    prefill_blocks: int = 2000
    decode_blocks: int = 8000
    chunk_tokens: int = 8192 // TOKEN_SCALE
    max_batch: int = 256
    speeds: Speeds = Speeds()
    slow: float = 1.0
    """How many times slower the first prefill worker is."""
    latency_s: float = 0.000_5
    tiers: TierShape = NO_TIERS
    """Below the device of each prefill worker."""
    routers: int = 1

    @property
    def cached_blocks(self) -> int:
        """Blocks that all prefill workers together hold, in all their tiers."""
        return self.prefill * (self.prefill_blocks + self.tiers.blocks)


@dataclass(slots=True)
class RoutingOutcome:
    """What became of a run. Seconds, and tokens of here; `gaps` counts tokens by the milliseconds before them."""

    ttft_s: list[float] = field(default_factory=list)
    gaps: dict[int, int] = field(default_factory=dict)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    busy_s: float = 0.0
    span_s: float = 0.0
    failed: int = 0
    found: list[tuple[float, int, int]] = field(default_factory=list)
    """When each prompt had been computed, how many of its tokens were cached, and how many it has."""
    came: list[PromptTurn] = field(default_factory=list)
    """The prompts in the order in which they came: a client of a chat that waits for an answer asks again later."""
    diverged: bool = False
    """The run was ended, since a prompt had waited for longer than anybody would (`PATIENCE_S`)."""
    reports_lost: int = 0
    restarted_s: float | None = None
    """When the router was restarted."""
    loaded_blocks: dict[str, int] = field(default_factory=dict)
    """How many blocks came back from each lower tier."""


class Clockwork:
    """What happens when."""

    # Mutable state: the time, and what is still to happen.

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._turn = count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._turn), what))

    def run(self, until: Callable[[], bool]) -> None:
        while self._due and not until():
            self.now, _, what = heapq.heappop(self._due)
            what()


class SimulatedPrefill:
    """One prefill worker. `tell` takes its reports."""

    # Mutable state: its cache, its line, who waits for which job, the step under way, and what it has measured.

    def __init__(
        self, name: str, shape: ClusterShape, slow: float, time: Clockwork, tell: Callable[[Load | CachedTold], None]
    ) -> None:
        self.name = name
        tiers = shape.tiers.open()
        self.kv = KVCacheManager(shape.prefill_blocks, BLOCK, FINGERPRINT, tiers)
        self.lower = None if tiers is None else SimulatedTiers(self.kv, tiers, shape.tiers, time, self._wake)
        fetches = None if self.lower is None else self.lower.fetches
        context_tokens = shape.prefill_blocks * BLOCK
        self.line = Line(PrefillConfig(chunk_tokens=shape.chunk_tokens), self.kv, fetches, context_tokens)
        self.busy_s = 0.0
        self._speeds, self._slow = shape.speeds, slow
        self._time, self._tell = time, tell
        self._finished: dict[Job, Callable[[Job], None]] = {}
        self._steps = 0
        self._stepping = False
        self._computing_tokens = 0
        self._speed = TokenSpeed()
        self._reported_s = self._stepped_s = -1.0

    def start(self, record: RequestRecord, finished: Callable[[Job], None]) -> None:
        """Prefill a prompt; `finished` is called with the job, which holds its blocks until `release`."""
        handoff = Handoff(record.request, 1, 1, Incarnation(1), Incarnation(2))
        job = Job(handoff, record, arrived=self._time.now, deadline=float("inf"))
        self.line.enter(job)
        self._finished[job] = finished
        self._wake()

    def release(self, job: Job) -> None:
        """Let its blocks go: they have been read."""
        assert job.lease is not None
        self.kv.release(job.lease)
        self._wake()

    def report(self) -> None:
        counts = self.kv.pool.counts()
        self._reported_s = self._time.now
        self._steps += 1
        for told in cached_told(self.kv):
            self._tell(told)
        self._tell(
            Load(
                step=self._steps,
                free_blocks=counts["free"],
                cached_blocks=counts["cached"],
                active_blocks=counts["active"],
                reserved_blocks=counts["reserved"],
                quarantined_blocks=counts["quarantined"],
                waiting_requests=len(self.line.waiting),
                waiting_tokens=self.line.backlog_tokens + self._computing_tokens,
                running_requests=len(self.line.running),
                s_per_token=self._speed.s_per_token,
                moved={
                    tier: b"".join(one[:SHORT_BYTES] for one in blocks)
                    for tier, blocks in self.kv.take_moved(MOVED_AT_ONCE).items()
                },
                s_per_loaded_block={} if self.kv.tiers is None else self.kv.tiers.cost.s_per_block,
                s_per_spared_token=self.line.s_per_spared_token,
                evicted=self.kv.take_evicted(),
            )
        )

    def _wake(self) -> None:
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        now = self._time.now
        self.line.admit(now)
        if self.lower is not None:
            self.lower.carry_out()
        shares = [(job, share) for job, share in self.line.shares(now) if share]
        self._stepping = bool(shares)
        if not shares:
            if self._reported_s < self._stepped_s:
                self.report()
            # Nobody is held back for a fetch for longer than this.
            held_until = [job.held_until for job in self.line.waiting if job.held_until is not None]
            if later := [until_s for until_s in held_until if until_s > now]:
                self._time.after(min(later) - now, self._wake)
            return
        tokens = self._computing_tokens = sum(share for _, share in shares)
        seconds = (self._speeds.prefill_step_s + tokens * self._speeds.prefill_token_s) * self._slow
        for job, share in shares:
            job.started = self._time.now if job.started is None else job.started
            job.computed += share
        self._time.after(seconds, lambda: self._stepped(shares, tokens, seconds))

    def _stepped(self, shares: list[tuple[Job, int]], tokens: int, seconds: float) -> None:
        self.busy_s += seconds
        self._computing_tokens = 0
        self._stepped_s = self._time.now
        self.line.order.ran(tokens, seconds)
        self._speed.measured(seconds, tokens)
        done = []
        for job, _ in shares:
            assert job.lease is not None
            self.kv.copied(job.lease)
            self.kv.commit(job.lease, job.record.tokens[: job.computed], tail=not job.remaining)
            if not job.remaining:
                self.line.retire(job)
                done.append(job)
        if self._time.now - self._reported_s >= REPORT_S:
            self.report()
        self._step()
        for job in done:
            self._finished.pop(job)(job)


def cached_told(kv: KVCacheManager) -> list[CachedTold]:
    """Return what a worker tells all of several routers before a report."""
    runs = [
        HeldRun(parent[:SHORT_BYTES], b"".join(one[:SHORT_BYTES] for one in run)) for parent, run in kv.take_cached()
    ]
    return [CachedTold(runs)] if runs else []


@dataclass(slots=True, eq=False)
class DecodingRow:
    """A request on a decode worker."""

    place: Place
    lease: Lease
    turn: PromptTurn
    arrived_s: float
    steps_left: int
    last_s: float = 0.0
    prefill_cached: int = 0
    stages: dict[str, float] = field(default_factory=dict)


class ServedCluster(Protocol):
    """What a decode worker needs of the cluster around it."""

    shape: ClusterShape
    time: Clockwork
    outcome: RoutingOutcome
    turns: dict[RequestId, tuple[PromptTurn, float]]
    prefills: dict[str, SimulatedPrefill]
    s_per_block: dict[str, float]

    def say(self, worker: str, record: DecodeRecord) -> None:
        """Send a worker's record to the router."""

    def has_begun(self, request: RequestId, ttft_s: float) -> None:
        """Hear that a request has had its first token, after so many seconds."""

    def ended(self, request: RequestId) -> None:
        """Hear that a request has had its last token."""


class SimulatedDecode:
    """One decode worker. `say` takes its records, `ended` hears of a request's last token."""

    # Mutable state: its cache, the rows that decode, how many requests it holds, and its reports.

    def __init__(self, name: str, cluster: ServedCluster) -> None:
        self.name = name
        self._cluster = cluster
        self._shape = cluster.shape
        self._time = cluster.time
        self.kv = KVCacheManager(self._shape.decode_blocks, BLOCK, FINGERPRINT)
        self._rows: list[DecodingRow] = []
        self._held = 0
        self._steps = 0
        self._stepping = False
        self._step_s = 0.0
        self._reported_s = -1.0

    def place(self, place: Place) -> None:
        record = place.record
        prompt = len(record.tokens)
        lease = None
        if self._held < self._shape.max_batch:
            lease = self.kv.acquire(
                b"",
                record.tokens,
                match_limit=prompt - 1,
                room_tokens=prompt,
                grow_tokens=prompt + record.max_tokens,
                migrating=True,
            )
        if lease is None:
            cached_tokens = self.kv.matched_tokens(b"", record.tokens, prompt - 1)
            self._say(Refused(record.request, place.placement, 1, cached_tokens))
            return
        self._held += 1
        self._say(Accepted(record.request, place.placement, lease.cached_tokens))
        turn, arrived_s = self._cluster.turns[record.request]
        row = DecodingRow(place, lease, turn, arrived_s, turn.output_tokens)
        began_s = self._time.now
        source = self._cluster.prefills[place.prefill.name]

        def finished(job: Job) -> None:
            # Chunks travel while the next ones are computed: what is left is what the wire is slower by.
            missing = len(lease.blocks) - lease.cached_tokens // BLOCK
            wire_s = missing * self._shape.speeds.move_block_s
            computed_s = self._time.now - (job.started or began_s)
            left_s = max(wire_s - computed_s, self._shape.speeds.move_block_s) + self._shape.latency_s
            row.prefill_cached = job.cached_tokens
            queued_s = self._time.now - began_s - computed_s
            row.stages = {"prefill_queue": queued_s, "prefill_run": computed_s, "migrate": left_s}
            outcome = self._cluster.outcome
            outcome.hit_tokens += job.cached_tokens
            outcome.prompt_tokens += prompt
            outcome.found.append((self._time.now, job.cached_tokens, prompt))
            self._time.after(left_s, lambda: self._landed(row, source, job))

        self._time.after(self._shape.latency_s, lambda: source.start(record, finished))

    def _landed(self, row: DecodingRow, source: SimulatedPrefill, job: Job) -> None:
        source.release(job)
        self.kv.landed(row.lease)
        self.kv.commit(row.lease, row.place.record.tokens)
        now = row.last_s = self._time.now
        request, placement = row.place.record.request, row.place.placement
        self._cluster.has_begun(request, now - row.arrived_s)
        self._say(Tokens(request, placement, 0, [1]))
        row.steps_left -= 1
        if row.steps_left > 0:
            self._rows.append(row)
            if not self._stepping:
                self._step()
        else:
            self._end(row)

    def _step(self) -> None:
        self._stepping = bool(self._rows)
        if not self._rows:
            return
        speeds = self._shape.speeds
        context = sum(len(row.lease.blocks) for row in self._rows)
        seconds = speeds.decode_step_s + len(self._rows) * speeds.decode_row_s + context * speeds.decode_block_s
        self._time.after(seconds, lambda: self._stepped(list(self._rows), seconds))

    def _stepped(self, rows: list[DecodingRow], seconds: float) -> None:
        self._step_s += (seconds - self._step_s) * (0.1 if self._step_s else 1.0)
        gaps, now = self._cluster.outcome.gaps, self._time.now
        ended = []
        for row in rows:
            gap = int((now - row.last_s) * 1000)
            gaps[gap] = gaps.get(gap, 0) + 1
            row.last_s = now
            row.steps_left -= 1
            if row.steps_left <= 0:
                ended.append(row)
        if ended:
            self._rows = [row for row in self._rows if row.steps_left > 0]
            for row in ended:
                self._end(row)
        if now - self._reported_s >= REPORT_S:
            self.report()
        self._step()

    def _end(self, row: DecodingRow) -> None:
        record, placement = row.place.record, row.place.placement
        answer = [(hash((record.request, n)) & 0x7FFFFFFF) for n in range(record.max_tokens)]
        tokens = record.tokens + answer
        self.kv.extend(row.lease, len(tokens))
        self.kv.commit(row.lease, tokens[:-1])
        self.kv.release(row.lease)
        self._held -= 1
        if len(answer) > 1:
            self._say(Tokens(record.request, placement, 1, answer[1:]))
        stats = RequestStats(
            stages=row.stages,
            prompt_tokens=len(record.tokens),
            output_tokens=len(answer),
            prefill_cached_tokens=row.prefill_cached,
            prefill_worker=row.place.prefill.name,
            decode_worker=self.name,
        )
        self._say(Ended(record.request, placement, reason=FinishReason.LENGTH, stats=stats))
        self._cluster.ended(record.request)

    def report(self) -> None:
        counts = self.kv.pool.counts()
        self._reported_s = self._time.now
        self._steps += 1
        load = Load(
            step=self._steps,
            free_blocks=counts["free"],
            cached_blocks=counts["cached"],
            active_blocks=counts["active"],
            reserved_blocks=counts["reserved"],
            quarantined_blocks=counts["quarantined"],
            promised_blocks=self.kv.promised,
            running_requests=len(self._rows),
            s_per_token=self._step_s * TOKEN_SCALE,  # of here: each is as many steps
            s_per_block=self._cluster.s_per_block,
            evicted=self.kv.take_evicted(),
        )
        for told in cached_told(self.kv):
            self._say(told)
        self._say(load)

    def _say(self, record: DecodeRecord) -> None:
        self._cluster.say(self.name, record)
