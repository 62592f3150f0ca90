"""The cluster's secret: where it comes from, and how it reaches the processes that open streams with it.

`headrace up` draws one at each start and hands it to the processes that it starts, over a pipe or as an argument of a
Ray actor, so that it is on no command line and in no environment. The verbs find it in the run folder. Where workers
are started alone, all of them and the supervisor read `secret_file`: one secret a line, two while one replaces the
other.
"""

import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from cluster.config import ConfigError
from engine.handshake import MAX_SECRETS, SECRET_BYTES, Keyring

log = logging.getLogger(__name__)

_MOUNTED = "..data"
"""Kubernetes mounts a Secret as links by way of this name; its files are root's, and the pod's group may read them."""


def drawn() -> bytes:
    """Draw a secret that nobody can guess."""
    return secrets.token_bytes(SECRET_BYTES)


class SecretFile:
    """The secrets of a file, which is read again when it has changed. Fulfils `engine.handshake.Secrets`."""

    # Mutable state: what was read last, of which file, and what the log has said since of a worse one.

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where there is no such file, others could read it, or it has no secret."""
        self._path = path
        self._read_of, secrets = _read(path)
        self._told: tuple[object, str] | None = None
        self._keyring = Keyring(secrets)

    def __repr__(self) -> str:
        return f"SecretFile({self._path})"

    def valid(self) -> tuple[bytes, ...]:
        """Return the secrets, the newest first. A file that cannot be used any more changes nothing, and is logged once
        for each thing that is wrong with it."""
        found = None
        try:
            found = _state(self._path.stat())
            if found != self._read_of:
                self.reread()
            self._told = None
        except (OSError, ConfigError) as error:
            if self._told != (found, str(error)):
                self._told = found, str(error)
                log.error("the secrets stay as they were: %s", error)
        return self._keyring.valid()

    def reread(self) -> None:
        """Take over what the file says now. Raises ConfigError where it cannot be used; nothing has changed then."""
        self._read_of, secrets = _read(self._path)
        self._keyring.replace(secrets)


def opened(path: str) -> SecretFile | Keyring:
    """Return the secrets of a file, which is made where there is none yet; a new one, of this process alone, where no
    file is named. Raises ConfigError."""
    if not path:
        return Keyring((drawn(),))
    file = Path(path).expanduser()
    if not file.exists():
        write(file, (drawn(),))
        log.warning("there was no secret at %s: one was made", file)
    return SecretFile(file)


def write(path: Path, valid: tuple[bytes, ...]) -> None:
    """Write secrets for this user alone, at once or not at all. Raises ConfigError."""
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.writelines(f"{secret.hex()}\n" for secret in valid)
            os.rename(partial, path)
        except OSError:
            os.unlink(partial)
            raise
    except OSError as error:
        raise ConfigError(f"secret file {path}: {error.strerror}") from error


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> tuple[tuple[int, int, int], tuple[bytes, ...]]:
    try:
        with path.open() as file:
            found = os.fstat(file.fileno())
            lines = [line.strip() for line in file.read(4096).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secret file {path}: {getattr(error, 'strerror', None) or error}") from error
    if (found.st_mode & 0o077) and not _is_mounted(path, found):
        raise ConfigError(f"secret file {path}: others can read it (mode {stat.S_IMODE(found.st_mode):o}, not 600)")
    if not 0 < len(lines) <= MAX_SECRETS:
        raise ConfigError(f"secret file {path}: has {len(lines)} secrets, one a line: there may be one, or two")
    values = tuple(_bytes(line) for line in lines)
    if any(len(value) < SECRET_BYTES for value in values):
        raise ConfigError(
            f"secret file {path}: a secret has at least {2 * SECRET_BYTES} hexadecimal digits, or {SECRET_BYTES} other "
            "characters"
        )
    return _state(found), values


def _is_mounted(path: Path, found: os.stat_result) -> bool:
    return (path.parent / _MOUNTED).exists() and found.st_uid == 0 and not found.st_mode & 0o022


def _bytes(line: str) -> bytes:
    """Return the bytes of hexadecimal digits, and of anything else as it is written."""
    try:
        return bytes.fromhex(line)
    except ValueError:
        return line.encode()
