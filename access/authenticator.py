"""Tells who a caller is, by API key, by certificate, or by both, from a file that may change at any time.

A file that cannot be read, or is wrong, replaces nothing: the last good one stays in force, and the log says why, once.
Requests are checked one by one, so a credential that was taken away opens nothing more, also on connections that are
open already. No method logs or repeats a key.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from access.config import AccessConfig, AccessError
from access.keys import bearer, is_key, key_id
from access.tenants import (
    ANYONE,
    Caller,
    Credential,
    CredentialTable,
    DeniedError,
    Tenant,
    may_others_write,
    parse_table,
)

RECHECK_S = 1.0
"""How long a change of the file may go unnoticed."""

log = logging.getLogger(__name__)


class Authenticator:
    """Every process that listens has one; any thread may ask it.

    Mutable state, under a lock but for reading: the table in force, what the file looked like when it was read, and
    when that was last compared.
    """

    def __init__(self, config: AccessConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys file, if there is one. Raises AccessError."""
        self._config = config
        self._clock = clock
        self._path = Path(config.keys_file).expanduser()
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._checked_s = clock()
        self._index(CredentialTable())
        if config.keys_file:
            self._seen = self._look()
            self._index(self._read())

    def __repr__(self) -> str:
        return f"Authenticator({self.summary})"

    @property
    def summary(self) -> str:
        return f"{len(self._keys)} keys, {len(self._names)} certificates, {len(self._tenants)} tenants"

    @property
    def is_open(self) -> bool:
        """True where no credentials are configured, and everybody is served."""
        return not self._config.has_credentials

    def tenant(self, name: str) -> Tenant:
        """Return what a tenant may use; one that is not listed has no limits."""
        self._refresh()
        return self._tenants.get(name, Tenant())

    def caller(self, authorization: str, names: Sequence[str] | None) -> Caller:
        """Tell whose request it is. `authorization` is the value of that header, or metadata; `names` are those in the
        client's verified certificate, None where it has shown none. Raises DeniedError."""
        if self.is_open:
            return ANYONE
        self._refresh()
        if self._config.client_ca_file and names is None:
            raise DeniedError("UNAUTHENTICATED", "a client certificate is needed")
        keyed = self._by_key(authorization) if authorization else None
        certified = self._by_name(names or ())
        if keyed is None and certified is None:
            if names is None:
                raise DeniedError("UNAUTHENTICATED", "an API key is needed: authorization: Bearer KEY")
            raise DeniedError("PERMISSION_DENIED", "the certificate is that of no tenant, and there is no API key")
        if keyed and certified and keyed.tenant and certified.tenant and keyed.tenant != certified.tenant:
            raise DeniedError("PERMISSION_DENIED", "the API key and the client certificate are of different tenants")
        found = keyed or certified
        assert found is not None
        return found

    def _by_key(self, authorization: str) -> Caller:
        shown = bearer(authorization)
        kept = self._keys.get(key_id(shown))
        if kept is None or not is_key(shown, kept):
            raise DeniedError("UNAUTHENTICATED", "the API key is not known here")
        return _caller(kept, f"key {kept.id}")

    def _by_name(self, names: Sequence[str]) -> Caller | None:
        """Find the tenant of a certificate. Without a keys file a certificate's first name is its tenant, and each may
        read metrics too: the authority alone decides."""
        if not self._config.keys_file:
            return Caller(names[0], "certificate", names[0]) if names else None
        for name in names:
            if (kept := self._names.get(name)) is not None:
                return _caller(kept, name)
        return None

    def _refresh(self) -> None:
        """Read the file again if it has changed since; look at most every RECHECK_S."""
        now = self._clock()
        if not self._config.keys_file or now - self._checked_s < RECHECK_S:
            return
        with self._lock:
            if now - self._checked_s < RECHECK_S:
                return
            self._checked_s = now
            seen = self._look()
            if seen == self._seen:
                return
            before, self._seen = self._seen, seen
            try:
                self._index(self._read())
            except AccessError as error:
                if isinstance(error.__cause__, OSError):
                    # Not what the file says: it may be read in a moment, and take a key away.
                    self._seen = before
                log.error("%s; the credentials before it stay in force", error)
            else:
                log.warning("%s was read again: %r", self._path, self)

    def _look(self) -> tuple[int, ...] | None:
        """Return what changes when the file does; None where it is not there."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode

    def _read(self) -> CredentialTable:
        """Raises AccessError with the file's name."""
        try:
            mode = os.stat(self._path).st_mode
            data = self._path.read_bytes()
        except OSError as error:
            raise AccessError(f"access.keys_file: {self._path}: {error.strerror}") from error
        if may_others_write(mode):
            raise AccessError(f"access.keys_file: {self._path}: others than its owner may write to it")
        try:
            return parse_table(data)
        except AccessError as error:
            raise AccessError(f"access.keys_file: {self._path}: {error}") from error

    def _index(self, table: CredentialTable) -> None:
        self._tenants = table.tenants
        self._keys = {key.id: key for key in table.keys}
        self._names = {certificate.name: certificate for certificate in table.certificates}


def _caller(kept: Credential, word: str) -> Caller:
    return Caller(kept.tenant, kept.role, word, kept.max_priority)
