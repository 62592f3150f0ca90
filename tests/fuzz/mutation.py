"""Makes inputs out of seeds: cuts, repeats, replaces, and writes numbers at their limits. Everything is drawn from a
seeded generator, so a run can be had again."""

from collections.abc import Sequence
from random import Random

EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 0x7FFF_FFFF_FFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF)
LONGEST_BYTES = 1 << 16
"""Longer inputs are cut: what a decoder makes of length is tried by what was found."""


def mutated(draw: Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the seeds after one to eight changes, most often after few."""
    data = bytearray(draw.choice(seeds))
    for _ in range(min(8, 1 + int(draw.expovariate(0.7)))):
        draw.choice(_CHANGES)(draw, data, seeds)
        del data[LONGEST_BYTES:]
    return bytes(data)


def _place(draw: Random, data: bytearray) -> int:
    # Headers stand at the beginning, and decide more than what follows.
    end = min(len(data), 64) if draw.random() < 0.3 else len(data)
    return draw.randint(0, end)


def _flip(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _byte(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[min(_place(draw, data), len(data) - 1)] = draw.randrange(256)


def _number(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    size = draw.choice((1, 2, 4, 8))
    value = (draw.choice(EDGES) + draw.randint(-1, 1)) % (1 << 8 * size)
    at = _place(draw, data)
    data[at : at + size] = value.to_bytes(size, draw.choice(("little", "big")))


def _cut(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    del data[_place(draw, data) :]


def _remove(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(draw, data)
    del data[at : at + draw.randint(1, 16)]


def _repeat(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(draw, data)
    piece = data[at : at + draw.randint(1, 32)]
    data[at:at] = piece * draw.choice((1, 2, 16, 256))


def _insert(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(draw, data)
    data[at:at] = draw.randbytes(draw.randint(1, 8))


def _digits(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    """Write what text has in place of a number."""
    at = _place(draw, data)
    data[at : at + draw.randint(0, 2)] = draw.choice((b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b'""', b"9" * 30))


def _splice(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = draw.choice(seeds)
    start = draw.randint(0, len(other))
    data[_place(draw, data) :] = other[start:]


_CHANGES = (_flip, _byte, _number, _number, _cut, _remove, _repeat, _insert, _digits, _splice)
