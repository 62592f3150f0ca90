"""Matrices have more rows than tokenizers have tokens: ids that stand for nothing are never drawn."""

from pathlib import Path

import msgspec
import pytest
import torch

from engine.backends.attention import TorchAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.logprobs import LEAST, prompt_scores
from engine.model.config import ModelConfig
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.storage.paged import PagedKV
from engine.types import BlockId
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


def test_a_prompts_log_probability_of_such_an_id_is_the_least(tmp_path: Path) -> None:
    """Guards scores of prompts: an id of no token has no share of the probability, and is among nobody's likeliest."""
    model = build("qwen2")
    with torch.no_grad():
        model.lm_head.weight[TOKENS:] *= 50
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", TOKENS)
    ours = load_model(prepare(str(tmp_path / "model"), tmp_path / "cache"))
    prompt = [5, TOKENS + 7, 7, 9]
    row = trial_row(prompt, 0, [BlockId(0)])
    record = msgspec.structs.replace(row.record, prompt_logprobs=4)
    row = msgspec.structs.replace(row, record=record, scored=3)
    kv, attention = PagedKV(ours.config.kv_layout(16), 1), TorchAttention(ours.config.heads)
    batch = ForwardBatch.build([row], 16)
    attention.begin(batch, kv)
    (told,) = prompt_scores(ours.logits, ours.hidden(batch, kv, attention), [row]).told()
    kv.close()
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, :3, :TOKENS].log_softmax(-1)
    assert [one.token for one in told] == prompt[1:]
    assert told[0].logprob == LEAST
    assert told[1].logprob == pytest.approx(float(wanted[1, 7]), abs=1e-4)
    for one, row_wanted in zip(told, wanted, strict=True):
        assert [token for token, _ in one.top] == row_wanted.topk(4).indices.tolist()
