"""The exact prefix tree: which blocks hold the KV of which token sequences.

One node is one block, its children are keyed by their block's tokens, so no node ever splits and `match` changes
nothing. A node with fewer tokens than a block is a leaf: the tail of a finished sequence.

Eviction is least recently used, O(1), without scans: all nodes nobody holds stand in one line, in the order in which
they were let go, a sequence's tail before its head. Whoever holds a node holds the path to it, so a child always stands
before its parent and the first in line is always a leaf.
Source: RadixAttention (Zheng et al. 2024, section 3); the line of free blocks follows vLLM's block pool.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine import identity
from engine.types import BlockId

MAX_PARTIAL_CANDIDATES = 8
"""How many siblings that share a first token are compared for a partial match."""


class Node:
    """One cached block. `block` is -1 in a root. Identity is by object."""

    __slots__ = ("block", "by_first", "children", "identity", "parent", "tokens")

    def __init__(self, parent: "Node | None", tokens: tuple[int, ...], block: BlockId, ident: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.identity = ident
        self.children: dict[tuple[int, ...], Node] = {}
        self.by_first: dict[int, list[Node]] = {}

    def __repr__(self) -> str:
        return f"Node(block={self.block}, {len(self.tokens)} tokens, {len(self.children)} children)"


class Match:
    """The longest cached prefix: whole blocks along `nodes`, then `partial_tokens` of `partial`'s first tokens."""

    __slots__ = ("nodes", "partial", "partial_tokens", "root")

    def __init__(self, root: Node, nodes: list[Node], partial: Node | None, partial_tokens: int) -> None:
        self.root = root
        self.nodes = nodes
        self.partial = partial
        self.partial_tokens = partial_tokens


class RadixCache:
    """Mutable state, all of it: the nodes under `_roots`, `_by_block`, and the line `_idle` of nodes nobody holds."""

    def __init__(self, block_size: int, fingerprint: str) -> None:
        self.block_size = block_size
        self._fingerprint = fingerprint
        self._roots: dict[bytes, Node] = {}
        self._by_block: dict[BlockId, Node] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_block)

    @property
    def idle(self) -> int:
        """Blocks that could be evicted, one after the other."""
        return len(self._idle)

    def root(self, namespace: bytes) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = Node(None, (), BlockId(-1), identity.root(namespace, self._fingerprint))
            self._roots[namespace] = root
        return root

    def match(self, namespace: bytes, tokens: Sequence[int], limit: int) -> Match:
        """The longest cached prefix of `tokens[:limit]`. Changes nothing but may create an empty root."""
        root = node = self.root(namespace)
        nodes: list[Node] = []
        size = self.block_size
        at = 0
        while at + size <= limit:
            child = node.children.get(tuple(tokens[at : at + size]))
            if child is None:
                break
            nodes.append(child)
            node = child
            at += size
        best, best_tokens = None, 0
        if at < limit:
            rest = tokens[at : min(at + size, limit)]
            for child in node.by_first.get(rest[0], ())[-MAX_PARTIAL_CANDIDATES:]:
                shared = _common(child.tokens, rest)
                if shared > best_tokens:
                    best, best_tokens = child, shared
        return Match(root, nodes, best, best_tokens)

    def insert(self, parent: Node, tokens: tuple[int, ...], block: BlockId) -> Node:
        """The child of `parent` for these tokens: the one there is, or a new one that indexes `block`. A shorter tail
        of the same tokens that nobody holds gives way and stays first in line for eviction."""
        child = parent.children.get(tokens)
        if child is not None:
            return child
        child = Node(parent, tokens, block, identity.extend(parent.identity, tokens))
        for sibling in parent.by_first.get(tokens[0], ()):
            if len(sibling.tokens) < len(tokens) and tokens[: len(sibling.tokens)] == sibling.tokens:
                if sibling.block in self._idle:
                    self._idle.move_to_end(sibling.block, last=False)
                break
        parent.children[tokens] = child
        parent.by_first.setdefault(tokens[0], []).append(child)
        self._by_block[block] = child
        return child

    def rebind(self, node: Node, block: BlockId) -> BlockId:
        """Index another block of the same content in place of an idle one, which is returned."""
        old = node.block
        del self._idle[old], self._by_block[old]
        node.block = block
        self._by_block[block] = node
        return old

    def holds(self, block: BlockId) -> bool:
        return block in self._by_block

    def occupy(self, block: BlockId) -> None:
        """The block has a holder again: it leaves the line."""
        self._idle.pop(block, None)

    def let_go(self, block: BlockId) -> None:
        """The block's last holder is gone: it joins the line. Call for a sequence's tail before its head."""
        self._idle[block] = None

    def evict(self) -> Node:
        """Forget the least recently used block nobody holds. Raises KeyError when there is none."""
        block, _ = self._idle.popitem(last=False)
        node = self._by_block.pop(block)
        parent = node.parent
        assert parent is not None and not node.children, "a node was evicted before its children"
        del parent.children[node.tokens]
        siblings = parent.by_first[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.by_first[node.tokens[0]]
        return node

    def nodes(self) -> Iterator[Node]:
        return iter(self._by_block.values())

    def check(self) -> None:
        """Recompute the shape of the tree and the order of the line."""
        seen: dict[BlockId, Node] = {}
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert sum(map(len, node.by_first.values())) == len(node.children)
            for key, child in node.children.items():
                assert child.tokens == key and child.parent is node and 0 < len(key) <= self.block_size
                assert len(key) == self.block_size or not child.children, "a partial block has a child"
                assert child in node.by_first[key[0]]
                assert child.block not in seen
                seen[child.block] = child
                stack.append(child)
        assert seen == self._by_block
        place = {block: at for at, block in enumerate(self._idle)}
        for block, at in place.items():
            for child in self._by_block[block].children.values():
                assert place.get(child.block, at) < at, "a parent stands before its child"


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
