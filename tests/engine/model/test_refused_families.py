"""Families that are not run are refused by name and with the reason, from a directory and from GGUF, before any tensor
is looked at. Which there are, transformers and the gguf package say: a new one of theirs fails here without a line."""

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import transformers.models
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS

from engine.model.config import ModelError
from engine.model.families import REFUSED
from engine.model.prepared.cache import prepare

LATENT, RECURRENT, CHUNKS = r"one latent row \(MLA\)", "a recurrent state|keeps a state", "attend within chunks"
CASES = {
    "deepseek_v2": LATENT, "deepseek_v3": LATENT, "deepseek_v32": LATENT, "kimi_k2": LATENT, "minicpm3": LATENT,
    "glm4_moe_lite": LATENT, "longcat_flash": LATENT, "mistral4": LATENT, "deepseek2": LATENT, "glm-dsa": LATENT,
    "llama4": CHUNKS, "llama4_text": CHUNKS,
    "kimi_linear": RECURRENT, "kimi-linear": RECURRENT, "zamba": RECURRENT, "zamba2": RECURRENT, "falcon_h1": RECURRENT,
    "falcon-h1": RECURRENT, "bamba": RECURRENT, "jamba": RECURRENT, "nemotron_h": RECURRENT, "nemotron-h": RECURRENT,
    "nemotron_h_moe": RECURRENT, "qwen3_next": RECURRENT, "qwen3next": RECURRENT, "qwen3_5": RECURRENT,
    "qwen35": RECURRENT, "minimax": RECURRENT, "lfm2": RECURRENT, "lfm2_moe": RECURRENT, "lfm2moe": RECURRENT,
    "granitemoehybrid": RECURRENT, "granitehybrid": RECURRENT, "mamba": RECURRENT, "mamba2": RECURRENT,
    "falcon_mamba": RECURRENT, "rwkv6": RECURRENT, "rwkv7": RECURRENT,
    "gemma3n": "layers share keys and values", "gemma4": "layers share keys and values", "gemma": "Gemma 1 is not",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    """Guards "unknown model_type", which tells nobody whether it is his file that is wrong."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ModelError, match=rf"config.json: model_type '{name}' is not run: .*({CASES[name]})"):
        prepare(str(folder), tmp_path / "cache")
    wrapped = {"model_type": "some_wrapper", "text_config": {"model_type": name}}
    (folder / "config.json").write_text(json.dumps(wrapped))
    with pytest.raises(ModelError, match=rf"config.json: model_type '{name}' is not run: .*({CASES[name]})"):
        prepare(str(folder), tmp_path / "cache")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"model.gguf: architecture '{name}' is not run: .*({CASES[name]})"):
        prepare(str(tmp_path / "model.gguf"), tmp_path / "cache")


SIGNS = ("kv_lora_rank", "linear_attention", "mamba_", "ssm_", "conv_L_cache", "lru_width", "attention_chunk_size")
"""What the configurations of such families have in their classes: latent attention, states, chunks."""
OTHERS = re.compile(r"_(vision|audio)|vision_model|encoder|nemotron3_5_transcribe|nemo_speechlm|pvt_v2")
"""What reads images and speech, and no text by itself."""


def of_transformers() -> Iterator[str]:
    """Yield the `model_type` of each configuration with one of the signs."""
    for package in pkgutil.iter_modules(transformers.models.__path__):
        spec = importlib.util.find_spec(f"transformers.models.{package.name}.configuration_{package.name}")
        if spec is None or spec.origin is None:
            continue
        text = Path(spec.origin).read_text()
        if any(sign in text for sign in SIGNS):
            yield from re.findall(r'model_type(?:: str)? = "([^"]+)"', text)


def of_gguf() -> Iterator[str]:
    """Yield the architectures that have tensors of a state or of latent attention."""
    signs = {kind for kind in MODEL_TENSOR if re.match(r"SSM_|SHORTCONV_|TIME_MIX_|ATTN_KV_A", kind.name)}
    for architecture in MODEL_ARCH:
        if signs & set(MODEL_TENSORS.get(architecture, ())):
            yield MODEL_ARCH_NAMES[architecture]


def test_none_of_transformers_is_forgotten() -> None:
    found = {name for name in of_transformers() if not OTHERS.search(name)}
    assert {"deepseek_v3", "qwen3_next", "llama4_text", "recurrent_gemma"} <= found and len(found) > 30
    assert not found - REFUSED.keys()


def test_none_of_gguf_is_forgotten() -> None:
    found = set(of_gguf())
    assert {"deepseek2", "mamba", "lfm2", "kimi-linear"} <= found and len(found) > 15
    assert not found - REFUSED.keys()
