"""A descriptor that is readable while somebody has something to do: wakes a thread that waits in `select`."""

import contextlib
import os
import select


class Bell:
    """Any thread may `ring`; the one that waits on `fileno` calls `hush`. Ringing twice is ringing once."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        # A full counter means that it rings already.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def wait(self, timeout_s: float) -> None:
        """Return when it rings, or after `timeout_s`."""
        if timeout_s > 0:
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            poller.poll(timeout_s * 1e3)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
