"""`headrace plan` and `headrace doctor` know every family of the table, from a directory and from GGUF, and every
format of quantized checkpoints; what they say is held against transformers' own sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.cli import __main__ as cli
from cluster.doctor.models import configured_model
from engine.model.families import FAMILIES
from engine.model.files.checkpoint import STORED
from tests.engine.model.checkpoints import build, save_gguf, save_hf
from tests.engine.model.hf_quantized import SIZES, save_quantized
from tests.engine.model.quantized import Kind, write_model
from tests.engine.model.test_families import reference
from tests.engine.model.test_hf_quantized import FORMATS

CASES = {
    "mistral": "mistral", "ministral3": "ministral3", "granite": "granite", "smollm3": "smollm3", "qwen2": "qwen2",
    "phi3": "phi3", "gemma2": "gemma2", "gemma3": "gemma3", "olmo2": "olmo2", "olmo3": "olmo3", "mixtral": "mixtral",
    "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
}  # fmt: skip
"""A case of `checkpoints` for every family but Llama and Qwen3, whose models `test_families` has."""
AS_GGUF = {"mistral": "llama", "olmo3": "olmo2"}
"""Families whose GGUF files say that they are another's."""
GGUF_KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "MXFP4")


def plan(source: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["plan", "--json", "--model", source, "--kv-memory", "1GiB", "--workspace", "1MiB"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def check(source: str, family: str, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = configured_model(source)
    assert said.level == "ok", said
    assert f"family {family}," in said.found and "weights and rotary tables take" in said.found
    found, config = plan(source, capsys), model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    assert found["sizes"]["token_bytes"] == token_bytes
    weights_bytes = 2 * sum(weight.numel() for weight in model.parameters())
    assert weights_bytes <= found["weights_bytes"] < 1.3 * weights_bytes


def test_every_family_has_a_case() -> None:
    assert CASES.keys() | {"llama", "qwen3"} == FAMILIES.keys()


@pytest.mark.parametrize("family", CASES)
def test_both_know_the_family(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(CASES[family])
    check(save_hf(model, tmp_path / "model"), family, model, capsys)
    check(save_gguf(model, tmp_path / "model.gguf"), AS_GGUF.get(family, family), model, capsys)


@pytest.mark.parametrize("name", FORMATS)
def test_both_know_the_format(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_quantized(reference(**SIZES, num_hidden_layers=1), tmp_path / "model", FORMATS[name]())
    said = configured_model(source)
    assert said.level == "ok" and "weights and rotary tables take" in said.found, said
    assert plan(source, capsys)["weights_bytes"] > 0


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_both_know_the_quantization(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "model.gguf", lambda name: Kind[kind])
    said = configured_model(source)
    assert said.level == "ok" and f"weights in {STORED.get(kind, kind)}," in said.found, said
    assert plan(source, capsys)["weights_bytes"] > 0


@pytest.mark.parametrize("change", ["missing", "unread", "no tokenizer", "pickles"])
def test_the_doctor_refuses_what_a_start_would(change: str, tmp_path: Path) -> None:
    """Guards a traceback of the doctor, and its word that a model runs whose start says no."""
    save_hf(build("mistral"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    bias, norm = "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"
    tensors[bias] = torch.ones(64)
    if change == "missing":
        del tensors[bias], tensors[norm]
    if change in ("missing", "unread"):
        save_file(tensors, file)
    elif change == "pickles":
        file.rename(file.with_name("pytorch_model.bin"))
    else:
        (tmp_path / "model" / "tokenizer.json").unlink()
    said = configured_model(str(tmp_path / "model"))
    told = {
        "missing": f"tensor {norm} is missing",
        "unread": f"tensor {bias}: the family mistral has no place",
        "no tokenizer": "tokenizer.json: cannot be read: No such file or directory",
        "pickles": "holds only pickled weights, which are never loaded",
    }
    assert said.level == "fail" and told[change] in said.found


def test_the_doctor_refuses_a_config_json_without_its_directory(tmp_path: Path) -> None:
    """Guards a word that a model runs of what the planner can read and a start cannot."""
    source = save_hf(build("mistral"), tmp_path / "model")
    assert configured_model(source).level == "ok"
    said = configured_model(f"{source}/config.json")
    assert said.level == "fail" and "config.json: neither a .gguf file nor a directory with config.json" in said.found
