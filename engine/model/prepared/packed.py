"""Packed weights, made once per host: what `kernels.linear.pack` makes of a prepared model's matrices, in a file beside
them that every worker maps. The plain matrices are then read no more, but for the embedding's rows.

    <prepared model>/packed-<key>.bin, .json     key: PyTorch's version and what the processor can do

Where packing is not possible the plain weights serve, and where the file is not, each process packs its own.
"""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from engine.model.config import ModelError
from engine.model.prepared.checked import make_once
from engine.model.prepared.loading import map_weights, matrices
from engine.model.prepared.pieces import Made, map_pieces
from kernels.linear import PackError, from_bytes, linear, pack, to_bytes

log = logging.getLogger(__name__)


def packed_weights(model_dir: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return every matrix of a prepared model that steps multiply with, packed, by name; the output matrix is always
    `head`. Empty where this machine cannot pack them."""
    plain = _packable(weights)
    try:
        pack(plain["layers.0.output"])
    except PackError as error:
        log.info("weights stay as they are: %s", error)
        return {}
    path = model_dir / f"packed-{_key()}.bin"
    try:
        # Made from a mapping of its own: its pages go when it does.
        make_once(path, lambda: _made(_packable(map_weights(model_dir))))
        packed = _map(path, plain["head"].dtype)
        _compare(packed, weights)
    except (OSError, ModelError, PackError) as error:
        log.warning("every worker packs weights of its own: %s", error)
        return {name: pack(weight) for name, weight in plain.items()}
    return packed


def _packable(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all matrices but those of a mixture of experts: rows come to them few at a time, in any number; and a
    router's are multiplied in 32 bits."""
    found = matrices(weights).items()
    return {name: weight for name, weight in found if weight.dim() == 2 and not name.endswith(".router")}


def _key() -> str:
    """Name what packed bytes depend on: they are private to one library on one kind of processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    what = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {flags}"
    return hashlib.blake2b(what.encode(), digest_size=8).hexdigest()


def _made(plain: dict[str, Tensor]) -> Iterator[Made]:
    for name, weight in plain.items():
        packed = pack(weight)
        raw, description = to_bytes(packed)  # a view, good while `packed` is held
        yield Made(name, weight.shape, description, [raw])


def _map(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Map the packed matrices. Raises ModelError and PackError for files that do not fit together."""
    found = {}
    for name, piece in map_pieces(path).items():
        rows, columns = piece.shape
        raw = torch.frombuffer(piece.raw, dtype=torch.uint8)
        weight = from_bytes(raw, (rows, columns), dtype, piece.form)
        weight.mapping = raw  # type: ignore[attr-defined]  # keeps the bytes where they are
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
