"""Where a running cluster can be found on its host: a private folder with its lock, its socket and its processes.

    NAME.lock   held for the supervisor's life: one supervisor of a name
    NAME.sock   the admin surface (`cluster.admin`)
    NAME.json   the processes, so that a killed supervisor's can still be found
    NAME.fault  what a supervisor that was asked to end could not end; until somebody has read it

All of it is worth nothing to other users, and is refused if it could be theirs.
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

from cluster.config import ClusterConfig, ConfigError
from cluster.processes.spec import LaunchError

SOCKET_PATH_BYTES = 107
"""The longest path of a socket that the kernel takes."""


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process, told apart from a later one with its pid: `started` is its start, in clock ticks after boot."""

    name: str
    pid: int
    started: int

    @classmethod
    def of(cls, name: str, pid: int) -> "ProcessIdentity | None":
        """Identify a running process; None if there is no such process on this host."""
        started = start_of(pid)
        return None if started is None else cls(name=name, pid=pid, started=started)

    @property
    def runs(self) -> bool:
        return start_of(self.pid) == self.started


def start_of(pid: int) -> int | None:
    """Return when a process started; None if it does not run, or is only waiting to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


class RunDir:
    """The files of one cluster name. Raises ConfigError for a folder that others can write to."""

    BUSY: ClassVar = (BlockingIOError, PermissionError)

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        self.name = config.name
        self.folder = Path(config.run_dir).expanduser() if config.run_dir else _default(environ)
        self.socket = self.folder / f"{self.name}.sock"
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"name: {self.name!r} cannot name a cluster's files")
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES:
            raise ConfigError(f"run_dir: {self.socket} is too long for a socket's path")

    def make(self) -> None:
        """Make the folder, this user's alone. Raises ConfigError, and OSError where it cannot be made."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(f"run_dir: {self.folder} is not a folder of this user alone (0700)")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Become the supervisor of this name. Raises LaunchError while another process is."""
        self.make()
        with self._lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except self.BUSY as error:
                raise LaunchError(f"a cluster named {self.name!r} runs here already") from error
            for stale in (self._left, self.socket, self._fault):
                stale.unlink(missing_ok=True)
            try:
                yield
            finally:
                self.socket.unlink(missing_ok=True)
                self._left.unlink(missing_ok=True)

    @property
    def is_held(self) -> bool:
        """Whether a supervisor of this name runs, or is starting or stopping."""
        if not self._lock.exists():
            return False
        with self._lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except self.BUSY:
                return True
        return False

    def write(self, processes: list[ProcessIdentity]) -> None:
        """Write down which processes there are."""
        partial = self._left.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(processes))
        partial.rename(self._left)

    def processes(self) -> list[ProcessIdentity]:
        """Return the processes that were written down last and still run."""
        try:
            known = msgspec.json.decode(self._left.read_bytes(), type=list[ProcessIdentity])
        except FileNotFoundError:
            return []
        return [process for process in known if process.runs]

    def tell_fault(self, fault: str) -> None:
        """Leave word of what did not end, for whoever has asked for the end."""
        self._fault.write_text(fault)

    def take_fault(self) -> str:
        """Return the word that was left, once; empty where all is well."""
        try:
            fault = self._fault.read_text()
        except FileNotFoundError:
            return ""
        self._fault.unlink()
        return fault

    def forget(self) -> None:
        """Remove what a killed supervisor has left in the folder."""
        self._left.unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)

    @property
    def _lock(self) -> Path:
        return self.folder / f"{self.name}.lock"

    @property
    def _fault(self) -> Path:
        return self.folder / f"{self.name}.fault"

    @property
    def _left(self) -> Path:
        return self.folder / f"{self.name}.json"


def _default(environ: Mapping[str, str]) -> Path:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime:
        return Path(runtime) / "headrace"
    return Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
