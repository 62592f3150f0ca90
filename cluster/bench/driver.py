"""The two loops: closed, N clients of which each sends its next request when its last one has ended; and open, in which
every session begins at its time, however many requests are outstanding."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from math import ceil
from random import Random

import msgspec

from access.client import ClientCredentials
from cluster.bench import traces
from cluster.bench.memory import tree_pss_bytes
from cluster.bench.search import SearchPlan
from cluster.bench.slo import Slo, SloAttainment, judge
from cluster.bench.stats import Sample, Summary, gaps, summarise
from cluster.bench.targets import UNKNOWN_TOKEN, LoadTarget, open_target
from cluster.bench.workloads import LoadSession, LoadTurn, Workload, arrivals, sessions
from engine.types import SamplingParams
from router.front.api import ApiError, Delta, Finished, GenerateCall

MEMORY_PERIOD_S = 2.0
WARMUP_AT_ONCE = 8
"""Requests at once in the warm-up of an open loop."""


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, where, and how often. A run has a level for each of `concurrency`, or for each of `loads`: requests
    per second, or, where `trace` names a file, its speed. Requests are per level, in whole chats."""

    target: str
    address: str
    workload: Workload
    requests: int
    concurrency: tuple[int, ...] = ()
    warmup: int
    seed: int
    timeout_s: float
    model: str | None
    pids: tuple[int, ...] = ()
    loads: tuple[float, ...] = ()
    burstiness: float = 1.0
    trace: str = ""
    slo: Slo | None = None
    search: SearchPlan | None = None
    temperature: float = 0.0


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """What one concurrency, or one rate, gave. `messages` holds one error message per error code.

    `concurrency` is None in an open loop; there `rate_per_s` is how many requests a second were to be sent, None for a
    trace of which all come at once, and `trace_speed` how much faster than its times a trace was played.
    """

    concurrency: int | None = None
    rate_per_s: float | None = None
    trace_speed: float | None = None
    summary: Summary
    slo: SloAttainment | None
    peak_pss_bytes: int | None
    messages: dict[str, str]

    @property
    def name(self) -> str:
        """The heading of its figures."""
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        rate = "" if self.rate_per_s is None else f"{self.rate_per_s:.3g}/s"
        return rate if self.trace_speed is None else f"speed {self.trace_speed:.3g} ({rate or 'at once'})"


class MemoryWatch:
    """Samples the summed PSS of process trees; `peak_bytes` is the largest sum seen, None without processes."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._pids = pids
        self.peak_bytes: int | None = None

    async def sample(self) -> None:
        """Measure once. Raises `ProcessLookupError` when a process is gone: then the figures are not of the server
        meant."""
        if not self._pids:
            return
        now = await asyncio.to_thread(lambda: sum(map(tree_pss_bytes, self._pids)))
        self.peak_bytes = max(now, self.peak_bytes or 0)

    async def run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(MEMORY_PERIOD_S)


class LoadGenerator:
    """One server under load: its connections, the plan, and the rows of the trace if the plan has one.

    Times are those of the running event loop's clock.
    """

    def __init__(self, target: LoadTarget, plan: LoadPlan, rows: Sequence[traces.TraceRow] = ()) -> None:
        self._target = target
        self._plan = plan
        self._rows = rows

    async def warm_up(self) -> None:
        """Send the first requests of sessions that no level sends. Raises `ApiError` if one fails: figures of a server
        that cannot answer mean nothing."""
        plan = self._plan
        at_once = max(plan.concurrency, default=WARMUP_AT_ONCE)
        seed = f"{plan.seed}/warm-up"
        made = (
            self._replayed(self._rows[: plan.warmup], 1.0, seed)
            if plan.trace
            else sessions(plan.workload, [0.0] * plan.warmup, seed)
        )
        firsts = [LoadSession(0.0, session.turns[:1]) for session in made]
        for sample in await self.closed(firsts, at_once):
            if sample.error:
                raise ApiError(sample.error, f"the warm-up failed: {sample.message}")

    async def at_once(self, concurrency: int, made: Sequence[LoadSession] = ()) -> Level:
        """Run one level of the closed loop, with the plan's sessions or with others."""
        plan = self._plan
        made = made or sessions(plan.workload, [0.0] * self._chats(plan.requests), f"{plan.seed}/{concurrency}")
        level = await self._measured(lambda: self.closed(made, concurrency))
        return msgspec.structs.replace(level, concurrency=concurrency)

    async def at_load(self, load: float, requests: int) -> Level:
        """Run one level of the open loop, at `load` requests per second, or at that speed of the trace."""
        plan = self._plan
        seed = f"{plan.seed}/{load}"
        if plan.trace:
            made = self._replayed(self._rows, load, seed)
            span_s = made[-1].begins_s
            rate, speed = (len(made) / span_s if span_s > 0 else None), load
        else:
            chats = self._chats(requests)
            rate, speed = load, None
            chats_per_s = load / plan.workload.turns
            begins_s = arrivals(chats, chats_per_s, plan.burstiness, Random(f"{seed}/arrivals"))
            made = sessions(plan.workload, begins_s, seed)
        level = await self._measured(lambda: self.open(made))
        return msgspec.structs.replace(level, rate_per_s=rate, trace_speed=speed)

    async def closed(self, made: Sequence[LoadSession], concurrency: int) -> list[Sample]:
        """Send all sessions, never more than `concurrency` at once; samples in order of completion."""
        waiting = iter(enumerate(made))
        samples: list[Sample] = []

        async def client(mine: Iterator[tuple[int, LoadSession]]) -> None:
            for number, session in mine:
                samples.extend(await self._play(session, number, None))

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(made))):
                clients.create_task(client(waiting))
        return samples

    async def open(self, made: Sequence[LoadSession]) -> list[Sample]:
        """Begin each session at its time, and return when all have ended. `made` is in order of time."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.TaskGroup() as running:
            played = []
            for number, session in enumerate(made):
                due = began + session.begins_s
                # Where it is past its time already, what is under way has a turn of the loop all the same.
                await asyncio.sleep(max(0.0, due - clock()))
                played.append(running.create_task(self._play(session, number, due)))
        return [sample for task in played for sample in task.result()]

    async def _play(self, session: LoadSession, number: int, due: float | None) -> list[Sample]:
        """Send the turns of a session, the first when called and each other one when its pause is over. When one fails
        those after it fail unsent."""
        clock = asyncio.get_running_loop().time
        samples: list[Sample] = []
        history: list[int] = []
        for place, turn in enumerate(session.turns):
            if place:
                due = clock() + turn.think_s
                await asyncio.sleep(turn.think_s)
            prompt = history + turn.tokens()
            call = self._call(prompt, turn, number * len(session.turns) + place)
            sample, answer = await _ask(self._target, call, due)
            samples.append(sample)
            left = len(session.turns) - len(samples)
            if sample.error and left:
                unsent = Sample(error="NOT_SENT", message="an earlier turn of its chat failed")
                return [*samples, *[unsent] * left]
            if left and UNKNOWN_TOKEN in answer:
                unsent = Sample(error="NO_TOKEN_IDS", message="a chat goes on with ids, and the server sends none")
                return [*samples, *[unsent] * left]
            history = prompt + answer
        return samples

    async def _measured(self, drive: Callable[[], Awaitable[list[Sample]]]) -> Level:
        """Run a loop, time it, and watch the memory meanwhile."""
        plan = self._plan
        clock = asyncio.get_running_loop().time
        memory = MemoryWatch(plan.pids)
        watch = asyncio.ensure_future(memory.run())
        try:
            began = clock()
            samples = await drive()
            wall_s = clock() - began
        finally:
            watch.cancel()
            (failure,) = await asyncio.gather(watch, return_exceptions=True)
        if isinstance(failure, Exception):
            raise failure
        # A run shorter than the period may have ended before the first sample.
        await memory.sample()
        return Level(
            summary=summarise(samples, wall_s),
            slo=judge(samples, wall_s, plan.slo) if plan.slo is not None else None,
            peak_pss_bytes=memory.peak_bytes,
            messages={sample.error: sample.message for sample in samples if sample.error},
        )

    def _chats(self, requests: int) -> int:
        return ceil(requests / self._plan.workload.turns)

    def _replayed(self, rows: Sequence[traces.TraceRow], speed: float, seed: str) -> list[LoadSession]:
        load = self._plan.workload
        return traces.replay(rows, speed, seed, load.token_low, load.token_high)

    def _call(self, prompt: list[int], turn: LoadTurn, number: int) -> GenerateCall:
        return GenerateCall(
            prompt=prompt,
            model=self._plan.model,
            max_tokens=turn.output_tokens,
            ignore_eos=True,
            sampling=SamplingParams(temperature=self._plan.temperature),
            seed=self._plan.seed + number,
            timeout_s=self._plan.timeout_s,
        )


async def run(
    plan: LoadPlan, credentials: ClientCredentials | None = None, rows: Sequence[traces.TraceRow] = ()
) -> list[Level]:
    """Warm up, then one level for each concurrency or load; `rows` are those of the plan's trace.

    Raises `ApiError` if the warm-up fails.
    """
    target = open_target(plan.target, plan.address, credentials)
    try:
        generator = LoadGenerator(target, plan, rows)
        await generator.warm_up()
        closed = [await generator.at_once(concurrency) for concurrency in plan.concurrency]
        return closed + [await generator.at_load(load, plan.requests) for load in plan.loads]
    finally:
        await target.close()


async def measure(target: LoadTarget, call: GenerateCall, due: float | None = None) -> Sample:
    """Send one request and time it by the event loop's clock, from `due` on, or from now."""
    sample, _ = await _ask(target, call, due)
    return sample


async def _ask(target: LoadTarget, call: GenerateCall, due: float | None) -> tuple[Sample, list[int]]:
    """Do what `measure` does, and return the ids of the answer too."""
    clock = asyncio.get_running_loop().time
    arrivals_s: list[tuple[float, int]] = []
    answer: list[int] = []
    end: Finished | None = None
    sent = clock()
    late_s = None if due is None else max(0.0, sent - due)
    began = sent if due is None else due

    def failed(code: str, message: str) -> tuple[Sample, list[int]]:
        return Sample(error=code, message=message, late_s=late_s), answer

    try:
        async with asyncio.timeout(call.timeout_s), aclosing(target.generate(call)) as events:
            async for item in events:
                if isinstance(item, Delta) and item.token_ids:
                    arrivals_s.append((clock() - began, len(item.token_ids)))
                    answer.extend(item.token_ids)
                elif isinstance(item, Finished):
                    end = item
        e2e_s = clock() - began
    except ApiError as error:
        return failed(error.code, error.message)
    except TimeoutError:
        return failed("DEADLINE_EXCEEDED", f"no end within {call.timeout_s} s")
    if end is None or not arrivals_s:
        return failed("NO_OUTPUT", "the answer ended without tokens or without a finish")
    if end.output_tokens != call.max_tokens:
        return failed("SHORT_OUTPUT", f"{end.output_tokens} of {call.max_tokens} output tokens")
    stats = end.stats
    sample = Sample(
        ttft_s=arrivals_s[0][0],
        itl_s=gaps(arrivals_s),
        e2e_s=e2e_s,
        prompt_tokens=end.prompt_tokens,
        output_tokens=end.output_tokens,
        cached_tokens=end.cached_tokens,
        migrated_blocks=stats.migrated_blocks,
        migrated_bytes=stats.migrated_bytes,
        migration_s=stats.migration_s,
        stages=stats.stages,
        late_s=late_s,
    )
    return sample, answer
