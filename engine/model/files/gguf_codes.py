"""The blocks of a quantized GGUF tensor as codes, scales and offsets; the formats are those of ggml's `block_q*`.

Left out: formats of one scale per 16 columns (Q2_K, Q3_K, Q6_K), of 5 bits with an offset (Q5_1, Q5_K), and those whose
codes stand for entries of a table (IQ*).
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from engine.model.codes import GROUP, Codes, FloatArray, nibbles

Bytes = NDArray[np.uint8]
Blocks = NDArray[np.void]  # structured, [rows, blocks per row]

_SCALE = ("scale", "<f2")
_MINIMUM = ("minimum", "<f2")


def codes_of(data: Bytes, kind: GGMLQuantizationType) -> Codes | None:
    """Return the codes in a tensor's bytes, row by row; None for a vector, or a format that is not taken here."""
    if kind not in _FORMATS or data.ndim != 2:
        return None
    block, read = _FORMATS[kind]
    return read(np.ascontiguousarray(data).view(block))


def _wide(values: NDArray[np.generic]) -> FloatArray:
    return values.astype(np.float32)


def _four_bits(raw: Bytes) -> Bytes:
    """Unpack `[rows, blocks, bytes]` to codes `[rows, columns]`: low halves of 16 or 32 columns, then the high ones."""
    return nibbles(raw).reshape(len(raw), -1)


def _q4_0(blocks: Blocks) -> Codes:
    # scale * (code - 8): the multiple of 8 is exact. Where a code is 8 this gives 0.0 whatever the scale's sign.
    scales = _wide(blocks["scale"])
    return Codes(_four_bits(blocks["codes"]), scales, scales * np.float32(-8), 4)


def _q4_1(blocks: Blocks) -> Codes:
    return Codes(_four_bits(blocks["codes"]), _wide(blocks["scale"]), _wide(blocks["minimum"]), 4)


def _q5_0(blocks: Blocks) -> Codes:
    high = np.unpackbits(np.ascontiguousarray(blocks["high"]), axis=-1, bitorder="little")
    codes = _four_bits(blocks["codes"]) | high.reshape(len(blocks), -1) << 4
    return Codes(codes.view(np.int8) - np.int8(16), _wide(blocks["scale"]), None, 8)


def _q8_0(blocks: Blocks) -> Codes:
    codes = np.ascontiguousarray(blocks["codes"]).reshape(len(blocks), -1)
    return Codes(codes, _wide(blocks["scale"]), None, 8)


def _q4_k(blocks: Blocks) -> Codes:
    """Eight groups a block, with scales and minima of 0 to 63 times the block's: the first four of each in the low six
    bits of four bytes; of the others the upper two bits stand above those, the lower four in bytes of their own."""
    scale_bytes, minimum_bytes, rest = np.split(blocks["factors"], 3, axis=-1)
    scales = np.concatenate([scale_bytes & 63, rest & 15 | (scale_bytes >> 6) << 4], axis=-1)
    minima = np.concatenate([minimum_bytes & 63, rest >> 4 | (minimum_bytes >> 6) << 4], axis=-1)
    rows = len(blocks)
    return Codes(
        _four_bits(blocks["codes"].reshape(rows, -1, GROUP)),
        (_wide(blocks["scale"])[..., None] * _wide(scales)).reshape(rows, -1),
        -(_wide(blocks["minimum"])[..., None] * _wide(minima)).reshape(rows, -1),
        4,
    )


def _block(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[np.void]:
    return np.dtype(list(fields))


_FORMATS: dict[GGMLQuantizationType, tuple[np.dtype[np.void], Callable[[Blocks], Codes]]] = {
    GGMLQuantizationType.Q4_0: (_block(_SCALE, ("codes", "u1", 16)), _q4_0),
    GGMLQuantizationType.Q4_1: (_block(_SCALE, _MINIMUM, ("codes", "u1", 16)), _q4_1),
    GGMLQuantizationType.Q5_0: (_block(_SCALE, ("high", "u1", 4), ("codes", "u1", 16)), _q5_0),
    GGMLQuantizationType.Q8_0: (_block(_SCALE, ("codes", "i1", 32)), _q8_0),
    GGMLQuantizationType.Q4_K: (_block(_SCALE, _MINIMUM, ("factors", "u1", 12), ("codes", "u1", 128)), _q4_k),
}
