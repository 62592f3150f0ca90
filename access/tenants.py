"""Tenants and their credentials, as the keys file holds them, and what a caller's credential lets it do. Pure.

    {"tenants":      {"acme": {"weight": 2, "tokens_per_s": 500, "concurrency": 8}},
     "keys":         [{"id": "5f0c2a9b", "sha256": "…", "tenant": "acme", "made": "2026-11-22"}],
     "certificates": [{"name": "acme.example", "tenant": "acme"}, {"name": "prometheus", "role": "monitor"}]}
"""

import math
import stat
from typing import Literal

import msgspec

from access.config import AccessError

MAX_NAME_CHARS = 128
MAX_LIMIT = 2**53
"""The most of either that a tenant may use: tokens at once, and samples at the same time."""
HIGHEST_PRIORITY = 100
"""No request has a higher one, and none a lower one than its negative."""
Role = Literal["tenant", "monitor"]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may use. 0 means: no limit."""

    weight: float = 1.0
    """Its share of the router's line while requests of several tenants wait, relative to theirs."""
    tokens_per_s: float = 0.0
    """Tokens of prompts and answers, on average."""
    burst_tokens: int = 0
    """Tokens that it may use at once after a pause; 0: what it may use in ten seconds."""
    concurrency: int = 0
    """Samples that run or wait at the same time."""
    cache_share: float = 0.0
    """The part of each worker's cache that is its own, and beyond which it fills nothing (`engine.kv.shares`); 0: it
    lives on what others leave."""
    shared_cache: str = ""
    """The cache that it shares with all tenants whose records name the same; empty: it shares with nobody. Who shares
    has no share of its own."""

    @property
    def burst(self) -> float:
        return float(self.burst_tokens) or 10.0 * self.tokens_per_s


class Credential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whom a credential is for. A monitor reads metrics and where they are, and nothing else; a tenant all but that."""

    tenant: str = ""
    role: Role = "tenant"
    made: str = ""
    """The day on which it was made."""
    max_priority: int = 0
    """The highest `priority` of its requests; what asks for more gets this."""


class ApiKey(Credential, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    id: str
    """The part of the key by which it is found, and named in logs."""
    sha256: str
    """The digest of the whole key, in hexadecimal. Keys have 256 random bits, so that nothing slower is needed."""


class CertificateName(Credential, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    """A subject alternative name, or the common name, of a client's certificate."""


class CredentialTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a keys file."""

    tenants: dict[str, Tenant] = {}
    keys: list[ApiKey] = []
    certificates: list[CertificateName] = []


class DeniedError(Exception):
    """A caller is not let in. `code` names a gRPC status code, `field` the field of the request at fault."""

    def __init__(self, code: Literal["UNAUTHENTICATED", "PERMISSION_DENIED"], message: str, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


class Caller(msgspec.Struct, frozen=True):
    """Who asks, as its credential says. Where no credentials are configured, everybody is `ANYONE`."""

    tenant: str
    role: Role | Literal["anyone", "certificate"]
    credential: str = ""
    """A word for logs: a key's id or a certificate's name."""
    max_priority: int = HIGHEST_PRIORITY

    @property
    def is_known(self) -> bool:
        return self.role != "anyone"

    def tenant_for(self, asked: str) -> str:
        """Return the tenant of a request that names `asked`, or "" where it names none. Raises DeniedError."""
        if self.role == "anyone":
            return asked
        if self.role == "monitor":
            raise DeniedError("PERMISSION_DENIED", "this credential is for reading metrics only")
        if asked not in ("", self.tenant):
            raise DeniedError("PERMISSION_DENIED", "tenant: the credential is that of another tenant", "tenant")
        return self.tenant

    def check_monitor(self) -> None:
        """Raises DeniedError where the caller may not read metrics: they tell of all tenants together."""
        if self.role == "tenant":
            raise DeniedError("PERMISSION_DENIED", "metrics need a credential of the role monitor")


ANYONE = Caller("", "anyone")


def parse_table(data: bytes) -> CredentialTable:
    """Read a keys file. Raises AccessError."""
    try:
        table = msgspec.json.decode(data, type=CredentialTable)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AccessError(f"is no file of keys: {error}") from error
    check_table(table)
    return table


def may_others_write(mode: int) -> bool:
    """Return True for a keys file's mode that no router takes: others than its owner may write to it."""
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH))


def check_table(table: CredentialTable) -> None:
    """Raises AccessError for what no keys file may say."""
    for name, tenant in table.tenants.items():
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise AccessError(f"a tenant's name has 1 to {MAX_NAME_CHARS} characters")
        if not all(0 <= limit <= MAX_LIMIT for limit in (tenant.burst_tokens, tenant.concurrency)):
            raise AccessError(f"tenant {name!r}: burst_tokens and concurrency must lie in 0 to {MAX_LIMIT}")
        limits = (tenant.tokens_per_s, tenant.burst_tokens, tenant.concurrency, tenant.cache_share)
        if not (math.isfinite(tenant.weight) and tenant.weight > 0):
            raise AccessError(f"tenant {name!r}: weight must be above 0")
        if not all(math.isfinite(limit) and limit >= 0 for limit in limits) or tenant.cache_share > 1:
            raise AccessError(f"tenant {name!r}: limits are not negative, and cache_share is at most 1")
        if tenant.shared_cache and tenant.cache_share:
            raise AccessError(f"tenant {name!r}: shared_cache and cache_share exclude each other")
        if tenant.burst_tokens and not tenant.tokens_per_s:
            raise AccessError(f"tenant {name!r}: burst_tokens needs tokens_per_s")
    if sum(tenant.cache_share for tenant in table.tenants.values()) > 1 + 1e-9:
        raise AccessError("the tenants' cache_share together is more than all of a cache")
    ids = [key.id for key in table.keys]
    names = [certificate.name for certificate in table.certificates]
    for kind, known in (("keys", ids), ("certificates", names)):
        if len(set(known)) != len(known) or "" in known:
            raise AccessError(f"{kind}: each needs a name of its own")
    for credential in (*table.keys, *table.certificates):
        if credential.role == "tenant" and credential.tenant not in table.tenants:
            raise AccessError(f"a credential is for the tenant {credential.tenant!r}, which is not listed")
        if credential.role == "monitor" and credential.tenant:
            raise AccessError("a credential of the role monitor has no tenant")
    for credential in (*table.keys, *table.certificates):
        if not -HIGHEST_PRIORITY <= credential.max_priority <= HIGHEST_PRIORITY:
            raise AccessError(f"max_priority must lie in -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}")
    for key in table.keys:
        if len(key.sha256) != 64 or not set(key.sha256) <= set("0123456789abcdef"):
            raise AccessError(f"keys: {key.id}: sha256 is no digest")
