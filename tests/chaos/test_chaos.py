"""Every row of `tests.chaos.rows` against real processes over shared memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.ground import Ground
from tests.chaos.rows import ROWS
from tests.chaos.strike import Reference, run_row

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def ground(model_dir: Path, reference: Reference) -> Iterator[Ground]:
    found = Ground(model_dir)
    try:
        reference.make(found)
        yield found
    finally:
        found.close()


@pytest.fixture(autouse=True)
def whole(ground: Ground) -> Iterator[None]:
    """Whatever a test left behind must not fail the next one."""
    yield
    ground.renew()


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[str(row) for row in ROWS])
def test_row(ground: Ground, reference: Reference, number: int) -> None:
    """Guards against a wrong token, a lost or doubled one, silence, and blocks that never come back."""
    run_row(ground, reference, ROWS[number], number)
