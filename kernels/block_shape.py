"""The sizes of a KV head's slice of a block, as the digest `wp64` and the copy kernel see it. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The parts of a head's slice of a block: rows of `row_bytes` `[layers, 2, block_size]`, then, for 8-bit rows, a
    float32 scale per row. Raises ValueError where that is not whole 64-bit words."""

    layers: int
    block_size: int
    row_bytes: int
    scaled: bool = False

    def __post_init__(self) -> None:
        if self.row_bytes % 8 or (self.layers * 2 * self.block_size * 4) % 8:
            raise ValueError(f"{self} is not whole 64-bit words")

    @property
    def payload_words(self) -> int:
        return self.layers * 2 * self.block_size * self.row_bytes // 8

    @property
    def words(self) -> int:
        return self.payload_words + (self.layers * self.block_size if self.scaled else 0)
