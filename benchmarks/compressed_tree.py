"""A path-compressed prefix tree, the peer of `engine.kv.radix_cache` in benchmarks/radix.py.

As in SGLang's radix cache: a node holds a run of blocks, children are keyed by their first block, and a sequence that
leaves a run in its middle splits the node. `match` therefore changes the tree. Whole blocks only.
"""

from collections.abc import Sequence
from struct import pack

from engine.types import BlockId

TOKEN_BYTES = 4


class TokenRun:
    """A node of the tree: a run of blocks. `key` are the packed tokens of `blocks`."""

    __slots__ = ("blocks", "children", "key", "parent")

    def __init__(self, parent: "TokenRun | None", key: bytes, blocks: list[BlockId]) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.children: dict[bytes, TokenRun] = {}


class CompressedTree:
    def __init__(self, block_size: int) -> None:
        self._stride = block_size * TOKEN_BYTES
        self.root = TokenRun(None, b"", [])

    def match(self, tokens: Sequence[int]) -> tuple[TokenRun, int]:
        """Return the node that ends with the longest cached prefix, split off if need be, and how many blocks that are.
        """
        return self._descend(pack(f"<{len(tokens)}I", *tokens))

    def insert(self, tokens: Sequence[int], blocks: Sequence[BlockId]) -> int:
        """Index `blocks`, one for each whole block of `tokens`; returns how many were there already."""
        key = pack(f"<{len(tokens)}I", *tokens)
        key = key[: len(key) - len(key) % self._stride]
        node, known = self._descend(key)
        rest = key[known * self._stride :]
        if rest:
            node.children[rest[: self._stride]] = TokenRun(node, rest, list(blocks[known:]))
        return known

    def _descend(self, key: bytes) -> tuple[TokenRun, int]:
        node, at, stride = self.root, 0, self._stride
        while (child := node.children.get(key[at : at + stride])) is not None:
            same = self._same_blocks(child.key, key[at : at + len(child.key)])
            at += same * stride
            if same < len(child.blocks):
                return self._split(child, same), at // stride
            node = child
        return node, at // stride

    def _same_blocks(self, a: bytes, b: bytes) -> int:
        if a == b:
            return len(a) // self._stride
        low, high = 1, min(len(a), len(b)) // self._stride
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * self._stride
            low, high = (middle, high) if a[:end] == b[:end] else (low, middle - 1)
        return low

    def _split(self, child: TokenRun, blocks: int) -> TokenRun:
        """Split a node: `child` keeps what follows its first `blocks`; they become a node of their own above it."""
        cut = blocks * self._stride
        assert child.parent is not None
        upper = TokenRun(child.parent, child.key[:cut], child.blocks[:blocks])
        child.parent.children[upper.key[: self._stride]] = upper
        child.parent, child.key, child.blocks = upper, child.key[cut:], child.blocks[blocks:]
        upper.children[child.key[: self._stride]] = child
        return upper
