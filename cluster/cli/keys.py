"""`headrace keys`: edits the file of tenants, keys and certificates that `access.keys_file` names.

Every change replaces the file whole, so that a router that reads it meanwhile has the old one or the new one. A new key
is shown once, on standard output; the file has its digest.
"""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from access.config import AccessError
from access.keys import make_key
from access.tenants import (
    CertificateName,
    Credential,
    CredentialTable,
    Role,
    Tenant,
    check_table,
    may_others_write,
    parse_table,
)
from cluster.config import ConfigError
from cluster.processes.spec import LaunchError

FILE_MODE = 0o600


def add_credential(
    path: Path, tenant: str, certificate: str, limits: dict[str, float | int | str], max_priority: int = 0
) -> int:
    """Make a key of `tenant`, or let `certificate` in as that; without a tenant it is a monitor's. `limits` are set for
    the tenant, which is made where it is new; its requests have at most `max_priority`. Raises ConfigError."""
    _check_printable("a tenant's name", tenant)
    _check_printable("a certificate's name", certificate)
    _check_printable("a cache's name", limits.get("shared_cache", ""))
    today = datetime.now(UTC).date().isoformat()
    role: Role = "tenant" if tenant else "monitor"
    with _changed(path) as table:
        if tenant:
            _limit(table, tenant, limits)
        if certificate:
            name = CertificateName(name=certificate, tenant=tenant, role=role, made=today, max_priority=max_priority)
            table.certificates.append(name)
            shown, what = "", f"the certificate {certificate}"
        else:
            shown, kept = make_key(tenant, role, today)
            table.keys.append(msgspec.structs.replace(kept, max_priority=max_priority))
            what = f"the key {kept.id}"
    print(f"{what} is that of {f'the tenant {tenant}' if tenant else 'a monitor'}, in {path}", file=sys.stderr)
    if shown:
        print("It is not shown again:", file=sys.stderr)
        print(shown)
    return 0


def limit_tenant(path: Path, tenant: str, limits: dict[str, float | int | str]) -> int:
    """Set what a tenant may use. Raises ConfigError, and LaunchError where there is none of that name."""
    _check_printable("a cache's name", limits.get("shared_cache", ""))
    with _changed(path) as table:
        if tenant not in table.tenants:
            raise LaunchError(f"{path} has no tenant {tenant!r}: `headrace keys add` makes one")
        _limit(table, tenant, limits)
        known = table.tenants[tenant]
    print(f"{tenant}: {_described(known)}")
    return 0


def remove_credential(path: Path, name: str) -> int:
    """Take away the key with that id, the certificate of that name, or a tenant with all of its own. Raises
    ConfigError, and LaunchError where there is none."""
    if not name:
        raise ConfigError("whose? Give a key's id, a certificate's name, or a tenant")
    with _changed(path) as table:
        before = len(table.keys) + len(table.certificates) + len(table.tenants)
        table.keys[:] = [key for key in table.keys if name not in (key.id, key.tenant)]
        table.certificates[:] = [one for one in table.certificates if name not in (one.name, one.tenant)]
        table.tenants.pop(name, None)
        if before == len(table.keys) + len(table.certificates) + len(table.tenants):
            raise LaunchError(f"{path} has no key, certificate or tenant {name!r}")
    print(f"{name} opens nothing more, within a second or two")
    return 0


def list_credentials(path: Path) -> int:
    """Print who may come in; no digest. Raises ConfigError."""
    table = _read(path)
    for name, tenant in sorted(table.tenants.items()):
        print(f"tenant {name}: {_described(tenant)}")
    for key in table.keys:
        print(f"key {key.id}: {key.tenant or key.role}, made {key.made or 'at an unknown date'}{_priority(key)}")
    for certificate in table.certificates:
        print(f"certificate {certificate.name}: {certificate.tenant or certificate.role}{_priority(certificate)}")
    return 0


def _priority(credential: Credential) -> str:
    return f", priority up to {credential.max_priority}" if credential.max_priority else ""


def _check_printable(what: str, name: object) -> None:
    """Raises ConfigError for a name that `keys list` could not show on one line."""
    if not str(name).isprintable():
        raise ConfigError(f"{what} has printable characters alone, and no line breaks: {name!r} has others")


def _limit(table: CredentialTable, tenant: str, limits: dict[str, float | int | str]) -> None:
    table.tenants[tenant] = msgspec.structs.replace(table.tenants.get(tenant, Tenant()), **limits)


def _described(tenant: Tenant) -> str:
    named = {
        "tokens per second": tenant.tokens_per_s,
        "burst": tenant.burst_tokens,
        "samples at once": tenant.concurrency,
        "share of the cache": tenant.cache_share,
    }
    limits = [f"{name} {value:g}" for name, value in named.items() if value]
    if tenant.shared_cache:
        limits.append(f"shares the cache {tenant.shared_cache}")
    return ", ".join([f"weight {tenant.weight:g}", *limits])


@contextmanager
def _changed(path: Path) -> Iterator[CredentialTable]:
    """Give the file's content to be changed, and write it: the file that a symbolic link leads to, and not the link.
    Others who do so meanwhile wait. Raises ConfigError."""
    path = Path(os.path.realpath(path))
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        table = _read(path) if path.exists() else CredentialTable(tenants={}, keys=[], certificates=[])
        yield table
        try:
            check_table(table)
        except AccessError as error:
            raise ConfigError(str(error)) from error
        _write(path, table)
    finally:
        os.close(folder)


def _read(path: Path) -> CredentialTable:
    try:
        if may_others_write(path.stat().st_mode):
            raise ConfigError(f"{path}: others than its owner may write to it, and no router takes it: chmod go-w")
        return parse_table(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except AccessError as error:
        raise ConfigError(f"{path}: {error}") from error


def _write(path: Path, table: CredentialTable) -> None:
    """Replace the file. One that was there keeps its owner, group and mode, as a router of another user may have to
    read it. Raises ConfigError, and replaces nothing, where this user cannot leave it to its owner."""
    found = path.stat() if path.exists() else None
    text = msgspec.json.format(msgspec.json.encode(table), indent=2)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text + b"\n")
            file.flush()
            if found is not None:
                _give(file.fileno(), path, found)
            os.fchmod(file.fileno(), FILE_MODE if found is None else found.st_mode & 0o777)
            os.fsync(file.fileno())
            os.rename(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _give(descriptor: int, path: Path, owner: os.stat_result) -> None:
    try:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    except OSError as error:
        why = f"a new one cannot be given to user {owner.st_uid} and group {owner.st_gid}: {error.strerror}"
        raise ConfigError(f"{path}: is left as it was: {why}") from error
