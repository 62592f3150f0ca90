"""Weights in panels, made once per host: a prepared model's matrices in the order in which our own kernels read them,
in a file beside them that every worker maps. Quantized ones stay as small as they came.

    <prepared model>/panels-<version of the layout>.bin, .json
    <prepared model>/panels-<version>-<rank>of<ranks>.bin, .json    a tensor-parallel rank's part

They are made by slabs of rows: no matrix is held as a whole. Where the file cannot be made, each process makes panels
of its own.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from engine.model.config import ModelError
from engine.model.prepared.checked import make_once
from engine.model.prepared.loading import PreparedWeights, Stored
from engine.model.prepared.pieces import Made, map_pieces
from kernels.panels import PANEL, VERSION, Kind, Panels, PanelStack, is_short, pack_as, pack_codes

log = logging.getLogger(__name__)

SLAB_VALUES = 1 << 22


def panel_weights(model_dir: Path, weights: PreparedWeights) -> dict[str, Panels | PanelStack]:
    """Return every matrix of a prepared model that steps multiply with, by name; the output matrix is always `head`.
    Each stands for the very values of `weights`. Raises ModelError where the folder is not whole."""
    path = model_dir / f"panels-{VERSION}{weights.suffix}.bin"
    try:
        # Made from mappings of its own: their pages go when they do.
        make_once(path, lambda: _made(weights.again(model_dir)))
        panels = _map(path)
        _compare(panels, weights)
    except (OSError, ModelError) as error:
        log.warning("every worker makes panels of its own: %s", error)
        return {
            name: _whole(weights.shape(key), kind, torch.cat(list(parts)))
            for name, key in weights.matrices().items()
            for kind, parts in [_packed(weights, key)]
        }
    return panels


def _made(weights: PreparedWeights) -> Iterator[Made]:
    for name, key in weights.matrices().items():
        kind, parts = _packed(weights, key)
        yield Made(name, weights.shape(key), kind.encode(), (part.numpy().data for part in parts))


def _packed(weights: PreparedWeights, key: str) -> tuple[Kind, Iterator[Tensor]]:
    """Return in which panels a matrix is exact, and their bytes in parts: panels of 64 rows lie behind each other."""
    *counts, rows, columns = weights.shape(key)
    starts = range(0, rows * (counts[0] if counts else 1), rows)
    step = max(1, SLAB_VALUES // columns // PANEL) * PANEL
    cuts = [(start + at, start + min(at + step, rows)) for start in starts for at in range(0, rows, step)]
    stored = weights.stored[key]
    kind: Kind
    if isinstance(stored, Tensor):
        kind = "bf16" if all(is_short(cast(Tensor, weights.rows(key, *cut))) for cut in cuts) else "f32"
    else:
        kind = stored.kind
    return kind, (_panels(weights.rows(key, *cut), kind) for cut in cuts)


def _panels(rows: Stored, kind: Kind) -> Tensor:
    if isinstance(rows, Tensor):
        return pack_as(kind, rows).raw
    return pack_codes(rows.unpacked(), rows.scales, rows.offsets, kind).raw


def _map(path: Path) -> dict[str, Panels | PanelStack]:
    found: dict[str, Panels | PanelStack] = {}
    for name, piece in map_pieces(path).items():
        try:
            raw = torch.frombuffer(piece.raw, dtype=torch.uint8)
            found[name] = _whole(piece.shape, cast(Kind, piece.form.decode()), raw)
        except ValueError as error:
            raise ModelError(path, f"{name}: {error}") from error
    return found


def _whole(shape: tuple[int, ...], kind: Kind, raw: Tensor) -> Panels | PanelStack:
    *counts, rows, columns = shape
    return PanelStack(counts[0], rows, columns, kind, raw) if counts else Panels(rows, columns, kind, raw)


def _compare(panels: dict[str, Panels | PanelStack], weights: PreparedWeights) -> None:
    """Raise ModelError for panels of other matrices than these."""
    wanted = {name: weights.shape(key) for name, key in weights.matrices().items()}
    if wanted != {name: item.shape for name, item in panels.items()}:
        raise ModelError("panels", "they are of another model's matrices")
