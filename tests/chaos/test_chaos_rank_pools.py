"""Workers of three ranks with a pool and a mover each, whose processes are struck one by one amid handoffs; and a
drain, a resume, samples and beams there: what `test_chaos_ranks` shows of ranks that share a pool."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos import test_chaos_ranks as shared
from tests.chaos.ground import Ground
from tests.chaos.rows import RANK_POOL_ROWS
from tests.chaos.strike import Reference, run_row

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("renewed")]


@pytest.fixture(scope="module")
def whole() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def ground(model_dir: Path, whole: Reference) -> Iterator[Ground]:
    with closing(Ground(model_dir, ranks=3, rank_wait_s=shared.RANK_WAIT_S, rank_pools="own")) as found:
        whole.make(found)
        yield found


@pytest.mark.parametrize("number", range(len(RANK_POOL_ROWS)), ids=[str(row) for row in RANK_POOL_ROWS])
def test_row_of_a_rank_with_its_own_pool(ground: Ground, whole: Reference, number: int) -> None:
    """Guards a chunk that lands with a part missing, and a worker that waits on for the parts of a rank that is gone,
    or was."""
    run_row(ground, whole, RANK_POOL_ROWS[number], number)


def test_samples_are_exact(ground: Ground, whole: Reference) -> None:
    """Guards copies on write, which every rank makes in its pool."""
    shared.test_samples_of_a_worker_that_loses_a_rank_are_exact(ground, whole, "seeded with penalties", 2)


def test_beams_are_found_again(ground: Ground, whole: Reference) -> None:
    shared.test_a_search_whose_worker_loses_a_rank_finds_the_same(ground, whole, 6, 2)


def test_a_drained_worker_hands_its_answer_over(ground: Ground, whole: Reference) -> None:
    """Guards blocks that leave a decode worker in parts."""
    shared.test_a_drained_worker_of_three_ranks_hands_its_answer_over(ground, whole)


def test_an_answer_is_resumed_at_another_router(ground: Ground, whole: Reference) -> None:
    shared.test_an_answer_of_three_ranks_is_resumed_at_another_router(ground, whole)
