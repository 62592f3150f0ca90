"""A single worker in two ranks, with one pool or one for each, whose requests guess tokens, lose their blocks to
others, and have them back from host memory, with products in integers. The answers are those of one process that
computes in the same slices, has room for all, and guesses nothing; also where a rank is killed amid swaps."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from cluster.config import ClusterConfig
from engine.config import EngineConfig, TierConfig
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from router.config import RouterConfig
from tests.chaos import faults
from tests.engine.model.checkpoints import build
from tests.engine.model.test_quantized_families import GROUPS, save_both
from tests.integration.test_one_pool import Served
from worker.config import DecodeConfig

SIZE, BLOCKS, REQUESTS, PROMPT, ANSWER = 4, 40, 6, 20, 60
Pools = Literal["shared", "own"]
CROWD = 8
"""How many ask each prompt at once where a fault must strike while blocks are swapped."""


class OnePool(Served):
    """A single worker that reads prompts and answers them."""

    def __init__(self, model_dir: Path, engine: EngineConfig, blocks: int, **more: object) -> None:
        block_bytes = ModelConfig.load(model_dir).kv_layout(SIZE, "float32").block_bytes
        engine = msgspec.structs.replace(engine, block_size=SIZE, pool_bytes=blocks * block_bytes)
        config = ClusterConfig(
            launcher="process",
            prefill_workers=0,
            decode_workers=1,
            # A busy machine takes its time to replace the only worker.
            router=RouterConfig(grpc_port=0, http_port=-1, unplaceable_s=90.0),
            decode=DecodeConfig(engine=engine, **more),  # type: ignore[arg-type]
        )
        self.serve(config, model_dir)

    def told(self, prompts: list[list[int]]) -> list[list[int]]:
        """Ask for all answers at once."""
        with ThreadPoolExecutor(len(prompts)) as asked:
            ends = list(asked.map(lambda prompt: self.ask(prompt, ANSWER), prompts))
        assert {end.stats.prefill_worker for _, end in ends} == {"decode-0"}
        return [tokens for tokens, _ in ends]



def coded(tmp_path: Path) -> tuple[Path, list[list[int]]]:
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 4}
    source, _ = save_both(build("qwen2", **sizes), tmp_path, GROUPS["w4a16"]())
    folder = prepare(source, tmp_path / "cache")
    draws = random.Random(3)
    prompts = [[draws.randrange(8, 120) for _ in range(PROMPT // 2)] * 2 for _ in range(REQUESTS)]
    return folder, prompts


@pytest.mark.parametrize("pools", ["shared", "own"])
def test_ranks_swap_and_guess_and_answer_as_one_process_does(tmp_path: Path, pools: Pools) -> None:
    """Guards paths that see blocks of a worker, and steps, in which other ranks have a part: blocks that are copied to
    host memory before a rank has written them, or without its heads, rows behind drafts that a rank does not get, a
    chunk beside answers."""
    folder, prompts = coded(tmp_path)
    alone = OnePool(folder, EngineConfig(sum_slices=2, speculation="off"), 400, preemption="off")
    try:
        wanted = [alone.ask(prompt, ANSWER)[0] for prompt in prompts]
        assert alone.counted("decode-0", "rank_weights_bytes", rank="1") == 0
    finally:
        alone.close()
    engine = EngineConfig(tensor_parallel=2, speculation="ngram", rank_pools=pools)
    tiers = TierConfig(host_bytes=16 << 20)
    ranks = OnePool(folder, engine, BLOCKS, preemption="swap", growth_tokens=SIZE, tiers=tiers)
    try:
        assert ranks.counted("decode-0", "rank_weights_bytes", rank="1") > 0
        assert ranks.told(prompts) == wanted
        assert ranks.told(prompts[::-1]) == wanted[::-1]
        for way in ("out", "in"):
            assert ranks.counted("decode-0", "swap_bytes_total", way=way) > 0, "nothing was swapped"
        assert ranks.counted("decode-0", "draft_tokens_total") > 0, "nothing was guessed"
    finally:
        ranks.close()


@pytest.mark.chaos
@pytest.mark.parametrize("pools", ["shared", "own"])
@pytest.mark.parametrize(
    ("preemption", "sign"), [("swap", ("swap_bytes_total", "out")), ("recompute", ("preemptions_total", ""))]
)
def test_a_rank_killed_amid_preemptions_and_drafts_changes_no_answer(
    tmp_path: Path, preemption: str, sign: tuple[str, str], pools: Pools
) -> None:
    """Guards against blocks of a dead worker's host memory that its replacement is said to have, and requests that wait
    for blocks, from host memory or computed again, that nobody brings; and guesses that are said as tokens."""
    family, way = sign
    labels = {"way": way} if way else {}
    folder, prompts = coded(tmp_path)
    alone = OnePool(folder, EngineConfig(sum_slices=2, speculation="off"), 400, preemption="off")
    try:
        wanted = [alone.ask(prompt, ANSWER)[0] for prompt in prompts]
    finally:
        alone.close()
    engine = EngineConfig(tensor_parallel=2, speculation="ngram", rank_pools=pools)
    tiers = TierConfig(host_bytes=16 << 20)
    ranks = OnePool(folder, engine, BLOCKS, preemption=preemption, growth_tokens=SIZE, tiers=tiers)
    try:
        life = ranks.cluster.workers["decode-0"]
        with ThreadPoolExecutor(1) as asking:
            told = asking.submit(ranks.told, prompts * CROWD)
            signs: list[tuple[str, dict[str, str]]] = [(family, labels), ("draft_tokens_total", {})]
            while any(ranks.counted("decode-0", name, **by) == 0 for name, by in signs):
                assert not told.done(), "all was answered before anybody was preempted, and anything was guessed"
            faults.kill(life.ranks[1].pid)
            assert not told.done(), "all was answered before the fault"
            assert told.result(timeout=120) == wanted * CROWD
        assert ranks.cluster.workers["decode-0"].pid != life.pid
    finally:
        ranks.close()
