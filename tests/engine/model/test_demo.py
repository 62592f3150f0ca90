"""The demo model, converted and run: against transformers reading the same file."""

import time
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch

from engine.backends.attention import TorchAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.model.llama import load_model
from engine.model.prepared.cache import find_demo_model, prepare
from engine.storage.paged import PagedKV
from engine.text.bundle import TextModel
from engine.types import BlockId
from tests.engine.text.chats import chat

PROMPT = "Write a short poem about the sea, 42 whales and 你好 😀."


@pytest.mark.slow
def test_demo_model_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the whole way from a real quantized file to logits, and that a second start does no work again."""
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = find_demo_model()
    folder = prepare(None, tmp_path)
    start = time.perf_counter()
    assert prepare(None, tmp_path) == folder
    assert time.perf_counter() - start < 1.0
    text = TextModel.load(folder)
    ids = text.encode_chat_text(text.render_chat(chat([("user", PROMPT)])))

    model = load_model(folder)
    config = model.config
    layout = config.kv_layout(16)
    blocks = [BlockId(block) for block in range(layout.blocks_for(len(ids)))]
    kv = PagedKV(layout, len(blocks))
    attention = TorchAttention(config.heads)
    batch = ForwardBatch.build([trial_row(ids, 0, blocks)], layout.block_size)
    attention.begin(batch, kv)
    logits = model.forward(batch, kv, attention)[0]
    kv.close()

    # transformers reads the file twice, and makes the same table of names for each of some 400 modules.
    for pure in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, pure, cache(getattr(gguf, pure)))
    with torch.inference_mode():
        oracle = LlamaForCausalLM(
            AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        ).eval()
        read = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=oracle)
        missing, unexpected = oracle.load_state_dict(read["tensors"], strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])
        oracle.tie_weights()
        wanted = oracle.float()(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=0)
    assert logits.topk(5).indices.tolist() == wanted.topk(5).indices.tolist()
