"""A model that takes no time: two layers of random weights."""

from pathlib import Path

import pytest

from engine.model.prepared.cache import prepare
from tests.engine.model.test_families import reference, save_hf


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = save_hf(reference(num_key_value_heads=2), tmp_path_factory.mktemp("tiny"))
    return prepare(source, tmp_path_factory.mktemp("cache"))
