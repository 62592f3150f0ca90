"""What the first process of a host makes and all others map."""

import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.model.prepared.pieces import Made, write_pieces


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that a file stands for, against every process of this host."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_once(path: Path, pieces: Callable[[], Iterable[Made]]) -> None:
    """Write a file derived from the prepared model in whose folder it lies, unless it is there. Raises OSError."""
    if path.exists():
        return
    with locked(path.parent.with_name(f"{path.parent.name}.lock")):
        if path.exists():
            return
        partial = path.with_suffix(".partial")
        try:
            write_pieces(partial, pieces())
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)


def make_folder_once(
    target: Path, is_whole: Callable[[Path], bool], fill: Callable[[Path], None]
) -> None:
    """Have `fill` write a folder, unless a whole one is there. It appears by one rename. Raises OSError, and what
    `fill` raises."""
    if is_whole(target):
        return
    with locked(target.with_name(f"{target.name}.lock")):
        if is_whole(target):
            return
        partial = target.with_name(f"{target.name}.partial")
        for rubbish in (partial, target):  # nobody else is at work: we hold the lock
            if rubbish.exists():
                shutil.rmtree(rubbish)
        partial.mkdir()
        try:
            fill(partial)
            partial.rename(target)
        finally:
            if partial.exists():
                shutil.rmtree(partial)
