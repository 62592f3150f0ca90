"""Where a sequence can be gone on with, if a lower tier brings what the device lacks before there. Pure.

    group 0   [ on the device | in a tier                ]            every block
    window    [ .  .  .  .  . | . .  on the device, or in a tier ]    those that the next token sees

Where layers are kept in groups (`engine.kv.groups`), all is wanted or nothing: a prefix counts only as far as group 0
and every window's tail are there. Where they are not, any leading part of what is found is of use.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.identity import in_group
from engine.kv.groups import GONE, LayerGroup
from engine.kv.lease import Lease
from engine.kv.radix_cache import Match, Node, RadixCache
from engine.kv.tiers.tiers import Tiers
from engine.types import BlockId


@dataclass(frozen=True, slots=True)
class Resuming:
    """`match` says where it is gone on; to be loaded is `wanted`: index and group of each block, by `identities`."""

    match: Match
    wanted: tuple[tuple[int, int], ...]
    identities: tuple[bytes, ...]
    saved_blocks: int
    """So many blocks need not be computed then, beyond what the device has."""

    @property
    def blocks(self) -> int:
        """Leading blocks of the sequence that are here then."""
        return len(self.match.nodes) + self.match.loaded

    def targets(self, lease: Lease) -> list[BlockId]:
        """Return the blocks to load into, of a lease that was acquired `behind` the match."""
        return [lease.tables[group][at] for at, group in self.wanted]


def resuming(
    cache: RadixCache,
    tiers: Tiers,
    groups: Sequence[LayerGroup],
    namespace: bytes,
    tokens: Sequence[int],
    limit: int,
    match: Match | None = None,
) -> Resuming | None:
    """Return the longest of `tokens[:limit]` in whole blocks that can be gone on with; None where the device alone has
    as much. `groups` are several. `match`: what the device has, if that is known."""
    size = cache.block_size
    match = match or cache.match(namespace, tokens, limit)
    nodes, here = match.path, len(match.nodes)
    parent = nodes[-1].identity if nodes else cache.root_identity(namespace)
    below = tiers.find(parent, tokens, len(nodes) * size, limit, size)
    names = [*(node.identity for node in nodes), *below]
    blocks = len(names)
    while blocks > here:
        lacks = _lacking(tiers, groups, nodes, names, blocks, size)
        if isinstance(lacks, list):
            count = min(len(nodes), blocks)
            wanted = [*((at, 0) for at in range(count, blocks)), *lacks]
            identities = tuple(in_group(names[at], group) for at, group in wanted)
            return Resuming(Match(nodes[:count], loaded=blocks - count), tuple(wanted), identities, blocks - here)
        blocks = lacks  # every longer one sees the block that is nowhere
    return None


def _lacking(
    tiers: Tiers, groups: Sequence[LayerGroup], nodes: Sequence[Node], names: Sequence[bytes], blocks: int, size: int
) -> list[tuple[int, int]] | int:
    """Return what the device lacks of the windows behind `blocks` blocks, where a tier has all of it; else the number
    of a block that is nowhere, the first that its group needs, so that few are looked at."""
    lacking = []
    for number, group in enumerate(groups[1:], 1):
        for at in range(group.first_needed(blocks * size, size), blocks):
            windows = nodes[at].windows if at < len(nodes) else None
            if windows is not None and windows[number - 1] != GONE:
                continue
            if not tiers.can_load(in_group(names[at], number)):
                return at
            lacking.append((at, number))
    return lacking
