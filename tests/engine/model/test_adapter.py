"""An adapter is known by what it computes: neither by its folder's name nor by how its file is laid out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.model.config import ModelError
from engine.model.files.adapter import CONFIG, WEIGHTS, digest

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def make(path: Path, config: dict[str, object] | None = None, **tensors: np.ndarray) -> Path:
    """Write an adapter of rank 2 to one matrix; an argument None leaves a field out."""
    path.mkdir()
    said: dict[str, object] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    said |= {"base_model_name_or_path": "someone/model"} | (config or {})
    (path / CONFIG).write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    rng = np.random.default_rng(1)
    found = {
        f"{Q}.lora_A.weight": rng.standard_normal((2, 8)).astype(np.float32),
        f"{Q}.lora_B.weight": rng.standard_normal((8, 2)).astype(np.float32),
    }
    found |= {f"{Q}.{name}.weight": value for name, value in tensors.items()}
    save_file(found, path / WEIGHTS)
    return path


def test_a_name_does_not_count(tmp_path: Path) -> None:
    one = make(tmp_path / "one")
    same = digest(one)
    assert len(same) == 32
    assert digest(Path(shutil.copytree(one, tmp_path / "two"))) == same
    renamed = {"base_model_name_or_path": "/elsewhere", "revision": "main", "inference_mode": True}
    assert digest(make(tmp_path / "three", renamed)) == same


def test_the_layout_of_the_file_does_not_count(tmp_path: Path) -> None:
    """Guards one adapter saved by two versions of a program: other order, other metadata."""
    one = make(tmp_path / "one", {"target_modules": ["q_proj", "v_proj"]})
    two = make(tmp_path / "two", {"target_modules": ["v_proj", "q_proj"]})
    raw = (two / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    turned = json.dumps({"__metadata__": {"format": "pt"}, **dict(reversed(list(header.items())))}).encode()
    (two / WEIGHTS).write_bytes(len(turned).to_bytes(8, "little") + turned + raw[8 + size :])
    assert digest(one) == digest(two)


def test_whatever_changes_a_result_changes_the_digest(tmp_path: Path) -> None:
    """Guards against an adapter that was trained on, and serves the blocks of what it was."""
    base = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)
    nudged = base.copy()
    nudged[1, 7] = np.nextafter(nudged[1, 7], np.float32(9))
    found = {
        digest(make(tmp_path / "base")),
        digest(make(tmp_path / "a", lora_A=nudged)),
        digest(make(tmp_path / "half", lora_A=base.astype(np.float16))),
        digest(make(tmp_path / "alpha", {"lora_alpha": 8})),
        digest(make(tmp_path / "scaled", {"use_rslora": True})),
        digest(make(tmp_path / "targets", {"target_modules": ["k_proj"]})),
        digest(make(tmp_path / "more", lora_magnitude_vector=np.ones(8, np.float32))),
    }
    assert len(found) == 7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported, only LORA"),
        ({"r": 0}, "r is 0, not a positive number"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much', not a number"),
        ({"target_modules": []}, r"target_modules is \[\], not a list of names"),
        ({"r": 3}, "has rank 2, and adapter_config.json says r is 3"),
    ],
)
def test_a_config_that_is_wrong(tmp_path: Path, config: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        digest(make(tmp_path / "adapter", config))


def cut(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-4])


def pickled(path: Path) -> None:
    (path / WEIGHTS).rename(path / "adapter_model.bin")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / CONFIG).unlink(), "adapter_config.json: cannot be read"),
        (lambda path: (path / CONFIG).write_text("[]"), "adapter_config.json: not a JSON object"),
        (cut, "adapter_model.safetensors: not a sound safetensors file"),
        (pickled, "only pickled weights"),
        (lambda path: (path / WEIGHTS).unlink(), "adapter_model.safetensors: cannot be read"),
        (lambda path: save_file({"x": np.ones(2)}, path / WEIGHTS), r"holds no tensor \*.lora_A.weight"),
        (
            lambda path: save_file({f"{Q}.lora_A.weight": np.ones((2, 8))}, path / WEIGHTS),
            f"tensor {Q}.lora_B.weight is missing",
        ),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    path = make(tmp_path / "adapter")
    spoil(path)
    with pytest.raises(ModelError, match=message):
        digest(path)


def test_factors_of_two_ranks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"shapes \(2, 8\) and \(8, 3\), of no one rank"):
        digest(make(tmp_path / "adapter", lora_B=np.ones((8, 3), np.float32)))
