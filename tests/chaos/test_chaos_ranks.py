"""Workers of three ranks, whose processes are struck one by one: the end of any rank is the worker's, and requests go
on elsewhere to the bit, as after any worker's end."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.ground import Ground
from tests.chaos.rows import RANK_ROWS
from tests.chaos.strike import Reference, run_row

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("renewed")]

RANK_WAIT_S = 8.0
"""Longer than a rank is frozen, so that it comes back; the worker of one that stays stopped ends after it."""


@pytest.fixture(scope="module")
def whole() -> Reference:
    """Answers of three ranks: they round otherwise than those of one."""
    return Reference()


@pytest.fixture(scope="module")
def ground(model_dir: Path, whole: Reference) -> Iterator[Ground]:
    with closing(Ground(model_dir, ranks=3, rank_wait_s=RANK_WAIT_S)) as found:
        whole.make(found)
        yield found


@pytest.mark.parametrize("number", range(len(RANK_ROWS)), ids=[str(row) for row in RANK_ROWS])
def test_row_of_a_rank(ground: Ground, whole: Reference, number: int) -> None:
    """Guards against a worker that goes on without a rank, or with one that comes back with another step's sums."""
    run_row(ground, whole, RANK_ROWS[number], number)
