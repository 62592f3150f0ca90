"""A descriptor that becomes readable every now and then: for what can only be asked, such as a GPU's events."""

import contextlib
import ctypes
import os

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class Pulse:
    """A timer of the system (timerfd). Beats every `FAST_S` while `on`, every `SLOW_S` once that has lasted `TIRED_S`:
    what takes long will not be missed by a few milliseconds. Raises OSError if there is none."""

    SPIN_S = 0.0002
    FAST_S = 0.0003
    SLOW_S = 0.005
    TIRED_S = 0.1

    # Mutable state: the period it is set to, 0 when off, and since when it beats.

    def __init__(self) -> None:
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._period_s = 0.0
        self._since_s = 0.0

    def fileno(self) -> int:
        return int(self._fd)

    def set(self, on: bool, now: float, *, afresh: bool = False) -> bool:
        """Beat, or be quiet. `afresh`: something has just happened, so that more may follow soon. True for the first
        `SPIN_S` of that: no timer is as quick as a copy, so whoever asks looks again at once."""
        if on and (afresh or not self._period_s):
            self._since_s = now
        period_s = self.SLOW_S if now - self._since_s > self.TIRED_S else self.FAST_S
        self._arm(period_s if on else 0.0)
        return on and now - self._since_s < self.SPIN_S

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _arm(self, period_s: float) -> None:
        if period_s == self._period_s:
            return
        self._period_s = period_s
        period = _Timespec(0, int(period_s * 1e9))
        setting = _Itimerspec(period, period)
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
