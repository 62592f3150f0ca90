"""Stands in for `xxhash` where it is not installed: BLAKE2b, cut to the same sizes. Both ends of a transfer must use
the same one, and so must all who share a folder of models."""

from hashlib import blake2b
from typing import Any


class _Digest:
    """A digest of `size` bytes."""

    def __init__(self, size: int, data: Any = b"", seed: int = 0) -> None:
        self._made = blake2b(digest_size=size, key=seed.to_bytes(8, "little"))
        self.update(data)

    def update(self, data: Any) -> None:
        self._made.update(data)

    def intdigest(self) -> int:
        return int.from_bytes(self._made.digest(), "big")

    def hexdigest(self) -> str:
        return self._made.hexdigest()


def xxh3_64(data: Any = b"", seed: int = 0) -> _Digest:
    return _Digest(8, data, seed)


def xxh3_128(data: Any = b"", seed: int = 0) -> _Digest:
    return _Digest(16, data, seed)


def xxh3_64_intdigest(data: Any, seed: int = 0) -> int:
    return xxh3_64(data, seed).intdigest()


def xxh3_128_hexdigest(data: Any, seed: int = 0) -> str:
    return xxh3_128(data, seed).hexdigest()
