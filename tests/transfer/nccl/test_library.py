"""The binding against a libnccl as it is shipped, where one is installed: symbols, versions, ids, and an error that it
gives without a GPU. And that the fake has the same symbols."""

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.transfer.fake_device import library_path
from transfer.nccl.library import (
    _PROTOTYPES,
    ID_BYTES,
    IN_PROGRESS,
    ONE_SIDED_PROTOTYPES,
    NcclError,
    NcclLibrary,
    _Config,
)
from transfer.transport import TransferError


@pytest.fixture
def shipped() -> Path:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        for path in Path(folder, "lib").glob("libnccl.so*"):
            return path
    pytest.skip("no libnccl is installed: pip install headrace[cuda13]")


def test_the_shipped_library_is_bound(shipped: Path) -> None:
    library = NcclLibrary(shipped)
    assert library.version >= 22700 and library.can_put == (library.version >= 22902)
    found = ctypes.create_string_buffer(ID_BYTES)
    raw = ctypes.CDLL(str(shipped))
    assert raw.ncclGetUniqueId(found) == 0 and any(found.raw)
    raw.ncclGetErrorString.restype = ctypes.c_char_p
    assert b"in progress" in raw.ncclGetErrorString(IN_PROGRESS)


def test_its_errors_are_told(shipped: Path) -> None:
    """Without a device, a communicator is refused with the library's own words."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("with a GPU it would wait for its peer")
    library = NcclLibrary(shipped)
    unique = ctypes.create_string_buffer(ID_BYTES)
    ctypes.CDLL(str(shipped)).ncclGetUniqueId(unique)
    with pytest.raises(NcclError, match=r"cuda|CUDA"):
        library.join(unique.raw, 0, 2, "test")
    if library.can_put:
        with pytest.raises(NcclError, match=r"ncclMemAlloc: .*(cuda|CUDA)"):
            library.allocate(1 << 20)


def test_a_communicators_name_outlives_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory that NCCL reads when it is long somebody else's: `parseCommConfig` copies the address of `commName`
    (2.27 to 2.30, `src/init.cc`), and a thread that makes the communicator hands it to profilers."""
    library = NcclLibrary(library_path())
    kept: list[int] = []

    def init(comm: Any, ranks: int, unique_id: Any, rank: int, config: Any) -> int:
        kept.append(ctypes.c_void_p.from_buffer(config._obj, _Config.commName.offset).value or 0)
        comm._obj.value = 1
        return IN_PROGRESS

    monkeypatch.setattr(library._lib, "ncclCommInitRankConfig", init)
    name = "headrace-of-forty-characters-and-no-less"
    library.join(bytes(ID_BYTES), 0, 2, name)
    others = [bytes([65 + n % 26]) * len(name) for n in range(4096)]  # where it was, if it is gone
    assert ctypes.string_at(kept[0], len(name)) == name.encode() and others


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="no NCCL"):
        NcclLibrary(tmp_path / "libnccl.so.2")


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = library_path()
    monkeypatch.setenv("FAKE_NCCL_VERSION", "21903")
    with pytest.raises(TransferError, match=r"2\.19\.3 is older than 2\.27\.0"):
        NcclLibrary(path)


def test_the_fake_has_every_verb() -> None:
    fake = ctypes.CDLL(str(library_path()))
    assert all(hasattr(fake, name) for name in (*_PROTOTYPES, *ONE_SIDED_PROTOTYPES))
