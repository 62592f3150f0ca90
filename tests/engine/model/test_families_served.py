"""Families as they are served: prefill and decode schedulers, chunks, migrated blocks, cached prefixes, batches. Every
answer is the reference's greedy one, token for token, whatever it was computed with.

Nothing is let pass as nearly tied: of every answer it is counted where the reference's two best logits are nearer to
each other than 1e-4, and with these models and prompts that is nowhere.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.config import EngineConfig
from engine.device import open_device
from engine.model.prepared.cache import prepare
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated, ColocatedAnswer
from kernels.launch import interpreted
from kernels.native import native
from tests.engine.model.checkpoints import CASES, OUTSIDE_GGUF, build, build_as_gguf, save_hf
from tests.engine.model.test_every_family import near_ties, one_thread, prompt_of
from tests.engine.model.test_experts import save_mxfp4
from worker.config import PrefillConfig

__all__ = ["one_thread"]

ANSWER_TOKENS = 64
CHUNK_TOKENS = 32
LENGTHS = (100, 41, 70)
PROMPTS = {"qwen2": 1, "olmo2": 1, "qwen3moe-sparse": 1}
"""The set of prompts of cases that nearly tie at one of the 320 tokens behind the first set, number 0."""
FAST = ("qwen2-window", "phi4-mini", "gemma3", "olmo3")
"""Between them every option; the other cases run with the suite of parity."""
FAST_GGUF = ("gemma2", "mistral-window")


def record(name: str, prompt: list[int]) -> RequestRecord:
    return RequestRecord(
        request=RequestId(name),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=ANSWER_TOKENS,
        seed=0,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[Colocated]]:
    opened: list[Colocated] = []
    yield opened
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.parity) for case in CASES]
)
def test_answers_are_the_references_alone_in_a_batch_chunked_cached_and_migrated(
    case: str, kernels: str, tmp_path: Path, served: list[Colocated]
) -> None:
    """Guards windows at the borders of chunks and of cached blocks, and tables whose rows are chosen by position."""
    if kernels == "native" and native() is None:
        pytest.skip("the native kernels were not built here")
    model = build(case)
    folder = prepare(save_hf(model, tmp_path / "model"), tmp_path / "cache")
    config = EngineConfig(model_dir=str(folder), threads=1, attention=kernels, pool_bytes=8 << 20)  # type: ignore[arg-type]
    serve(model, config, served, PROMPTS.get(case, 0))


@pytest.mark.parametrize(
    "case",
    [
        case if case in FAST_GGUF else pytest.param(case, marks=pytest.mark.parity)
        for case in CASES
        if case not in OUTSIDE_GGUF
    ],
)
def test_so_are_those_of_a_gguf_file(case: str, tmp_path: Path, served: list[Colocated]) -> None:
    """Guards a family's GGUF files in use: windows, tables and factors that come from their metadata."""
    source, model = build_as_gguf(case, tmp_path / "model.gguf")
    folder = prepare(source, tmp_path / "cache")
    config = EngineConfig(model_dir=str(folder), threads=1, pool_bytes=8 << 20)
    serve(model, config, served, PROMPTS.get(case, 0))


@pytest.mark.parametrize("case", ["gemma3", "olmo3", pytest.param("gemma2", marks=pytest.mark.parity),
                                  pytest.param("gpt-oss", marks=pytest.mark.parity),
                                  pytest.param("qwen2-window", marks=pytest.mark.parity)])
def test_answers_are_the_references_with_layer_groups(case: str, tmp_path: Path, served: list[Colocated]) -> None:
    """Guards windows that slide behind chunks, migrated tails, and prefixes whose windows are gone."""
    model = build(case)
    folder = prepare(save_hf(model, tmp_path / "model"), tmp_path / "cache")
    serve(model, EngineConfig(model_dir=str(folder), threads=1, pool_bytes=8 << 20, layer_groups="on"), served, 0)


SMALLER: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
ON_TRITON: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "phi4-mini": {},
    "gemma2": {},
    "gemma3": {"sliding_window_pattern": 2},
    "olmo2": {},
    "qwen3moe": {},
    "gpt-oss": {},
    "ministral3": {},
    "granite": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "llama": {},
    "qwen3": {},
    "mistral-window": {},
    "mixtral-window": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
}
"""One of each family, and so of each mechanism: biases; LongRoPE over half a head; windows, caps and norms around
branches; two thetas; norms behind branches and of whole rows; experts; experts in MXFP4 with sinks; queries with a
temperature; factors; layers that rotate nothing. Smaller than the others, since the interpreter takes most of a second
for a token of those."""
SMALLER_PROMPTS = {"qwen3moe": 1, "ministral3": 1, "granite": 1}


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter")
@pytest.mark.parametrize("case", ON_TRITON)
def test_so_are_those_of_tritons_kernels(case: str, tmp_path: Path, served: list[Colocated]) -> None:
    """Guards what only the kernels of a GPU do with an option between a prompt's chunks and the last of 64 tokens:
    alone, and behind a cached prefix in a batch, on blocks that another worker filled."""
    model = build(case, **SMALLER, **ON_TRITON[case])
    save = save_mxfp4 if case == "gpt-oss" else save_hf
    folder = prepare(save(model, tmp_path / "model"), tmp_path / "cache")
    engine = opened(EngineConfig(model_dir=str(folder), threads=1, attention="triton", pool_bytes=1 << 20), served)
    seed = 10 * SMALLER_PROMPTS.get(case, 0)
    prompt, more, other = (prompt_of(tokens, seed=seed + at) for tokens, at in ((60, 7), (9, 1), (41, 2)))
    alone = engine.run([record("alone", prompt)])
    both = engine.run([record("cached", [*prompt, *more]), record("beside", other)])
    check_ways(alone[0], both[0], 60)
    check(model, [*alone, *both])


def opened(config: EngineConfig, served: list[Colocated]) -> Colocated:
    prefill = PrefillConfig(chunk_tokens=CHUNK_TOKENS)
    served.append(Colocated(open_device(config), open_device(config), prefill_config=prefill, check=True))
    return served[-1]


def serve(model: transformers.PreTrainedModel, config: EngineConfig, served: list[Colocated], prompts: int) -> None:
    """Run prompts every way there is, and compare them with the reference's answers."""
    engine, seed = opened(config, served), 10 * prompts
    prompt = prompt_of(LENGTHS[0], seed=seed + 7)
    alone = engine.run([record("alone", prompt)])
    cached = engine.run([record("cached", [*prompt, *prompt_of(9, seed=seed + 1)])])
    batch = engine.run([record(f"batch-{n}", prompt_of(tokens, seed=seed + n)) for n, tokens in enumerate(LENGTHS)])
    again = engine.run([record("again", prompt)])
    assert again[0].tokens == alone[0].tokens
    check_ways(alone[0], cached[0], LENGTHS[0])
    check(model, [*alone, *cached, *batch])


def check_ways(alone: ColocatedAnswer, cached: ColocatedAnswer, tokens: int) -> None:
    """Blocks of the first were moved, and the second found all of its prompt's whole blocks."""
    assert alone.ended is not None and alone.ended.stats.migrated_blocks >= tokens // 16
    assert cached.ended is not None and cached.ended.stats.decode_cached_tokens >= tokens // 16 * 16


def check(model: transformers.PreTrainedModel, answers: list[ColocatedAnswer]) -> None:
    near = 0
    for answer in answers:
        assert len(answer.tokens) == ANSWER_TOKENS
        near += near_ties(model, answer.record.tokens[: answer.record.prompt_tokens], answer.tokens)
    assert near == 0, f"the reference nearly ties at {near} tokens: they prove nothing"
