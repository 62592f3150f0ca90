"""Real processes, real faults: every row of `tests.chaos.rows`, and some that are no table rows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.model.cache import prepare
from tests.chaos.ground import Ground
from tests.chaos.rows import ROWS, Row
from tests.chaos.strike import Reference, run_row

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(None, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def ground(model_dir: Path, reference: Reference) -> Iterator[Ground]:
    found = Ground(model_dir)
    try:
        reference.make(found)
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[str(row) for row in ROWS])
def test_row(ground: Ground, reference: Reference, number: int) -> None:
    """Guards against a wrong token, a lost or doubled one, silence, and blocks that never come back."""
    row: Row = ROWS[number]
    run_row(ground, reference, row, number)
