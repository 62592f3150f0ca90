"""The settings of who may come in, and the rule about listening beyond loopback. The same hold for every process of a
cluster: the router's fronts and each worker's page of metrics. Pure."""

import ipaddress
from typing import Literal

import msgspec


class AccessError(ValueError):
    """Access as it is configured cannot be: the message names the setting or the file, and what to do."""


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

    @property
    def has_credentials(self) -> bool:
        return bool(self.keys_file or self.client_ca_file)

    @property
    def has_tls(self) -> bool:
        return bool(self.cert_file)


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
