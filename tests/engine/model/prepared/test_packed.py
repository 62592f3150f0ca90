"""Packed weights: one file for all workers of a host, the same products, and a way without them."""

import random
from pathlib import Path

import pytest
import torch

from engine.model.llama import load_model
from engine.model.prepared import packed as packed_module
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import map_weights
from engine.model.prepared.packed import packed_weights
from kernels.linear import PackError, linear, pack
from tests.engine.model.test_families import reference, save_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = save_hf(reference(num_key_value_heads=2), tmp_path_factory.mktemp("hf"))
    return prepare(source, tmp_path_factory.mktemp("cache"))


def test_products_are_those_of_the_plain_weights(folder: Path) -> None:
    """Guards the opaque bytes: mapped at a wrong offset or under a wrong description they are still numbers."""
    weights = map_weights(folder)
    packed = packed_weights(folder, weights)
    assert set(packed) == {"head"} | {name for name in weights if name.startswith("layers") and "norm" not in name}
    for name, matrix in packed.items():
        plain = weights["embedding" if name == "head" else name]
        x = torch.randn(12, plain.shape[1])
        torch.testing.assert_close(linear(x, matrix), linear(x, plain), atol=1e-4, rtol=1e-5)
        assert torch.equal(linear(x, matrix), linear(x, pack(plain))), "mapped and own copy differ"


def test_they_are_written_once_and_mapped(folder: Path) -> None:
    """Guards memory and start: each worker of a host packing for itself."""
    load_model(folder)
    (file,) = folder.glob("packed-*.bin")
    written = file.stat().st_mtime_ns
    model = load_model(folder)
    assert file.stat().st_mtime_ns == written
    assert str(file) in Path("/proc/self/maps").read_text()
    assert model._head.is_mkldnn


@pytest.mark.parametrize("harm", ["cut", "swapped"])
def test_spoiled_bytes_are_not_used(folder: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards wrong answers after a full disk or another library's file: it is made again."""
    load_model(folder)
    (file,) = folder.glob("packed-*.bin")
    whole = file.read_bytes()
    spoiled = bytearray(whole)
    if harm == "cut":
        del spoiled[len(whole) // 2 :]
    else:
        random.Random(1).shuffle(spoiled)
    file.unlink()
    file.write_bytes(spoiled)
    weights = map_weights(folder)
    packed = packed_weights(folder, weights)
    assert "it is made again" in caplog.text
    assert file.read_bytes() == whole
    for name in ("layers.0.qkv", "layers.1.down"):
        x = torch.randn(4, weights[name].shape[1])
        assert torch.equal(linear(x, packed[name]), linear(x, pack(weights[name])))
    file.unlink()


def test_a_folder_that_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a model on a read-only disk: it is packed in memory, for each worker again."""

    def cannot(path: Path, pieces: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    for file in folder.glob("packed-*"):
        file.unlink()
    monkeypatch.setattr(packed_module, "make_once", cannot)
    assert load_model(folder)._head.is_mkldnn
    assert "of its own" in caplog.text
    assert not list(folder.glob("packed-*"))


def test_where_nothing_can_be_packed_the_plain_weights_serve(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(weight: torch.Tensor) -> torch.Tensor:
        raise PackError("not here")

    for file in folder.glob("packed-*"):
        file.unlink()
    monkeypatch.setattr(packed_module, "pack", cannot)
    assert not load_model(folder)._head.is_mkldnn
    assert not list(folder.glob("packed-*"))
