"""The `headrace` command as it is started: small, so that Ctrl-C is heard in plain words before anything is loaded.

What a person types is read in `cluster/cli/command.py`.
"""

import os
import select
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper

UNREAD = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status. Whoever stops reading (`headrace status | head -1`) ends it quietly."""
    open_closed()
    show_anything()
    # Loading takes a second. Until a verb listens for itself, Ctrl-C ends this process as it does any other.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from cluster.cli.command import run

        try:
            return run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread(1):
            raise
        # The interpreter writes what it still holds once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return UNREAD
    finally:
        signal.signal(signal.SIGINT, before)


def open_closed() -> None:
    """Open the null device on those of descriptors 0 to 2 that are closed, as in `headrace down >&-`: otherwise a
    socket or a file would get their number, and what is printed."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # It is the lowest that is free, so it is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def show_anything() -> None:
    """Print a question mark for what the output's encoding does not have, such as the bars of `top` in Latin-1, or a
    file's name that is no UTF-8. Whoever asks for something else by PYTHONIOENCODING gets that."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def is_unread(descriptor: int) -> bool:
    """Say whether this is a pipe that nobody reads any more."""
    looking = select.poll()
    looking.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in looking.poll(0))


if __name__ == "__main__":
    sys.exit(main())
