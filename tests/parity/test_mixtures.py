"""Mixtures of experts through a whole cluster: random ones of each family, prefilled by one worker and decoded by
another, token for token what transformers makes of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.model.prepared.cache import prepare
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import Delta, Finished, GenerateCall
from router.grpc.client import Client
from tests.engine.model.checkpoints import build, save_hf
from tests.engine.model.test_every_family import greedy_gap, prompt_of

pytestmark = pytest.mark.parity

ANSWER_TOKENS = 48
LENGTHS = (5, 33, 75, 120)


def ask(client: Client, prompt: list[int]) -> tuple[list[int], Finished]:
    sampling = SamplingParams(temperature=0.0)
    call = GenerateCall(prompt=prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, sampling=sampling)
    tokens: list[int] = []
    finished = None
    for event in client.generate(call):
        if isinstance(event, Delta):
            tokens += event.token_ids
        elif isinstance(event, Finished):
            finished = event
    assert finished is not None
    return tokens, finished


@pytest.mark.parametrize("case", ["mixtral", "qwen3moe", "gpt-oss"])
def test_a_mixture_is_migrated_and_equals_transformers(case: str, tmp_path: Path) -> None:
    """Guards experts behind a handoff: the worker that decodes has not seen the prompt, and others are in its steps."""
    model = build(case)
    folder = prepare(save_hf(model, tmp_path / "model"), tmp_path / "cache")
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    config = ClusterConfig(launcher="process", router=RouterConfig(grpc_port=0, http_port=-1), cache_dir="unused")
    with (
        Cluster(config, make_launcher("process"), model_dir=str(folder)) as running,
        Client(running.start().grpc) as client,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        alone = [ask(client, prompt) for prompt in prompts]
        together = list(pool.map(lambda prompt: ask(client, prompt), prompts))
    for prompt, (tokens, finished), (again, _) in zip(prompts, alone, together, strict=True):
        assert len(tokens) == ANSWER_TOKENS and again == tokens
        assert finished.stats.migrated_blocks > 0 and finished.stats.transport == "shm"
        with torch.inference_mode():
            assert greedy_gap(model, prompt, tokens) == 0.0
