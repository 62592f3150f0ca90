"""TLS from files that may change at any time: the next handshake has what they hold then.

A pair that does not fit together, as while one of two files was already written, or that has expired, replaces nothing
that is better, and the log says so.
TLS 1.3 alone and no session tickets: a ticket would let a client in without showing its certificate again.
"""

import logging
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from access.config import AccessError, PemSettings
from access.validity import Validity, validity_of

log = logging.getLogger(__name__)


class PemFiles(msgspec.Struct, frozen=True):
    """What the files held when they were last good. `client_ca` is empty where clients need no certificate."""

    chain: bytes
    key: bytes
    client_ca: bytes
    validity: Validity

    def __repr__(self) -> str:
        return f"PemFiles({len(self.chain)} bytes of certificates)"


class ServerCertificates:
    """Any thread may use it.

    Mutable state, under a lock: what the files looked like when they were read, what they held, the contexts made of
    it, when to look again at files that were refused, and what the log has said.
    """

    def __init__(
        self,
        files: PemSettings,
        check: Callable[[ssl.SSLContext], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`check` is asked about what the files hold, before that counts, with a listening socket's context; `clock`
        tells the time that certificates speak of. Raises AccessError for files that cannot be used, and what `check`
        raises; a certificate that has expired is used, and the log says so."""
        self._files = files
        self._check = check
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: tuple[object, ...] = ()
        self._told: tuple[object, ...] = ()
        self._again_s = math.inf
        self._said = ""
        self._bad: Validity | None = None
        self._pem, self._contexts = self._load()
        self._tell_if_bad()

    @property
    def needs_client(self) -> bool:
        return bool(self._files.ca)

    @property
    def chain_file(self) -> str:
        return self._files.chain

    def pem(self) -> PemFiles:
        """Return what the files hold now, or held when they were last good."""
        with self._lock:
            seen = self._look()
            if seen != self._seen and (seen != self._told or self._clock() >= self._again_s):
                self._again_s = math.inf
                try:
                    self._pem, self._contexts = self._load(self._pem.validity)
                except AccessError as error:
                    if str(error) != self._said:
                        log.error("%s; the certificates before it stay in force", error)
                    self._said = str(error)
                    cause = error.__cause__
                    if isinstance(cause, ssl.SSLError) or not isinstance(cause, OSError):  # else it may soon be read
                        self._told = seen
                else:
                    self._said = ""
                    log.warning("the certificate %s was read again", self._files.chain)
            self._tell_if_bad()
            return self._pem

    def context(self, *, lets_in: bool = False) -> ssl.SSLContext:
        """Return a context for a listening socket, good for as long as that. Where clients need certificates, `lets_in`
        takes those in that show none: who listens must refuse them. A wrong certificate is refused here in any case."""
        outer = self._make(lets_in)

        def latest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            self.pem()
            with self._lock:
                connection.context = self._contexts[lets_in]

        # OpenSSL calls it in every handshake, also for a client that names no server.
        outer.sni_callback = latest
        return outer

    def _tell_if_bad(self) -> None:
        """Log, once for each certificate, that clients refuse it."""
        validity = self._pem.validity
        if validity is not self._bad and (problem := validity.problem(self._clock())):
            self._bad = validity
            log.error("%s: %s: %s; clients refuse it", self._files.chain_setting, self._files.chain, problem)

    def _load(self, before: Validity | None = None) -> tuple[PemFiles, dict[bool, ssl.SSLContext]]:
        """Read the files, check that they fit together and are not worse than what was good until `before` says, and
        make a context of them for each `lets_in`: later they may be broken. Raises AccessError."""
        seen = self._look()
        files = self._files
        chain = _read(files.chain_setting, files.chain)
        pem = PemFiles(
            chain,
            _read(files.key_setting, files.key),
            _read(files.ca_setting, files.ca) if files.ca else b"",
            _validity(files, chain),
        )
        contexts = {lets_in: self._make(lets_in) for lets_in in (False, True)}
        if self._check is not None:
            self._check(contexts[False])
        now_s = self._clock()
        if before and (problem := pem.validity.problem(now_s)) and not before.problem(now_s):
            self._again_s = pem.validity.begins_s if now_s < pem.validity.begins_s else before.ends_s
            raise AccessError(f"{files.chain_setting}: {files.chain}: {problem}")
        if self._look() != seen:
            raise AccessError(f"{files.chain_setting}: the files changed while they were read")
        self._seen = seen
        return pem, contexts

    def _make(self, lets_in: bool) -> ssl.SSLContext:
        """Raises AccessError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        load_files(context, self._files)
        if self._files.ca:
            context.verify_mode = ssl.CERT_OPTIONAL if lets_in else ssl.CERT_REQUIRED
        return context

    def _look(self) -> tuple[object, ...]:
        files = (self._files.chain, self._files.key, self._files.ca)
        return tuple(_state(_path(file)) for file in files if file)


def ends_s(front: ServerCertificates | None, internal: ServerCertificates | None) -> Mapping[str, float]:
    """Return until when the certificates in force are good, in seconds since 1970, by what they are for; infinity
    where there are none."""
    both = {"front": front, "internal": internal}
    return {kind: found.pem().validity.ends_s if found else math.inf for kind, found in both.items()}


def load_files(context: ssl.SSLContext, files: PemSettings) -> None:
    """Have `context` speak TLS 1.3 with what the files hold. Raises AccessError, which names the setting."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(_path(files.chain), _path(files.key), password=no_password)
    except (OSError, ValueError) as error:
        raise AccessError(f"{files.chain_setting}, {files.key_setting}: {reason(error)}") from error
    if files.ca:
        try:
            context.load_verify_locations(_path(files.ca))
        except (OSError, ValueError) as error:
            raise AccessError(f"{files.ca_setting}: {reason(error)}") from error


def names_in(certificate: Mapping[str, Any] | None) -> list[str] | None:
    """Return the names in a verified certificate as `getpeercert` gives it, the subject's alternative ones first; None
    where the client has shown none."""
    if not certificate:
        return None
    names = [str(value) for _, value in certificate.get("subjectAltName", ())]
    subject = certificate.get("subject", ())
    return names + [str(value) for part in subject for kind, value in part if kind == "commonName"]


def names_of_peer(properties: Mapping[str, Sequence[bytes]]) -> list[str] | None:
    """Do the same for gRPC's `auth_context`."""
    if not properties.get("x509_pem_cert"):
        return None
    found = [*properties.get("x509_subject_alternative_name", ()), *properties.get("x509_common_name", ())]
    return [name.decode("utf-8", "replace") for name in found]


def _path(file: str) -> Path:
    return Path(file).expanduser()


def _read(setting: str, file: str) -> bytes:
    try:
        return _path(file).read_bytes()
    except OSError as error:
        raise AccessError(f"{setting}: {file}: {error.strerror}") from error


def _validity(files: PemSettings, chain: bytes) -> Validity:
    try:
        return validity_of(chain)
    except ValueError as error:
        raise AccessError(f"{files.chain_setting}: {files.chain}: {error}") from error


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def no_password() -> str:
    """Given to OpenSSL, which would else ask at the terminal. Raises ValueError."""
    raise ValueError("the private key is encrypted; give it without a password")


def reason(error: OSError | ValueError) -> str:
    """Return what a failure to load files of TLS is due to."""
    return getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)
