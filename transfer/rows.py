"""The rows of a block, found in its bytes."""

import numpy as np
import numpy.typing as npt

from engine.kv.layout import KVLayout


def block_rows(view: memoryview, layout: KVLayout) -> list[npt.NDArray[np.uint8]]:
    """Views `[kv_heads, layers, 2, block_size, bytes]` of one block: its rows and, for 8-bit ones, their scales.

    Raises ValueError where the block has another size.
    """
    heads = np.frombuffer(view, dtype=np.uint8).reshape(layout.kv_heads, layout.head_bytes)
    rows = layout.layers * 2 * layout.block_size
    # The split of a contiguous last dimension is a view, never a copy.
    return [
        heads[:, plane.offset : plane.offset + rows * plane.row_bytes].reshape(
            layout.kv_heads, layout.layers, 2, layout.block_size, plane.row_bytes
        )
        for plane in layout.planes
    ]
