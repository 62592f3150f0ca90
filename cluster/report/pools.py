"""Pools of workers in simulated time, by steps: what requests would have met in another arrangement. Pure.

A worker takes prompts in the order in which they come, and rows. Its step lasts what its rows take, and what the prompt
tokens in it take. Beside rows a step takes only as many prompt tokens as its bound allows (as in
`decode_worker.scheduler.pace`); a prefill worker never has rows. Where there is a prefill pool, a prompt goes to the
prefill worker with the least left to read, and its row, after the wait for its blocks, to the decode worker with the
fewest requests. With `auto` a decode worker reads it itself where that is predicted to be sooner, the time that its
rows lose included. What is cached is what was found: tokens that the prefill worker, or the decode worker, had.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from router.status.traffic import RequestShape


class PoolSizes(msgspec.Struct, frozen=True):
    """How many workers read prompts only, and how many decode. `is_auto`: the latter read prompts too where that is the
    cheaper; without prefill workers they always do."""

    prefill: int
    decode: int
    is_auto: bool = False

    def __str__(self) -> str:
        if not self.prefill:
            return f"one pool of {self.decode}"
        return f"split {self.prefill}+{self.decode}" + (" with local prefill" if self.is_auto else "")


class PoolSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: of a prompt token, of a step without rows, of each row in it, until blocks have come behind a prompt
    that another worker read, and what a first token takes besides. The rest bounds a step with prompts beside rows."""

    token_s: float
    alone_s: float
    row_s: float
    migrate_s: float
    overhead_s: float
    mixed_step_s: float
    chunk_tokens: int
    least_tokens: int


class PredictedTimes(msgspec.Struct, frozen=True):
    """Seconds: to the first token, and the mean gap between tokens (0.0 for an answer of one)."""

    ttft_s: float
    itl_s: float


@dataclass(slots=True, eq=False)
class _Visit:
    """One request on its way."""

    number: int
    shape: RequestShape
    left_tokens: int = 0
    left_answer: int = 0
    home: "_PoolWorker | None" = None
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True, eq=False)
class _PoolWorker:
    """Mutable state: the prompts that it reads, the rows of its next step and of the one under way, how many requests
    it was given as rows, and whether a step is under way."""

    prompts: deque[_Visit] = field(default_factory=deque)
    rows: list[_Visit] = field(default_factory=list)
    running: list[_Visit] = field(default_factory=list)
    given: int = 0
    is_stepping: bool = False

    @property
    def backlog_tokens(self) -> int:
        return sum(visit.left_tokens for visit in self.prompts)


def simulate(shapes: Sequence[RequestShape], sizes: PoolSizes, speeds: PoolSpeeds) -> list[PredictedTimes]:
    """Return the times of each of `shapes`, of which each arrives when it did. Raises ValueError without a decode
    worker."""
    if sizes.decode < 1:
        raise ValueError("nobody decodes")
    return _PoolRun(sizes, speeds).run(shapes)


class _PoolRun:
    # Mutable state: the workers, what is still to happen, and the times found.

    def __init__(self, sizes: PoolSizes, speeds: PoolSpeeds) -> None:
        self._speeds, self._sizes = speeds, sizes
        self._readers = [_PoolWorker() for _ in range(sizes.prefill)]
        self._homes = [_PoolWorker() for _ in range(sizes.decode)]
        self._due: list[tuple[float, int, _Visit | None, _PoolWorker | None, int]] = []
        self._turn = 0
        self._found: dict[int, PredictedTimes] = {}

    def run(self, shapes: Sequence[RequestShape]) -> list[PredictedTimes]:
        for number, shape in enumerate(shapes):
            self._at(shape.arrived_s, _Visit(number, shape, left_answer=max(shape.output_tokens, 1)), None)
        while self._due:
            now, _, visit, worker, tokens = heapq.heappop(self._due)
            if worker is None and visit is not None:
                self._come(visit, now)
            elif visit is not None and worker is not None:
                self._land(visit, worker, now)
            elif worker is not None:
                self._stepped(worker, tokens, now)
        return [self._found[number] for number in range(len(shapes))]

    def _at(self, when_s: float, visit: _Visit | None, worker: _PoolWorker | None, tokens: int = 0) -> None:
        self._turn += 1
        heapq.heappush(self._due, (when_s, self._turn, visit, worker, tokens))

    def _come(self, visit: _Visit, now: float) -> None:
        shape, speeds = visit.shape, self._speeds
        home = min(self._homes, key=lambda worker: worker.given)
        remote_tokens = max(shape.prompt_tokens - shape.prefill_cached_tokens, 1)
        local_tokens = max(shape.prompt_tokens - shape.decode_cached_tokens, 1)
        reader = min(self._readers, key=lambda worker: worker.backlog_tokens) if self._readers else None
        if reader is None or self._sizes.is_auto:
            local = min(self._homes, key=lambda worker: (worker.backlog_tokens * speeds.token_s, worker.given))
            if reader is None:
                local = min(self._homes, key=lambda worker: (worker.backlog_tokens, worker.given))
            beside = len(local.rows) + len(local.running)
            local_s = (local.backlog_tokens + local_tokens * (1 + beside)) * speeds.token_s
            if reader is None or local_s < self._remote_s(reader, remote_tokens):
                reader, home = local, local
        assert reader is not None
        visit.home = home
        home.given += 1
        visit.left_tokens = local_tokens if reader is home else remote_tokens
        reader.prompts.append(visit)
        self._step(reader, now)

    def _remote_s(self, reader: _PoolWorker, tokens: int) -> float:
        return (reader.backlog_tokens + tokens) * self._speeds.token_s + self._speeds.migrate_s

    def _step(self, worker: _PoolWorker, now: float) -> None:
        if worker.is_stepping or not (worker.prompts or worker.rows):
            return
        speeds, rows = self._speeds, len(worker.rows)
        rows_s = speeds.alone_s + speeds.row_s * rows if rows else 0.0
        most = speeds.chunk_tokens
        if rows and speeds.token_s:
            most = min(most, max(int((speeds.mixed_step_s - rows_s) / speeds.token_s), speeds.least_tokens))
        tokens = min(most, worker.backlog_tokens)
        worker.is_stepping, worker.running, worker.rows = True, worker.rows, []
        self._at(now + rows_s + tokens * speeds.token_s, None, worker, tokens)

    def _stepped(self, worker: _PoolWorker, tokens: int, now: float) -> None:
        running, worker.running = worker.running, []
        for visit in running:
            visit.left_answer -= 1
            visit.last_s = now
            self._go_on(visit, worker)
        while tokens:
            visit = worker.prompts[0]
            share = min(tokens, visit.left_tokens)
            visit.left_tokens -= share
            tokens -= share
            if not visit.left_tokens:
                worker.prompts.popleft()
                home = visit.home
                assert home is not None
                if home is worker:
                    self._land(visit, home, now)
                else:
                    self._at(now + self._speeds.migrate_s, visit, home)
        worker.is_stepping = False
        self._step(worker, now)

    def _land(self, visit: _Visit, home: _PoolWorker, now: float) -> None:
        """Its KV is there, and its first token: it gets a row."""
        visit.first_s = visit.last_s = now
        visit.left_answer -= 1
        self._go_on(visit, home)
        self._step(home, now)

    def _go_on(self, visit: _Visit, home: _PoolWorker) -> None:
        """Give it a row in the next step, or end it."""
        if visit.left_answer > 0:
            home.rows.append(visit)
            return
        home.given -= 1
        gaps, shape = max(visit.shape.output_tokens - 1, 0), visit.shape
        ttft_s = visit.first_s - shape.arrived_s + self._speeds.overhead_s
        self._found[visit.number] = PredictedTimes(ttft_s, (visit.last_s - visit.first_s) / gaps if gaps else 0.0)
