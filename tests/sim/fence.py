"""The fence, seen from outside: what must hold of a block while somebody reads it, or writes to it."""

from engine.kv.block_pool import BlockState
from engine.types import BlockId
from tests.sim.clock import Violation
from tests.sim.shadow import ShadowKV


def readable(memory: ShadowKV, block: BlockId, generation: int, what: str) -> None:
    """Check that whoever reads a block finds it held, in the generation that was offered. Raises Violation."""
    owner, pool = memory.process, memory.pool
    if not owner.alive:
        return
    if memory.generations[block] != generation or not pool.refs(block):
        raise Violation(
            f"{owner}: source block {block} {what}, but is at generation "
            f"{memory.generations[block]} (offered: {generation}), held by {pool.refs(block)}"
        )


def writable(memory: ShadowKV, block: BlockId, generation: int, who: str) -> None:
    """Check that a target is still the reserved block that it was, and nobody shares it. Raises Violation."""
    pool, state = memory.pool, memory.pool.state(block)
    shared = pool.refs(block) != 1 or memory.manager.cache.holds(block)
    held = state in (BlockState.RESERVED, BlockState.QUARANTINED, BlockState.ACTIVE)
    if not held or shared or memory.generations[block] != generation:
        raise Violation(
            f"{memory.process}: a copy for {who} writes to block {block}, which is {state} by now"
        )
