"""Families as they are served: prefill and decode schedulers, chunks, migrated blocks, cached prefixes, batches. Every
answer is the reference's greedy one, whatever it was computed with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from engine.config import EngineConfig
from engine.device import open_device
from engine.model.prepared.cache import prepare
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated
from kernels.native import native
from tests.engine.model.checkpoints import CASES, build, save_hf
from tests.engine.model.test_every_family import greedy_gap, one_thread, prompt_of
from worker.config import PrefillConfig

__all__ = ["one_thread"]

ANSWER_TOKENS = 64
CHUNK_TOKENS = 32
NEAR_TIE = 1e-4
FAST = ("qwen2-window", "phi4-mini", "gemma3", "olmo3")
"""Between them every option; the other cases run with the suite of parity."""


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
    serve(model, EngineConfig(model_dir=str(folder), threads=1, attention=kernels, pool_bytes=8 << 20), served)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["gemma3", "olmo3", pytest.param("gemma2", marks=pytest.mark.parity),
                                  pytest.param("gpt-oss", marks=pytest.mark.parity),
                                  pytest.param("qwen2-window", marks=pytest.mark.parity)])
def test_answers_are_the_references_with_layer_groups(case: str, tmp_path: Path, served: list[Colocated]) -> None:
    """Guards windows that slide behind chunks, migrated tails, and prefixes whose windows are gone."""
    model = build(case)
    folder = prepare(save_hf(model, tmp_path / "model"), tmp_path / "cache")
    serve(model, EngineConfig(model_dir=str(folder), threads=1, pool_bytes=8 << 20, layer_groups="on"), served)


def serve(model: transformers.PreTrainedModel, config: EngineConfig, served: list[Colocated]) -> None:
    """Run prompts every way there is, and compare them with the reference's answers."""
    engine = Colocated(
        open_device(config),
        open_device(config),
        prefill_config=PrefillConfig(chunk_tokens=CHUNK_TOKENS),
        check=True,
    )
    served.append(engine)
    prompt = prompt_of(100)
    alone = engine.run([record("alone", prompt)])
    cached = engine.run([record("cached", [*prompt, *prompt_of(9, seed=1)])])
    batch = engine.run([record(f"batch-{n}", prompt_of(tokens, seed=n)) for n, tokens in enumerate((100, 41, 70))])
    again = engine.run([record("again", prompt)])
    assert again[0].tokens == alone[0].tokens
    assert cached[0].ended is not None and cached[0].ended.stats.decode_cached_tokens >= 96
    assert alone[0].ended is not None and alone[0].ended.stats.migrated_blocks > 0
    for answer in (*alone, *cached, *batch):
        assert len(answer.tokens) == ANSWER_TOKENS
        assert greedy_gap(model, answer.record.tokens[: answer.record.prompt_tokens], answer.tokens) <= NEAR_TIE


