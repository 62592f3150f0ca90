"""The blocks of a quantized GGUF tensor as codes, scales and offsets; the formats are those of ggml's `block_q*`.

Left out: Q2_K and Q3_K, and those whose codes stand for entries of a table (IQ*).
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from engine.model.codes import GROUP, Codes, FloatArray, Form, nibbles
from engine.model.files.floats import TWICE_E2M1, half_powers

Bytes = NDArray[np.uint8]
Blocks = NDArray[np.void]  # structured, [rows, blocks per row]

_SCALE = ("scale", "<f2")
_MINIMUM = ("minimum", "<f2")


def codes_of(data: Bytes, kind: GGMLQuantizationType) -> Codes | None:
    """Return the codes in a tensor's bytes, row by row; None for a vector, or a format that is not taken here."""
    if kind not in _FORMATS or data.ndim != 2:
        return None
    _, block, read = _FORMATS[kind]
    return read(np.ascontiguousarray(data).view(block))


def form_of(kind: GGMLQuantizationType) -> Form | None:
    """Return the form of `codes_of` a matrix in this format; None where it is not taken here."""
    return _FORMATS[kind][0] if kind in _FORMATS else None


def _wide(values: NDArray[np.generic]) -> FloatArray:
    return values.astype(np.float32)


def _four_bits(raw: Bytes) -> Bytes:
    """Unpack `[rows, blocks, bytes]` to codes `[rows, columns]`: low halves of 16 or 32 columns, then the high ones."""
    return nibbles(raw).reshape(len(raw), -1)


def _q4_0(blocks: Blocks) -> Codes:
    # scale * (code - 8): the multiple of 8 is exact. Where a code is 8 this gives 0.0 whatever the scale's sign.
    scales = _wide(blocks["scale"])
    return Codes(_four_bits(blocks["codes"]), scales, scales * np.float32(-8), "q4")


def _q4_1(blocks: Blocks) -> Codes:
    return Codes(_four_bits(blocks["codes"]), _wide(blocks["scale"]), _wide(blocks["minimum"]), "q4")


def _q5_0(blocks: Blocks) -> Codes:
    return Codes(_five_bits(blocks) - np.int8(16), _wide(blocks["scale"]), None, "q8")


def _q5_1(blocks: Blocks) -> Codes:
    return Codes(_five_bits(blocks), _wide(blocks["scale"]), _wide(blocks["minimum"]), "a8")


def _five_bits(blocks: Blocks) -> NDArray[np.int8]:
    """The fifth bits of a block's 32 codes stand in four bytes."""
    high = np.unpackbits(np.ascontiguousarray(blocks["high"]), axis=-1, bitorder="little")
    return (_four_bits(blocks["codes"]) | high.reshape(len(blocks), -1) << 4).view(np.int8)


def _q8_0(blocks: Blocks) -> Codes:
    codes = np.ascontiguousarray(blocks["codes"]).reshape(len(blocks), -1)
    return Codes(codes, _wide(blocks["scale"]), None, "q8")


def _q4_k(blocks: Blocks) -> Codes:
    return Codes(_four_bits(blocks["codes"].reshape(len(blocks), -1, GROUP)), *_eight_groups(blocks), "q4")


def _q5_k(blocks: Blocks) -> Codes:
    """As Q4_K; the fifth bits stand in 32 bytes, one per column of a group, whose lowest bits are the first group's."""
    rows = len(blocks)
    groups = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks["high"][..., None, :] >> groups & 1).reshape(rows, -1)
    codes = _four_bits(blocks["codes"].reshape(rows, -1, GROUP)) | high << 4
    return Codes(codes.view(np.int8), *_eight_groups(blocks), "a8")


def _q6_k(blocks: Blocks) -> Codes:
    """Two halves of 128 columns a block. A half's 64 low bytes have the lower four bits of columns 0 to 63 and 64 to
    127, its 32 high bytes the upper two of columns j, j + 32, j + 64 and j + 96. Sixteen 8-bit scales times the
    block's."""
    rows = len(blocks)
    low = nibbles(blocks["low"].reshape(rows, -1, 2, 64)).reshape(rows, -1, 2, 4, GROUP)
    quarters = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks["high"].reshape(rows, -1, 2, 1, GROUP) >> quarters & 3
    codes = (low | high << 4).reshape(rows, -1).view(np.int8) - np.int8(32)
    scales = _wide(blocks["scale"])[..., None] * _wide(blocks["scales"])
    return Codes(codes, scales.reshape(rows, -1), None, "h8")


def _mxfp4(blocks: Blocks) -> Codes:
    """An exponent, then the columns' halves of bytes as in Q4_0."""
    return Codes(TWICE_E2M1[_four_bits(blocks["codes"])], half_powers(blocks["exponent"]), None, "q8")


def _eight_groups(blocks: Blocks) -> tuple[FloatArray, FloatArray]:
    """Return scales and offsets of eight groups a block, 0 to 63 times the block's: the first four of each in the low
    six bits of four bytes; of the others the upper two bits stand above those, the lower four in bytes of their own.
    """
    scale_bytes, minimum_bytes, rest = np.split(blocks["factors"], 3, axis=-1)
    scales = np.concatenate([scale_bytes & 63, rest & 15 | (scale_bytes >> 6) << 4], axis=-1)
    minima = np.concatenate([minimum_bytes & 63, rest >> 4 | (minimum_bytes >> 6) << 4], axis=-1)
    rows = len(blocks)
    return (
        (_wide(blocks["scale"])[..., None] * _wide(scales)).reshape(rows, -1),
        -(_wide(blocks["minimum"])[..., None] * _wide(minima)).reshape(rows, -1),
    )


def _block(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[np.void]:
    return np.dtype(list(fields))


_FORMATS: dict[GGMLQuantizationType, tuple[Form, np.dtype[np.void], Callable[[Blocks], Codes]]] = {
    GGMLQuantizationType.Q4_0: ("q4", _block(_SCALE, ("codes", "u1", 16)), _q4_0),
    GGMLQuantizationType.Q4_1: ("q4", _block(_SCALE, _MINIMUM, ("codes", "u1", 16)), _q4_1),
    GGMLQuantizationType.Q5_0: ("q8", _block(_SCALE, ("high", "u1", 4), ("codes", "u1", 16)), _q5_0),
    GGMLQuantizationType.Q5_1: ("a8", _block(_SCALE, _MINIMUM, ("high", "u1", 4), ("codes", "u1", 16)), _q5_1),
    GGMLQuantizationType.Q8_0: ("q8", _block(_SCALE, ("codes", "i1", 32)), _q8_0),
    GGMLQuantizationType.Q4_K: ("q4", _block(_SCALE, _MINIMUM, ("factors", "u1", 12), ("codes", "u1", 128)), _q4_k),
    GGMLQuantizationType.Q5_K: (
        "a8",
        _block(_SCALE, _MINIMUM, ("factors", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)),
        _q5_k,
    ),
    GGMLQuantizationType.Q6_K: (
        "h8",
        _block(("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE),
        _q6_k,
    ),
    GGMLQuantizationType.MXFP4: ("q8", _block(("exponent", "u1"), ("codes", "u1", 16)), _mxfp4),
}
