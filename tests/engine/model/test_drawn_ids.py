"""Matrices have more rows than tokenizers have tokens: ids that stand for nothing are never drawn."""

from pathlib import Path

import pytest
import torch

from engine.model.config import ModelConfig
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from tests.engine.model.checkpoints import VOCAB, build, save_gguf, save_tokenizer
from tests.engine.model.test_families import Ours

TOKENS = 300


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_ids_beyond_the_tokenizer_cannot_be_drawn(form: str, tmp_path: Path) -> None:
    """Guards Qwen2.5, whose matrices have 151,936 or 152,064 rows for the same 151,665 tokens: an id among the rest
    would be text of no meaning, or none."""
    model = build("qwen2")
    with torch.no_grad():
        model.lm_head.weight[TOKENS:] *= 50  # so that they would be drawn
    if form == "gguf":
        source = save_gguf(model, tmp_path / "model.gguf", TOKENS)
    else:
        model.save_pretrained(tmp_path / "model")
        save_tokenizer(tmp_path / "model", TOKENS)
        source = str(tmp_path / "model")
    folder = prepare(source, tmp_path / "cache")
    assert ModelConfig.load(folder).drawable == TOKENS
    ours = Ours(load_model(folder))
    with torch.inference_mode():
        wanted = model(torch.tensor([[5, 6, 7]])).logits[0, -1]
        logits = ours.step([5, 6, 7])
    ours.close()
    assert int(wanted.argmax()) >= TOKENS and len(logits) == VOCAB
    assert logits[TOKENS:].isneginf().all()
    torch.testing.assert_close(logits[:TOKENS], wanted[:TOKENS], atol=1e-4, rtol=0)
