"""The model and the fault-free answers, made once for all chaos tests, and a cluster for those of one module."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.ground import Ground
from tests.chaos.strike import Reference


@pytest.fixture(scope="session")
def model_dir(demo_model: Path) -> Path:
    return demo_model


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def ground(model_dir: Path) -> Iterator[Ground]:
    with closing(Ground(model_dir)) as found:
        yield found


@pytest.fixture
def renewed(ground: Ground) -> Iterator[None]:
    """Replace whatever workers a test leaves broken, so that it does not fail the next one."""
    yield
    ground.renew()
