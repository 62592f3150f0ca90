"""TLS between our own processes: gRPC ports and channels of router and workers, in plain text or with the certificates
of `access.internal_*`.

Both ends show a certificate, and both ask for one name, since workers are dialled by address: so a certificate that the
same authority signed for something else opens nothing. Of each, the files are read again as they change: a port has
what they hold at the next handshake, a dialer what they hold when it dials.
"""

import hashlib
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from access.config import AccessConfig, AccessError, check_settings
from access.tls import PemFiles, ServerCertificates, load_files, names_of_peer

INTERNAL_NAME = "headrace-internal"
_OVERRIDE = ("grpc.ssl_target_name_override", INTERNAL_NAME)
_FIRST = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class StrangeCertificateError(Exception):
    """The other end has shown a certificate that is not one of our own processes'."""


def internal_certificates(config: AccessConfig) -> ServerCertificates | None:
    """Return what this process shows others of its cluster; None without TLS between them. Raises AccessError for files
    that cannot be used, and for a certificate that a process with the same files would refuse."""
    check_settings(config)
    if not config.has_internal_tls:
        return None
    files = config.internal_files

    def is_taken_by_itself(server: ssl.SSLContext) -> None:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_files(client, files)
        if _FIRST.search(Path(files.chain).expanduser().read_bytes()) is None:  # of OpenSSL's own form, as of a CA
            raise AccessError(f"{files.chain_setting}: {files.chain}: does not begin with BEGIN CERTIFICATE")
        try:
            _shake_hands(server, client)
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise AccessError(
                f"{files.chain_setting}: {files.chain}: other processes would refuse it, by the authorities in "
                f"{files.ca_setting} and for the name {INTERNAL_NAME!r}: {reason}"
            ) from error

    return ServerCertificates(files, is_taken_by_itself)


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Let the two shake hands in memory. Raises ssl.SSLError where one refuses the other."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(there, here, server_hostname=INTERNAL_NAME),
        server.wrap_bio(here, there, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)


def listen(server: grpc.aio.Server, address: str, files: ServerCertificates | None) -> int:
    """Bind `address`, with TLS where there are certificates; each handshake has those that the files hold then. Returns
    the port, and raises RuntimeError, as gRPC does."""
    if files is None:
        return int(server.add_insecure_port(address))
    sent = files.pem()

    def latest() -> Any:
        nonlocal sent
        pem = files.pem()
        if pem is sent:
            return None
        sent = pem
        return _configuration(pem)

    secure = grpc.dynamic_ssl_server_credentials(_configuration(sent), latest, files.needs_client)
    return int(server.add_secure_port(address, secure))


def dial(
    address: str, options: Sequence[tuple[str, Any]], files: ServerCertificates | None
) -> tuple[grpc.aio.Channel, bytes]:
    """Return a channel to another of our processes, and what both ends know of its encryption: the digest of the
    certificate that it shows there, empty without TLS."""
    if files is None:
        return grpc.aio.insecure_channel(address, options), b""
    pem = files.pem()
    secure = grpc.ssl_channel_credentials(pem.client_ca, pem.key, pem.chain)
    return grpc.aio.secure_channel(address, secure, (*options, _OVERRIDE)), _digest(pem.chain)


def shown_by_dialer(context: grpc.aio.ServicerContext) -> bytes:
    """Return the same of a stream that was opened here. Raises StrangeCertificateError for a certificate that is not
    of INTERNAL_NAME."""
    properties = context.auth_context()
    names = names_of_peer(properties)
    if names is None or INTERNAL_NAME not in names:
        raise StrangeCertificateError(f"its certificate is not one of the name {INTERNAL_NAME!r}")
    return _digest(properties["x509_pem_cert"][0])


def why_unreachable(details: str, files: ServerCertificates | None) -> str:
    """Return gRPC's words for a stream that could not be opened, with what they may mean where they do not say it: a
    listener that refuses a handshake closes the connection, and says nothing that gRPC would pass on."""
    if "Socket closed" in details and "failed to connect" in details:
        if files is None:
            return f"{details} (it may ask for TLS: see access.internal_cert_file)"
        return f"{details} (it may have refused the certificate of this process: its log or its clock may say why)"
    if "WRONG_VERSION_NUMBER" in details:
        return f"{details} (it speaks without TLS: it has no access.internal_cert_file)"
    return details


def is_refusal(details: str) -> bool:
    """Say whether gRPC's words tell of a listener whose certificate, or want of one, was refused here."""
    return "Tls handshake failed" in details or "Verification Check failed" in details


def _configuration(pem: PemFiles) -> Any:
    pair = [(pem.key, pem.chain)]
    return grpc.ssl_server_certificate_configuration(pair, pem.client_ca or None)


def _digest(chain: bytes) -> bytes:
    """Return the SHA-256 of the first certificate of a chain, which is the one that is shown for it."""
    found = _FIRST.search(chain)
    if found is None:
        raise StrangeCertificateError("what it has shown is no certificate in PEM")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found.group().decode("ascii", "replace"))).digest()
