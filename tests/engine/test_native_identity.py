"""Blocks that are named in native code have the names that `engine.identity` gives them."""

import random
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import setuptools

from engine import identity
from engine.identity import Hasher, chain, hash_piece, root
from engine.native_identity import native_hasher, use_native_identities

SOURCE = Path(__file__).parents[2] / "kernels" / "host" / "identity.cpp"


def build(source: Path, library: Path) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as its sources are now, wherever this is installed."""
    return build(SOURCE, tmp_path_factory.mktemp("host") / "host.so")


@pytest.fixture
def hasher(built: Path) -> Hasher:
    found = native_hasher(built)
    assert found is not None
    return found


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    identity.hash_with(hash_piece)
    identity._piece.cache_clear()


def test_an_installation_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the extension that setup.py names: where it cannot be built, an installation goes on without it."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", told.update)
    monkeypatch.chdir(SOURCE.parents[2])
    runpy.run_path("setup.py")
    (mine,) = [one for one in told["ext_modules"] if one.name == "kernels._native_host"]
    command = told["cmdclass"]["build_ext"](setuptools.Distribution({"ext_modules": [mine]}))
    command.build_lib, command.build_temp = str(tmp_path / "lib"), str(tmp_path / "objects")
    command.ensure_finalized()
    command.run()
    (library,) = (tmp_path / "lib" / "kernels").iterdir()
    assert library.name.startswith("_native_host") and library.name.endswith(tuple(EXTENSION_SUFFIXES))
    assert native_hasher(library) is not None


@pytest.mark.parametrize("stride", [4, 60, 64, 108, 112, 116, 236, 240, 244, 1024])
def test_names_are_the_same(hasher: Hasher, stride: int) -> None:
    """Guards against a router and a worker that name the same block differently, one of which has no compiler: at the
    borders of the hash's own blocks, and however many blocks there are."""
    draws = random.Random(stride)
    for blocks in (0, 1, 2, 31, 32, 33, 200):
        parent, packed = draws.randbytes(16), draws.randbytes(blocks * stride)
        assert hasher(parent, packed, stride) == hash_piece(parent, packed, stride)


def test_another_parent_or_another_rest_is_left_to_python(hasher: Hasher) -> None:
    """Guards against reading behind what was given: a parent of another length, tokens that fill no block."""
    for parent, packed in ((b"p" * 15, b"t" * 128), (b"", b"t" * 64), (b"p" * 16, b"t" * 100), (b"p" * 16, b"t")):
        assert hasher(parent, packed, 64) == hash_piece(parent, packed, 64)


def test_a_process_goes_on_with_it(hasher: Hasher, restored: None) -> None:
    """Guards against pieces that were remembered from the other way, and against chains that are joined wrongly."""
    tokens = [random.Random(7).randrange(1 << 32) for _ in range(16 * 75 + 3)]
    before = chain(root(b"n", "f"), tokens, 16)
    identity._piece.cache_clear()
    calls = []
    identity.hash_with(lambda *given: calls.append(given) or hasher(*given))  # type: ignore[func-returns-value]
    assert chain(root(b"n", "f"), tokens, 16) == before
    assert [len(packed) // stride for _, packed, stride in calls] == [32, 32, 11]


def test_what_names_blocks_otherwise_is_not_used(tmp_path: Path) -> None:
    """Guards against a library of other sources, or of no use, after which no worker would know a router's blocks."""
    (tmp_path / "text.so").write_text("no library")
    assert native_hasher(tmp_path / "text.so") is None
    other = tmp_path / "other.cpp"
    other.write_text(SOURCE.read_text().replace("0x01010000", "0x01010100"))
    assert native_hasher(build(other, tmp_path / "other.so")) is None


def test_what_is_installed_is_used(restored: None) -> None:
    """Guards against a library that is built and never found; without one, nothing changes."""
    libraries = [found for suffix in EXTENSION_SUFFIXES for found in SOURCE.parents[1].glob(f"_native_host{suffix}")]
    assert use_native_identities() is bool(libraries)
    assert (identity._hasher is hash_piece) is not bool(libraries)
