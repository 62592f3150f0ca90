"""The block tables of window groups: what leases hold of them, and what they are charged. Pure.

    group 0   [ 0 1 2 3 4 5 6 7 | room to grow ]          every block
    window    [ . . . . . 5 6 7 | the next ones ]         from the first that the last token sees; `.` is GONE

A lease is charged for the most blocks of a window group that it may hold at once. What it holds less than that, it is
promised; so a window that slides finds its next block whatever others do. A block that two leases hold is charged to
both, since either may let go first: `doubled` are those charges that no block stands for. So what is free, idle or
doubled changes by one with every block that a lease takes or lets go, and promises stay backed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from engine.kv.block_pool import PART_BLOCKS, BlockPool, BlockState
from engine.kv.groups import GONE, LayerGroup
from engine.kv.lease import Lease
from engine.kv.radix_cache import Match, Node, RadixCache
from engine.types import BlockId

Allocate = Callable[[bytes, int, BlockState, int], list[BlockId]]
Give = Callable[[BlockId], None]


class WindowTables:
    """Mutable state: `promised`, `doubled`, `_holders`, `_worth` (blocks at whose end somebody has gone on, or may),
    and of every lease its `windows`, `held`, `charges` and `starts`. Owner: the manager."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        ahead_tokens: int,
        pool: BlockPool,
        cache: RadixCache,
        allocate: Allocate,
        let_go: Give,
        free: Give,
    ) -> None:
        """`groups`: all but the first. `ahead_tokens`: how far the steps under way may go beyond the last one that has
        ended."""
        self.groups = tuple(groups)
        self.promised = 0
        self.doubled = 0
        self._holders: Counter[BlockId] = Counter()
        self._size = block_size
        self._most = [group.most_blocks(block_size, ahead_tokens) for group in groups]
        self._worth: set[BlockId] = set()
        self._pool = pool
        self._cache = cache
        self._allocate = allocate
        self._let_go = let_go
        self._free = free

    @property
    def charged(self) -> int:
        """Blocks that are free or idle, and yet nobody's to have."""
        return self.promised + self.doubled

    def charges(self, blocks: int) -> list[int]:
        """Return the most blocks that a sequence of `blocks` blocks holds of each group at once."""
        return [min(blocks, most) for most in self._most]

    def for_fork(self, blocks: int) -> list[int]:
        """Return what a fork to come is charged that will have `blocks` blocks, shared ones included: one more, for the
        boundary block that it copies, which is held beside its table."""
        return [charge + 1 for charge in self.charges(blocks)]

    def migrating(self, charges: Sequence[int], match: Match, tokens: int, promised: int) -> list[int]:
        """Return what a lease is charged while its blocks are to come: it keeps the windows of what it has found, too.
        Behind a match of nothing that is never more than `charges` says."""
        nodes = len(match.nodes) + match.loaded
        left = -(-tokens // self._size) + promised - nodes
        # Lost handoffs may name tokens: where the last one's tail begins in its block is not known yet.
        tails = [min(left, group.tail_blocks(self._size, 0)) for group in self.groups]
        both = zip(charges, self._firsts(match), tails, strict=True)
        return [max(charge, nodes - first + tail) for charge, first, tail in both]

    # what a match has

    def _firsts(self, match: Match) -> list[int]:
        """Return which node is the first that each group needs to compute on behind a match."""
        nodes = len(match.nodes) + match.loaded
        tokens = nodes * self._size + match.partial_tokens
        return [min(nodes, group.first_needed(tokens, self._size)) for group in self.groups]

    def hold(self, match: Match) -> tuple[list[BlockId], ...]:
        """Hold the blocks that computing on behind a match takes, the partly matching ones for a copy; return the
        tables that they make. What a lower tier is to bring is GONE in them."""
        tables = []
        for group, first in enumerate(self._firsts(match)):
            blocks = [_windows(node)[group] for node in match.nodes[first:]]
            for block in blocks:
                if block != GONE:
                    self._worth.add(block)
                    self.retain(block)
            tables.append([GONE] * min(first, len(match.nodes)) + blocks)
        if match.partial is not None:
            for block in _windows(match.partial):
                self.retain(block)
        return tuple(tables)

    def copy(self, lease: Lease, partial: Node, at: int) -> list[tuple[BlockId, BlockId]]:
        """Begin the blocks at `at` as copies of those of a node, which are held. Return the copies."""
        copies = []
        for group, source in enumerate(_windows(partial)):
            self.take(lease, group, range(at, at + 1))
            copies.append((source, lease.windows[group][at]))
        return copies

    def load(self, lease: Lease, match: Match) -> None:
        """Reserve what a lower tier is to bring of a lease that `hold` has begun."""
        last = len(match.nodes) + match.loaded
        for group, first in enumerate(self._firsts(match)):
            self.take(lease, group, range(first, last), BlockState.RESERVED)

    def retain(self, block: BlockId) -> None:
        self._pool.retain(block)
        self._cache.occupy(block)
        self._holders[block] += 1
        self.doubled += self._holders[block] > 1

    def is_worth(self, block: BlockId) -> bool:
        """Return True for a block, which leaves the device now, if what comes behind it is gone on with."""
        if block not in self._worth:
            return False
        self._worth.remove(block)
        return True

    def give_back(self, block: BlockId) -> None:
        """One that was retained, or taken, is let go."""
        holders = self._holders[block] = self._holders[block] - 1
        if holders:
            self.doubled -= 1
        else:
            del self._holders[block]
        self._let_go(block)

    # what a lease has

    def open(self, lease: Lease, tables: tuple[list[BlockId], ...], charges: Sequence[int]) -> None:
        """Make the tables the lease's, as long as its own."""
        lease.windows, lease.charges = tables, list(charges)
        lease.held = [sum(block != GONE for block in table) for table in tables]
        lease.starts = [next((at for at, b in enumerate(table) if b != GONE), len(table)) for table in tables]
        self.promised += sum(map(_promise, charges, lease.held))
        self.lengthen(lease)

    def lengthen(self, lease: Lease) -> None:
        for table in lease.windows:
            table += [GONE] * (len(lease.blocks) - len(table))

    def charge(self, lease: Lease, charges: Sequence[int]) -> None:
        for group, charge in enumerate(charges):
            self.promised += _promise(charge, lease.held[group]) - _promise(lease.charges[group], lease.held[group])
            lease.charges[group] = charge

    def take(self, lease: Lease, group: int, blocks: range, state: BlockState = BlockState.ACTIVE) -> None:
        """Allocate what the lease does not hold of these blocks of a group. Raises ValueError beyond its charge."""
        table = lease.windows[group]
        missing = [at for at in blocks if table[at] == GONE]
        if not missing:
            return
        if lease.held[group] + len(missing) > lease.charges[group]:
            raise ValueError(f"window group {group + 1} of a lease goes beyond its {lease.charges[group]} blocks")
        found = self._allocate(lease.namespace, len(missing), state, group + 1)
        for at, block in zip(missing, found, strict=True):
            table[at] = block
            self._holders[block] = 1
        lease.starts[group] = min(lease.starts[group], missing[0])
        self._changed(lease, group, len(missing))

    def reach(self, lease: Lease, start: int, end: int) -> None:
        """Have the blocks that computing `tokens[start:end]` writes."""
        for group in range(len(self.groups)):
            self.take(lease, group, range(start // self._size, -(-end // self._size)))

    def reserve(self, lease: Lease, have_blocks: int, tokens: int) -> None:
        """Reserve what is to come of a sequence of `tokens` tokens, of which `have_blocks` blocks are here. What was
        reserved for fewer tokens and does not come for so many is let go: nobody would have written it."""
        for group, blocks in enumerate(self.wanted(have_blocks, tokens)):
            self._drop(lease, group, range(have_blocks, blocks.start))
            self.take(lease, group, blocks, BlockState.RESERVED)

    def wanted(self, have_blocks: int, tokens: int) -> list[range]:
        """Return which blocks of each group are to come then."""
        last = -(-tokens // self._size)
        return [range(max(have_blocks, group.first_migrated(tokens, self._size)), last) for group in self.groups]

    def slide(self, lease: Lease, tokens: int) -> None:
        """Let go what is not needed any more where `tokens` tokens are computed."""
        for number, group in enumerate(self.groups):
            first = min(group.first_kept(tokens, self._size), len(lease.blocks))
            if first > lease.starts[number]:
                self._drop(lease, number, range(lease.starts[number], first))
                lease.starts[number] = first

    def drop_behind(self, lease: Lease, blocks: int) -> None:
        """Let go everything but the first `blocks` blocks of each table: nothing is in the others."""
        for group, table in enumerate(lease.windows):
            self._drop(lease, group, range(blocks, len(table)))

    def replace(self, lease: Lease, nodes: Sequence[Node]) -> None:
        """Go on behind `nodes`, which a match at their end has found, in place of what the lease has."""
        tokens = len(nodes) * self._size
        for number, group in enumerate(self.groups):
            table, first = lease.windows[number], group.first_needed(tokens, self._size)
            shared = [_windows(node)[number] for node in nodes[first:]]
            for block in shared:
                self._worth.add(block)
                self.retain(block)
            self._changed(lease, number, len(shared))
            self._drop(lease, number, range(len(nodes)))
            table[first : len(nodes)] = shared
            lease.starts[number] = first

    def fork(self, parent: Lease, child: Lease, tokens: int) -> list[tuple[BlockId, BlockId]]:
        """Share what computing on from `tokens` takes; return the copies of the boundary block that are to be made."""
        whole, rest = divmod(tokens, self._size)
        copies = []
        self.charge(child, [max(0, charge - 1) for charge in child.charges])
        for number, group in enumerate(self.groups):
            first = group.first_needed(tokens, self._size)
            shared = parent.windows[number][first:whole]
            for block in shared:
                self.retain(block)
            child.windows[number][:] = [GONE] * min(first, whole) + shared
            child.starts[number] = first
            self._changed(child, number, len(shared))
        if rest:
            self.lengthen(child)
            for number in range(len(self.groups)):
                boundary = parent.windows[number][whole]
                pending = {target: source for source, target in parent.copies}
                source = pending.get(boundary, boundary)
                self.retain(source)
                self.take(child, number, range(whole, whole + 1))
                copies.append((source, child.windows[number][whole]))
        return copies

    def can_fork(self, parent: Lease, tokens: int) -> bool:
        """Return True where the parent still has all that computing on from `tokens` takes."""
        last = -(-tokens // self._size)
        return all(
            GONE not in parent.windows[number][group.first_needed(tokens, self._size) : last]
            for number, group in enumerate(self.groups)
        )

    def landed(self, lease: Lease) -> None:
        """Nothing is to come any more."""
        for block in self.holders(lease):
            if self._pool.state(block) is BlockState.RESERVED:
                self._pool.landed(block)
        self.charge(lease, self.charges(len(lease.blocks) + lease.promised))

    def _risen(self, lease: Lease, blocks: int) -> list[int]:
        own = len(lease.blocks) + lease.promised + blocks
        new = self.charges(own) if lease.to_share is None else self.for_fork(own + lease.to_share)
        return [max(pair) for pair in zip(lease.charges, new, strict=True)]

    def rise(self, lease: Lease, blocks: int) -> int:
        """Return how much more the lease is charged with the promise of `blocks` more blocks."""
        risen = zip(self._risen(lease, blocks), lease.held, strict=True)
        now = zip(lease.charges, lease.held, strict=True)
        return sum(_promise(*pair) for pair in risen) - sum(_promise(*pair) for pair in now)

    def grow(self, lease: Lease, blocks: int) -> None:
        self.charge(lease, self._risen(lease, blocks))

    def forgo(self, lease: Lease) -> None:
        """The lease is released: it is promised nothing more."""
        self.charge(lease, [0] * len(self.groups))

    def close(self, lease: Lease) -> None:
        """Let all go, tail first; behind what is let go of group 0, since without its tail that is worth little."""
        for group, table in enumerate(lease.windows):
            self._worth.update(block for block in table if block != GONE and self._cache.holds(block))
            self._drop(lease, group, range(len(table)))

    def index(self, lease: Lease, at: int, node: Node) -> None:
        """The cached node has what the lease has in its tables at `at`, where nobody holds another block for it."""
        theirs = _windows(node)
        for group, table in enumerate(lease.windows):
            ours, known = table[at], theirs[group]
            if ours in (GONE, known) or self._cache.holds(ours):
                continue
            if known != GONE and self._pool.state(known) is not BlockState.CACHED:
                continue
            if known != GONE:
                self._cache.unbind(node, group)
                self._worth.discard(known)
                self._free(known)
            self._cache.bind(node, group, ours)

    def _drop(self, lease: Lease, group: int, blocks: range) -> None:
        table, dropped = lease.windows[group], 0
        for at in reversed(blocks):
            if table[at] != GONE:
                block, table[at] = table[at], GONE
                self.give_back(block)
                dropped += 1
        self._changed(lease, group, -dropped)

    def _changed(self, lease: Lease, group: int, more: int) -> None:
        charge, held = lease.charges[group], lease.held[group]
        lease.held[group] = held + more
        self.promised += _promise(charge, held + more) - _promise(charge, held)

    def holders(self, lease: Lease) -> Iterator[BlockId]:
        return (block for table in lease.windows for block in table if block != GONE)

    def check(self, leases: Sequence[Lease]) -> None:
        """Recompute what is promised and doubled, and that no lease lacks a block between those that it has."""
        for _ in self.check_parts(leases):
            pass
        assert all(map(self._cache.holds, self._worth)), "what is gone is worth nothing"

    def check_parts(self, leases: Sequence[Lease]) -> Iterator[int]:
        """Do so a part at a time, and yield how many blocks each was; between two, anything may change. What leases
        hold is copied in the beginning."""
        tables, starts, held, promised = [], [], [], 0
        others = [[source for source, _ in lease.copies[1:]] for lease in leases]
        holding, doubled = self._holders.copy(), self.doubled
        for lease in leases:
            assert all(len(table) == len(lease.blocks) for table in lease.windows)
            assert all(node.windows is not None for node in lease.path[-1:])
            tables += [table.copy() for table in lease.windows]
            starts += lease.starts
            held += lease.held
            promised += sum(map(_promise, lease.charges, lease.held))
        assert promised == self.promised, (promised, self.promised)
        yield (sum(map(len, tables)) + len(holding)) // 32
        holders: Counter[BlockId] = Counter()
        for table, start, count in zip(tables, starts, held, strict=True):
            for at in range(0, len(table), PART_BLOCKS):
                part = [block for block in table[at : at + PART_BLOCKS] if block != GONE]
                assert not part or all(block == GONE for block in table[at : min(start, at + PART_BLOCKS)]), (at, start)
                holders.update(part)
                count -= len(part)
                yield PART_BLOCKS
            assert not count, (start, count)
        for sources in others:
            holders.update(sources)
        assert holders == holding, holders - holding
        assert doubled == sum(holders.values()) - len(holders)
        yield len(holders) // 8
        worth = list(self._worth)
        for at in range(0, len(worth), PART_BLOCKS):
            part = worth[at : at + PART_BLOCKS]
            assert all(self._cache.holds(block) or block not in self._worth for block in part), "it is worth nothing"
            yield PART_BLOCKS


def _promise(charge: int, held: int) -> int:
    return max(0, charge - held)


def _windows(node: Node) -> list[BlockId]:
    assert node.windows is not None, "a node has a block for each group"
    return node.windows
