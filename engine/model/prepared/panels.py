"""Weights in panels, made once per host: a prepared model's matrices in the order in which our own kernels read them,
in a file beside them that every worker maps. Quantized ones stay as small as they came.

    <prepared model>/panels-<version of the layout>.bin, .json
    <prepared model>/panels-<version>-<rank>of<ranks>.bin, .json    a tensor-parallel rank's slices

Where the file cannot be made, each process makes panels of its own.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from engine.model.codes import Codes
from engine.model.config import ModelError
from engine.model.prepared.checked import make_once
from engine.model.prepared.codes_file import CodesFile
from engine.model.prepared.loading import map_weights, matrices
from engine.model.prepared.pieces import Made, map_pieces
from engine.model.prepared.sliced import Slices
from kernels.panels import VERSION, Kind, Panels, PanelStack, pack_codes, pack_plain, pack_stack, stacked

log = logging.getLogger(__name__)


def panel_weights(
    model_dir: Path, weights: dict[str, Tensor], slices: Slices | None = None
) -> dict[str, Panels | PanelStack]:
    """Return every matrix of a prepared model that steps multiply with, by name, or a rank's `slices` of them; the
    output matrix is always `head`. `weights` are 32-bit and whole, and each matrix in panels stands for the bits of its
    plain one. Raises ModelError where the folder is not whole."""
    path = model_dir / f"panels-{VERSION}{'' if slices is None else slices.suffix}.bin"
    try:
        # Made from mappings of its own: their pages go when they do.
        make_once(path, lambda: _made(model_dir, map_weights(model_dir), slices))
        panels = _map(path)
        _compare(panels, weights, slices)
    except (OSError, ModelError) as error:
        log.warning("every worker makes panels of its own: %s", error)
        return dict(_panels(model_dir, weights, slices))
    return panels


def _panels(
    model_dir: Path, weights: dict[str, Tensor], slices: Slices | None
) -> Iterator[tuple[str, Panels | PanelStack]]:
    stored = CodesFile(model_dir)
    for name, whole in matrices(weights).items():
        weight, codes = whole, stored.get(name if name in weights else "embedding")  # tied: the head's codes too
        if slices is not None:
            codes = None if codes is None else slices.codes(name, codes, len(whole) if whole.dim() == 3 else 1)
            weight = slices.tensor(name, whole)
        if weight.dim() == 3:
            yield name, pack_stack(weight) if codes is None else stacked(_split(codes, len(weight)))
        else:
            yield name, pack_plain(weight) if codes is None else _packed(codes)


def _split(codes: Codes, count: int) -> Iterator[Panels]:
    """Pack the codes of `count` matrices, whose rows lie under each other, one after the other."""
    rows = len(codes.codes) // count
    for first in range(0, len(codes.codes), rows):
        yield _packed(codes.rows(first, first + rows))


def _packed(codes: Codes) -> Panels:
    offsets = None if codes.offsets is None else torch.from_numpy(codes.offsets)
    scales = torch.from_numpy(codes.scales)
    return pack_codes(torch.from_numpy(codes.codes), scales, offsets, codes.form)


def _made(model_dir: Path, weights: dict[str, Tensor], slices: Slices | None) -> Iterator[Made]:
    for name, panels in _panels(model_dir, weights, slices):
        yield Made(name, panels.shape, panels.kind.encode(), [panels.raw.numpy().data])


def _map(path: Path) -> dict[str, Panels | PanelStack]:
    found: dict[str, Panels | PanelStack] = {}
    for name, piece in map_pieces(path).items():
        *counts, rows, columns = piece.shape
        kind, raw = cast(Kind, piece.form.decode()), torch.frombuffer(piece.raw, dtype=torch.uint8)
        try:
            one = Panels(rows, columns, kind, raw) if not counts else None
            found[name] = one or PanelStack(counts[0], rows, columns, kind, raw)
        except ValueError as error:
            raise ModelError(path, f"{name}: {error}") from error
    return found


def _compare(
    panels: dict[str, Panels | PanelStack], weights: dict[str, Tensor], slices: Slices | None
) -> None:
    """Raise ModelError for panels of other matrices than these."""
    wanted = {
        name: tuple(weight.shape) if slices is None else slices.shape(name, weight)
        for name, weight in matrices(weights).items()
    }
    if wanted != {name: item.shape for name, item in panels.items()}:
        raise ModelError("panels", "they are of another model's matrices")
