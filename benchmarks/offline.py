"""Runs requests through both schedulers in one process and thread, a number of them at a time, and times each token.

Times are processor time of that thread, which does all the work: other work on the machine inflates it little.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.device import EngineDevice
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated, ColocatedAnswer


@dataclass(slots=True)
class Served:
    """How a set of requests went. `seconds` from the first request to the last token; times to the first token from
    when each was handed in."""

    seconds: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    moved_blocks: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


@contextmanager
def engine(make: Callable[[], EngineDevice]) -> Iterator[Colocated]:
    """Build two new devices with both schedulers over them. Runs in namespaces of their own share nothing in it."""
    devices = make(), make()
    made = Colocated(*devices)
    try:
        yield made
    finally:
        made.close()
        for device in devices:
            device.kv.close()


def record(name: str, prompt: list[int], answer: int, namespace: bytes = b"") -> RequestRecord:
    """Make a request that is greedy and runs to its full length."""
    return RequestRecord(
        request=RequestId(name),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=answer,
        seed=1,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
        namespace=namespace,
    )


def serve(
    both: Colocated,
    records: Sequence[RequestRecord],
    at_once: int,
    *,
    forks: Mapping[RequestId, RequestId] | None = None,
    static: bool = False,
) -> Served:
    """Run all of them, `at_once` at a time: whenever one ends the next is handed in; or, where `static`, when all have
    ended. `forks` says whose prompt a request shares. Raises RuntimeError if one fails."""
    waiting, served = list(reversed(records)), Served()
    handed_in: dict[RequestId, float] = {}
    under_way: list[ColocatedAnswer] = []
    began_s = time.thread_time()
    while waiting or under_way:
        joins = not under_way or not static
        while joins and waiting and len(under_way) < at_once:
            one = waiting.pop()
            handed_in[one.request] = time.thread_time()
            under_way.append(both.submit(one, (forks or {}).get(one.request)))
        if not both.turn():
            raise RuntimeError(f"stuck: {both.prefill!r}, {both.decode!r}")
        now_s = time.thread_time()
        for answer in list(under_way):
            name = answer.record.request
            if answer.tokens and name in handed_in:
                served.ttft_s.append(now_s - handed_in.pop(name))
            if answer.ended is not None:
                if len(answer.tokens) != answer.record.max_tokens:
                    raise RuntimeError(f"{name} has ended: {answer.ended}")
                stats = answer.ended.stats
                served.output_tokens += len(answer.tokens)
                served.prompt_tokens += answer.record.prompt_tokens
                served.cached_tokens += max(stats.prefill_cached_tokens, stats.decode_cached_tokens)
                under_way.remove(answer)
    served.seconds = time.thread_time() - began_s
    while both.turn():
        pass
    served.moved_blocks = sum(migration.blocks for migration in both.decode.prefills.handoffs.take_migrated())
    return served
