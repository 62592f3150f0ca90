"""The names of the digests and which blocks have them, and of the forms in which blocks travel. Pure: the schedulers'
side of `transfer.digest` and `transfer.host.narrow`."""

from typing import Final

from engine.kv.layout import KVLayout
from kernels.block_shape import BlockShape

XXH3, WP64 = "xxh3-64", "wp64"
ALGORITHMS = (XXH3, WP64)
AS_STORED: Final = "as_stored"
WIRES = (AS_STORED, "int8", "fp8")
"""How blocks may travel: as they are stored, or in 8 bits."""


def digest_shape(layout: KVLayout) -> BlockShape:
    """A head's slice as `wp64` sees it. Raises ValueError where it is not whole 64-bit words."""
    return BlockShape(layout.layers, layout.block_size, layout.row_bytes, layout.scale_bytes > 0)
