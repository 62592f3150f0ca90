"""Every family against transformers on small random models, from shards of safetensors and from GGUF: logits within
1e-4, and 64 greedy tokens equal, of prompts that are longer than windows and original contexts; by PyTorch's kernels,
the native ones and Triton's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.gpu.attention import TritonAttention
from engine.backends.native_attention import NativeAttention, attends
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from kernels.launch import interpreted
from kernels.native import native
from tests.engine.model.checkpoints import CASES, OUTSIDE_GGUF, VOCAB, build, build_as_gguf, save_gguf, save_hf
from tests.engine.model.test_families import Ours

PROMPT_TOKENS = 75
ANSWER_TOKENS = 64


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are not worth a second thread, which on a busy machine takes its time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompt_of(tokens: int = PROMPT_TOKENS, seed: int = 7) -> list[int]:
    return torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy_gap(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Return by how much, at most, the reference prefers another token than the answer's."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return float((logits.max(-1).values - logits.gather(1, torch.tensor(answer).unsqueeze(1))[:, 0]).max())


def near_ties(model: Any, prompt: list[int], answer: list[int], near: float = 1e-4) -> int:
    """Return at how many tokens of an answer the reference's two best logits are nearer to each other than `near`.
    Fails where one of the others is not the reference's best."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best, second = logits.topk(2).values.unbind(-1)
    is_near = best - second < near
    assert torch.equal(logits.argmax(-1)[~is_near], torch.tensor(answer)[~is_near])
    return int(is_near.sum())


def compare(source: str, model: Any, cache: Path) -> None:
    prompt = prompt_of()
    ours = Ours(load_model(prepare(source, cache)))
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0]
    assert wanted[-1].std() > 0.1, "a flat reference would prove nothing"
    with torch.inference_mode():
        first, last = ours.step(prompt[:41]), ours.step(prompt[41:])
        torch.testing.assert_close(first, wanted[40], atol=1e-4, rtol=0)
        torch.testing.assert_close(last, wanted[-1], atol=1e-4, rtol=0)
        answer = [int(last.argmax())]
        while len(answer) < ANSWER_TOKENS:
            answer.append(int(ours.step(answer[-1:]).argmax()))
    ours.close()
    assert greedy_gap(model, prompt, answer) == 0.0
    if (kernels := native()) is not None:
        ours = Ours(ours.model, NativeAttention(ours.model.config.heads, kernels))
        assert attends(ours.kv)
        with torch.inference_mode():
            torch.testing.assert_close(ours.step(prompt[:41]), wanted[40], atol=1e-4, rtol=0)
            torch.testing.assert_close(ours.step(prompt[41:74]), wanted[73], atol=1e-4, rtol=0)
            torch.testing.assert_close(ours.step(prompt[74:]), wanted[-1], atol=1e-4, rtol=0)
        ours.close()


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers_from_safetensors(case: str, tmp_path: Path) -> None:
    """Guards what a family does otherwise than Llama: each option left out, or on the wrong layers, changes logits; and
    tensors that are not in the file where others of their layer are."""
    model = build(case)
    source = save_hf(model, tmp_path / "model", max_shard_size="60KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 4
    compare(source, model, tmp_path / "cache")


@pytest.mark.parametrize("case", [case for case in CASES if case not in OUTSIDE_GGUF])
def test_equals_transformers_from_gguf(case: str, tmp_path: Path) -> None:
    """Guards names, constants and orders of rows that GGUF files have otherwise, and windows where a file has one."""
    source, model = build_as_gguf(case, tmp_path / "model.gguf")
    compare(source, model, tmp_path / "cache")


def test_only_what_gguf_cannot_say_is_left_out() -> None:
    """Guards the list of cases without a GGUF file: three, and of families that have others."""
    families = {case: CASES[case].family for case in CASES}
    assert set(families.values()) == {family for case, family in families.items() if case not in OUTSIDE_GGUF}
    assert len(OUTSIDE_GGUF) == 3


TRITON_AT_ONCE = ("llama", "qwen3", "phi4-mini", "gemma2", "gemma3", "olmo3", "gpt-oss", "ministral3")
"""Between them every option; the other cases run with the slow suite."""


@pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter")
@pytest.mark.parametrize(
    "case", [case if case in TRITON_AT_ONCE else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_equals_transformers_by_tritons_kernels(case: str, tmp_path: Path) -> None:
    """Guards an option that only the kernels of a GPU pass over, of a prompt in chunks and of single tokens behind it.
    The interpreter computes in 32 bits exactly."""
    model, prompt = build(case), prompt_of(48)
    folder = prepare(save_hf(model, tmp_path / "model"), tmp_path / "cache")
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0]
    loaded = load_model(folder, packed=False)
    layout = loaded.config.kv_layout(16)
    attention: Any = TritonAttention(loaded.config, layout, "cpu", max_batch=2, programs=2)
    ours = Ours(loaded, attention)
    ours.kv.tensor.zero_()
    with torch.inference_mode():
        torch.testing.assert_close(ours.step(prompt[:21]), wanted[20], atol=1e-4, rtol=0)
        torch.testing.assert_close(ours.step(prompt[21:45]), wanted[44], atol=1e-4, rtol=0)
        for at in range(45, 47):
            torch.testing.assert_close(ours.step(prompt[at : at + 1]), wanted[at], atol=1e-4, rtol=0)
    ours.close()


@pytest.mark.parametrize("case", ["ministral3", "ministral3-mscale"])
def test_ministral_from_a_directory_and_from_gguf_are_one(case: str, tmp_path: Path) -> None:
    """Guards YaRN's factor and the temperature of queries, which the two forms say in different words: far from
    the beginning, a difference grows that 1e-4 of the reference would let through."""
    model, prompt = build(case), prompt_of(150)
    logits = list[torch.Tensor]()
    for at, source in enumerate((save_hf(model, tmp_path / "model"), save_gguf(model, tmp_path / "model.gguf"))):
        ours = Ours(load_model(prepare(source, tmp_path / f"cache-{at}")))
        with torch.inference_mode():
            logits.append(torch.cat([ours.step(prompt[:100]), ours.step(prompt[100:])]))
        ours.close()
    assert logits[0].std() > 0.1
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
