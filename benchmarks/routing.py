"""Measures how long one routing decision takes: `python -m benchmarks.routing`.

A decision is all the router does between a request's arrival and its `Place`: block identities of
the prompt, matches against every worker's tree, the policy, and the bookkeeping. Prompts of 512
blocks share prefixes of random length, 8 prefill and 8 decode workers, trees filled to their bounds.
"""

import argparse
import json
import time
from random import Random

from engine.identity import chain, root
from engine.messages import Accepted, Ended, Load, PeerAddress, Place, RequestStats, WorkerInfo
from engine.types import FinishReason, Incarnation, RequestId, RequestRecord
from router.config import RouterConfig
from router.core.core import Router
from router.core.events import Connected, Submit, TellWorker, WorkerSaid
from router.core.policy import LeastCost

BLOCK_TOKENS = 16


def measure(workers: int, prompt_blocks: int, requests: int, seed: int = 0) -> dict[str, float]:
    """Return microseconds per decision (p50, p99, worst) and for the block identities alone (p50)."""
    random = Random(seed)
    router = Router(RouterConfig(), LeastCost(Random(seed)))
    pool_blocks = 32 * prompt_blocks
    for index in range(workers):
        role = ("prefill", "decode")[index % 2]
        info = WorkerInfo(
            name=f"{role}{index}",
            role=role,
            incarnation=Incarnation(index),
            address="",
            model="m",
            fingerprint="f",
            block_size=BLOCK_TOKENS,
            blocks=pool_blocks,
            context_tokens=1 << 20,
            pid=0,
            host="",
        )
        router.handle(Connected(PeerAddress(info.name, ""), info), 0.0)
    load = Load(
        step=1,
        free_blocks=pool_blocks,
        cached_blocks=0,
        active_blocks=0,
        reserved_blocks=0,
        quarantined_blocks=0,
        s_per_token=1e-3,
    )
    families = [[random.randrange(49_152) for _ in range(prompt_blocks * 16)] for _ in range(16)]
    spent_us, hashed_us = [], []
    for number in range(requests):
        prompt = list(random.choice(families))
        cut = random.randrange(len(prompt))
        prompt[cut:] = [random.randrange(49_152) for _ in prompt[cut:]]
        request = RequestId(str(number))
        record = RequestRecord(
            request=request, tokens=prompt, prompt_tokens=len(prompt), max_tokens=64, seed=0
        )
        begin_s = time.perf_counter()
        (place,) = router.handle(Submit(record), 0.0)
        spent_us.append((time.perf_counter() - begin_s) * 1e6)
        begin_s = time.perf_counter()
        chain(root(b"", "f"), prompt, BLOCK_TOKENS)
        hashed_us.append((time.perf_counter() - begin_s) * 1e6)
        assert isinstance(place, TellWorker) and isinstance(place.record, Place)
        end = Ended(request=request, placement=1, reason=FinishReason.STOP, stats=RequestStats())
        for answer in (Accepted(request, 1, 0), end, load):
            router.handle(WorkerSaid(place.worker, answer), 0.0)
    spent_us.sort()
    hashed_us.sort()
    return {
        "p50_us": spent_us[len(spent_us) // 2],
        "p99_us": spent_us[len(spent_us) * 99 // 100],
        "worst_us": spent_us[-1],
        "identities_p50_us": hashed_us[len(hashed_us) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--prompt-blocks", type=int, default=512)
    parser.add_argument("--requests", type=int, default=2000)
    given = parser.parse_args()
    print(json.dumps(measure(given.workers, given.prompt_blocks, given.requests), indent=2))


if __name__ == "__main__":
    main()
