"""A disk so small that a test can fill it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str = "64k") -> Iterator[Path]:
    """A file system of this size, in memory."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"a file system can be mounted by root alone: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte of a disk; what was written shows that it took effect."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 512)
    with pytest.raises(OSError, match="No space left"):
        (folder / "more").write_bytes(b"x" * 8192)
    (folder / "more").unlink(missing_ok=True)
    return filler
