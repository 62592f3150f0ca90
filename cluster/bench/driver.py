"""The closed loop itself: N clients, each sending its next request when its last one has ended."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing

import msgspec

from access.client import ClientCredentials
from cluster.bench.memory import tree_pss_bytes
from cluster.bench.stats import Sample, Summary, gaps, summarise
from cluster.bench.targets import LoadTarget, open_target
from cluster.bench.workloads import Workload, prompts
from engine.types import SamplingParams
from router.front.api import ApiError, Delta, Finished, GenerateCall

MEMORY_PERIOD_S = 2.0


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, where, and how often."""

    target: str
    address: str
    workload: Workload
    requests: int
    concurrency: tuple[int, ...]
    warmup: int
    seed: int
    timeout_s: float
    model: str | None
    pids: tuple[int, ...] = ()


class Level(msgspec.Struct, frozen=True):
    """What one concurrency gave. `messages` holds one error message per error code."""

    concurrency: int
    summary: Summary
    peak_pss_bytes: int | None
    messages: dict[str, str]


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


async def run(plan: LoadPlan, credentials: ClientCredentials | None = None) -> list[Level]:
    """Warm up, then one level for each concurrency.

    Raises `ApiError` if the warm-up fails: figures of a server that cannot answer mean nothing.
    """
    target = open_target(plan.target, plan.address, credentials)
    try:
        seed = f"{plan.seed}/warm-up"
        for sample in await drive(target, plan, seed, plan.warmup, max(plan.concurrency)):
            if sample.error:
                raise ApiError(sample.error, f"the warm-up failed: {sample.message}")
        return [await _level(target, plan, concurrency) for concurrency in plan.concurrency]
    finally:
        await target.close()


async def _level(target: LoadTarget, plan: LoadPlan, concurrency: int) -> Level:
    memory = MemoryWatch(plan.pids)
    watch = asyncio.ensure_future(memory.run())
    try:
        began = time.perf_counter()
        seed = f"{plan.seed}/{concurrency}"
        samples = await drive(target, plan, seed, plan.requests, concurrency)
        wall_s = time.perf_counter() - began
    finally:
        watch.cancel()
        (failure,) = await asyncio.gather(watch, return_exceptions=True)
    if isinstance(failure, Exception):
        raise failure
    # A run shorter than the period may have ended before the first sample.
    await memory.sample()
    messages = {sample.error: sample.message for sample in samples if sample.error}
    return Level(concurrency, summarise(samples, wall_s), memory.peak_bytes, messages)


async def drive(
    target: LoadTarget, plan: LoadPlan, seed: str, requests: int, concurrency: int
) -> list[Sample]:
    """Send `requests` requests, never more than `concurrency` at once; samples in order of completion."""
    waiting = iter(enumerate(prompts(plan.workload, requests, seed)))
    samples: list[Sample] = []

    async def client(mine: Iterator[tuple[int, list[int]]]) -> None:
        for number, prompt in mine:
            samples.append(await measure(target, _call(plan, prompt, number)))

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, requests)):
            clients.create_task(client(waiting))
    return samples


async def measure(target: LoadTarget, call: GenerateCall) -> Sample:
    """Send one request and time it by this process's clock."""
    arrivals: list[tuple[float, int]] = []
    end: Finished | None = None
    began = time.perf_counter()
    try:
        async with asyncio.timeout(call.timeout_s), aclosing(target.generate(call)) as events:
            async for item in events:
                if isinstance(item, Delta) and item.token_ids:
                    arrivals.append((time.perf_counter() - began, len(item.token_ids)))
                elif isinstance(item, Finished):
                    end = item
        e2e_s = time.perf_counter() - began
    except ApiError as error:
        return Sample(error=error.code, message=error.message)
    except TimeoutError:
        return Sample(error="DEADLINE_EXCEEDED", message=f"no end within {call.timeout_s} s")
    if end is None or not arrivals:
        return Sample(
            error="NO_OUTPUT", message="the answer ended without tokens or without a finish"
        )
    if end.output_tokens != call.max_tokens:
        got = f"{end.output_tokens} of {call.max_tokens} output tokens"
        return Sample(error="SHORT_OUTPUT", message=got)
    stats = end.stats
    return Sample(
        ttft_s=arrivals[0][0],
        itl_s=gaps(arrivals),
        e2e_s=e2e_s,
        prompt_tokens=end.prompt_tokens,
        output_tokens=end.output_tokens,
        cached_tokens=end.cached_tokens,
        migrated_blocks=stats.migrated_blocks,
        migrated_bytes=stats.migrated_bytes,
        migration_s=stats.migration_s,
        stages=stats.stages,
    )


def _call(plan: LoadPlan, prompt: list[int], number: int) -> GenerateCall:
    return GenerateCall(
        prompt=prompt,
        model=plan.model,
        max_tokens=plan.workload.output_tokens,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0.0),
        seed=plan.seed + number,
        timeout_s=plan.timeout_s,
    )
