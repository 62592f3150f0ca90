"""Packed weights, made once per host: what `kernels.linear.pack` makes of a prepared model's matrices, in a file beside
them that every worker maps. What the folder keeps is then read no more, but for the embedding's rows.

    <prepared model>/packed-<key>.bin, .json     key: PyTorch's version and what the processor can do
    <prepared model>/wide-<key>.bin, .json       what cannot be packed and is not kept in the model's type

Where packing is not possible the plain weights serve, and where the file is not, each process packs its own.
"""

import hashlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from engine.model.config import ModelError
from engine.model.prepared.checked import make_once
from engine.model.prepared.loading import PreparedWeights
from engine.model.prepared.pieces import Made, map_pieces
from kernels.linear import PackError, from_bytes, linear, pack, to_bytes

log = logging.getLogger(__name__)


def packed_weights(model_dir: Path, weights: PreparedWeights) -> dict[str, Tensor]:
    """Return every matrix of a prepared model that steps multiply with, packed, by name; the output matrix is always
    `head`. Empty where this machine cannot pack them."""
    plain = _packable(weights)
    try:
        pack(weights["layers.0.output"])
    except PackError as error:
        log.info("weights stay as they are: %s", error)
        return {}
    path = model_dir / f"packed-{_key()}.bin"
    try:
        # Made from a mapping of its own: its pages go when it does.
        make_once(path, lambda: _made(PreparedWeights(model_dir)))
        packed = _map(path, weights.dtype)
        _compare(packed, weights)
    except (OSError, ModelError, PackError) as error:
        log.warning("every worker packs weights of its own: %s", error)
        return {name: pack(weights[key]) for name, key in plain.items()}
    return packed


def wide_weights(model_dir: Path, weights: PreparedWeights, but: Collection[str]) -> dict[str, Tensor]:
    """Return every matrix that steps multiply with, but those, in the model's type: views of the folder's files where
    they are kept in it, and else widened once per host, in a file that every worker maps."""
    wanted = {name: key for name, key in weights.matrices().items() if name not in but}
    kept = {name: key for name, key in wanted.items() if _is_kept(weights, key)}
    found = {name: weights[key] for name, key in kept.items()}
    others = {name: key for name, key in wanted.items() if name not in kept}
    if not others:
        return found
    named = hashlib.blake2b(" ".join(others).encode(), digest_size=8).hexdigest()
    path = model_dir / f"wide-{named}.bin"
    try:
        make_once(path, lambda: _widened(PreparedWeights(model_dir), others))
        wide = {
            name: torch.frombuffer(piece.raw, dtype=weights.dtype).view(piece.shape)
            for name, piece in map_pieces(path).items()
        }
        if {name: tuple(weight.shape) for name, weight in wide.items()} != {
            name: weights.shape(key) for name, key in others.items()
        }:
            raise ModelError(path, "holds other matrices than the model's")
    except (OSError, ModelError) as error:
        log.warning("every worker widens weights of its own: %s", error)
        wide = {name: weights[key] for name, key in others.items()}
    return found | wide


def _is_kept(weights: PreparedWeights, key: str) -> bool:
    stored = weights.stored[key]
    return isinstance(stored, Tensor) and stored.dtype == weights.dtype


def _widened(weights: PreparedWeights, wanted: dict[str, str]) -> Iterator[Made]:
    form = str(weights.dtype).removeprefix("torch.").encode()
    for name, key in wanted.items():
        yield Made(name, weights.shape(key), form, [weights[key].view(torch.uint8).numpy().data])


def _packable(weights: PreparedWeights) -> dict[str, str]:
    """Name all matrices but those of a mixture of experts: rows come to them few at a time, in any number; and a
    router's are multiplied in 32 bits."""
    found = weights.matrices().items()
    return {name: key for name, key in found if len(weights.shape(key)) == 2 and not name.endswith(".router")}


def _key() -> str:
    """Name what packed bytes depend on: they are private to one library on one kind of processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    what = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {flags}"
    return hashlib.blake2b(what.encode(), digest_size=8).hexdigest()


def _made(weights: PreparedWeights) -> Iterator[Made]:
    for name, key in _packable(weights).items():
        packed = pack(weights[key])
        raw, description = to_bytes(packed)  # a view, good while `packed` is held
        yield Made(name, weights.shape(key), description, [raw])


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


def _compare(packed: dict[str, Tensor], weights: PreparedWeights) -> None:
    """The packed form is opaque: see that it multiplies as the plain one does, on one layer. Raises PackError."""
    for name in (name for name in packed if name.startswith("layers.0.")):
        weight = weights[name]
        x = torch.linspace(-1, 1, 4 * weight.shape[1]).view(4, -1).to(weight.dtype)
        got, want = linear(x, packed[name]).float(), linear(x, weight).float()
        if not torch.allclose(got, want, rtol=1e-2, atol=float(want.abs().max()) * 1e-2):
            raise PackError(f"{name} as packed on this machine multiplies differently")
