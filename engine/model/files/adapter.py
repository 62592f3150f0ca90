"""The identity of a low-rank adapter: a digest of what it computes, whatever its folder is called.

An adapter that was trained on under its old name must not find what it computed before. So nothing but the contents
counts: every tensor's name, type, shape and bytes, and all of adapter_config.json that may change a result. Where
tensors lie in their file, and in which order, does not count. `engine.identity.space` takes the digest from a request's
record; blocks that were computed under one adapter are then found under no other, in no cache and no tier.

The files are PEFT's: adapter_config.json and adapter_model.safetensors (LoRA: Hu et al. 2021, arXiv 2106.09685).
"""

from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from engine.model.config import PICKLES, ModelError
from engine.model.files.checkpoint import read_json
from engine.model.files.safetensors_reader import SafetensorsFile, StoredTensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
DIGEST_BYTES = 16

_NAMES = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
)
"""What says how an adapter is called, or by what it was made."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


def digest(path: Path) -> str:
    """Return the digest of the adapter in the folder `path`: 32 hexadecimal digits. Raises ModelError naming the file
    and the field or tensor that is missing or wrong."""
    config, weights = _config(path / CONFIG), _weights(path)
    _check(weights, config, path / WEIGHTS)
    found = blake2b(digest_size=DIGEST_BYTES, person=b"headrace adapter")
    told = {key: value for key, value in config.items() if key not in _NAMES}
    if isinstance(told["target_modules"], list):
        told["target_modules"] = sorted(told["target_modules"])  # PEFT keeps a set
    _tell(found, msgspec.json.encode(told, order="sorted"))
    for name, tensor in sorted(weights.tensors.items()):
        _tell(found, msgspec.json.encode([name, tensor.dtype, tensor.shape]))
        _tell(found, weights.raw(name).data)
    return found.hexdigest()


def _tell(digest: blake2b, part: bytes | memoryview) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(path, f"peft_type {kind!r} is not supported, only LORA")
    rank, alpha, targets = (config.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ModelError(path, f"r is {rank!r}, not a positive number")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ModelError(path, f"lora_alpha is {alpha!r}, not a number")
    is_list = isinstance(targets, list) and all(isinstance(one, str) for one in targets)
    if not targets or not (is_list or isinstance(targets, str)):
        raise ModelError(path, f"target_modules is {targets!r}, not a list of names")
    return config


def _weights(path: Path) -> SafetensorsFile:
    file = path / WEIGHTS
    if not file.exists() and any(item.suffix in PICKLES for item in path.iterdir()):
        raise ModelError(path, f"holds only pickled weights, which are never loaded: use {WEIGHTS}")
    return SafetensorsFile(file)


def _check(weights: SafetensorsFile, config: dict[str, Any], path: Path) -> None:
    """Raise ModelError for factors without their counterpart, or whose shapes do not go together."""
    tensors = weights.tensors
    if not any(name.endswith(_A) for name in tensors):
        raise ModelError(path, f"holds no tensor *{_A}")
    patterns = config.get("rank_pattern") or {}
    for name in tensors:
        if not name.endswith((_A, _B)):
            continue
        stem = name.removesuffix(_A).removesuffix(_B)
        a, b = tensors.get(stem + _A), tensors.get(stem + _B)
        if a is None or b is None:
            raise ModelError(path, f"tensor {stem}{_A if a is None else _B} is missing")
        rank = _rank(a, b, path, stem)
        if not patterns and rank != config["r"]:
            raise ModelError(path, f"tensor {stem}{_A} has rank {rank}, and {CONFIG} says r is {config['r']}")


def _rank(a: StoredTensor, b: StoredTensor, path: Path, stem: str) -> int:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise ModelError(path, f"tensors {stem}.lora_A and lora_B have shapes {a.shape} and {b.shape}, of no one rank")
    return a.shape[0]
