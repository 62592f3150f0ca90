"""Packed weights, made once per host: what `kernels.linear.pack` makes of a prepared model's matrices, in a file beside
them that every worker maps. The plain matrices are then read no more, but for the embedding's rows.

    <prepared model>/packed-<key>.bin, .json     key: PyTorch's version and what the processor can do

Where packing is not possible the plain weights serve, and where the file is not, each process packs its own.
"""

import hashlib
import logging
import os
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.kv.paged import TORCH_DTYPES
from engine.model.cache import locked
from engine.model.mapped import map_weights
from engine.model.weights import ALIGN_BYTES
from kernels.linear import PackError, from_bytes, linear, pack, to_bytes

log = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True):
    offset_bytes: int
    size_bytes: int
    shape: tuple[int, int]
    description: bytes


class _Index(msgspec.Struct, frozen=True):
    dtype: str
    size_bytes: int
    matrices: dict[str, _Entry]


def packed_weights(model_dir: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix of a prepared model that steps multiply with, packed, by name; the output matrix is always `head`.
    Empty where this machine cannot pack them."""
    matrices = _matrices(weights)
    try:
        pack(matrices["layers.0.output"])
    except PackError as error:
        log.info("weights stay as they are: %s", error)
        return {}
    path = model_dir / f"packed-{_key()}.bin"
    try:
        if not path.exists():
            _write(model_dir, path)
        packed = _map(path)
        _compare(packed, weights)
    except (OSError, PackError) as error:
        log.warning("every worker packs weights of its own: %s", error)
        return {name: pack(weight) for name, weight in matrices.items()}
    return packed


def _matrices(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    embedding = found.pop("embedding")
    return {"head": embedding, **found}


def _key() -> str:
    """Packed bytes are private to one library on one kind of processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    what = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {flags}"
    return hashlib.blake2b(what.encode(), digest_size=8).hexdigest()


def _write(model_dir: Path, path: Path) -> None:
    """Pack, one matrix after the other, through a mapping of its own: its pages go when it does."""
    with locked(model_dir.with_name(f"{model_dir.name}.lock")):
        if path.exists():
            return
        partial = path.with_suffix(".partial")
        try:
            index = _pack_into(partial, _matrices(map_weights(model_dir)))
            path.with_suffix(".json").write_bytes(msgspec.json.encode(index))
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)


def _pack_into(path: Path, matrices: dict[str, Tensor]) -> _Index:
    offset, entries, dtype = 0, dict[str, _Entry](), ""
    with path.open("wb") as file:
        for name, weight in matrices.items():
            offset += file.write(b"\0" * (-offset % ALIGN_BYTES))
            packed = pack(weight)
            raw, description = to_bytes(packed)
            entries[name] = _Entry(offset, len(raw), (weight.shape[0], weight.shape[1]), description)
            offset += file.write(raw)
            dtype = str(weight.dtype).removeprefix("torch.")
        file.flush()
        os.fsync(file.fileno())
    return _Index(dtype, offset, entries)


def _map(path: Path) -> dict[str, Tensor]:
    """Raises PackError for files that do not fit together."""
    try:
        index = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=_Index)
    except msgspec.DecodeError as error:
        raise PackError(f"{path}: {error}") from error
    if path.stat().st_size != index.size_bytes:
        raise PackError(f"{path} has {path.stat().st_size} bytes, not {index.size_bytes}")
    mapped = torch.from_file(str(path), shared=False, size=index.size_bytes, dtype=torch.uint8)
    found = {}
    for name, entry in index.matrices.items():
        raw = mapped[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        weight = from_bytes(raw, entry.shape, TORCH_DTYPES[index.dtype], entry.description)
        weight.mapping = mapped  # type: ignore[attr-defined]  # keeps the bytes where they are
        found[name] = weight
    return found


def _compare(packed: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """The packed form is opaque: see that it multiplies as the plain one does, on one layer. Raises PackError."""
    for name in (name for name in packed if name.startswith("layers.0.")):
        weight = weights[name]
        x = torch.linspace(-1, 1, 4 * weight.shape[1]).view(4, -1).to(weight.dtype)
        got, want = linear(x, packed[name]).float(), linear(x, weight).float()
        if not torch.allclose(got, want, rtol=1e-2, atol=float(want.abs().max()) * 1e-2):
            raise PackError(f"{name} as packed on this machine multiplies differently")
