"""The prompts that wait and those that run: who runs next, and how a step's budget is shared. Pure.

Waiting jobs are admitted in the order of `matched_tokens + λ · waiting_seconds`, each only when blocks for its whole
prompt are leased, so a running job can always finish; and no earlier than there is budget for it, so that it finds in
the cache what those before it have computed. Running jobs share the step's token budget in the same order; those that
are much shorter than one of them may slip in, as far as half of a step holds them (`engine.plan.share_budget`);
`prefill_worker.scheduler.order` has the rules.

A job whose next tokens are on their way into the cache is held back for them:

- Another job is computing them. Jobs that share an uncached prefix compute it once: the later ones wait until the first
  has come to where they part. What is less than a block is computed twice rather than waited for.
- A lower tier has them, and gives them back sooner than they would be computed: the fetch is begun while the job waits
  (`engine.kv.tiers.fetches`). No job is held for longer than computing its prompt would have taken.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from engine.kv.manager import KVCacheManager
from engine.kv.radix_cache import Match
from engine.kv.tiers.fetches import Fetches
from engine.plan import CompiledConstraint, is_compiled, share_budget
from engine.types import RequestRecord
from prefill_worker.scheduler.order import Job, JobState, Order
from worker.config import PrefillConfig

MAX_CONSIDERED = 64
"""How many of the longest-waiting jobs are compared at each step."""
MAX_ADMITTED_BLOCKS = 8192
"""Where those that a step admits hold as many, the next one goes on: to lease and to offer so many takes about a tenth
of a second, in which nobody has a step."""
LOOK_AHEAD = 4
"""How many of the first in line may be fetched for."""


class Line:
    """Mutable state: `waiting`, in the order of arrival, `running`, the jobs' states, fetches and expectations, the
    beginnings of all of them, how often it was asked again what is coming, and what `order` has measured. Owner: the
    scheduler."""

    def __init__(
        self,
        config: PrefillConfig,
        kv: KVCacheManager,
        fetches: Fetches | None,
        context_tokens: int,
        compiled: CompiledConstraint | None = None,
    ) -> None:
        fairness = config.fairness_tokens_per_s
        self.order = Order(None if fairness == "auto" else fairness, context_tokens)
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self._kv = kv
        self._chunk_tokens = config.chunk_tokens
        self._max_prompts = config.max_prompts
        self._fetches = fetches
        self._compiled = compiled
        self._begun: Counter[int] = Counter()
        self._asked = 0

    def __iter__(self) -> Iterator[Job]:
        """Go over all that is not computed yet."""
        return iter((*self.waiting, *self.running))

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that are in no step yet: what is cached, or is another one's to compute, does not count, nor
        what a lower tier will have brought by then."""
        waiting = sum(min(job.expected, job.remaining - job.coming) for job in self.waiting)
        return waiting + sum(job.remaining for job in self.running)

    @property
    def s_per_spared_token(self) -> dict[str, float]:
        """What `Load.s_per_spared_token` says."""
        return {} if self._fetches is None else {"here": 1 / self.order.speed}

    def enter(self, job: Job) -> None:
        """Let a job wait."""
        total, size = len(job.record.tokens), self._kv.block_size
        job.beginnings = _beginnings(job.record, size)
        begun = sum(1 for _ in takewhile(self._begun.__contains__, job.beginnings))
        job.expected = total - max(self._matched(job), min(begun * size, job.match_limit))
        job.coming = self._coming(job)
        self._begun.update(job.beginnings)
        self.waiting.append(job)

    def retire(self, job: Job) -> None:
        """Compute no more of this job; its lease stays."""
        for key in job.beginnings:
            self._begun[key] -= 1
            if not self._begun[key]:
                del self._begun[key]
        job.beginnings = []
        if job.state is JobState.WAITING:
            self.waiting.remove(job)
        elif job.state is JobState.RUNNING:
            self.running.remove(job)
        job.state = JobState.SENDING

    def admit(self, now: float) -> list[Job]:
        """Let jobs run, and return them, each with a lease for its whole prompt. Those whose constraint is still being
        compiled are passed over. Whoever runs has tokens to compute, so those that are left have a next step."""
        able = (job for job in self.waiting if is_compiled(job.record, self._compiled))
        matched = {job: self._matched(job) for job in islice(able, MAX_CONSIDERED)}
        for waiting, cached in matched.items():
            waiting.expected = min(waiting.expected, waiting.remaining - cached)

        def priority(job: Job) -> float:
            return self.order.priority(matched[job], job, now)

        line = sorted(matched, key=priority, reverse=True)
        self._fetch([(job, matched[job]) for job in line[:LOOK_AHEAD]], now)
        self._ask_again(line[LOOK_AHEAD:])
        admitted: list[Job] = []
        held: list[Job] = []
        while matched and sum(self._kv.blocks_for(len(job.record.tokens)) for job in admitted) < MAX_ADMITTED_BLOCKS:
            has_budget = sum(job.remaining for job in self.running) < self._chunk_tokens
            job = max(matched, key=priority) if has_budget else self._slips_in(matched)
            if job is None or not self.order.is_in_time(job, [*held, job]):
                break  # the budget is full, or it comes too late to overtake those who are held back
            if self._is_held(job, matched.pop(job), now):
                held.append(job)
            elif self._start(job):
                admitted.append(job)
            else:
                break
        return admitted

    def _fetch(self, first: Sequence[tuple[Job, int]], now: float) -> None:
        """Ask the lower tiers for what the first in line lack. Each comes with how many of its tokens are cached."""
        if self._fetches is None:
            return
        for job, cached in first:
            if job.held_until is not None and now >= job.held_until:
                job.coming = 0  # it is computed, whatever is still on its way
                continue
            record, limit, before = job.record, job.match_limit, job.fetch
            if not limit:
                continue
            match = self._match(job)  # anew: to fetch for another may have pushed some of it out
            job.fetch = self._fetches.wanted(record.space, record.tokens, limit, self.order.speed, match)
            if job.fetch is not before or (job.coming and job.fetch is None):
                job.coming = self._coming(job)
            if job.fetch is not None and job.held_until is None:
                job.held_until = now + (limit - cached) / self.order.speed

    def _ask_again(self, behind: Sequence[Job]) -> None:
        """Ask what lower tiers still give one of those who are not fetched for yet, another one at each step: to ask
        for all of them would take long."""
        reckoned = [job for job in behind if job.coming]
        if reckoned:
            self._asked += 1
            job = reckoned[self._asked % len(reckoned)]
            job.coming = self._coming(job)

    def _is_held(self, job: Job, matched: int, now: float) -> bool:
        """Return True if the job must wait although the step has room. `matched` of its tokens are in the cache."""
        if job.fetch is not None and not job.fetch.is_over:
            assert job.held_until is not None
            if now < job.held_until:
                return True
        if not job.match_limit:
            return False
        # Whole blocks that another has computed are in the cache: what is not matched, it has still to compute.
        end = matched + self._kv.block_size
        return end < len(job.record.tokens) and any(
            _begin_alike(job.record, other.record, matched, end) for other in self.running
        )

    def _start(self, job: Job) -> bool:
        """Return False where there is no room for it now."""
        record, total = job.record, len(job.record.tokens)
        self._kv.entitle(record.namespace, record.cache_share)
        lease = self._kv.acquire(record.space, record.tokens, match_limit=job.match_limit, room_tokens=total)
        if lease is None:
            return False
        self.waiting.remove(job)
        self.running.append(job)
        job.state, job.lease = JobState.RUNNING, lease
        job.cached_tokens = job.computed = lease.cached_tokens
        return True

    def _slips_in(self, matched: dict[Job, int]) -> Job | None:
        """Return the prompt that may share the steps of a much longer one, though the budget is full."""
        running = [job.remaining for job in self.running if job.remaining]
        oldest = min(self, key=lambda job: job.arrived)
        in_time = [job for job in matched if self.order.is_in_time(job, [oldest])]
        if not in_time or len(running) >= self._max_prompts:
            return None
        shortest = min(in_time, key=lambda job: job.remaining - matched[job])
        uncached = shortest.remaining - matched[shortest]
        return shortest if self.order.slips_in(uncached, running, self._chunk_tokens // 2) else None

    def _matched(self, job: Job) -> int:
        return self._kv.tokens_of(self._match(job))

    def _match(self, job: Job) -> Match:
        record = job.record
        # In every step: of a long prompt, only what was cached, or has gone, since the last one is looked at.
        job.match = self._kv.cache.match(record.space, record.tokens, job.match_limit, before=job.match)
        return job.match

    def _coming(self, job: Job) -> int:
        """Return what `Job.coming` says, as things stand."""
        record, limit = job.record, job.match_limit
        if self._fetches is None or not limit:
            return 0
        return self._fetches.coming(record.space, record.tokens, limit, self.order.speed, self._match(job))

    def shares(self, now: float) -> list[tuple[Job, int]]:
        """Return how many tokens of the next step each running job has, the first in order first; some have none, and
        those beyond `max_prompts` are not named, nor is one whose last tokens the step under way computes."""
        self.running.sort(key=lambda job: self.order.priority(job.cached_tokens, job, now), reverse=True)
        first = [job for job in self.running if job.remaining][: self._max_prompts]
        missing = [job.remaining for job in first]
        return list(zip(first, share_budget(missing, self._chunk_tokens), strict=True))

    def check(self) -> None:
        assert all(job.state is JobState.WAITING for job in self.waiting)
        assert all(job.state is JobState.RUNNING and job.lease for job in self.running)
        assert all(0 < job.expected <= job.remaining for job in self.waiting)
        assert all(0 <= job.coming <= job.match_limit for job in self.waiting)
        begun: Counter[int] = Counter()
        for job in self:
            begun.update(job.beginnings)
        assert begun == self._begun


def _beginnings(record: RequestRecord, size: int) -> list[int]:
    """Return a number for the beginning that ends with each whole block: equal ones for equal beginnings, and as good
    as never for others. Nothing but an estimate depends on them."""
    packed = array("Q", record.tokens).tobytes()
    stride = size * 8
    key, keys = hash(record.space), []
    for at in range(0, len(packed) - stride + 1, stride):
        key = hash((key, packed[at : at + stride]))
        keys.append(key)
    return keys


def _begin_alike(one: RequestRecord, other: RequestRecord, matched: int, end: int) -> bool:
    """Say if both begin with the same `end` tokens. The last of them, which differ most often, are compared first."""
    mine, theirs = one.tokens, other.tokens
    return (
        one.space == other.space
        and mine[matched:end] == theirs[matched:end]
        and mine[:matched] == theirs[:matched]
    )
