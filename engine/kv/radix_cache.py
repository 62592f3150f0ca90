"""The exact prefix tree: which blocks hold the KV of which token sequences.

One node is one block, its children are keyed by their block's tokens, so no node ever splits and `match` changes
nothing. A node with fewer tokens than a block is a leaf: the tail of a finished sequence. Where a node has several
children, their keys also stand in order: the one that shares most with a boundary block is found among two neighbours.

Eviction is least recently used, without scans: all nodes of a namespace that nobody holds stand in one line, in the
order in which they were let go, a sequence's tail before its head. Whoever holds a node holds the path to it, so a
child always stands before its parent and the first in line is always a leaf. Whose line gives way: `engine.kv.shares`.
Source: RadixAttention (Zheng et al. 2024, section 3); the line of free blocks follows vLLM's block pool. Why a node
is one block, and what all this costs: docs/kv-memory.md.
"""

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from engine import identity
from engine.identity import owner
from engine.kv.groups import GONE, LayerGroup
from engine.kv.shares import CacheShares
from engine.kv.sorted_keys import SortedKeys
from engine.types import BlockId

TOKEN_BYTES = identity.TOKEN_BYTES


class Node:
    """One cached block. `key` are its tokens, packed; in a root it is the namespace and `block` is -1. Identity is by
    object."""

    __slots__ = ("block", "children", "identity", "key", "namespace", "order", "parent", "windows")

    def __init__(
        self, parent: "Node | None", key: bytes, block: BlockId, ident: bytes, windows: list[BlockId] | None = None
    ) -> None:
        self.parent = parent
        self.key = key
        self.namespace: bytes = key if parent is None else parent.namespace
        self.block = block
        self.windows = windows
        """What the layer groups but the first have of it, GONE where they have nothing; None: there is one group."""
        self.identity = ident
        self.children: dict[bytes, Node] = {}
        self.order: SortedKeys | None = None
        """The keys of `children`; None as long as there has been but one."""

    def add(self, child: "Node") -> None:
        if self.order is not None:
            self.order.add(child.key)
        elif self.children:
            self.order = SortedKeys((*self.children, child.key))
        self.children[child.key] = child

    def remove(self, child: "Node") -> None:
        del self.children[child.key]
        if not self.children:
            self.children, self.order = {}, None  # a dict never shrinks by itself
        elif self.order is not None:
            self.order.remove(child.key)

    def neighbours(self, key: bytes) -> Iterable[bytes]:
        """At most two keys of children, of which one shares as many tokens with `key` as any."""
        return self.children if self.order is None else self.order.around(key)

    def __repr__(self) -> str:
        tokens = len(self.key) // TOKEN_BYTES
        return f"Node(block={self.block}, {tokens} tokens, {len(self.children)} children)"


class Match(NamedTuple):
    """The longest cached prefix: whole blocks along `nodes`, then `partial_tokens` of `partial`'s first tokens.
    `loaded`: whole blocks behind them that a lower tier brings, with what window groups lack of those before. `uncut`:
    the path that the first layer group has, where there are window groups, by whose blocks `nodes` are cut."""

    nodes: list[Node]
    partial: Node | None = None
    partial_tokens: int = 0
    loaded: int = 0
    uncut: list[Node] | None = None

    @property
    def path(self) -> list[Node]:
        """Whole blocks that the first layer group has, whatever the others have."""
        return self.nodes if self.uncut is None else self.uncut


class RadixCache:
    """Mutable state, all of it: the nodes under `_roots`, `_by_block`, and `shares`, the lines of nodes nobody holds.

    Tokens are 0 .. 2**32 - 1, else struct.error is raised.
    """

    def __init__(
        self, block_size: int, fingerprint: str, blocks: int = 0, windows: Sequence[LayerGroup] = ()
    ) -> None:
        """`blocks` is the size of the pool, of which namespaces have shares; `windows` are the layer groups but the
        first, if there are several."""
        self.block_size = block_size
        self._windows = tuple(windows)
        self._fingerprint = fingerprint
        self._pack = Struct(f"<{block_size}I").pack
        self._roots: dict[bytes, Node] = {}
        self._by_block: dict[BlockId, Node] = {}
        self.shares: CacheShares[BlockId] = CacheShares(blocks)

    def __len__(self) -> int:
        return len(self._by_block)

    @property
    def idle(self) -> int:
        """Blocks that could be evicted, one after the other."""
        return self.shares.idle

    def match(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        limit: int,
        *,
        whole: bool = False,
        before: Match | None = None,
    ) -> Match:
        """The longest cached prefix of `tokens[:limit]`, from whose end can be computed on; `whole`: of whole blocks.
        `before`: what was found last of the same, by which it is found sooner, and which is used up. Changes nothing.
        """
        found = self.longest(namespace, tokens, limit, before)
        if self._windows:
            return self._in_windows(found, whole)
        return Match(found.nodes) if whole else found

    def _in_windows(self, found: Match, whole: bool) -> Match:
        """Cut a match to where every window group has the blocks that the next token sees."""
        path, size = found.nodes, self.block_size
        best = len(path)
        while (gap := self._gap(path, best, best * size)) is not None:
            best = gap  # whoever goes on between there and here sees it too
        partial, tokens = found.partial, found.partial_tokens
        if partial is not None:
            lacks = whole or best < len(path) or GONE in (partial.windows or ())
            if lacks or self._gap(path, best, best * size + tokens) is not None:
                partial, tokens = None, 0
        return Match(path if best == len(path) else path[:best], partial, tokens, uncut=path)

    def _gap(self, path: Sequence[Node], blocks: int, tokens: int) -> int | None:
        """Return the number of one of the first `blocks` blocks of `path` that computing on from `tokens` tokens reads,
        and a window group lacks: the first that the group reads, so that few nodes are looked at."""
        for group, layers in enumerate(self._windows):
            for at in range(layers.first_needed(tokens, self.block_size), blocks):
                windows = path[at].windows
                assert windows is not None
                if windows[group] == GONE:
                    return at
        return None

    def longest(
        self, namespace: bytes, tokens: Sequence[int], limit: int, before: Match | None = None
    ) -> Match:
        """Do the same for the first layer group alone, whatever the others have."""
        nodes: list[Node] = []
        node = self._roots.get(namespace)
        if node is None:
            return Match(nodes)
        size, pack, at = self.block_size, self._pack, 0
        # A node goes after its children: while the last one is there, all before it are.
        if before is not None and before.path and self._by_block.get(before.path[-1].block) is before.path[-1]:
            nodes = before.path
            node, at = nodes[-1], len(nodes) * size
        while at + size <= limit:
            child = node.children.get(pack(*tokens[at : at + size]))
            if child is None:
                break
            nodes.append(child)
            node = child
            at += size
        best, best_tokens = None, 0
        if at < limit and node.children:
            rest = self._key(tokens[at : min(at + size, limit)])
            for key in node.neighbours(rest):
                shared = _common_tokens(key, rest)
                if shared > best_tokens:
                    best, best_tokens = node.children[key], shared
        return Match(nodes, best, best_tokens)

    def root_identity(self, namespace: bytes) -> bytes:
        """The parent identity of a first block."""
        return identity.root(namespace, self._fingerprint)

    def root(self, namespace: bytes) -> Node:
        """The node where this namespace's sequences begin: valid until the next `evict`, or while it has children."""
        root = self._roots.get(namespace)
        if root is None:
            ident = self.root_identity(namespace)
            root = self._roots[namespace] = Node(None, namespace, BlockId(-1), ident)
        return root

    def insert(self, parent: Node, tokens: Sequence[int], block: BlockId) -> Node | None:
        """The child of `parent` for these tokens: the one there is, or a new one that indexes `block`; None if they
        only begin a longer child's. A shorter tail of the same tokens that nobody holds gives way: it becomes first in
        line for eviction."""
        key = self._key(tokens)
        child = parent.children.get(key)
        if child is not None:
            return child
        for near in parent.neighbours(key):
            if near.startswith(key):
                return None
            if key.startswith(near):
                shorter = parent.children[near].block
                if (parent.namespace, shorter) in self.shares:
                    self.shares.let_go(parent.namespace, shorter, first=True)
        windows = [GONE] * len(self._windows) if self._windows else None
        child = Node(parent, key, block, identity.extend_packed(parent.identity, key), windows)
        parent.add(child)
        self._by_block[block] = child
        return child

    def rebind(self, node: Node, block: BlockId) -> BlockId:
        """Index another block of the same content in place of an idle one, which is returned."""
        old = node.block
        self.shares.occupy(node.namespace, old)
        del self._by_block[old]
        node.block = block
        self._by_block[block] = node
        return old

    def bind(self, node: Node, group: int, block: BlockId) -> None:
        """Index what a window group, counted without the first group, has of a node's tokens. It had nothing."""
        assert node.windows is not None and node.windows[group] == GONE
        node.windows[group] = block
        self._by_block[block] = node

    def unbind(self, node: Node, group: int) -> None:
        """Index nothing there any more; the block that was indexed is idle."""
        assert node.windows is not None
        block, node.windows[group] = node.windows[group], GONE
        self.shares.occupy(node.namespace, block)
        del self._by_block[block]

    def holds(self, block: BlockId) -> bool:
        return block in self._by_block

    def occupy(self, block: BlockId) -> None:
        """The block has a holder again: it leaves the line."""
        node = self._by_block.get(block)
        if node is not None:
            self.shares.occupy(node.namespace, block)

    def let_go(self, block: BlockId) -> None:
        """The block's last holder is gone: it joins the line. Call for a sequence's tail before its head."""
        self.shares.let_go(self._by_block[block].namespace, block)

    def evict(self, namespace: bytes) -> Node:
        """Forget the least recently used block of a namespace that nobody holds. Raises KeyError when there is none."""
        return self.forget(self.shares.pop(namespace))

    def forget(self, block: BlockId) -> Node:
        """Forget a block that stands in no line, and return its node: gone with it, or, where the block was a window
        group's, with a gap in its place."""
        node = self._by_block.pop(block)
        if block != node.block:
            assert node.windows is not None
            node.windows[node.windows.index(block)] = GONE
            return node
        parent = node.parent
        assert parent is not None and not node.children, "a node was evicted before its children"
        parent.remove(node)
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]
        return node

    def node(self, block: BlockId) -> Node | None:
        """The node that indexes a block, if it is cached."""
        return self._by_block.get(block)

    def nodes(self) -> Iterator[Node]:
        if not self._windows:
            return iter(self._by_block.values())
        return (node for block, node in self._by_block.items() if node.block == block)

    def check(self) -> None:
        """Recompute the shape of the tree and the order of the line."""
        seen: dict[BlockId, Node] = {}
        stack = list(self._roots.values())
        assert all(root.children for root in stack), "a namespace without blocks is kept"
        while stack:
            node = stack.pop()
            if node.order is None:
                assert len(node.children) < 2
            else:
                assert list(node.order) == sorted(node.children)
            for key, child in node.children.items():
                tokens = len(key) // TOKEN_BYTES
                assert child.key == key and child.parent is node and 0 < tokens <= self.block_size
                assert tokens == self.block_size or not child.children, "a partial block has a child"
                assert (child.windows is None) == (not self._windows)
                for block in (child.block, *(block for block in child.windows or () if block != GONE)):
                    assert block not in seen
                    seen[block] = child
                stack.append(child)
        assert seen == self._by_block
        place = {block: at for _, line in self.shares.lines() for at, block in enumerate(line)}
        lines = self.shares.lines()
        assert all(owner(self._by_block[block].namespace) == name for name, line in lines for block in line)
        for block, at in place.items():
            node = self._by_block[block]
            for child in node.children.values() if node.block == block else ():
                assert place.get(child.block, at) < at, "a parent stands before its child"

    def _key(self, tokens: Sequence[int]) -> bytes:
        if len(tokens) == self.block_size:
            return self._pack(*tokens)
        return Struct(f"<{len(tokens)}I").pack(*tokens)


def _common_tokens(a: bytes, b: bytes) -> int:
    """How many tokens two keys begin with alike."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * TOKEN_BYTES
        if a[:end] == b[:end]:
            low = middle
        else:
            high = middle - 1
    return low
