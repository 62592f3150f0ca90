"""What `headrace doctor` says of who may come in: the rule about listening, keys and certificates, as at a start."""

import time
from collections.abc import Callable, Iterator

from access.authenticator import Authenticator
from access.config import AccessError, check_settings
from access.internal import internal_certificates
from access.tls import ServerCertificates
from cluster.config import ClusterConfig, ConfigError, check_listening
from cluster.doctor.check import Check

RENEW = "put a renewed certificate and its key in the same files: they are read again without a restart"


def access_checks(config: ClusterConfig, clock: Callable[[], float] = time.time) -> Iterator[Check]:
    """Nothing is said of what is not configured."""
    access = config.access
    try:
        check_settings(access)
        check_listening(config)
    except (AccessError, ConfigError) as error:
        yield Check("access", "fail", str(error), "docs/credentials.md says how")
        return
    if access.keys_file:
        yield _keys(config)
    if access.has_tls:
        yield _certificates("certificates", lambda: ServerCertificates(access.front_files), clock)
    if access.has_internal_tls:
        yield _certificates("internal certificates", lambda: internal_certificates(access), clock)


def _keys(config: ClusterConfig) -> Check:
    try:
        known = Authenticator(config.access)
    except AccessError as error:
        return Check("keys", "fail", str(error), "`headrace keys` writes it; docs/credentials.md says what it holds")
    return Check("keys", "ok", f"{config.access.keys_file}: {known.summary}")


def _certificates(name: str, load: Callable[[], ServerCertificates | None], clock: Callable[[], float]) -> Check:
    try:
        found = load()
        assert found is not None
    except (AccessError, OSError) as error:
        return Check(name, "fail", str(error), "docs/credentials.md says what is wanted")
    validity, now_s = found.pem().validity, clock()
    if warning := validity.warning(now_s):
        return Check(name, "fail" if validity.problem(now_s) else "warn", f"{found.chain_file}: {warning}", RENEW)
    return Check(name, "ok", f"{found.chain_file}: good for {(validity.ends_s - now_s) / 86_400:.0f} days")
