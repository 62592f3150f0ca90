"""The model and the fault-free answers, made once for all chaos tests."""

from pathlib import Path

import pytest

from engine.model.cache import prepare
from tests.chaos.strike import Reference


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(None, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()
