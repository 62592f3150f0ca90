"""The type that a checkpoint keeps its weights in: what a GPU computes in unless told otherwise."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.model.config import ModelError
from engine.model.prepared.cache import find_demo_model, stored_dtype
from tests.engine.model.quantized import Kind, write_model


def directory(folder: Path, said: dict[str, str]) -> Path:
    """Two shards, of which the second holds most of the bytes, in 16 bits."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said))
    save_file({"norm": np.ones(64, np.float32)}, folder / "model-1.safetensors")
    save_file({"matrix": np.ones((64, 64), np.float16)}, folder / "model-2.safetensors")
    return folder


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({}, "float16"),
    ],
)
def test_a_directory_is_what_its_configuration_says(
    said: dict[str, str], found: str, tmp_path: Path
) -> None:
    """Guards against a field of one generation of transformers that is overlooked, and against the first shard, or the
    norms, speaking for all where no field says it."""
    assert stored_dtype(directory(tmp_path / "model", said)) == found


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Kind.F32, "float32"),
        (Kind.F16, "float16"),
        (Kind.BF16, "bfloat16"),
        (Kind.Q4_K, "Q4_K"),
    ],
)
def test_a_gguf_file_is_what_most_of_it_is(kind: Kind, found: str, tmp_path: Path) -> None:
    """Guards against the norms, which are in 32 bits in every file."""
    path = write_model(tmp_path / "model.gguf", lambda name: kind)
    assert stored_dtype(Path(path)) == found


def test_the_demo_model_is_quantized() -> None:
    assert stored_dtype(find_demo_model()) == "Q4_1"


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF, it says")
    with pytest.raises(ModelError, match="not a sound GGUF file"):
        stored_dtype(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"config\.json"):
        stored_dtype(tmp_path)
