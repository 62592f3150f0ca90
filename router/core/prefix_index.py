"""The router's belief of what is cached where: one approximate prefix tree per worker.

Block identities are chained (`engine.identity`), so a worker's tree is a set of identities that is
closed under "parent of", and how far a prompt matches is a binary search along its chain. Beliefs
come from requests that workers accepted, shrink by what workers report they evicted or really
reused, and are bounded by the worker's pool with its own rule: least recently used, leaves first.

The order of `_nodes` carries that rule without a second list. A chain is touched from its last block
to its first, so a parent is always more recent than its children, and the oldest node is a leaf.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Chain = Sequence[bytes]


class PrefixTree:
    """The blocks one worker is believed to hold, at most `capacity_blocks`."""

    # Mutable state: identity -> (parent identity, child identities), least recently used first.

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._nodes: OrderedDict[bytes, tuple[bytes, set[bytes]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        return f"PrefixTree({len(self._nodes)}/{self._capacity_blocks} blocks)"

    def match(self, chain: Chain) -> int:
        """Return how many leading blocks of `chain` are held. O(log len); changes nothing."""
        nodes = self._nodes
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in nodes:
                low = middle + 1
            else:
                high = middle
        return low

    def insert(self, chain: Chain) -> None:
        """Believe that `chain` is held, and was used just now. O(len)."""
        nodes = self._nodes
        chain = chain[: self._capacity_blocks]
        held = self.match(chain)
        for index in range(held, len(chain)):
            parent = chain[index - 1] if index else b""
            nodes[chain[index]] = (parent, set())
            if index:
                nodes[parent][1].add(chain[index])
        for identity in reversed(chain):
            nodes.move_to_end(identity)
        while len(nodes) > self._capacity_blocks:
            oldest, (parent, _) = nodes.popitem(last=False)
            if parent:
                nodes[parent][1].discard(oldest)

    def truncate(self, chain: Chain, actual_blocks: int) -> None:
        """The worker held only `actual_blocks` of `chain`: drop the next one and all below it."""
        if actual_blocks < len(chain):
            self.evict([chain[actual_blocks]])

    def evict(self, identities: Iterable[bytes]) -> None:
        """Drop blocks with everything below them; unknown ones are ignored."""
        nodes = self._nodes
        for identity in identities:
            node = nodes.get(identity)
            if node is None:
                continue
            if node[0]:
                nodes[node[0]][1].discard(identity)
            doomed = [identity]
            while doomed:
                doomed.extend(nodes.pop(doomed.pop())[1])

    def check(self) -> None:
        """Raise AssertionError if the tree is not closed, not bounded or not in LRU order."""
        assert len(self._nodes) <= self._capacity_blocks
        age = {identity: place for place, identity in enumerate(self._nodes)}
        for identity, (parent, children) in self._nodes.items():
            assert not parent or identity in self._nodes[parent][1]
            for child in children:
                assert self._nodes[child][0] == identity
                assert age[child] < age[identity], "a parent is older than its child"


class PrefixIndex:
    """The trees of all workers, by worker name."""

    def __init__(self) -> None:
        self._trees: dict[str, PrefixTree] = {}

    def __repr__(self) -> str:
        return f"PrefixIndex({self._trees})"

    def add(self, worker: str, capacity_blocks: int) -> None:
        """Begin with an empty tree for `worker`, whatever was believed of it."""
        self._trees[worker] = PrefixTree(capacity_blocks)

    def forget(self, worker: str) -> None:
        self._trees.pop(worker, None)

    def held_blocks(self, worker: str) -> int:
        """Return the number of blocks that `worker` is believed to hold."""
        tree = self._trees.get(worker)
        return len(tree) if tree is not None else 0

    def match(self, worker: str, chain: Chain) -> int:
        tree = self._trees.get(worker)
        return tree.match(chain) if tree is not None else 0

    def insert(self, worker: str, chain: Chain) -> None:
        tree = self._trees.get(worker)
        if tree is not None:
            tree.insert(chain)

    def correct(self, worker: str, chain: Chain, actual_blocks: int) -> None:
        """The worker really held `actual_blocks` of `chain`; never raises the belief."""
        tree = self._trees.get(worker)
        if tree is not None:
            tree.truncate(chain, actual_blocks)

    def evict(self, worker: str, identities: Iterable[bytes]) -> None:
        tree = self._trees.get(worker)
        if tree is not None:
            tree.evict(identities)

    def check(self) -> None:
        for tree in self._trees.values():
            tree.check()
