"""Servers that answer by rule, on an event loop whose time passes at once, so that what a load generator measures is
exact."""

import asyncio
import selectors
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from cluster.bench.driver import LoadPlan
from cluster.bench.workloads import Kind, Workload
from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.api import ApiError, Delta, Finished, GenerateCall, GenerateEvent

T = TypeVar("T")


class _Skipping(selectors.SelectSelector):
    """Does not wait: the time that would have passed is added to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is left that could happen"
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Skipping()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class OneAtATime:
    """A queue with one server, first come first served, which takes `service_s` for each answer's first token and
    `gap_s` for each later one. `refuses` says which requests, by number, it refuses; `busy_s` is how long the client's
    own processor is busy sending the request of that number."""

    def __init__(
        self,
        service_s: float,
        gap_s: float = 0.0,
        refuses: range | tuple[int, ...] = (),
        busy_s: dict[int, float] | None = None,
        has_ids: bool = True,
    ) -> None:
        self.calls: list[GenerateCall] = []
        self.sent_s: list[float] = []
        self.answers: list[list[int]] = []
        self.ended_s: list[float] = []
        self.outstanding = self.most = 0
        self._service_s, self._gap_s = service_s, gap_s
        self._refuses, self._busy_s, self._has_ids = refuses, busy_s or {}, has_ids
        self._free_s = 0.0

    async def close(self) -> None: ...

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop) and isinstance(call.prompt, list) and call.max_tokens is not None
        number = len(self.calls)
        self.calls.append(call)
        self.sent_s.append(loop.time())
        loop.clock.now += self._busy_s.get(number, 0.0)
        if number in self._refuses:
            raise ApiError("RESOURCE_EXHAUSTED", "the line is full")
        self.outstanding += 1
        self.most = max(self.most, self.outstanding)
        self._free_s = max(self._free_s, loop.time()) + self._service_s
        await asyncio.sleep(self._free_s - loop.time())
        answer = [1000 * number + n if self._has_ids else -1 for n in range(call.max_tokens)]
        for place, token in enumerate(answer):
            if place:
                await asyncio.sleep(self._gap_s)
            yield Delta("x", (token,))
        self.answers.append(answer)
        self.ended_s.append(loop.time())
        self.outstanding -= 1
        yield finished(len(call.prompt), call.max_tokens)


def finished(prompt_tokens: int, output_tokens: int) -> Finished:
    return Finished(
        reason=FinishReason.LENGTH,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=0,
        stats=RequestStats(),
        ttft_s=0.0,
        itl_mean_s=0.0,
        itl_p99_s=0.0,
        e2e_s=0.0,
    )


SHORT = Workload(kind=Kind.RANDOM, input_tokens=4, output_tokens=1)


def plan(**fields: Any) -> LoadPlan:
    """A plan of short requests with one load; no warm-up."""
    settings: dict[str, Any] = {
        "target": "grpc",
        "address": "nowhere",
        "workload": SHORT,
        "requests": 100,
        "warmup": 0,
        "seed": 0,
        "timeout_s": 1e6,
        "model": None,
        "loads": (1.0,),
    }
    return LoadPlan(**settings | fields)
