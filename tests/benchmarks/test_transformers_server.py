"""The peer that computes static batches, with a model that takes no time."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from benchmarks import transformers_server
from benchmarks.peers import free_port
from cluster.bench.driver import measure
from cluster.bench.stats import Sample
from cluster.bench.targets import open_target
from engine.types import SamplingParams
from router.front.api import GenerateCall


class SummingModel:
    """A row's tokens are the sum of its prompt and of its length, then one more each."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate(self, ids: Any, *, attention_mask: Any, max_new_tokens: int, streamer: Any, **rest: object) -> None:
        self.batches.append(len(ids))
        self.drawing = {name: rest[name] for name in rest if not name.endswith("_token_id")}
        streamer.put(ids)
        for step in range(max_new_tokens):
            streamer.put(((ids + 1) * attention_mask).sum(-1) + step)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> tuple[SummingModel, int]:
    model, port, threads = SummingModel(), free_port(), torch.get_num_threads()
    monkeypatch.setattr(transformers_server, "read", lambda: model)
    threading.Thread(target=transformers_server.main, args=(port, threads, 4), daemon=True).start()
    for _ in range(200):
        try:
            httpx.get(f"http://127.0.0.1:{port}/", timeout=5)
            break
        except httpx.ConnectError:
            threading.Event().wait(0.05)
    return model, port


def test_a_batch_of_different_lengths(served: tuple[SummingModel, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows that see another row's prompt, or are told more tokens than they asked for."""
    monkeypatch.setattr(transformers_server, "QUIET_S", 2.0)
    model, port = served

    def ask(count: int) -> list[int]:
        body = {"prompt": [7] * count, "max_tokens": count, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).json()
        assert answer["usage"] == {"prompt_tokens": count, "completion_tokens": count}
        return list(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(1, 5)))
    assert answers == [[8 * count + step for step in range(count)] for count in range(1, 5)]
    assert max(model.batches) > 1 and model.drawing == {"do_sample": False}


def test_the_load_generator_reads_it(served: tuple[SummingModel, int]) -> None:
    call = GenerateCall(
        prompt=[1, 2, 3], model=None, max_tokens=5, ignore_eos=True, sampling=SamplingParams(temperature=0.5), seed=0,
        timeout_s=30.0,
    )  # fmt: skip

    async def ask() -> Sample:
        target = open_target("http", f"127.0.0.1:{served[1]}")
        try:
            return await measure(target, call)
        finally:
            await target.close()

    sample = asyncio.run(ask())
    assert (sample.error, sample.prompt_tokens, sample.output_tokens, len(sample.itl_s)) == ("", 3, 5, 4)
    # From all tokens, as the other servers draw.
    assert served[0].drawing == {"do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 1.0}
