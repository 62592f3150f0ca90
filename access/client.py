"""What a client shows of itself, and whom it trusts: the other side of `access.authenticator` and `access.tls`."""

import ssl
from collections.abc import Mapping
from pathlib import Path

import msgspec

from access.config import AccessError
from access.tls import no_password, reason

SYSTEM = "system"
"""The name of the authorities that this machine trusts anyway."""


class ClientCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """Without an authority the connection has no TLS."""

    api_key: str = ""
    ca_file: str = ""
    """The authority that signed the server's certificate, in PEM; or `system`."""
    cert_file: str = ""
    """The client's own certificate chain, in PEM."""
    key_file: str = ""
    server_name: str = ""
    """The name in the server's certificate, where that is not the one it is reached by."""

    def __repr__(self) -> str:
        key = "an API key" if self.api_key else "no API key"
        return f"ClientCredentials({key}, ca={self.ca_file!r}, cert={self.cert_file!r})"

    @property
    def has_tls(self) -> bool:
        return bool(self.ca_file)

    def check(self) -> None:
        """Raises AccessError for what does not go together."""
        if bool(self.cert_file) != bool(self.key_file):
            raise AccessError("a client's certificate and its key go together: give --cert and --key")
        if self.cert_file and not self.ca_file:
            raise AccessError("a client's certificate needs TLS: give --ca, the authority of the server's certificate")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise AccessError("the API key has characters that no key has")

    @property
    def authorization(self) -> str:
        """The value of the `authorization` header, or metadata; empty without a key."""
        return f"Bearer {self.api_key}" if self.api_key else ""

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return authorities (None: the system's), private key and certificate chain. Raises AccessError for files that
        gRPC could not use: it would not say which one is at fault."""
        if self.has_tls:
            self.ssl_context()
        else:
            self.check()
        roots = None if self.ca_file == SYSTEM else _read(self.ca_file)
        if not self.cert_file:
            return roots, None, None
        return roots, _read(self.key_file), _read(self.cert_file)

    def ssl_context(self) -> ssl.SSLContext:
        """Return the same for Python's own TLS. Raises AccessError."""
        self.check()
        authority = None if self.ca_file == SYSTEM else Path(self.ca_file).expanduser()
        try:
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise AccessError(f"{self.ca_file}: {reason(error)}") from error
        if self.cert_file:
            chain, key = (Path(file).expanduser() for file in (self.cert_file, self.key_file))
            try:
                context.load_cert_chain(chain, key, password=no_password)
            except (OSError, ValueError) as error:
                raise AccessError(f"{self.cert_file}, {self.key_file}: {reason(error)}") from error
        return context


VARIABLES = {
    "HEADRACE_API_KEY": "api_key",
    "HEADRACE_CA": "ca_file",
    "HEADRACE_CERT": "cert_file",
    "HEADRACE_KEY": "key_file",
    "HEADRACE_SERVER_NAME": "server_name",
}
"""Variables that clients read. None of them is a setting of a cluster."""


def credentials_from(environ: Mapping[str, str], given: Mapping[str, str | None] | None = None) -> ClientCredentials:
    """Return what `given` names, and for the rest what the variables say. Raises AccessError."""
    found = {field: environ.get(name, "") for name, field in VARIABLES.items()}
    found |= {field: value for field, value in (given or {}).items() if value is not None}
    credentials = ClientCredentials(**found)
    credentials.check()
    return credentials


def _read(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise AccessError(f"{file}: {error.strerror}") from error
