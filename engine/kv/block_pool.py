"""Reference-counted block ids. Integers only: it knows nothing of tokens, tensors or requests.

    FREE --allocate--> ACTIVE or RESERVED      RESERVED --landed--> ACTIVE
    ACTIVE --last release--> CACHED (kept: still indexed) or FREE
    CACHED --retain--> ACTIVE      CACHED --recycle--> FREE
    ACTIVE, RESERVED --quarantine--> QUARANTINED --last release--> CACHED or FREE

Every block is in exactly one state, so free + cached + active + reserved + quarantined == total, always. What is handed
out is of one layer group (`engine.kv.groups`) until it is free again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from enum import StrEnum

from engine.types import BlockId


class BlockState(StrEnum):
    FREE = "free"
    CACHED = "cached"
    """Nobody holds it, its content is still indexed: evictable."""
    ACTIVE = "active"
    RESERVED = "reserved"
    """Held as the target of a migration: content is still to land."""
    QUARANTINED = "quarantined"
    """Its request is over, but a peer may still read it: not reusable until that is settled."""

    __hash__ = str.__hash__  # an enum's own is a Python call, and every move of a block looks two states up


PART_BLOCKS = 64
"""Blocks that are checked together."""
_HELD = frozenset((BlockState.ACTIVE, BlockState.RESERVED, BlockState.QUARANTINED))


class BlockPool:
    """Mutable state, all of it: `_free`, `_states`, `_refs`, `_generations`, `_counts`, `_groups`, `_held`. Owner: the
    engine thread."""

    def __init__(self, blocks: int, groups: int = 1) -> None:
        if blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {blocks}")
        self.total = blocks
        self._free = [BlockId(b) for b in range(blocks - 1, -1, -1)]
        self._states = [BlockState.FREE] * blocks
        self._refs = [0] * blocks
        self._generations = [0] * blocks
        self._counts = {state.value: 0 for state in BlockState}
        self._counts[BlockState.FREE] = blocks
        self._groups = [0] * blocks
        self._held = [0] * groups

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def free_list(self) -> Sequence[BlockId]:
        """The blocks that are handed out next, the last one first."""
        return self._free

    def state(self, block: BlockId) -> BlockState:
        return self._states[block]

    def refs(self, block: BlockId) -> int:
        return self._refs[block]

    def group(self, block: BlockId) -> int:
        """Return the layer group that the block was handed out for last."""
        return self._groups[block]

    def generation(self, block: BlockId) -> int:
        """Return how often the block has been allocated. The memory's header mirrors it for readers in other
        processes."""
        return self._generations[block]

    @property
    def generations(self) -> Sequence[int]:
        """The generation of every block, in order."""
        return self._generations

    def counts(self) -> dict[str, int]:
        return self._counts.copy()

    def recount(self) -> dict[str, int]:
        """Count the blocks anew where they are: on the free list, or by state. Unlike `counts`, which move in pairs,
        these add up to `total` only if none is lost or in two places. Takes 30 µs for a thousand blocks."""
        found = dict.fromkeys(self._counts, 0) | Counter(self._states)
        return found | {BlockState.FREE.value: len(self._free)}

    def held(self) -> list[int]:
        """Return how many active, reserved and quarantined blocks there are of each layer group."""
        return self._held.copy()

    def allocate(self, count: int, state: BlockState = BlockState.ACTIVE, group: int = 0) -> list[BlockId]:
        """Hand out `count` free blocks with one reference each, under a new generation, for layers of a group. Raises
        IndexError if there are fewer: making room is the manager's business."""
        if count > len(self._free):
            raise IndexError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self._generations[block] += 1
            self._groups[block] = group
            self._move(block, BlockState.FREE, state)
        self._held[group] += count
        return blocks

    def retain(self, block: BlockId) -> None:
        """One more holder of a cached, active or quarantined block."""
        state = self._states[block]
        if state is BlockState.CACHED:
            self._move(block, state, BlockState.ACTIVE)
            self._held[self._groups[block]] += 1
        elif state not in (BlockState.ACTIVE, BlockState.QUARANTINED):
            raise ValueError(f"block {block} is {state}: it cannot be shared")
        self._refs[block] += 1

    def release(self, block: BlockId, keep: bool) -> bool:
        """One holder less. With the last one gone the block is cached (`keep`) or free; then True is returned."""
        if self._refs[block] < 1:
            raise ValueError(f"block {block} is released more often than it was held")
        self._refs[block] -= 1
        if self._refs[block]:
            return False
        self._move(block, self._states[block], BlockState.CACHED if keep else BlockState.FREE)
        self._held[self._groups[block]] -= 1
        if not keep:
            self._free.append(block)
        return True

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more holder of each of these active or quarantined blocks. Takes a tenth of the time of `retain`."""
        states, refs = self._states, self._refs
        for block in blocks:
            if states[block] is not BlockState.ACTIVE and states[block] is not BlockState.QUARANTINED:
                raise ValueError(f"block {block} is {states[block]}: it has no holder to share it with")
            refs[block] += 1

    def unshare(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """One holder less of each that has several; return the others, in their order: they are to be released."""
        refs, last = self._refs, list[BlockId]()
        for block in blocks:
            if refs[block] > 1:
                refs[block] -= 1
            else:
                last.append(block)
        return last

    def landed(self, block: BlockId) -> None:
        self._move(block, BlockState.RESERVED, BlockState.ACTIVE)

    def quarantine(self, block: BlockId) -> None:
        if self._refs[block] < 1:
            raise ValueError(f"block {block} is held by nobody")
        self._move(block, self._states[block], BlockState.QUARANTINED)

    def recycle(self, block: BlockId) -> None:
        """A cached block leaves the index."""
        self._move(block, BlockState.CACHED, BlockState.FREE)
        self._free.append(block)

    def _move(self, block: BlockId, old: BlockState, new: BlockState) -> None:
        if self._states[block] is not old:
            raise ValueError(f"block {block} is {self._states[block]}, not {old}")
        self._states[block] = new
        self._counts[old] -= 1
        self._counts[new] += 1

    def copy(self) -> "BlockPool":
        """Return another one that is as this one is now. Takes some nanoseconds for a block."""
        other = copy(self)
        other._free, other._states, other._refs = self._free.copy(), self._states.copy(), self._refs.copy()
        other._generations, other._groups = self._generations.copy(), self._groups.copy()
        other._counts, other._held = self._counts.copy(), self._held.copy()
        return other

    def check(self) -> None:
        """Recompute the conservation law and every count."""
        for _ in self.check_parts():
            pass

    def check_parts(self) -> Iterator[int]:
        """Do so a part at a time, and yield how many blocks each was. Nothing may change meanwhile."""
        recount, by_group = dict.fromkeys(self._counts, 0), Counter[int]()
        assert len(self._states) == len(self._refs) == len(self._groups) == self.total, self
        for at in range(0, self.total, PART_BLOCKS):
            part = slice(at, at + PART_BLOCKS)
            states = self._states[part]
            for state, count in Counter(states).items():
                recount[state] += count
            held = [state in _HELD for state in states]
            assert held == [refs > 0 for refs in self._refs[part]], (at, states, self._refs[part])
            by_group.update(group for group, is_held in zip(self._groups[part], held, strict=True) if is_held)
            yield len(states)
        recount |= {BlockState.FREE.value: len(self._free)}
        assert sum(recount.values()) == self.total and recount == self._counts, (self, recount)
        assert self._held == [by_group[group] for group in range(len(self._held))], (self._held, by_group)
        assert sum(self._held) == sum(recount[state] for state in _HELD)
        free: set[BlockId] = set()
        for at in range(0, len(self._free), PART_BLOCKS):
            free.update(self._free[at : at + PART_BLOCKS])
            yield PART_BLOCKS
        assert len(self._free) == len(free)

    def __repr__(self) -> str:
        return "BlockPool(" + ", ".join(f"{n} {state}" for state, n in self.counts().items()) + ")"
