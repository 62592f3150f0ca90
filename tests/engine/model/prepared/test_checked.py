"""Prepared models whose files were damaged: found at the first use after a boot, and made again."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.model.config import ModelError
from engine.model.prepared import checked
from engine.model.prepared.cache import prepare
from engine.model.prepared.checked import CheckRecord, check_folder, check_once, sealed_files
from engine.model.prepared.loading import map_weights
from engine.model.prepared.panels import panel_weights
from tests.engine.model.quantized import Kind, write_model
from tests.small_disk import fill, small_disk

FILES = (
    "config.json",
    "weights.bin",
    "weights.json",
    "codes.bin",
    "codes.json",
    "tokenizer.json",
    "chat_template.jinja",
    "text.json",
    "digests.json",
)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_model(tmp_path / "model.gguf", lambda name: Kind.Q4_K)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change a file in place, as a disk would: with the times that it had."""
    was = path.stat()
    raw = bytearray(path.read_bytes())
    change(raw)
    with path.open("r+b") as file:
        file.write(raw)
        file.truncate()
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def flip(raw: bytearray) -> None:
    raw[len(raw) // 2] ^= 4


def erase(raw: bytearray) -> None:
    raw[len(raw) // 3 : len(raw) // 2] = bytes(len(raw) // 2 - len(raw) // 3)


@pytest.mark.parametrize("change", [flip, erase, None], ids=["flip", "zeros", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_or_missing_file_is_made_again(
    source: str, tmp_path: Path, name: str, change: Callable[[bytearray], None] | None
) -> None:
    """Guards against fluent wrong answers: zeros in the weights, or another tokenizer, went unnoticed."""
    folder = prepare(source, tmp_path / "cache")
    whole = contents(folder)
    assert set(whole) == set(FILES)
    if change is None or not whole[name]:
        (folder / name).unlink()
    else:
        damage(folder / name, change)
        assert contents(folder) != whole, "the damage has been done"
    assert prepare(source, tmp_path / "cache") == folder
    assert contents(folder) == whole


def test_the_fault_names_the_tensor(source: str, tmp_path: Path) -> None:
    folder = prepare(source, tmp_path / "cache")
    damage(folder / "weights.bin", flip)
    with pytest.raises(ModelError, match=r"weights\.bin: (layers\.\d\.\w+|embedding|\w+) holds other bytes"):
        check_folder(folder)


def test_a_folder_is_read_once_after_each_boot(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the start of a host: a worker that reads gigabytes which another has read a moment ago."""
    read: list[Path] = []

    def counting(folder: Path, progress: object = None) -> int:
        read.append(folder)
        return check_folder(folder)

    folder = prepare(source, tmp_path / "cache")
    monkeypatch.setattr(checked, "check_folder", counting)
    for _ in range(2):
        prepare(source, tmp_path / "cache")
    assert not read, "who has written it knows what it holds"
    monkeypatch.setattr(checked, "_boot", lambda: "another boot")
    for _ in range(3):
        prepare(source, tmp_path / "cache")
        check_once(folder)
    assert read == [folder]
    os.utime(folder / "weights.bin")
    check_once(folder)
    assert read == [folder, folder], "somebody has touched it since"


def test_a_record_is_of_the_latest_boots(source: str, tmp_path: Path) -> None:
    """Guards hosts that share a cache, each of which would make the others read all of it again."""
    folder = prepare(source, tmp_path / "cache")
    files = sealed_files(folder)
    for number in range(20):
        CheckRecord(folder, f"boot {number}").note(files)
    assert CheckRecord(folder, "boot 19").knows(files) and CheckRecord(folder, "boot 13").knows(files)
    assert not CheckRecord(folder, "boot 5").knows(files)


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_where_nothing_can_be_noted_the_model_is_read_and_serves(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """Guards a model on a full or read-only disk, which must serve, and must not serve damaged."""
    folder = prepare(source, tmp_path / "cache")
    CheckRecord(folder)._path.unlink()
    refused: list[Path] = []

    def cannot(path: Path, *rest: object) -> None:
        refused.append(path)
        raise OSError(problem, os.strerror(problem), str(path))

    monkeypatch.setattr(Path, "write_bytes", cannot)
    monkeypatch.setattr(checked, "locked", cannot)
    check_once(folder)
    assert len(refused) == 2 and not CheckRecord(folder).knows(sealed_files(folder))
    damage(folder / "codes.bin", flip)
    with pytest.raises(ModelError, match=r"codes\.bin"):
        check_once(folder)


def test_a_disk_that_is_full_at_a_conversion_is_said_and_left_as_it_was(source: str, tmp_path: Path) -> None:
    """Guards a newcomer's small disk: a line that says what is missing, and nothing half-made that looks whole."""
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(ModelError, match=r"preparing .*model\.gguf: No space left on device"):
            prepare(source, disk)
        assert not [path for path in disk.iterdir() if path.is_dir() and path.name != "seen"]


def test_a_prepared_model_on_a_full_disk_serves(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a cluster whose disk has filled up since: it starts, checks its model, and makes panels in memory."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        folder = prepare(source, disk)
        for note in (CheckRecord(folder)._path, *(disk / "seen").iterdir()):
            note.unlink()
        filler = fill(disk)
        caplog.set_level("INFO")
        assert prepare(source, disk) == folder
        assert caplog.text.count("not noted (No space left on device)") == 2
        weights = map_weights(folder)
        assert panel_weights(folder, weights) and not list(folder.glob("panels-*.bin"))
        assert "every worker makes panels of its own: [Errno 28] No space left" in caplog.text
        damage(folder / "weights.bin", flip)
        filler.unlink()
        assert prepare(source, disk) == folder and check_folder(folder)
