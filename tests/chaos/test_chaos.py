"""Every row of `tests.chaos.rows` against real processes over shared memory."""


import pytest

from tests.chaos.ground import Ground
from tests.chaos.rows import ROWS
from tests.chaos.strike import Reference, run_row

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("renewed")]


@pytest.fixture(scope="module")
def ground(ground: Ground, reference: Reference) -> Ground:
    reference.make(ground)
    return ground


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[str(row) for row in ROWS])
def test_row(ground: Ground, reference: Reference, number: int) -> None:
    """Guards against a wrong token, a lost or doubled one, silence, and blocks that never come back."""
    run_row(ground, reference, ROWS[number], number)
