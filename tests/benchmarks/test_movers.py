"""What movers cost a handoff: that the blocks move, and whose movers are measured."""

from pathlib import Path

import pytest

from benchmarks import movers
from engine.types import BlockId

HERE = Path(movers.__file__).parents[1]


@pytest.mark.parametrize("kind", [movers.OWN, movers.BARE])
def test_a_handoff_moves_its_blocks(kind: str) -> None:
    """Guards figures of handoffs that end without a copy."""
    blocks = 3
    ends = movers.Ends(kind, blocks, 2, 8)
    try:
        for _ in range(2):
            ends.hand_over()
            sent, landed = ends._pools
            for block in map(BlockId, range(blocks)):
                assert bytes(landed.block(block)) == bytes(sent.block(block)) != bytes(sent.block_bytes)
                landed.block(block)[:] = bytes(landed.block_bytes)
    finally:
        for mover in ends._movers:
            mover.stop()
        for pool in ends._pools:
            pool.close()


def test_turns_are_told_by_tree_and_shape() -> None:
    """Guards ratios of other turns than the same."""
    trees = {kind: (HERE, kind) for kind in (movers.OWN, movers.BARE)}
    turns = movers.measure(trees, 2)
    assert len(turns) == 2
    for turn in turns:
        assert turn.keys() == trees.keys()
        assert all(spent.keys() == movers.SHAPES.keys() and min(spent.values()) > 0 for spent in turn.values())


def test_a_checkout_without_movers_is_refused(tmp_path: Path) -> None:
    """Guards a ratio of 1 that installed packages beside an empty folder would give."""
    with pytest.raises(RuntimeError, match="has ended: 1"):
        movers.measure({movers.OWN: (tmp_path, movers.OWN)}, 1)
