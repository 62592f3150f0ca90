"""Panels of a prepared model: the bits of its matrices, one file for all workers of a host, and a way without it."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.prepared import checked as checked_module
from engine.model.prepared import panels as panels_module
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import map_weights
from engine.model.prepared.panels import panel_weights
from engine.model.prepared.pieces import Made, PieceIndex, write_pieces
from kernels.panels import Panels, unpack
from tests.engine.model.quantized import Kind, write_model
from tests.engine.model.test_families import reference, save_hf

MATRICES = {"head", "layers.0.qkv", "layers.0.output", "layers.0.gate_up", "layers.0.down"}
FINER = {
    "token_embd": Kind.Q8_0,
    "blk.0.attn_v": Kind.Q8_0,
    "blk.0.ffn_down": Kind.Q6_K,
    "output": Kind.F32,
}


def mixed(name: str) -> Kind:
    return FINER.get(name, Kind.Q4_K)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(write_model(tmp_path / "model.gguf", mixed), tmp_path / "cache")


def check(panels: dict[str, Panels], weights: dict[str, Tensor]) -> dict[str, str]:
    """The kinds. Every matrix in panels has the bits of the plain one."""
    for name, item in panels.items():
        plain = weights.get(name, weights["embedding"])
        assert torch.equal(unpack(item).view(torch.int32), plain.view(torch.int32)), name
        assert item.raw.data_ptr() % 64 == 0
    return {name: item.kind for name, item in panels.items()}


def test_each_matrix_is_as_small_as_its_file_has_it(folder: Path) -> None:
    weights = map_weights(folder)
    panels = panel_weights(folder, weights)
    assert check(panels, weights) == {
        "head": "q8",
        "layers.0.qkv": "a8",
        "layers.0.output": "q4",
        "layers.0.gate_up": "q4",
        "layers.0.down": "h8",
    }


def test_an_untied_head_is_not_the_embedding(tmp_path: Path) -> None:
    """Guards a head without codes: the embedding's, which are there, are of another matrix."""
    source = write_model(tmp_path / "model.gguf", mixed, tied=False)
    folder = prepare(source, tmp_path / "cache")
    weights = map_weights(folder)
    assert check(panel_weights(folder, weights), weights)["head"] == "f32"


def test_weights_that_were_bfloat16_are_again(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    model = reference().to(torch.bfloat16)
    folder = prepare(save_hf(model, tmp_path / "hf"), tmp_path / "cache")
    weights = map_weights(folder)
    assert set(check(panel_weights(folder, weights), weights).values()) == {"bf16"}


def test_they_are_made_once_and_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory and start: workers that start in the same moment, each making panels for itself."""
    written = []

    def counting(path: Path, pieces: Iterable[Made]) -> PieceIndex:
        written.append(path)
        return write_pieces(path, pieces)

    monkeypatch.setattr(checked_module, "write_pieces", counting)
    weights = map_weights(folder)
    found: list[dict[str, Panels]] = []
    workers = [
        threading.Thread(target=lambda: found.append(panel_weights(folder, weights)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(found) == 4
    assert len(written) == 1
    for panels in found:
        assert check(panels, weights).keys() == MATRICES
    (file,) = folder.glob("panels-*.bin")
    assert str(file) in Path("/proc/self/maps").read_text()
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("harm", ["cut", "other"])
def test_spoiled_files_are_not_used(
    folder: Path, harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards wrong answers after a full disk, or with files copied from another model's folder. What is no sound file
    is made again."""
    weights = map_weights(folder)
    panel_weights(folder, weights)
    (file,) = folder.glob("panels-*.bin")
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-64])
    else:
        (tmp_path / "hf").mkdir()
        other = prepare(save_hf(reference(), tmp_path / "hf"), tmp_path / "cache")
        panel_weights(other, map_weights(other))
        for suffix in (".bin", ".json"):
            spoiled = (other / file.name).with_suffix(suffix)
            file.with_suffix(suffix).write_bytes(spoiled.read_bytes())
    panels = panel_weights(folder, weights)
    assert ("it is made again" if harm == "cut" else "of its own") in caplog.text
    assert check(panels, weights).keys() == MATRICES


@pytest.mark.parametrize("suffix", [".bin", ".json"])
def test_a_flipped_bit_and_a_missing_file_are_made_again(folder: Path, suffix: str) -> None:
    """Guards answers that were empty: one bit of the codes in the file was another, and nobody looked."""
    weights = map_weights(folder)
    panel_weights(folder, weights)
    (path,) = folder.glob("panels-*.bin")
    whole, file = path.read_bytes(), path.with_suffix(suffix)
    for place in (100, file.stat().st_size // 2, file.stat().st_size - 100):
        raw = bytearray(file.read_bytes())
        raw[place] ^= 1
        file.write_bytes(raw)
        assert check(panel_weights(folder, weights), weights).keys() == MATRICES
        assert path.read_bytes() == whole
    file.unlink()
    assert check(panel_weights(folder, weights), weights).keys() == MATRICES
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a model on a read-only disk: panels in memory, for each worker again."""

    def cannot(path: Path, pieces: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(panels_module, "make_once", cannot)
    weights = map_weights(folder)
    assert check(panel_weights(folder, weights), weights)["layers.0.output"] == "q4"
    assert "of its own" in caplog.text
    assert not list(folder.glob("panels-*"))
