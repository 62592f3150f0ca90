"""Maps rows of a sender's blocks to their places when its blocks have another size than the receiver's. Pure integers.

A handoff moves the *sender's* blocks: it names them, makes their digests and numbers them. The receiver already has a
prefix that ends at a border of its own blocks; of each block it takes the rows beyond, cut at its own borders:

    sender, 16      |0 . . . . . . .|1 . . . . . . .|2 . . . .   last one partly filled
    receiver, 24    |cached . . . . . . .|1 . . . . . . . .  .
    rows taken                            ^^^^^^^^^^^ ^^^^^^^    none of a cached block, each of the others once
"""

from collections.abc import Collection, Sequence

from engine.kv.groups import LayerGroup, migrated, place
from engine.types import BlockId
from transfer.handoff.commands import Rows


def rows_by_block(
    tokens: int, have_tokens: int, sender_size: int, block_size: int, blocks: Sequence[BlockId]
) -> dict[int, tuple[Rows, ...]]:
    """Return, for each of the sender's blocks that `tokens` fill and that has rows beyond `have_tokens`, where these
    rows go. `blocks` are the receiver's, `block_size` tokens each, from the beginning of the sequence."""
    found: dict[int, tuple[Rows, ...]] = {}
    for index in range(have_tokens // sender_size, -(-tokens // sender_size)):
        start = index * sender_size
        end = min(start + sender_size, tokens)
        rows, at = [], max(start, have_tokens)
        while at < end:
            count = min(end - at, block_size - at % block_size)
            rows.append(Rows(at - start, blocks[at // block_size], at % block_size, count))
            at += count
        found[index] = tuple(rows)
    return found


def landed_blocks(
    landed: Collection[int], have_blocks: int, groups: Sequence[LayerGroup], tokens: int, block_size: int
) -> int:
    """Return how many leading blocks are there, with the blocks at the places `landed` behind the first `have_blocks`:
    of each layer group those that `tokens` tokens need. Both sides cut blocks alike."""
    blocks = -(-tokens // block_size)
    wanted = migrated(groups, range(have_blocks, blocks), tokens, block_size)
    return next((at for at, group in wanted if place(at, group, len(groups)) not in landed), blocks)


def landed_tokens(landed: Collection[int], have_tokens: int, sender_size: int, tokens: int) -> int:
    """Return how many leading tokens are there, with the sender's blocks `landed` behind the first `have_tokens`."""
    index = have_tokens // sender_size
    while index in landed:
        index += 1
    return min(tokens, max(have_tokens, index * sender_size))
