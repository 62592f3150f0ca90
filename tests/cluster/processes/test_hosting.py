"""What a process makes sure of before it opens what it hosts."""

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.processes.collector import YOUNG_OBJECTS
from cluster.processes.hosting import Hosted, _check_model, prepared
from cluster.processes.spec import ChildSpec, ModelSource
from engine.handshake import Keyring
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


class Started:
    """The least that a process can host."""

    def start(self) -> SimpleNamespace:
        return SimpleNamespace(name="decode-0", address="127.0.0.1:1", incarnation=7, ranks=())


def open_nothing(*_: object) -> Started:
    return Started()


@pytest.fixture
def own_collector() -> Iterator[None]:
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    yield
    gc.callbacks[:] = callbacks
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_there_before_serving_is_not_collected_again(own_collector: None) -> None:
    """Guards every stream of a worker against pauses of a tenth of a second: full collections that walk all modules."""
    before = gc.get_freeze_count()
    nothing = ChildSpec(kind="decode", name="decode-0", factory=f"{__name__}:open_nothing", config={})
    hosted = Hosted(nothing, Keyring((b"s" * 32,)))
    assert gc.get_freeze_count() == before, "what is frozen too early is the garbage of the start as well"
    hosted.start()
    assert gc.get_freeze_count() > before + 10_000
    assert gc.get_threshold()[0] == YOUNG_OBJECTS


@pytest.mark.parametrize("kind", ["router", "decode"])
def test_only_a_router_s_threads_give_way_to_a_loop(kind: str) -> None:
    """Guards the step of a worker's engine, which the loop of its streams would part otherwise."""
    before_s = sys.getswitchinterval()
    try:
        Hosted(ChildSpec(kind=kind, name="it", factory=f"{__name__}:open_nothing", config={}), Keyring((b"s" * 32,)))
        assert (sys.getswitchinterval() < before_s) == (kind == "router")
    finally:
        sys.setswitchinterval(before_s)
