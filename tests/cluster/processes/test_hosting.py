"""What a process makes sure of before it opens what it hosts."""

import logging
from pathlib import Path

import pytest

from cluster.processes.hosting import _check_model, prepared
from cluster.processes.spec import ChildSpec, ModelSource
from engine.model.config import ModelError
from engine.model.prepared.checked import check_folder
from tests.engine.model.quantized import Kind, write_model


@pytest.fixture
def spec(tmp_path: Path) -> ChildSpec:
    model = write_model(tmp_path / "model.gguf", lambda name: Kind.Q4_K)
    source = ModelSource(model=model, cache_dir=str(tmp_path / "cache"))
    return ChildSpec(kind="decode", name="decode-0", factory="", config={}, model_dir=prepared(source), source=source)


@pytest.mark.parametrize("name", ["weights.bin", "tokenizer.json", ""], ids=["weights", "tokenizer", "all"])
def test_a_worker_that_is_started_again_does_not_open_a_damaged_model(
    spec: ChildSpec, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a cluster that runs for weeks: its model is prepared once, and its workers are replaced much later."""
    folder = Path(spec.model_dir)
    _check_model(spec)
    assert not caplog.records
    if name:
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    else:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    with caplog.at_level(logging.WARNING):
        _check_model(spec)
    assert "the model is prepared again" in caplog.text
    check_folder(folder)


def test_a_worker_does_not_take_another_model_instead(spec: ChildSpec) -> None:
    """Guards a source that was replaced while the cluster runs: its other workers serve the old one."""
    folder = Path(spec.model_dir)
    (folder / "weights.bin").unlink()
    assert spec.source is not None
    write_model(Path(spec.source.model), lambda name: Kind.Q8_0)
    with pytest.raises(ModelError, match="its source is another model now"):
        _check_model(spec)
