"""Measures one routing decision, and what the router's index costs: `python -m benchmarks.decision`.

A decision is all the router does between a request's arrival and its `Place`: identities of the prompt's blocks, one
walk of the index, views of all workers, the policy, and the bookkeeping; `policy` is the policy's part of it, what it
takes to hand the decision to its log and to shadows included. Half of the workers prefill; `--queued` prompts for each
of them were sent before, and none of these has been read. Prompts begin
like one of 16 others, for a random length; the index is filled to the bounds of all workers before anything is timed,
so that whatever comes in drives something out. The process is prepared as a router's is: identities in native code, if
there is any, and Python's collector told of what stays. `accepted` is what the router does when a worker takes a
request: both of its workers are believed to hold the prompt, and to have forgotten as much. Times are of the process's
own CPU time (`cpu`) and of the wall; where other programs share the cores, the wall's tail is theirs.
"""

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from benchmarks.routing.cluster import stand_in
from cluster.processes.collector import spare_collector
from engine import identity
from engine.messages import Accepted, Ended, Load, PeerAddress, Place, RequestStats
from engine.native_identity import use_native_identities
from engine.types import FinishReason, RequestId, RequestRecord
from router.config import RouterConfig
from router.core.core import Router
from router.core.decisions import RecordedPolicy, RepeatablePolicy
from router.core.events import Connected, Submit, TellWorker, WorkerSaid
from router.core.policies import make_policy
from router.core.policy import RoutingPolicy
from router.decision_log import DecisionLog
from router.shadows import ShadowPolicy

BLOCK_TOKENS = 16
CHUNK_TOKENS = 2048
VOCAB = 49_152

T = TypeVar("T")


class Stopwatch:
    """Microseconds of CPU and wall, by what was done."""

    def __init__(self) -> None:
        self.spent_us: dict[str, list[tuple[float, float]]] = {}

    def time(self, what: str, act: Callable[[], T]) -> T:
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        done = act()
        wall_us, cpu_us = (time.perf_counter() - wall_s) * 1e6, (time.thread_time() - cpu_s) * 1e6
        self.spent_us.setdefault(what, []).append((cpu_us, wall_us))
        return done

    def table(self) -> dict[str, dict[str, float]]:
        return {what: _figures(spent) for what, spent in self.spent_us.items()}


def _figures(spent: list[tuple[float, float]]) -> dict[str, float]:
    cpu, wall = (sorted(column) for column in zip(*spent, strict=True))
    return {
        "cpu_p50_us": round(cpu[len(cpu) // 2], 1),
        "cpu_p99_us": round(cpu[len(cpu) * 99 // 100], 1),
        "cpu_worst_us": round(cpu[-1], 1),
        "wall_p50_us": round(wall[len(wall) // 2], 1),
        "wall_p99_us": round(wall[len(wall) * 99 // 100], 1),
        "wall_worst_us": round(wall[-1], 1),
    }


class Prompts:
    """Prompts that begin like one of 16 others."""

    def __init__(self, random: Random, blocks: int) -> None:
        self._random = random
        self._families = [self._tokens(blocks * BLOCK_TOKENS) for _ in range(16)]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(count)]

    def next(self) -> list[int]:
        prompt = list(self._random.choice(self._families))
        cut = self._random.randrange(len(prompt))
        prompt[cut:] = self._tokens(len(prompt) - cut)
        return prompt


def measure(
    workers: int,
    prompt_blocks: int,
    pool_blocks: int,
    requests: int,
    policy: str,
    seed: int = 0,
    decision_log: str = "",
    shadows: Sequence[str] = (),
    per_s: float = 0.0,
    queued: int = 0,
) -> dict[str, object]:
    """Return the figures of a router with these workers, each with a pool of `pool_blocks`; its decisions logged and
    shadowed as `router.decision_log` and `router.shadow_policies` would, at `per_s` requests a second if that is set;
    behind `queued` prompts for each prefill worker."""
    use_native_identities()
    random = Random(seed)
    before_ms = collect(5)
    rss_before = _rss_bytes()
    taps = _taps(decision_log, shadows, seed)
    heard = [tap.put for tap in taps]
    deciding: RoutingPolicy = RecordedPolicy(policy, seed, heard) if heard else make_policy(policy, seed)
    watch = Stopwatch()
    choose = deciding.choose
    deciding.choose = lambda *given: watch.time("policy", lambda: choose(*given))  # type: ignore[method-assign]
    router = Router(RouterConfig(), deciding)
    names = []
    for number in range(workers):
        role = ("prefill", "decode")[number % 2]
        info = stand_in(f"{role}{number}", role, number, BLOCK_TOKENS, pool_blocks, chunk_tokens=CHUNK_TOKENS)
        names.append(info.name)
        router.handle(Connected(PeerAddress(info.name, ""), info), 0.0)
    fill(router, names, prompt_blocks, pool_blocks, random)
    lengths = queue_up(router, names[::2], queued, random)
    held = sum(router.index.held_blocks(name) for name in names)
    gc.collect()
    rss_after = _rss_bytes()
    pauses_ms = collect(5)
    spare_collector()
    pauses = Pauses()
    gc.callbacks.append(pauses)
    own_s, all_s = time.thread_time(), time.process_time()
    serve(router, Prompts(random, prompt_blocks), pool_blocks, requests, watch, per_s)
    beside_s = time.process_time() - all_s - (time.thread_time() - own_s)
    gc.callbacks.remove(pauses)
    for tap in taps:
        tap.close()
    identify(random, prompt_blocks, watch)
    return {
        "workers": workers,
        "prompt_blocks": prompt_blocks,
        "held_blocks": held,
        "shortest_and_longest_line": (min(lengths), max(lengths)),
        "bytes_per_block_and_worker": round((rss_after - rss_before) / max(held, 1), 1),
        "full_collection_before_ms": before_ms,
        "full_collection_ms": pauses_ms,
        "other_threads_us_per_request": round(beside_s / requests * 1e6, 1),
        "longest_collection_while_serving_ms": round(pauses.longest_s * 1e3, 2),
        **watch.table(),
    }


def fill(router: Router, names: list[str], prompt_blocks: int, pool_blocks: int, random: Random) -> None:
    """Let every worker hold as much as it can: chains that no two of them share, the most that a block can cost."""
    for name in names:
        for _ in range(pool_blocks // prompt_blocks + 1):
            packed = random.randbytes(prompt_blocks * identity.IDENTITY_BYTES)
            router.index.insert(name, [packed[at : at + 16] for at in range(0, len(packed), 16)])


def queue_up(router: Router, names: list[str], queued: int, random: Random) -> list[int]:
    """Send so many cold prompts for each of these workers, of 256 to 8,191 tokens; return how many each has."""
    lines = Counter({name: 0 for name in names})
    for number in range(queued * len(names)):
        prompt = [random.randrange(VOCAB) for _ in range(random.randrange(256, 8192))]
        request = RequestId(f"queued {number}")
        record = RequestRecord(request=request, tokens=prompt, prompt_tokens=len(prompt), max_tokens=64, seed=0)
        (place,) = router.handle(Submit(record), 0.0)
        assert isinstance(place, TellWorker) and isinstance(place.record, Place)
        router.handle(WorkerSaid(place.worker, Accepted(request, 1, 0)), 0.0)
        lines[place.record.prefill.name] += 1
    return list(lines.values())


def _taps(decision_log: str, shadows: Sequence[str], seed: int) -> list[DecisionLog | ShadowPolicy]:
    taps: list[DecisionLog | ShadowPolicy] = [
        ShadowPolicy(RepeatablePolicy(name, seed), lambda policy, what, cost_s: None) for name in shadows
    ]
    if decision_log:
        taps.append(DecisionLog(decision_log, 1 << 30, 0.0, lambda written, dropped: None))
    return taps


def serve(
    router: Router, prompts: Prompts, pool_blocks: int, requests: int, watch: Stopwatch, per_s: float = 0.0
) -> None:
    """Place so many requests, each accepted and ended at once; the next one when its turn comes, if `per_s` is set."""
    load = Load(
        step=1,
        free_blocks=pool_blocks,
        cached_blocks=0,
        active_blocks=0,
        reserved_blocks=0,
        quarantined_blocks=0,
        s_per_token=1e-3,
    )
    for number in range(requests):
        prompt = prompts.next()
        if per_s:
            time.sleep(1.0 / per_s)
        request = RequestId(str(number))
        record = RequestRecord(request=request, tokens=prompt, prompt_tokens=len(prompt), max_tokens=64, seed=0)
        (place,) = watch.time("decision", lambda: router.handle(Submit(record), 0.0))  # noqa: B023
        assert isinstance(place, TellWorker) and isinstance(place.record, Place)
        accepted = WorkerSaid(place.worker, Accepted(request, 1, 0))
        watch.time("accepted", lambda: router.handle(accepted, 0.0))  # noqa: B023
        end = Ended(request=request, placement=1, reason=FinishReason.STOP, stats=RequestStats())
        for answer in (end, load):
            router.handle(WorkerSaid(place.worker, answer), 0.0)


def identify(random: Random, prompt_blocks: int, watch: Stopwatch) -> None:
    """Hash prompts that nobody has sent before, and then the next turn of each: two blocks more."""
    root = identity.root(b"", "f")
    for _ in range(200):
        tokens = [random.randrange(VOCAB) for _ in range((prompt_blocks + 2) * BLOCK_TOKENS)]
        first = tokens[: prompt_blocks * BLOCK_TOKENS]
        watch.time("identities", lambda: identity.chain(root, first, BLOCK_TOKENS))  # noqa: B023
        watch.time("identities_next_turn", lambda: identity.chain(root, tokens, BLOCK_TOKENS))  # noqa: B023


class Pauses:
    """The longest run of the garbage collector."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.thread_time()
        else:
            self.longest_s = max(self.longest_s, time.thread_time() - self._began_s)


def collect(times: int) -> list[float]:
    """Return the milliseconds of so many full collections."""
    pauses = []
    for _ in range(times):
        begin_s = time.thread_time()
        gc.collect()
        pauses.append(round((time.thread_time() - begin_s) * 1e3, 2))
    return pauses


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--prompt-blocks", type=int, default=512)
    parser.add_argument("--pool-blocks", type=int, default=27_000, help="of each worker")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--policy", default="least-cost")
    parser.add_argument("--decision-log", default="", metavar="FILE", help="log the decisions, as a router would")
    parser.add_argument("--shadow", action="append", default=[], metavar="POLICY", help="a policy that does not act")
    parser.add_argument("--per-s", type=float, default=0.0, help="requests in a second; without: one after another")
    parser.add_argument("--queued", type=int, default=0, help="prompts sent to each prefill worker before")
    given = parser.parse_args()
    figures = measure(
        given.workers,
        given.prompt_blocks,
        given.pool_blocks,
        given.requests,
        given.policy,
        decision_log=given.decision_log,
        shadows=given.shadow,
        per_s=given.per_s,
        queued=given.queued,
    )
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
