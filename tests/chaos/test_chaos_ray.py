"""A few rows again over Ray: its actors are never restarted by Ray, the supervisor replaces them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.ground import Ground
from tests.chaos.rows import RAY_ROWS
from tests.chaos.strike import Reference, run_row

pytestmark = [pytest.mark.chaos, pytest.mark.ray]


@pytest.fixture(scope="module")
def ground(model_dir: Path, reference: Reference) -> Iterator[Ground]:
    found = Ground(model_dir, launcher="ray")
    try:
        reference.make(found)
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("number", range(len(RAY_ROWS)), ids=[str(row) for row in RAY_ROWS])
def test_row_over_ray(ground: Ground, reference: Reference, number: int) -> None:
    """Guards against an actor that comes back under its name with another's memory, and one that never does."""
    run_row(ground, reference, RAY_ROWS[number], number)
