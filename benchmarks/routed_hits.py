"""Counts what a real cluster's prefill workers find in their caches, by policy: `python -m benchmarks.routed_hits`.

Real processes with the demo model, one compute thread each. The workload is the classic one for cache-aware routing:
groups of prompts with one beginning per group, asked in a shuffled order, a few at a time, while one worker's cache
holds the beginnings of a part of all groups only. Hits are counted by the workers, over all prompts. With `--kill` the
router is killed with SIGKILL when two thirds have been answered, and started again by the supervisor: `before` are the
hits of the last of those prompts, one for each group, `after` those of as many that come first to the new router.

    python -m benchmarks.routed_hits --prefill 2 --decode 2 --policies least-cost,affinity-threshold,round-robin --kill
    python -m benchmarks.routed_hits --prefill 8 --decode 1 --groups 32 --each 16 --pool-blocks 80
"""

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks import output
from benchmarks.bed import Bed, TimedAnswer, random_prompt, transfer_config
from cluster.processes.spec import LaunchError
from engine.config import EngineConfig, TierConfig
from engine.device import open_device
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from router.front.api import ApiError

TENANT, OTHERS = "hits", "others"
ANSWERS_AGAIN_S = 60.0


def prompts(groups: int, each: int, prefix_tokens: int, own_tokens: int, vocab: int, seed: int) -> list[list[int]]:
    """Return `each` prompts for each group, shuffled."""
    made = [
        random_prompt(prefix_tokens, vocab, f"{seed} {group}") + random_prompt(own_tokens, vocab, f"{seed} {group} {n}")
        for group in range(groups)
        for n in range(each)
    ]
    Random(seed).shuffle(made)
    return made


def hits(answers: Sequence[TimedAnswer]) -> float:
    """Return the share of prompt tokens that prefill workers had in their caches."""
    cached = sum(answer.finished.stats.prefill_cached_tokens for answer in answers)
    return cached / sum(answer.finished.prompt_tokens for answer in answers)


def kill_router(bed: Bed) -> float:
    """Kill the router, and return after how many seconds another one answers. Raises LaunchError if none does."""
    pid, began_s = bed.cluster.router.pid, time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while time.monotonic() < began_s + ANSWERS_AGAIN_S:
        if bed.cluster.router.pid != pid:
            try:
                bed.ask([1, 2, 3], 1, OTHERS)
            except ApiError:
                pass
            else:
                return time.monotonic() - began_s
        time.sleep(0.02)
    raise LaunchError("no router answers after one was killed")


def measure(
    model_dir: Path,
    policy: str,
    *,
    prefill: int,
    decode: int,
    pool_blocks: int,
    host_blocks: int,
    asked: Sequence[list[int]],
    groups: int,
    clients: int,
    answer_tokens: int,
    is_killed: bool,
) -> output.Line:
    """Ask one cluster all of `asked`, `clients` at a time; return what came of it."""
    engine = EngineConfig(model_dir=str(model_dir), threads=1)
    block_bytes = open_device(engine).layout.block_bytes
    engine = EngineConfig(threads=1, pool_bytes=pool_blocks * block_bytes)
    tiers = TierConfig(host_bytes=host_blocks * block_bytes)
    transfer = transfer_config("auto", True)
    with (
        Bed(
            model_dir, prefill=prefill, decode=decode, transfer=transfer, engine=engine, policy=policy, tiers=tiers
        ) as bed,
        ThreadPoolExecutor(clients) as pool,
    ):

        def ask(part: Sequence[list[int]]) -> list[TimedAnswer]:
            return list(pool.map(lambda prompt: bed.ask(prompt, answer_tokens, TENANT), part))

        began_s = time.monotonic()
        cut = len(asked) * 2 // 3 if is_killed else len(asked)
        answers = ask(asked[:cut])
        restart: dict[str, float] = {}
        if is_killed:
            away_s = kill_router(bed)
            later = ask(asked[cut:])
            restart = {"before": hits(answers[-groups:]), "after": hits(later[:groups]), "away s": away_s}
            answers += later
        took_s = time.monotonic() - began_s
    workers = {answer.finished.stats.prefill_worker for answer in answers}
    return {
        "policy": policy,
        "hits": hits(answers),
        **restart,
        "TTFT p50 s": median(answer.ttft_s for answer in answers),
        "workers used": len(workers),
        "took s": took_s,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = output.parser(__doc__)
    parser.add_argument("--policies", default="least-cost,affinity-threshold,round-robin", metavar="NAME,...")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--each", type=int, default=12, help="prompts of a group")
    parser.add_argument("--prefix-tokens", type=int, default=128)
    parser.add_argument("--own-tokens", type=int, default=8, help="of each prompt, behind its group's")
    parser.add_argument("--pool-blocks", type=int, default=100, help="of each worker")
    parser.add_argument("--host-blocks", type=int, default=0, help="of each worker's tier in host memory")
    parser.add_argument("--clients", type=int, default=4, help="prompts at a time")
    parser.add_argument("--answer-tokens", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill the router when two thirds are answered")
    options = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="headrace-hits-") as folder:
        model_dir = prepare(None, Path(folder))
        vocab = ModelConfig.load(model_dir).vocab
        asked = prompts(options.groups, options.each, options.prefix_tokens, options.own_tokens, vocab, options.seed)
        table = [
            measure(
                model_dir,
                policy,
                prefill=options.prefill,
                decode=options.decode,
                pool_blocks=options.pool_blocks,
                host_blocks=options.host_blocks,
                asked=asked,
                groups=options.groups,
                clients=options.clients,
                answer_tokens=options.answer_tokens,
                is_killed=options.kill,
            )
            for policy in options.policies.split(",")
        ]
    output.tell(options, "routed-hits", {"Found in the caches of prefill workers": table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
