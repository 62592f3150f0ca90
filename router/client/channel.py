"""A client's connections: how they are opened, watched and secured, and how their errors are told."""

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc

from router.client.errors import NOBODY, ApiError

Metadata = tuple[tuple[str, str], ...]
Options = Sequence[tuple[str, Any]]

OPTIONS: Options = (
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Without all three a server that is silent, and not gone, is waited for without end.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_UNANSWERED = re.compile(r"failed to connect to all addresses.* ipv[46]:(\S+): (.+)")


@dataclass(frozen=True, kw_only=True)
class ClientSecrets:
    """What a client shows of itself and whom it trusts. Certificates and keys are the contents of PEM files. Raises
    ValueError for what does not go together."""

    api_key: str = ""
    has_tls: bool = False
    roots: bytes | None = None
    """The authorities that may have signed the server's certificate; None: those that this machine trusts."""
    key: bytes | None = None
    chain: bytes | None = None
    """The client's own certificate, where the server asks for one."""
    server_name: str = ""
    """The name in the server's certificate, where that is not the one it is reached by."""

    def __post_init__(self) -> None:
        if (self.key is None) != (self.chain is None):
            raise ValueError("a client's certificate and its key go together")
        if self.chain is not None and not self.has_tls:
            raise ValueError("a client's certificate needs TLS: name the authority of the server's")

    def __repr__(self) -> str:
        return f"ClientSecrets({'an API key' if self.api_key else 'no API key'}, has_tls={self.has_tls})"

    @classmethod
    def of_variables(cls, environ: Mapping[str, str]) -> "ClientSecrets":
        """Return what the variables of `headrace`'s own clients say: `HEADRACE_API_KEY`; with `HEADRACE_CA`, a file or
        `system`, TLS, and then `HEADRACE_CERT`, `HEADRACE_KEY` and `HEADRACE_SERVER_NAME`. Raises OSError for a file
        that cannot be read, ValueError for what does not go together, and for a file that holds something else."""
        authority, chain, key = (environ.get(f"HEADRACE_{name}", "") for name in ("CA", "CERT", "KEY"))
        made = cls(
            api_key=environ.get("HEADRACE_API_KEY", ""),
            has_tls=bool(authority),
            roots=_contents("" if authority == "system" else authority),
            key=_contents(key),
            chain=_contents(chain),
            server_name=environ.get("HEADRACE_SERVER_NAME", ""),
        )
        if made.has_tls:
            _check_files("" if authority == "system" else authority, chain, key)
        return made

    @property
    def metadata(self) -> Metadata:
        """What every call carries."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def _contents(file: str) -> bytes | None:
    return Path(file).expanduser().read_bytes() if file else None


def _check_files(authority: str, chain: str, key: str) -> None:
    """Raises ValueError that names the files which OpenSSL cannot use: gRPC would not say which they are."""
    named = authority
    try:
        context = ssl.create_default_context(cafile=Path(authority).expanduser() if authority else None)
        if chain:
            named = f"{chain}, {key}"
            context.load_cert_chain(Path(chain).expanduser(), Path(key).expanduser(), password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{named}: {getattr(error, 'reason', None) or error}") from error


def _no_password() -> bytes:
    """Given to OpenSSL, which would else ask at the terminal. Raises ValueError."""
    raise ValueError("the private key is encrypted; give it without a password")


def can_travel(text: str) -> bool:
    """Return False for what gRPC sends in no metadata."""
    return text.isascii() and text.isprintable()


def open_channel(library: Any, address: str, secrets: ClientSecrets, options: Options = ()) -> Any:
    """Open a channel of `grpc` or of `grpc.aio`; `options` count before ours. Raises ApiError for an API key that
    cannot travel."""
    if not can_travel(secrets.api_key):
        raise ApiError("INVALID_ARGUMENT", "API key: only printable ASCII can travel")
    ours = [*OPTIONS, *options]
    if not secrets.has_tls:
        return library.insecure_channel(address, ours)
    if secrets.server_name:
        ours.append(("grpc.ssl_target_name_override", secrets.server_name))
    secure = grpc.ssl_channel_credentials(secrets.roots, secrets.key, secrets.chain)
    return library.secure_channel(address, secure, ours)


def api_error(error: grpc.RpcError) -> tuple[ApiError, bool]:
    """Return the error of a call, and whether the server itself gave this status: any other comes from a broken
    connection."""
    metadata = {key: value for key, value in error.trailing_metadata() or ()}
    retry_ms = metadata.get("retry-after-ms")
    told = ApiError(
        error.code().name,
        _plain(error.details() or ""),
        str(metadata.get("headrace-field", "")),
        int(retry_ms) / 1e3 if retry_ms else None,
    )
    return told, "headrace-ended" in metadata


def _plain(details: str) -> str:
    """Say who does not answer and why, where a connection failed, without what the library writes around it."""
    found = _UNANSWERED.search(details)
    if found is None:
        return details
    address, why = unquote(found[1]), found[2]
    if "WRONG_VERSION_NUMBER" in why:
        return f"TLS with {address} failed: it speaks without TLS"
    if "security handshaker" in why:
        return f"TLS with {address} failed: the client's authority, or its own certificate and key, cannot be used"
    if "handshake failed" in why or "erification check failed" in why:
        return f"TLS with {address} failed: {why.removesuffix(': OK').rpartition(': ')[2]}"
    return f"{NOBODY} at {address}: {why.rpartition(': ')[2]}"
