"""Where a running cluster can be found on its host: a private folder with its lock, its socket and its processes.

    NAME.lock   held for the supervisor's life: one supervisor of a name
    NAME.sock   the admin surface (`cluster.admin`)
    NAME.secret the cluster's secret, by which the verbs prove that they may ask
    NAME.json   the processes, so that a killed supervisor's can still be found
    NAME.key    keys the cache namespaces of tenants (`router.namespace_key`), from the first start on
    NAME.fault  what a supervisor that was asked to end could not end; until somebody has read it

All of it is worth nothing to other users, and is refused if it could be theirs. A full disk takes away what is written
here and nothing else: every process of a cluster bears a mark in its environment (`MARK`), by which it is found too.
"""

import fcntl
import logging
import os
import secrets
import stat
import string
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import msgspec

from cluster.config import ClusterConfig, ConfigError, problem
from cluster.processes.spec import LaunchError
from cluster.secret import write
from engine.messages import guarded

MARK = "_HEADRACE_CLUSTER"
"""The variable that tells a cluster's processes on its host: the path of the cluster's socket."""
KEY_BYTES = 32
SOCKET_PATH_BYTES = 107
"""The longest path of a socket that the kernel takes."""
CHILD = b"cluster.processes.child"
"""Before the name, in the command line of a process of the `process` launcher."""

log = logging.getLogger(__name__)


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


_read_processes = guarded(msgspec.json.Decoder(list[ProcessIdentity]).decode)


def start_of(pid: int) -> int | None:
    """Return when a process started; None if it does not run, or is only waiting to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def command_line(words: str, name: str) -> str:
    """Return what to type for a verb about the cluster of this name; the usual one needs no name."""
    return f"headrace {words}" if name in ("", ClusterConfig().name) else f"headrace {words} --name {name}"


class RunDir:
    """The files of one cluster name. Raises ConfigError for a folder that others can write to."""

    BUSY: ClassVar = (BlockingIOError, PermissionError)

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        self.name = config.name
        self.folder = Path(config.run_dir).expanduser() if config.run_dir else _default(environ)
        self.socket = self.folder / f"{self.name}.sock"
        if (reason := problem("name", self.name)) is not None:
            raise ConfigError(f"name: {reason}")
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES:
            raise ConfigError(f"run_dir: {self.socket} is too long for a socket's path")

    def make(self) -> None:
        """Make the folder, this user's alone. Raises ConfigError."""
        try:
            with suppress(FileExistsError):
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.lstat()
        except OSError as error:
            raise ConfigError(f"run_dir: {self.folder}: {error.strerror}") from error
        if stat.S_ISLNK(found.st_mode):
            raise ConfigError(f"run_dir: {self.folder} is a symbolic link; name the folder itself")
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
            for stale in (self._left, self.socket, self._fault, self.secret):
                stale.unlink(missing_ok=True)
            try:
                yield
            finally:
                self.socket.unlink(missing_ok=True)
                self.secret.unlink(missing_ok=True)
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

    def entrust(self, secrets: tuple[bytes, ...]) -> None:
        """Leave the secrets for the verbs of this user. Raises ConfigError."""
        write(self.secret, secrets)

    def namespace_key(self) -> str:
        """Return the key of this cluster's cache namespaces, drawn at its first start; call it while holding the name.
        Raises ConfigError for one that others may read, and where it cannot be kept."""
        path = self.folder / f"{self.name}.key"
        try:
            return _kept_key(path) or _new_key(path)
        except OSError as error:
            raise ConfigError(f"run_dir: {path}: {error.strerror}") from error

    def write(self, processes: list[ProcessIdentity]) -> None:
        """Write down which processes there are. Raises OSError, and then the last list is still there."""
        partial = self._left.with_suffix(".partial")
        try:
            partial.write_bytes(msgspec.json.encode(processes))
            partial.rename(self._left)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def processes(self) -> list[ProcessIdentity]:
        """Return the processes that were written down last and still run, those that bear the mark, and the supervisor.
        """
        try:
            known = _read_processes(self._left.read_bytes())
        except (OSError, msgspec.DecodeError):
            known = []
        listed = {process.pid: process for process in known if process.runs}
        return [*({one.pid: one for one in (*self._marked(), *self._holders())} | listed).values()]

    @property
    def mark(self) -> dict[str, str]:
        """The variable that the cluster's processes are to be started with."""
        return {MARK: os.path.realpath(self.socket)}

    def _marked(self) -> Iterator[ProcessIdentity]:
        """Yield the processes that bear the mark: this user's only, as no other's environment can be read."""
        wanted = os.fsencode(f"{MARK}={self.mark[MARK]}")
        for pid in _pids():
            with suppress(OSError):
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                    name = words[-1] if CHILD in words else words[0]
                    if (found := ProcessIdentity.of(name.decode(errors="replace"), pid)) is not None:
                        yield found

    def _holders(self) -> Iterator[ProcessIdentity]:
        """Yield who holds the lock, which is the supervisor alone. Others may have its file open, for a moment."""
        locks, path = Path("/proc/locks"), os.path.realpath(self._lock)
        with suppress(OSError):
            holding = {int(line.split()[-4]) for line in locks.read_text().splitlines() if " FLOCK " in line}
            for pid in holding - {os.getpid()}:
                with suppress(OSError):
                    is_open = any(_leads_to(f"/proc/{pid}/fd/{fd}", path) for fd in os.listdir(f"/proc/{pid}/fd"))
                    if is_open and (found := ProcessIdentity.of("supervisor", pid)) is not None:
                        yield found

    def tell_fault(self, fault: str) -> None:
        """Leave word of what did not end, for whoever has asked for the end; on a full disk it is in the log alone."""
        try:
            self._fault.write_text(fault)
        except OSError as error:
            log.warning("%s: %s", self._fault, error.strerror)

    def take_fault(self) -> str:
        """Return the word that was left, once; empty where all is well."""
        try:
            fault = self._fault.read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""
        self._fault.unlink()
        return fault

    def forget(self) -> None:
        """Remove what a killed supervisor has left in the folder."""
        for left in (self._left, self.socket, self.secret):
            with suppress(FileNotFoundError, NotADirectoryError):
                left.unlink()

    @property
    def secret(self) -> Path:
        return self.folder / f"{self.name}.secret"

    @property
    def _lock(self) -> Path:
        return self.folder / f"{self.name}.lock"

    @property
    def _fault(self) -> Path:
        return self.folder / f"{self.name}.fault"

    @property
    def _left(self) -> Path:
        return self.folder / f"{self.name}.json"


def _kept_key(path: Path) -> str:
    """Return the key of this file; empty where there is none yet, or one that a full disk has cut short. Raises
    ConfigError for one that others may read, and OSError."""
    try:
        found = path.lstat()
        kept = path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"run_dir: {path} is not a file of this user alone (0600)")
    return kept if len(kept) == 2 * KEY_BYTES and set(kept) <= set(string.hexdigits) else ""


def _new_key(path: Path) -> str:
    """Draw a key and leave it in this file, at once or not at all. Raises OSError."""
    key, partial = secrets.token_hex(KEY_BYTES), path.with_suffix(".partial-key")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(key)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return key


def _pids() -> list[int]:
    """List the processes of this host but this one."""
    return [pid for entry in os.listdir("/proc") if entry.isdigit() and (pid := int(entry)) != os.getpid()]


def _default(environ: Mapping[str, str]) -> Path:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime:
        return Path(runtime) / "headrace"
    return Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"


def _leads_to(link: str, path: str) -> bool:
    """Return whether a process's descriptor is of this file; of one that was closed meanwhile, it is not."""
    try:
        return os.readlink(link) == path
    except OSError:
        return False
