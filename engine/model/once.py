"""What the first process of a host makes and all others map."""

import fcntl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.model.pieces import Made, write_pieces


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
