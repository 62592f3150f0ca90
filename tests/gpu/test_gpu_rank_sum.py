"""Sums over ranks in one kernel, of ranks that share one card: what only a GPU can show of it."""

from pathlib import Path

import pytest

from tests.engine.ranks.test_one_shot import run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_over_mapped_memory_have_the_same_bits(ranks: int, tmp_path: Path) -> None:
    """Guards CUDA's IPC, atomics on memory that another process has allocated, notes in the host's memory, and fences
    that an interpreter does not need. Two processes take turns on one card: what it takes says nothing of two cards."""
    done = run(tmp_path, ranks, steps=200, seed=ranks, device="cuda:0")
    assert [one.returncode for one in done] == [0] * ranks, done[0].stderr + done[-1].stderr
    assert len({one.stdout for one in done}) == 1 and done[0].stdout
