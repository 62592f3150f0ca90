"""Guards the page of metrics of a process that has no front of its own: a worker, or a supervisor.

It fulfils `telemetry.page_server.PageGuard`. The page tells of all tenants together, so it is for monitors.
"""

import ssl
from collections.abc import Mapping
from typing import Any

from access.authenticator import Authenticator
from access.config import AccessConfig, check_exposed
from access.tenants import DeniedError
from access.tls import ServerCertificates, names_in


class MonitorGuard:
    """Asks each reader of a page for a credential, and gives the page TLS, as far as `config` says so."""

    def __init__(self, config: AccessConfig) -> None:
        """Raises AccessError for files that cannot be used."""
        self._authenticator = Authenticator(config)
        self.certificates = ServerCertificates(config.front_files) if config.has_tls else None

    def context(self) -> ssl.SSLContext | None:
        """Return what the listening socket needs for TLS, None without it. A client certificate, where one is needed,
        is asked for in the handshake: no probe comes here."""
        return None if self.certificates is None else self.certificates.context()

    def status(self, authorization: str, certificate: Mapping[str, Any] | None) -> int:
        """Return 200 for a reader that is let in, or the HTTP status of its refusal."""
        try:
            self._authenticator.caller(authorization, names_in(certificate)).check_monitor()
        except DeniedError as error:
            return 401 if error.code == "UNAUTHENTICATED" else 403
        return 200


def guard_page(config: AccessConfig, host: str, process: str) -> MonitorGuard | None:
    """Return the guard of a page on `host`; None where everybody may read it. Raises AccessError where that was not
    asked for by name and others can reach it."""
    check_exposed(host, config, process)
    return MonitorGuard(config) if config.has_credentials or config.has_tls else None
