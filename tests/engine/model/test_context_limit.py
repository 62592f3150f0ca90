"""A deployment's shorter context: what is served, what the model is known by, and which of LongRoPE's tables is
used."""

from pathlib import Path

import pytest
import torch

from engine.model.config import ModelConfig, ModelError
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.text.bundle import TextModel, fingerprint
from tests.engine.model.checkpoints import build, save_gguf, save_hf
from tests.engine.model.test_every_family import prompt_of
from tests.engine.model.test_families import Ours

ORIGINAL_TOKENS = 32


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("case", ["phi3-longrope", "phi4-mini"])
def test_original_context_has_the_short_table(case: str, form: str, tmp_path: Path) -> None:
    """Guards a deployment of short chats: by the long table its answers are worse than the model's own."""
    model = build(case)
    is_gguf = form == "gguf"
    saved = save_gguf(model, tmp_path / "model.gguf") if is_gguf else save_hf(model, tmp_path / "model")
    whole, short = prepare(saved, tmp_path), prepare(saved, tmp_path, context_tokens=ORIGINAL_TOKENS)
    prompt = prompt_of(ORIGINAL_TOKENS - 2)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    answers = []
    for folder in (short, whole):
        ours = Ours(load_model(folder))
        answers.append(ours.step(prompt))
        ours.close()
    torch.testing.assert_close(answers[0], wanted, atol=1e-4, rtol=0)
    assert (answers[1] - wanted).abs().max() > 1e-3, "one table for both would prove nothing"
    assert fingerprint(whole) != fingerprint(short)
    assert TextModel.load(short).context_tokens == ModelConfig.load(short).context_tokens == ORIGINAL_TOKENS
    assert prepare(saved, tmp_path) == whole
    # What does not depend on the context is there once.
    assert (short / "weights.bin").samefile(whole / "weights.bin")


def test_left_weights_have_their_limit_too(tmp_path: Path) -> None:
    saved = save_hf(build("qwen2"), tmp_path / "model")
    whole = prepare(saved, tmp_path, mapped=False)
    short = prepare(saved, tmp_path, mapped=False, context_tokens=64)
    assert short != whole and not (short / "weights.bin").exists()
    assert ModelConfig.load(short).context_tokens == 64 and fingerprint(short) != fingerprint(whole)


@pytest.mark.parametrize("mapped", [True, False])
def test_longer_context_than_the_models_is_refused(mapped: bool, tmp_path: Path) -> None:
    saved = save_hf(build("qwen2"), tmp_path / "model")
    with pytest.raises(ModelError, match="context_tokens is 100000"):
        prepare(saved, tmp_path, mapped=mapped, context_tokens=100000)
