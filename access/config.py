"""The settings of who may come in, and the rule about listening beyond loopback. The same hold for every process of a
cluster: the router's fronts and each worker's page of metrics. Pure."""

import ipaddress
from typing import Literal

import msgspec


class AccessError(ValueError):
    """Access as it is configured cannot be: the message names the setting or the file, and what to do."""


class PemSettings(msgspec.Struct, frozen=True):
    """The files of one kind of certificate, and what the settings are called that name them. `ca` is empty where the
    other end needs no certificate."""

    chain: str
    key: str
    ca: str
    chain_setting: str = "access.cert_file"
    key_setting: str = "access.key_file"
    ca_setting: str = "access.client_ca_file"


class AccessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All files are read again when they change, without a restart."""

    keys_file: str = ""
    """The tenants, and the API keys and certificates by which they are known; `headrace keys` writes it."""
    cert_file: str = ""
    """The server's certificate chain, in PEM."""
    key_file: str = ""
    """Its private key, in PEM."""
    client_ca_file: str = ""
    """The authorities that sign clients' certificates, in PEM: whoever shows none is refused."""
    insecure: Literal["no", "plaintext", "open"] = "no"
    """What is given up where a process listens beyond loopback. `plaintext`: credentials, but no TLS, since something
    in front ends it. `open`: neither; everybody who reaches the port is served."""

    internal_cert_file: str = ""
    """The certificate chain, in PEM, that router and workers show each other, of the name `headrace-internal`. With it
    the streams between them have TLS, and a process without it is refused. Each host may have its own."""
    internal_key_file: str = ""
    """Its private key, in PEM."""
    internal_ca_file: str = ""
    """The authorities that sign these certificates, in PEM; those of clients should be others."""
    internal_clear_kv: bool = False
    """KV blocks may travel over `tcp` and `nccl`, which have no TLS, although the streams between router and workers
    have it. Otherwise such a cluster only starts with a `transfer.transport` that stays within a host."""

    @property
    def has_credentials(self) -> bool:
        return bool(self.keys_file or self.client_ca_file)

    @property
    def has_tls(self) -> bool:
        return bool(self.cert_file)

    @property
    def has_internal_tls(self) -> bool:
        return bool(self.internal_cert_file)

    @property
    def front_files(self) -> PemSettings:
        """Return the files of those sockets that clients and monitors reach."""
        return PemSettings(self.cert_file, self.key_file, self.client_ca_file)

    @property
    def internal_files(self) -> PemSettings:
        """Return the files of both ends of a stream between our own processes."""
        names = (f"access.internal_{which}_file" for which in ("cert", "key", "ca"))
        return PemSettings(self.internal_cert_file, self.internal_key_file, self.internal_ca_file, *names)


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach a socket that listens on `host`. A name other than localhost may be
    anything, and counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_settings(config: AccessConfig) -> None:
    """Raises AccessError for settings that do not go together."""
    if bool(config.cert_file) != bool(config.key_file):
        raise AccessError("access.cert_file and access.key_file go together: give both")
    if config.client_ca_file and not config.cert_file:
        raise AccessError("access.client_ca_file needs the server's own access.cert_file and access.key_file")
    internal = (config.internal_cert_file, config.internal_key_file, config.internal_ca_file)
    if any(internal) and not all(internal):
        raise AccessError(
            "access.internal_cert_file, access.internal_key_file and access.internal_ca_file go together: give all "
            "three"
        )


def check_transport(config: AccessConfig, transport: str, setting: str) -> None:
    """Raises AccessError where streams have TLS and KV blocks might travel without it, unasked. `setting` is the name
    of the setting that `transport` comes from."""
    if config.has_internal_tls and not config.internal_clear_kv and transport in ("auto", "tcp", "nccl"):
        raise AccessError(
            f'{setting}="{transport}" may send KV blocks over tcp or nccl, which have no TLS, while '
            'access.internal_cert_file asks for it: set it to "shm" (on GPUs "cuda_ipc"), where all workers share a '
            "host; or say access.internal_clear_kv=true, where the network between hosts encrypts or is trusted with KV"
        )


def check_exposed(host: str, config: AccessConfig, what: str) -> None:
    """Raises AccessError where `what` would listen on `host` for strangers, or in plain text, and nobody has asked for
    that by name."""
    check_settings(config)
    if is_loopback(host) or config.insecure == "open":
        return
    where = f"{what} would listen on {host or 'every address'}"
    if not config.has_credentials:
        raise AccessError(
            f"{where} and serve everybody: make API keys with `headrace keys add` and name their file in "
            "access.keys_file, or name the authority of clients' certificates in access.client_ca_file; or say "
            "access.insecure=open"
        )
    if not config.has_tls and config.insecure != "plaintext":
        raise AccessError(
            f"{where} without TLS, and API keys would travel in plain text: give access.cert_file and "
            "access.key_file; or say access.insecure=plaintext, where something in front of it ends TLS"
        )
