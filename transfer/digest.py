"""Digests of KV blocks: what the sender had is what landed, in the place it was meant for.

64 bits over the valid bytes of each KV head's slice (`[layers, 2, valid tokens, head_dim]`, in that order, then the
scales of 8-bit rows), combined per block and bound to what the block is and to the transfer it travels in. A fast
checksum against corruption and mix-ups, not a seal against forgers. Two algorithms, settled by the hellos: `xxh3-64`,
the fastest on a CPU, hashes a full head slice in place and releases the GIL; `wp64` is what a GPU makes on the way of a
copy (`kernels.block_copy`), and what a CPU worker must speak with one.

Where the two workers hold different ranges of the model's KV heads, a block travels with the heads that both hold, and
its digest covers those: each receiver can check all that it takes, and needs no byte that it does not.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import xxhash

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from kernels.wp64 import wp64
from transfer.handoff.commands import IncomingBlock
from transfer.handoff.negotiation import WP64, XXH3, digest_shape

_GENERATION = struct.Struct("<Q")
_NUMBERS = struct.Struct("<QIQQI")
_SAMPLING = 0x6865616472616365
"""Seed of the draw, so that a block's share in it tells nothing about its digest."""


class Binding:
    """What digests of a handoff are bound to: block identity, generation of the source block, and the handoff's whole
    name, which is packed once."""

    __slots__ = ("_name",)

    def __init__(self, handoff: Handoff) -> None:
        name = handoff.request.encode()
        numbers = _NUMBERS.pack(handoff.placement, handoff.attempt, handoff.decode, handoff.prefill, len(name))
        self._name = numbers + name

    def of(self, identity: bytes, generation: int) -> bytes:
        return _GENERATION.pack(generation) + self._name + identity


def is_sampled(binding: bytes, share: float) -> bool:
    """Return True if this block of this handoff is among the `share` of blocks that have a digest. Sender and receiver
    agree, and a new attempt at the same blocks draws anew."""
    return share >= 1.0 or xxhash.xxh3_64_intdigest(binding, seed=_SAMPLING) < share * 2.0**64


@dataclass(slots=True)
class Tally:
    """Digests of one worker since it started. Only the transfer thread writes; the numbers only grow."""

    made: int = 0
    verified: int = 0
    mismatched: int = 0


class Verifier:
    """Compares the blocks of one handoff, as they have come, with the digests that were offered."""

    def __init__(self, handoff: Handoff, share: float, tally: Tally) -> None:
        self._binding = Binding(handoff)
        self._share = share
        self._tally = tally

    def fits(self, block: IncomingBlock, digest: Callable[[bytes], int]) -> bool:
        """True also where none was agreed on. `digest` makes that of what has come, from what it is bound to."""
        bound = self._binding.of(block.identity, block.generation)
        if not is_sampled(bound, self._share):
            return True
        fits = digest(bound) == block.digest
        self._tally.verified += 1
        self._tally.mismatched += not fits
        return fits


def block_digest(view: memoryview, layout: KVLayout, tokens: int, binding: bytes, algorithm: str = XXH3) -> int:
    """64 bits over the first `tokens` rows of a block whose flat bytes are `view`.

    What lies behind the valid rows does not count. Raises ValueError if the sizes do not fit the layout, or the layout
    not the algorithm.
    """
    if view.nbytes != layout.block_bytes or not 0 < tokens <= layout.block_size:
        raise ValueError(f"{view.nbytes} bytes with {tokens} valid tokens do not fit {layout}")
    make = {XXH3: _xxh3, WP64: _wp64}[algorithm]
    return combine(make(view, layout, tokens), tokens, binding)


def combine(heads: Sequence[int], tokens: int, binding: bytes) -> int:
    """A block's digest from those of its KV heads, unsigned; for heads that a GPU has digested."""
    return xxhash.xxh3_64_intdigest(_summary(len(heads)).pack(tokens, *heads) + binding)


@cache
def _summary(heads: int) -> struct.Struct:
    return struct.Struct(f"<I{heads}Q")


def _xxh3(view: memoryview, layout: KVLayout, tokens: int) -> list[int]:
    if tokens == layout.block_size:
        size = layout.head_bytes
        slices = [view[head * size : (head + 1) * size] for head in range(layout.kv_heads)]
        return [xxhash.xxh3_64_intdigest(piece) for piece in slices]
    rows = [plane[:, :, :, :tokens] for plane in block_rows(view, layout)]
    joined = (np.concatenate([part.ravel() for part in head]) for head in zip(*rows, strict=True))
    return [xxhash.xxh3_64_intdigest(head.data) for head in joined]


def _wp64(view: memoryview, layout: KVLayout, tokens: int) -> list[int]:
    heads = np.frombuffer(view, dtype=np.uint8).reshape(layout.kv_heads, layout.head_bytes)
    return wp64(heads, digest_shape(layout), tokens)


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
