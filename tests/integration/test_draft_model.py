"""A draft model in real processes: one pool, also of two ranks, and a split cluster. The answers are those without."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.model.prepared.cache import prepare
from engine.types import SamplingParams
from router.front.api import Delta, GenerateCall
from tests.engine.model.checkpoints import build, save_hf
from tests.integration.test_ranks_one_pool import OnePool

ANSWER = 40
SIZES = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 4}


class Sampled(OnePool):
    """Asks at several temperatures at once."""

    def all_of(self, prompts: list[list[int]]) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as asked:
            return list(asked.map(self._one, prompts, range(len(prompts))))

    def _one(self, prompt: list[int], number: int) -> list[int]:
        sampling = SamplingParams(temperature=0.4 * (number % 3), repetition_penalty=1.0 + 0.2 * (number % 2))
        call = GenerateCall(prompt=prompt, sampling=sampling, seed=number, max_tokens=ANSWER, ignore_eos=True)
        events = list(self.client.generate(call))
        return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "pools"), [(1, "auto"), (2, "shared"), (2, "own")])
def test_answers_with_a_draft_model_are_those_without(
    ranks: int, pools: Literal["auto", "shared", "own"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is the model itself, so that many of its guesses are drawn; blocks are short, so that requests
    give way. Guards a worker that has the draft model's tokens, threads or memory mixed up with its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    source = save_hf(build("qwen2", **SIZES), tmp_path / "model")
    folder = prepare(source, tmp_path / "cache")
    prompts = [[(7 * n + at) % 250 + 8 for at in range(5 + 9 * n)] for n in range(6)]
    engine = EngineConfig(sum_slices=ranks, speculation="off")
    alone = Sampled(folder, engine, 400, preemption="off")
    try:
        wanted = alone.all_of(prompts)
        assert alone.counted("decode-0", "memory_planned_bytes", purpose="draft_kv_bytes") == 0
    finally:
        alone.close()
    ours = EngineConfig(tensor_parallel=ranks, rank_pools=pools)
    engine = replace(ours, speculation="model", draft_model=source, draft_pool_bytes=1 << 22)
    drafting = Sampled(folder, engine, 60, growth_tokens=4)
    try:
        for _ in range(2):
            assert drafting.all_of(prompts) == wanted
        assert drafting.counted("decode-0", "draft_tokens_total", outcome="drawn") > 0, "nothing was guessed"
        assert drafting.counted("decode-0", "memory_planned_bytes", purpose="draft_kv_bytes") > 1 << 21
        assert drafting.counted("decode-0", "memory_planned_bytes", purpose="draft_weights_bytes") > 100_000
        assert drafting.counted("decode-0", "draft_model_seconds_total") > 0
        assert drafting.counted("decode-0", "draft_model_read_tokens_total") > 0
    finally:
        drafting.close()
