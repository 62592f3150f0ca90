"""An engine on the native kernels: which of them it takes, and whose cores."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from engine import cores, device
from engine.backends.attention import TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.config import EngineConfig
from engine.cores import Cores
from engine.device import EngineDevice, open_device
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from engine.step import Row, StepPlan
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams
from kernels.native import native
from tests.engine.model.quantized import Kind, write_model
from tests.engine.model.test_families import reference, save_hf

THREADS = 2
"""Another worker's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = save_hf(reference(num_attention_heads=4, num_key_value_heads=2), tmp_path_factory.mktemp("hf"))
    return prepare(source, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cores]:
    """Another worker of this host that has nothing to do."""
    if native() is None:
        pytest.skip("the native kernels were not built here: they need a C++ compiler at installation")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "LOOK_S", 0.0)
    cores.process_cores.cache_clear()
    path = tmp_path / f"headrace-cores-{cores.os.getuid()}"
    worker = Cores(path, THREADS)
    yield worker
    if (own := cores.process_cores(1)) is not None:
        own.close()
    cores.process_cores.cache_clear()
    worker.close()


def prefill(opened: EngineDevice, tokens: int) -> object:
    record = RequestRecord(
        request=RequestId("r"),
        tokens=list(range(1, tokens + 1)),
        prompt_tokens=tokens,
        max_tokens=1,
        seed=0,
        sampling=SamplingParams(),
    )
    blocks = [BlockId(at) for at in range(-(-tokens // opened.layout.block_size))]
    row = Row(record.request, record, record.tokens, 0, tokens, blocks, draw=True)
    return opened.runner.run(StepPlan((row,)))


def test_a_prompt_is_read_with_the_cores_of_an_idle_worker(
    folder: Path, idle: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the wiring: an engine that is at work asks how many threads it may use, each time."""
    kernels = native()
    assert kernels is not None
    monkeypatch.setattr(kernels, "threads", kernels.threads)
    opened = open_device(EngineConfig(model_dir=str(folder), pool_bytes=1 << 20))
    lent = kernels.threads
    told: list[int] = []
    monkeypatch.setattr(kernels, "threads", lambda: told.append(lent()) or told[-1])
    token = prefill(opened, 40)
    assert max(told) == 1 + THREADS
    told.clear()
    with idle.at_work():
        assert prefill(opened, 40) == token
    assert set(told[2:]) == {1}, "given back"
    told.clear()
    prefill(opened, 8)
    assert max(told) == 1 + THREADS, "a short step too"
    opened.kv.close()


def test_without_the_library_pytorch_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards an installation without a compiler: it answers, and only who insists on the native kernels is refused."""
    monkeypatch.setattr(device, "find_native", lambda: None)
    config = EngineConfig(model_dir=str(folder), pool_bytes=1 << 20)
    opened = open_device(config)
    assert not isinstance(opened.runner._attention, NativeAttention)  # type: ignore[attr-defined]
    assert prefill(opened, 20)
    opened.kv.close()
    with pytest.raises(ValueError, match="were not built"):
        open_device(EngineConfig(model_dir=str(folder), pool_bytes=1 << 20, attention="native"))


def test_codes_are_multiplied_in_integers_unless_told_otherwise(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards two things: KV of one arithmetic taken for KV of the other, and a warning about workers of a model without
    codes, for which the setting changes no bit."""
    if native() is None:
        pytest.skip("the native kernels were not built here: they need a C++ compiler at installation")
    coded = prepare(write_model(tmp_path / "model.gguf", lambda _: Kind.Q4_K), tmp_path / "cache")

    def opened(model: Path, arithmetic: Literal["auto", "integer", "integer16", "float32"]) -> EngineDevice:
        found = open_device(EngineConfig(model_dir=str(model), pool_bytes=1 << 22, arithmetic=arithmetic))
        found.kv.close()
        return found

    asked: tuple[Literal["auto", "integer", "integer16", "float32"], ...] = ("auto", "integer", "integer16", "float32")
    auto, integer, short, float32 = (opened(coded, one).arithmetic for one in asked)
    assert auto == integer == f"{float32} in integers of 23 bits" and short == f"{float32} in integers of 16 bits"
    assert opened(coded, "auto").is_deterministic
    assert len({opened(folder, one).arithmetic for one in asked}) == 1
    config = EngineConfig(model_dir=str(coded), pool_bytes=1 << 22, arithmetic="integer")
    with pytest.raises(ValueError, match=r"engine\.arithmetic: the torch kernels"):
        open_device(msgspec.structs.replace(config, attention="torch"))
    monkeypatch.setattr(device, "find_native", lambda: None)
    with pytest.raises(ValueError, match=r"engine\.arithmetic: .* not built"):
        open_device(config)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
def test_kv_of_8_bits_is_the_native_kernels_too(
    folder: Path, kv_dtype: Literal["float32", "int8", "fp8"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards 8-bit KV that PyTorch's kernels attend to unasked, and KV of one kind of kernels taken for the other's:
    what rounds is named, and differs."""
    kernels = native()
    if kernels is None:
        pytest.skip("the native kernels were not built here: they need a C++ compiler at installation")
    config = EngineConfig(model_dir=str(folder), pool_bytes=1 << 20, kv_dtype=kv_dtype, deterministic="on")
    mine = open_device(config)
    theirs = open_device(msgspec.structs.replace(config, attention="torch"))
    assert mine.arithmetic == f"native {kernels.sources}" and mine.arithmetic != theirs.arithmetic
    assert mine.fingerprint == theirs.fingerprint and mine.layout == theirs.layout
    monkeypatch.setattr(TorchAttention, "attend", None)
    assert prefill(mine, 40)
    with pytest.raises(TypeError, match="not callable"):
        prefill(theirs, 40)
    mine.kv.close()
    theirs.kv.close()


def test_an_engine_computes_in_what_its_model_was_prepared_in(folder: Path) -> None:
    """Guards against a pool whose blocks are laid out for another type than the steps write."""
    config = EngineConfig(model_dir=str(folder), pool_bytes=1 << 20)
    prepared = ModelConfig.load(folder).dtype
    assert config.dtype == "auto" and prepared == "float32"
    opened = open_device(config)
    assert opened.layout.dtype == prepared and opened.fingerprint.endswith(f"/{prepared}")
    opened.kv.close()
    with pytest.raises(ValueError, match=r"engine\.dtype: bfloat16, but .* prepared in float32"):
        open_device(msgspec.structs.replace(config, dtype="bfloat16"))
