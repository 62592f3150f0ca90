"""KV memory as schedulers see it: leases on blocks, composed of a block pool and a radix cache.

A lease is one request's hold on the blocks of its sequence:

    block table   [ matched: shared, read-only | new: this lease's own ... ]
    tokens        [ cached_tokens            | to be computed or received | room to grow (promised) ]

Matched blocks are shared by reference count. A boundary block that matches partly is copied on write: the first own
block starts as a copy (`copies`) and counts into `cached_tokens`. A fork shares the head of another lease in the same
way: whole blocks by reference count, the boundary block by a copy, out of its promise. Room to grow is a promise, not
blocks: cached blocks stay cached until the room is really needed, and the promise guarantees that they can be evicted
then.

With tiers below the device, a whole block that is evicted goes there before it is forgotten (`engine.kv.tiers`), and
comes back by `engine.kv.tiers.fetches`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from weakref import WeakKeyDictionary

from engine.identity import in_group
from engine.kv.block_pool import BlockPool, BlockState
from engine.kv.groups import GONE, LayerGroup
from engine.kv.lease import Lease as Lease
from engine.kv.radix_cache import TOKEN_BYTES, Match, Node, RadixCache
from engine.kv.tiers.tiers import Tiers
from engine.kv.windows import WindowTables
from engine.types import BlockId


class KVCacheManager:
    """Owner: the engine thread. Expected shortage is None or False, never an exception."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        fingerprint: str,
        tiers: Tiers | None = None,
        groups: Sequence[LayerGroup] = (),
        ahead_tokens: int = 0,
    ) -> None:
        """`groups` are the layers' (`KVLayout.groups`). Where there are several, `ahead_tokens` says how many tokens
        of a sequence the steps under way compute at most."""
        self.tiers = tiers
        self.groups = tuple(groups)
        self.pool = BlockPool(blocks, len(groups) or 1)
        self.cache = RadixCache(block_size, fingerprint, blocks, groups[1:])
        self.block_size = block_size
        self.windows: WindowTables | None = None
        """The tables of the layer groups but the first, where there are several."""
        if groups:
            self.windows = WindowTables(
                *(groups[1:], block_size, ahead_tokens, self.pool, self.cache),
                *(self._allocate, self._let_go, self._free),
            )
        self._promised = 0
        self._handed_out: list[BlockId] = []
        self._evicted: list[bytes] = []
        self._cached: list[tuple[bytes, list[bytes]]] = []
        self.tells_cached = False
        """Whether `take_cached` is to be kept; set by the shell."""
        self._leases: WeakKeyDictionary[Lease, None] = WeakKeyDictionary()
        """All that hold blocks and that somebody still has: one that was dropped has leaked its blocks."""
        self._identities: set[bytes] = set()
        """The names of all cached blocks, where there are tiers."""
        self._below: set[bytes] = set()
        """The names of what this life has put into lower tiers of layer groups with a window: routers know none."""
        self._above: dict[bytes, bytes] = {}
        """The identity before each block that went to a lower tier, the latest last; empty for a first block."""
        self._moved: dict[bytes, None] = {}
        """The names of blocks that went to another tier, in that order."""
        self._owners: dict[BlockId, bytes] = {}
        """The namespace of every block that is not free."""

    # what there is

    @property
    def promised(self) -> int:
        """Blocks that are free or evictable, and kept for leases that are there."""
        return self._promised if self.windows is None else self._promised + self.windows.charged

    @property
    def available(self) -> int:
        """Blocks that a new lease could have: free or evictable, and promised to nobody."""
        return self.pool.free + self.cache.idle - self.promised

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def pool_blocks_for(self, tokens: int) -> int:
        """Return the most blocks of the pool that a sequence of so many tokens holds at once, of all layer groups."""
        blocks = self.blocks_for(tokens)
        return blocks if self.windows is None else blocks + sum(self.windows.charges(blocks))

    def matched_tokens(self, namespace: bytes, tokens: Sequence[int], limit: int) -> int:
        """Return how many of `tokens[:limit]` are cached, to the token."""
        return self.tokens_of(self.cache.match(namespace, tokens, limit))

    def tokens_of(self, match: Match) -> int:
        """Return how many tokens a match is long."""
        return len(match.nodes) * self.block_size + match.partial_tokens

    # leases

    def entitle(self, namespace: bytes, share: float) -> None:
        """Make `share` of all blocks, here and in host memory, the namespace's own (`engine.kv.shares`)."""
        self.cache.shares.entitle(namespace, share)
        if self.tiers is not None:
            self.tiers.host.shares.entitle(namespace, share)

    def acquire(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        *,
        match_limit: int,
        room_tokens: int,
        grow_tokens: int = 0,
        migrating: bool = False,
        spare: int = 0,
        behind: Match | None = None,
    ) -> Lease | None:
        """Return a lease that holds blocks for `room_tokens` tokens now and the promise of blocks up to `grow_tokens`.

        At most `match_limit` leading tokens are taken from the cache. `migrating`: only whole blocks are reused, and
        new blocks are RESERVED until `landed`. `behind`: go on there, where a lower tier is about to bring what is
        missing (`engine.kv.tiers.resuming`). None when there is no room that leaves `spare` blocks to others; then
        nothing has changed.
        """
        match = behind or self.cache.match(namespace, tokens, match_limit, whole=migrating)
        promised = max(0, self.blocks_for(grow_tokens) - self.blocks_for(room_tokens))
        partial, room = match.partial, self._room_beside(match, room_tokens, promised, migrating) - spare
        if partial is not None and room < self._idle_in(partial):
            # The copy's source is the very block that is needed.
            partial, match = None, self.cache.match(namespace, tokens, match_limit, whole=True)
            room = self._room_beside(match, room_tokens, promised, migrating) - spare
        if room < 0 and migrating and behind is None and self.windows is not None:
            # To keep the window behind a match takes room of its own, which a pool need not have for anybody.
            match = Match([])
            room = self._room_beside(match, room_tokens, promised, migrating) - spare
        if room < 0:
            return None
        shared = [node.block for node in match.nodes]
        for block in shared:
            self._hold(block)
        if partial is not None:
            self._hold(partial.block)
        tables = None if self.windows is None else self.windows.hold(match)
        new = self.blocks_for(room_tokens) - len(shared)
        own = self._allocate(namespace, new, BlockState.RESERVED if migrating else BlockState.ACTIVE)
        self._promised += promised
        cached_tokens = (len(shared) + match.loaded) * self.block_size
        lease = Lease(shared + own, cached_tokens, [], promised, namespace, match.nodes)
        self._leases[lease] = None
        if partial is not None:
            lease.copies.append((partial.block, own[0]))
            lease.cached_tokens += match.partial_tokens
        if self.windows is not None and tables is not None:
            self.windows.open(lease, tables, self._window_charges(match, room_tokens, promised, migrating))
            if migrating:
                self.windows.load(lease, match)
                self.windows.reserve(lease, len(shared) + match.loaded, room_tokens)
            elif partial is not None:
                lease.copies += self.windows.copy(lease, partial, len(shared))
        return lease

    def exchange(self, lease: Lease, tokens: Sequence[int], match_limit: int, behind: Match) -> Lease:
        """Let go of a lease of `tokens` into which nothing has been copied yet. Return one as large that goes on
        `behind` what a lower tier is about to bring (`acquire`), or, where there is no room for that, one like the old.
        """
        grow_tokens = self.room_tokens(lease)
        self.release(lease)
        for match in (behind, None):
            other = self.acquire(
                lease.namespace,
                tokens,
                match_limit=match_limit,
                room_tokens=len(tokens),
                grow_tokens=grow_tokens,
                migrating=True,
                behind=match,
            )
            if other is not None:
                return other
        raise AssertionError("what was let go can be had again")

    def _room_beside(self, match: Match, room_tokens: int, promised: int, migrating: bool) -> int:
        """Return how many blocks are left to others where such a lease is given."""
        new = self.blocks_for(room_tokens) - len(match.nodes)
        charges = self._window_charges(match, room_tokens, promised, migrating)
        return self.available - sum(self._is_idle(node.block) for node in match.nodes) - new - promised - sum(charges)

    def _window_charges(self, match: Match, room_tokens: int, promised: int, migrating: bool) -> list[int]:
        if self.windows is None:
            return []
        blocks = self.blocks_for(room_tokens)
        charges = self.windows.charges(blocks + promised)
        return self.windows.migrating(charges, match, room_tokens, promised) if migrating else charges

    def _idle_in(self, partial: Node) -> int:
        """Return how many blocks others have less while a copy is made of a node's."""
        return self._is_idle(partial.block) + len(partial.windows or ())

    def promise(self, namespace: bytes, blocks: int, spare: int = 0, to_share: int | None = None) -> Lease | None:
        """Return a lease of no blocks that may grow to `blocks`, for a fork to come, beside `to_share` leading ones of
        its parent; None when there is no room that leaves `spare` blocks to others."""
        if self.windows is None:
            tokens = blocks * self.block_size
            return self.acquire(namespace, (), match_limit=0, room_tokens=0, grow_tokens=tokens, spare=spare)
        # One that is promised nothing yet is charged when it grows.
        is_fork = to_share is not None and blocks > 0
        charges = self.windows.for_fork(blocks + (to_share or 0)) if is_fork else self.windows.charges(0)
        if self.available < blocks + sum(charges) + spare:
            return None
        self._promised += blocks
        lease = Lease([], 0, [], blocks, namespace, [], to_share=to_share)
        self._leases[lease] = None
        self.windows.open(lease, tuple([] for _ in charges), charges)
        return lease

    def fork(self, parent: Lease, child: Lease, tokens: int) -> None:
        """`child`, which holds nothing yet, begins with the parent's first `tokens` tokens, all of them computed.

        Whole blocks are shared; a boundary block is copied into one of the child's own, out of its promise. What the
        parent appends to that block meanwhile does no harm: the child writes its own rows over it. Whole blocks must
        be committed: were they indexed later, under nodes of other blocks, only the parent would hold the path to them.
        Raises ValueError where they are not, for a child that holds blocks or has no promise for the copy, and for
        tokens beyond the parent's blocks.
        """
        whole, rest = divmod(tokens, self.block_size)
        if child.blocks or parent.namespace != child.namespace:
            raise ValueError("only an empty lease of the same namespace can become a fork")
        if self.blocks_for(tokens) > len(parent.blocks) or bool(rest) > child.promised:
            raise ValueError(f"{tokens} tokens cannot be forked")
        if len(parent.path) < whole:
            raise ValueError(f"{whole} whole blocks to fork, {len(parent.path)} committed")
        child.path = parent.path[:whole]
        child.blocks = [node.block for node in child.path]
        self.pool.share(child.blocks)
        child.cached_tokens = tokens
        child.to_share = None
        if rest:
            boundary = parent.blocks[whole]
            # A copy that the parent itself awaits dies with it: the child makes its own from the same block.
            pending = {target: source for source, target in parent.copies}
            source = pending.get(boundary, boundary)
            self._hold(source)
            self.extend(child, tokens)
            child.copies = [(source, child.blocks[whole])]
        if self.windows is not None:
            child.copies += self.windows.fork(parent, child, tokens)

    def extend(self, lease: Lease, tokens: int, *, migrating: bool = False) -> None:
        """Blocks for `tokens` tokens, out of the lease's promise; `migrating`: their content is to land. Raises
        ValueError beyond the promise."""
        missing = max(0, self.blocks_for(tokens) - len(lease.blocks))
        if missing > lease.promised:
            raise ValueError(f"{missing} blocks wanted, {lease.promised} promised")
        lease.promised -= missing
        self._promised -= missing
        state = BlockState.RESERVED if migrating else BlockState.ACTIVE
        lease.blocks += self._allocate(lease.namespace, missing, state) if missing else []
        if self.windows is not None:
            self.windows.lengthen(lease)
            if migrating:
                self.windows.reserve(lease, lease.cached_tokens // self.block_size, tokens)

    def reach(self, lease: Lease, start: int, end: int) -> None:
        """Have the window groups' blocks, too, that computing the tokens from `start` to `end` writes. The lease has
        blocks for `end` tokens."""
        if self.windows is not None:
            self.windows.reach(lease, start, end)

    def slide(self, lease: Lease, tokens: int) -> None:
        """Let go what window groups do not need any more where `tokens` tokens are computed: the steps under way, and
        those to come, compute from there on."""
        if self.windows is not None and not lease.released:
            self.windows.slide(lease, tokens)

    def restart(self, lease: Lease, known: int) -> None:
        """Compute everything behind `known` tokens here: what is behind them in the lease is not theirs."""
        if self.windows is not None:
            self.windows.drop_behind(lease, self.blocks_for(known))

    def can_fork(self, parent: Lease, tokens: int) -> bool:
        """Return True where the parent still has what computing on from `tokens` of its tokens takes."""
        return self.windows is None or self.windows.can_fork(parent, tokens)

    def room_tokens(self, lease: Lease) -> int:
        """Return the tokens that the lease has blocks for, or is promised."""
        return (len(lease.blocks) + lease.promised) * self.block_size

    def shortage(self, lease: Lease, tokens: int) -> int:
        """Blocks that the lease neither has nor is promised, of those that `tokens` tokens need."""
        return max(0, self.blocks_for(tokens) - len(lease.blocks) - lease.promised - (lease.to_share or 0))

    def cost(self, lease: Lease, blocks: int) -> int:
        """Return how many blocks of the pool it takes to promise the lease `blocks` more."""
        if self.windows is None or not blocks:
            return blocks
        return blocks + self.windows.rise(lease, blocks)

    def grow(self, lease: Lease, blocks: int) -> bool:
        """Promise the lease `blocks` more; False, and nothing changed, where so many are not there."""
        if self.cost(lease, blocks) > self.available:
            return False
        if self.windows is not None and blocks:
            self.windows.grow(lease, blocks)
        lease.promised += blocks
        self._promised += blocks
        return True

    def copied(self, lease: Lease) -> None:
        """The lease's copies have been made: their sources are let go."""
        for at, (source, _) in enumerate(lease.copies):
            if at and self.windows is not None:
                self.windows.give_back(source)
            else:
                self._let_go(source)
        lease.copies = []

    def landed(self, lease: Lease) -> None:
        """Everything a migrating lease waited for has landed and is verified."""
        for block in lease.blocks:
            if self.pool.state(block) is BlockState.RESERVED:
                self.pool.landed(block)
        if self.windows is not None:
            self.windows.landed(lease)

    def commit_loaded(self, lease: Lease, tokens: Sequence[int]) -> None:
        """A lower tier has brought all that a lease was to go on behind: `tokens` are all that is here."""
        self.landed(lease)
        if self.windows is not None:
            for at, node in enumerate(lease.path):
                self.windows.index(lease, at, node)
        self.commit(lease, tokens)

    def commit(self, lease: Lease, tokens: Sequence[int], *, tail: bool = False) -> None:
        """Index the lease's blocks that `tokens` fill, where `tokens` are all that has been computed so far; one whose
        content is indexed already gives way to that block. Nobody may be reading it for this lease. `tail`
        also indexes a partly filled last block: only when the sequence will not be written again, so not before the
        steps under way have ended."""
        if tail and lease.steps:
            tail, lease.tail = False, list(tokens)
        size, path, cached = self.block_size, lease.path, list[bytes]()
        above = path[-1].identity if path else b""
        last = len(tokens) if tail else len(tokens) - len(tokens) % size
        unwritten = [target for _, target in lease.copies]
        for start in range(len(path) * size, last, size):
            block = lease.blocks[start // size]
            if block in unwritten:
                break  # its copy has not been made
            parent = path[-1] if path else self.cache.root(lease.namespace)
            node = self.cache.insert(parent, tokens[start : min(start + size, last)], block)
            if node is None:
                break  # the tail begins a longer block that is cached
            if node.block == block and start + size <= last:
                cached.append(node.identity)
            elif not cached:
                above = node.identity
            # Three cases. 1. The content is new, and indexed under this block now: nothing more to do.
            # 2. A block that nobody holds has it too: this block takes its place in the index.
            if node.block != block and self._is_idle(node.block):
                self._free(self.cache.rebind(node, block))
            # 3. Somebody holds a block with it: to keep both would be more than was counted for this lease.
            elif node.block != block:
                self._hold(node.block)
                lease.blocks[start // size] = node.block
                if lease.steps:
                    lease.displaced.append(block)
                else:
                    self._let_go(block)
            if self.tiers is not None:
                if node.identity not in self._identities and node.identity in self.tiers:
                    self._moved[node.identity] = None
                self._identities.add(node.identity)
            if self.windows is not None:
                self.windows.index(lease, start // size, node)
            path.append(node)
        if cached and self.tells_cached:
            self._cached.append((above, cached))

    def adopt(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Put what is cached of the whole blocks of `tokens`, behind what the lease has committed, in the place of its
        own blocks, which nobody has written or will read. Return how many leading tokens of the lease are computed."""
        matched = self.cache.match(lease.namespace, tokens, len(tokens)).nodes
        if self.windows is not None and len(matched) > len(lease.path):
            self.windows.replace(lease, matched)
        for at in range(len(lease.path), len(matched)):
            node, own = matched[at], lease.blocks[at]
            self._hold(node.block)
            lease.blocks[at] = node.block
            lease.path.append(node)
            self._let_go(own)
        return len(lease.path) * self.block_size

    def quarantine(self, lease: Lease) -> None:
        """The request is over, but a peer may still read these blocks: they stay held, and are shown as such, until
        the lease is released. Blocks that others hold too stay active."""
        held = () if self.windows is None else self.windows.holders(lease)
        for block in (*lease.blocks, *held):
            if self.pool.refs(block) == 1:
                self.pool.quarantine(block)

    def release(self, lease: Lease) -> None:
        """Let everything go, tail first. What is indexed stays cached, the rest is free; as long as a step is under
        way that reads or writes these blocks, they are held."""
        if lease.released:
            raise ValueError("a lease is released once")
        lease.released = True
        self._promised -= lease.promised
        lease.promised = 0
        if self.windows is not None:
            self.windows.forgo(lease)
        if not lease.steps:
            self._give_back(lease)

    def launched(self, leases: Iterable[Lease]) -> None:
        """Note that a step is under way that reads and writes blocks of these leases."""
        for lease in leases:
            lease.steps += 1

    def ended(self, leases: Iterable[Lease]) -> None:
        """Note that the step has ended for which `launched` was called with the same leases."""
        for lease in leases:
            lease.steps -= 1
            if lease.steps:
                continue
            for block in lease.displaced:
                self._let_go(block)
            lease.displaced.clear()
            if lease.tail:
                self.commit(lease, lease.tail, tail=True)
                lease.tail = ()
            if lease.released:
                self._give_back(lease)

    def _give_back(self, lease: Lease) -> None:
        self._leases.pop(lease, None)
        self.copied(lease)
        for block in self.pool.unshare(reversed(lease.blocks)):
            self._let_go(block)
        if self.windows is not None:
            self.windows.close(lease)

    # what the shell must know

    def leases(self) -> Iterator[Lease]:
        """Every lease that somebody has and that holds blocks, the oldest first."""
        return iter(self._leases.keys())

    def take_handed_out(self) -> list[BlockId]:
        """Blocks allocated since the last call: their generation in memory must be advanced before they are written."""
        taken, self._handed_out = self._handed_out, []
        return taken

    def take_evicted(self) -> list[bytes]:
        """Identities that left the cache, and every tier below it, since the last call."""
        taken, self._evicted = self._evicted, []
        if self.tiers is not None:
            gone = [*taken, *self.tiers.take_forgotten()]
            lost = [ident for ident in gone if ident not in self.tiers]
            taken = [ident for ident in lost if ident not in self._identities and ident not in self._below]
            for ident in lost:
                self._above.pop(ident, None)
                self._below.discard(ident)
        return taken

    def take_moved(self, limit: int) -> dict[str, list[bytes]]:
        """Return the highest tier ("device", "host" or "disk") of at most `limit` blocks that went to another one since
        they were told of, in the order in which they went; those that no tier has any more are left out."""
        if self.tiers is None:
            return {}
        self._moved |= dict.fromkeys(self.tiers.take_sunk())
        moved: dict[str, list[bytes]] = {}
        for ident in list(islice(self._moved, limit)):
            del self._moved[ident]
            tier = "device" if ident in self._identities else self.tiers.tier(ident)
            if tier and ident not in self._below:
                moved.setdefault(tier, []).append(ident)
        return moved

    def take_cached(self) -> list[tuple[bytes, list[bytes]]]:
        """Runs of identities that came into the cache since the last call, where `tells_cached`: the one before each
        run, empty where it begins a sequence, and the run."""
        taken, self._cached = self._cached, []
        return taken

    def lower(self) -> list[bytes]:
        """Identities of blocks that this life has put into lower tiers, the latest last; some may be gone."""
        return list(self._above)

    def above(self, ident: bytes) -> bytes | None:
        """The identity of the block before one that `lower` names, empty for a first; None where no tier has it."""
        return self._above.get(ident) if self.tiers is not None and ident in self.tiers else None

    def check(self) -> None:
        """Recompute every invariant of pool and cache and of what joins them."""
        self.pool.check()
        self.cache.check()
        assert self._promised >= 0 and self.available >= 0, self
        if self.windows is not None:
            self.windows.check(list(self._leases))
        for lease in self._leases:
            for group, table in enumerate(lease.tables):
                assert all(block == GONE or self.pool.group(block) == group for block in table), (group, table)
        cached = 0
        for node in self.cache.nodes():
            state = self.pool.state(node.block)
            assert state is not BlockState.FREE and state is not BlockState.RESERVED
            cached += state is BlockState.CACHED
            for block in node.windows or ():
                if block != GONE:
                    is_idle = self._is_idle(block)
                    assert is_idle or state is not BlockState.CACHED, "whoever holds a window's block holds its node"
                    cached += is_idle
                    assert self._owners[block] == node.namespace
            if state is not BlockState.CACHED and node.parent is not None and node.parent.block >= 0:
                assert not self._is_idle(node.parent.block), "a held block's parent is held"
        assert cached == self.cache.idle == self.pool.counts()["cached"]
        assert len(self._owners) == self.pool.total - self.pool.free
        self.cache.shares.check(Counter(self._owners.values()))
        assert all(self._owners[node.block] == node.namespace for node in self.cache.nodes())
        if self.tiers is not None:
            self.tiers.check()
            assert self._identities == {node.identity for node in self.cache.nodes()}

    def __repr__(self) -> str:
        return f"KVCacheManager({self.pool!r}, {self._promised} promised)"

    # the joint between pool and cache

    def _is_idle(self, block: BlockId) -> bool:
        return self.pool.state(block) is BlockState.CACHED

    def _hold(self, block: BlockId) -> None:
        self.pool.retain(block)
        self.cache.occupy(block)

    def _let_go(self, block: BlockId) -> None:
        keep = self.cache.holds(block)
        if not self.pool.release(block, keep):
            return
        if keep:
            self.cache.let_go(block)
        else:
            self.cache.shares.gave(self._owners.pop(block))

    def _free(self, block: BlockId) -> None:
        """A cached block that has left the index is nobody's."""
        self.cache.shares.gave(self._owners.pop(block))
        self.pool.recycle(block)

    def _allocate(self, namespace: bytes, count: int, state: BlockState, group: int = 0) -> list[BlockId]:
        shares = self.cache.shares
        shares.took(namespace, count)
        while shares.excess(namespace):  # with a block go those of its windows
            self._evict(namespace)
        while self.pool.free < count:
            self._evict(shares.loser(namespace))
        blocks = self.pool.allocate(count, state, group)
        self._owners.update(dict.fromkeys(blocks, namespace))
        self._handed_out += blocks
        return blocks

    def _evict(self, namespace: bytes) -> None:
        block = self.cache.shares.pop(namespace)
        if (found := self.cache.node(block)) is not None and found.block != block:
            assert found.windows is not None
            group = found.windows.index(block)
            self.cache.forget(block)
            self._leave(found, group, block)
            return
        node = self.cache.forget(block)
        if not self._demote(node):
            self._evicted.append(node.identity)
        # Behind it, so that they stay longer below: without them it is worth little.
        for group, window in enumerate(node.windows or ()):
            if window != GONE:
                self.cache.unbind(node, group)
                self._leave(node, group, window)
        self._free(block)

    def _leave(self, node: Node, group: int, block: BlockId) -> None:
        """Let a block of a layer group with a window leave the device, for a lower tier where it is worth one."""
        assert self.windows is not None
        is_whole = len(node.key) == self.block_size * TOKEN_BYTES
        if self.windows.is_worth(block) and is_whole and self.tiers is not None:
            name = in_group(node.identity, group + 1)
            if self.tiers.demote(name, block, node.namespace):
                self._below.add(name)
        self._free(block)

    def _demote(self, node: Node) -> bool:
        if self.tiers is None:
            return False
        self._identities.remove(node.identity)
        is_whole = len(node.key) == self.block_size * TOKEN_BYTES
        if not is_whole or not self.tiers.demote(node.identity, node.block, node.namespace):
            return False
        assert node.parent is not None
        self._above.pop(node.identity, None)
        self._above[node.identity] = b"" if node.parent.parent is None else node.parent.identity
        self._moved[node.identity] = None
        return True
