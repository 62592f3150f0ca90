"""Log probabilities on the demo model in 32-bit against transformers, within 0.001: of drawn tokens and alternatives,
by both schedulers, cold and from the cache, and by the whole cluster over both fronts, also where a worker is lost."""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.config import EngineConfig
from engine.device import open_device
from engine.text.bundle import TextModel
from engine.types import RequestId, RequestRecord, SamplingParams, TokenLogprobs
from fakes.colocated import Colocated
from router.config import RouterConfig
from router.front.api import Delta, Finished, GenerateCall
from router.grpc.client import Client
from tests.parity.reference import Reference, demo_reference

pytestmark = pytest.mark.parity

WITHIN = 1e-3
ALTERNATIVES, OUTPUT_TOKENS = 5, 12
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.3, top_k=20, repetition_penalty=1.3)]
TEXTS = ("Once upon a time", "The three most important rules of a kitchen are these: " * 8, "🚀 Launch day! Today we")


@pytest.fixture(scope="module")
def model_dir(demo_model: Path) -> Path:
    return demo_model


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    text = TextModel.load(model_dir)
    return [text.encode(words, add_special=True) for words in TEXTS]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return demo_reference()


@torch.inference_mode()
def check(reference: Reference, prompt: list[int], told: list[TokenLogprobs], alternatives: int = ALTERNATIVES) -> None:
    """Compare what was said of an answer with one pass of transformers over prompt and answer."""
    tokens = [one.token for one in told]
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    logits = reference.model(ids, use_cache=False, logits_to_keep=len(told)).logits[0].float()
    for one, want in zip(told, logits.log_softmax(-1), strict=True):
        assert one.logprob == pytest.approx(float(want[one.token]), abs=WITHIN)
        assert len(one.top) == alternatives
        for token, value in one.top:
            assert value == pytest.approx(float(want[token]), abs=WITHIN)
        # Which are the likeliest may differ where two nearly tie; their values may not.
        best = want.topk(alternatives).values.tolist() if alternatives else []
        assert [value for _, value in one.top] == pytest.approx(best, abs=WITHIN)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_schedulers_agree_with_transformers_cold_and_warm(
    model_dir: Path, prompts: list[list[int]], reference: Reference, sampling: SamplingParams
) -> None:
    config = EngineConfig(model_dir=str(model_dir), threads=1)
    engine = Colocated(open_device(config), open_device(config))
    records = [
        RequestRecord(
            request=RequestId(str(number)),
            tokens=prompt,
            prompt_tokens=len(prompt),
            max_tokens=OUTPUT_TOKENS,
            seed=number,
            sampling=sampling,
            ignore_eos=True,
            logprobs=ALTERNATIVES,
        )
        for number, prompt in enumerate(prompts)
    ]
    cold = engine.run(records)
    warm = engine.run([msgspec.structs.replace(one, request=RequestId(f"{one.request} again")) for one in records])
    assert any(answer.ended and answer.ended.stats.prefill_cached_tokens for answer in warm)
    for prompt, first, second in zip(prompts, cold, warm, strict=True):
        assert len(first.logprobs) == len(second.logprobs) == OUTPUT_TOKENS
        for answer in (first, second):
            assert [one.token for one in answer.logprobs] == answer.tokens
            check(reference, prompt, answer.logprobs)
    engine.close()


@torch.inference_mode()
def check_prompt(reference: Reference, prompt: list[int], told: list[TokenLogprobs], alternatives: int) -> None:
    """Compare what was said of a prompt's tokens, from the second on, with transformers."""
    assert [one.token for one in told] == prompt[1:]
    logits = reference.model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].float()
    for one, want in zip(told, logits.log_softmax(-1), strict=True):
        assert one.logprob == pytest.approx(float(want[one.token]), abs=WITHIN)
        best = want.topk(alternatives).values.tolist()
        assert [value for _, value in one.top] == pytest.approx(best, abs=WITHIN)


def test_prompts_agree_with_transformers_by_either_worker(
    model_dir: Path, prompts: list[list[int]], reference: Reference
) -> None:
    """Guards chunks, and logits that are made some at a time: by the prefill worker, cold and then with all cached,
    and by a decode worker alone."""
    config = EngineConfig(model_dir=str(model_dir), threads=1)
    engine = Colocated(open_device(config), open_device(config))
    for turn in ("cold", "warm", "alone"):
        if turn == "alone":
            engine.lose_prefill()
        records = [
            RequestRecord(
                request=RequestId(f"{turn} {number}"),
                tokens=prompt,
                prompt_tokens=len(prompt),
                max_tokens=2,
                seed=number,
                sampling=SAMPLINGS[0],
                ignore_eos=True,
                prompt_logprobs=ALTERNATIVES,
            )
            for number, prompt in enumerate(prompts)
        ]
        for prompt, answer in zip(prompts, engine.run(records), strict=True):
            check_prompt(reference, prompt, answer.prompt_logprobs, ALTERNATIVES)
    engine.close()


@pytest.fixture(scope="module")
def cluster(model_dir: Path) -> Iterator[tuple[str, str]]:
    config = ClusterConfig(launcher="process", router=RouterConfig(grpc_port=0, http_port=0), cache_dir="unused")
    with Cluster(config, make_launcher("process"), model_dir=str(model_dir)) as running:
        addresses = running.start()
        yield addresses.grpc, addresses.http


def _post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())


@torch.inference_mode()
def test_the_cluster_agrees_over_both_fronts(
    cluster: tuple[str, str], prompts: list[list[int]], reference: Reference
) -> None:
    """Guards the wire: the first token's values, which cross from the prefill worker, and all that follow."""
    for prompt in prompts:
        call = GenerateCall(
            prompt=prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, sampling=SAMPLINGS[0], logprobs=ALTERNATIVES
        )
        told: list[TokenLogprobs] = []
        with Client(cluster[0]) as client:
            for event in client.generate(call):
                if isinstance(event, Delta):
                    told += event.logprobs
                elif isinstance(event, Finished):
                    assert event.stats.transport == "shm", "it did not migrate"
        check(reference, prompt, told)
        greedy = {"temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        body = {"prompt": prompt, "logprobs": ALTERNATIVES, **greedy}
        choice = _post(cluster[1], body)["choices"][0]
        echoed = _post(cluster[1], body | {"echo": True, "max_tokens": 0, "prompt": [prompt, prompt[:1]]})["choices"]
        assert echoed[1]["logprobs"]["token_logprobs"] == [None]
        first, *rest = echoed[0]["logprobs"]["token_logprobs"]
        want = reference.model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
        own = want.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert first is None and rest == pytest.approx(own, abs=WITHIN)
        values = choice["logprobs"]["token_logprobs"]
        assert values == pytest.approx([one.logprob for one in told], abs=1e-4)
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] or "bytes:" in str(choice["logprobs"]["tokens"])


def test_an_answer_that_moves_agrees_on_both_sides(
    model_dir: Path, prompts: list[list[int]], reference: Reference
) -> None:
    """Guards recovery: what the lost worker has said stays, and what the next one says is of the same model and
    tokens."""
    router = RouterConfig(grpc_port=0, http_port=0)
    config = ClusterConfig(launcher="process", decode_workers=2, router=router, cache_dir="unused")
    stop = threading.Event()
    with Cluster(config, make_launcher("process"), model_dir=str(model_dir)) as running, Client(
        running.start().grpc
    ) as client:
        watcher = threading.Thread(target=running.watch, args=(stop,), daemon=True)
        watcher.start()
        try:
            call = GenerateCall(
                prompt=prompts[1], max_tokens=48, ignore_eos=True, sampling=SAMPLINGS[0], logprobs=ALTERNATIVES
            )
            home = _run(client, msgspec.structs.replace(call, max_tokens=2), lambda _: None)[1].stats.decode_worker
            pid, killed = running.workers[home].pid, list[int]()

            def lose(told: int) -> None:
                if told >= 8 and not killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(told)

            told, end = _run(client, call, lose)
        finally:
            stop.set()
            watcher.join(30)
    assert killed and killed[0] < 48 == len(told)
    assert end.stats.decode_worker != home, "it was not there that was lost"
    check(reference, prompts[1], told)


def _run(client: Client, call: GenerateCall, see: Callable[[int], None]) -> tuple[list[TokenLogprobs], Finished]:
    """Return all values of an answer and its end; `see` is told how many there are, each time that more have come."""
    told: list[TokenLogprobs] = []
    for event in client.generate(call):
        if isinstance(event, Delta):
            told += event.logprobs
            see(len(told))
        elif isinstance(event, Finished):
            end = event
    return told, end
