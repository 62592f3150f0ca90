"""Layers that keep alike, in groups: which of a sequence's blocks each group needs at a position. Pure integers.

All blocks of a pool are of one size, and hold the same number of layers: group 0's. A sequence has a block table per
group. Group 0 keeps everything; the others are of sliding-window layers and keep their window. docs/layer-groups.md
has the rules.
"""

from collections.abc import Sequence

import msgspec

from engine.types import BlockId

GONE = BlockId(-1)
"""In the table of a window group: the block was let go, or was never here."""


class LayerGroup(msgspec.Struct, frozen=True):
    """Layer `layers[i]` of the model is layer i of this group's blocks. `window`: how many keys a query of these
    layers sees, its own included; 0: all, or nothing is freed (group 0)."""

    layers: tuple[int, ...]
    window: int = 0

    def first_needed(self, position: int, block_size: int) -> int:
        """Return the first block that whoever computes `position` next still needs: those before it may go. A block of
        the tokens [a, b) may go when b <= position - window + 1."""
        return max(0, position - self.window + 1) // block_size if self.window else 0

    def first_migrated(self, tokens: int, block_size: int) -> int:
        """Return the first block that whoever goes on with a sequence of so many tokens elsewhere needs: it may have to
        compute the last of them again."""
        return self.first_needed(max(0, tokens - 1), block_size)

    def first_kept(self, tokens: int, block_size: int) -> int:
        """Return the first block that a sequence of so many tokens keeps: it may be gone on with elsewhere, or from its
        last whole block on, which is as far as lower tiers keep it."""
        whole = tokens // block_size * block_size
        return min(self.first_migrated(tokens, block_size), self.first_needed(whole, block_size))

    def most_blocks(self, block_size: int, ahead_tokens: int) -> int:
        """Return the most blocks that a sequence holds which keeps those (`first_kept`), and is computed up to
        `ahead_tokens` beyond."""
        window = -(-(self.window - 1) // block_size) + -(-(block_size - 1 + ahead_tokens) // block_size)
        return max(self.tail_blocks(block_size, ahead_tokens + 1), window)

    def tail_blocks(self, block_size: int, tokens: int = 1) -> int:
        """Return the most blocks that computing `tokens` tokens from any position on takes: the window before them and
        their own."""
        return -(-(self.window - 1 + tokens) // block_size) + 1


def layer_groups(windows: Sequence[int]) -> tuple[LayerGroup, ...]:
    """Return the groups of a model whose layer i has window `windows[i]`, 0 for all; empty where one group does: all
    layers are alike.

    Layers of the largest reach are group 0. The layers of each other window fill as many groups as they need of as
    many layers; the last may have fewer, and leaves part of its blocks unused.
    """
    kinds = sorted(set(windows), key=lambda window: (window != 0, -window))
    if len(kinds) < 2:
        return ()
    by_kind = {kind: [layer for layer, window in enumerate(windows) if window == kind] for kind in kinds}
    first, *others = kinds
    size = len(by_kind[first])
    groups = [LayerGroup(tuple(by_kind[first]))]
    for kind in others:
        layers = by_kind[kind]
        groups += [LayerGroup(tuple(layers[at : at + size]), kind) for at in range(0, len(layers), size)]
    return tuple(groups)


def group_names(groups: Sequence[LayerGroup]) -> list[str]:
    """Return what operators call the groups, by number and window. `groups` are all of them; empty: one."""
    windows = [group.window for group in groups] or [0]
    return [f"{at} window {window}" if window else f"{at} all" for at, window in enumerate(windows)]


def migrated(groups: Sequence[LayerGroup], indices: range, tokens: int, block_size: int) -> list[tuple[int, int]]:
    """Return which of the blocks `indices` of a sequence of `tokens` tokens go from one worker to another: index and
    group of each, in order. `groups` are all of them; empty: one."""
    firsts = [group.first_migrated(tokens, block_size) for group in groups] or [0]
    return [(index, group) for index in indices for group, first in enumerate(firsts) if index >= first]


def place(index: int, group: int, groups: int) -> int:
    """Return the number by which block `index` of a sequence goes on the wire, in the table of `group`: the index
    itself where there is one group."""
    return index * groups + group


def index_and_group(place: int, groups: int) -> tuple[int, int]:
    """Undo `place`."""
    return divmod(place, groups)
