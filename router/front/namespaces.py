"""Which part of the cache a tenant's prompts are kept in, and how much of it is its own.

A tenant has a namespace of its own: a name that nobody can guess without the cluster's key, from which every block's
identity follows (`engine.identity`). Tenants share a namespace only where the records of both name the same shared
cache: neither can be drawn into one by what the other's record says.

A request's salt parts a namespace further: those with the same salt find each other's prompts, and nobody else does. It
is hashed below the tenant's name, and the namespace begins as it does without a salt. So no salt leads into another's
cache, and the cache's fairness counts all parts of a tenant's as one.
"""

import secrets
from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

from engine.identity import NOBODY
from router.core.sessions import NAME_BYTES, Session

NAMESPACE_BYTES = 16
_TENANT = b"headrace tenant"
_SHARED = b"headrace shared"
_SALT = b"headrace salt"
"""Whose salted requests without a tenant are."""
_TALKER = b"headrace talker"
_SESSION = b"headrace session"


class CacheTerms(Protocol):
    """The part of a tenant's record that the cache needs."""

    @property
    def cache_share(self) -> float:
        """The part of each worker's cache that is its own and that it may fill; 0: what others leave."""

    @property
    def shared_cache(self) -> str:
        """The cache that it shares with all whose records name the same; empty: it shares with nobody."""


class OwnCache:
    """The terms of a tenant of which nothing is said. Fulfils `CacheTerms`."""

    cache_share = 0.0
    shared_cache = ""


class CacheNamespaces:
    """The namespaces of one cluster. A request that names no tenant is of nobody: all such share one namespace."""

    def __init__(self, key: str, terms: Callable[[str], CacheTerms] = lambda tenant: OwnCache()) -> None:
        """`key` is the cluster's; where there is none, one is drawn for the life of this object."""
        self._secret = blake2b((key or secrets.token_hex(32)).encode(), digest_size=32).digest()
        self._terms = terms

    def of(self, tenant: str, salt: str = "") -> bytes:
        """Return the namespace of a tenant's requests: 16 bytes, or none where it is nobody's; with a salt, 16 more."""
        if salt:
            whose = self.of(tenant) or NOBODY
            parted = blake2b(whose, key=self._secret, digest_size=NAMESPACE_BYTES, person=_SALT)
            parted.update(salt.encode())
            return whose + parted.digest()
        if not tenant:
            return b""
        shared = self._terms(tenant).shared_cache
        # The two kinds are hashed apart: a tenant that has a shared cache's name is still outside of it.
        return self._hashed(shared, _SHARED) if shared else self._hashed(tenant, _TENANT)

    def session(self, tenant: str, name: str) -> Session:
        """Return the name by which all routers know a tenant's conversation. Who shares a cache shares no
        conversations."""
        whose = self._hashed(tenant, _TALKER)
        named = blake2b(whose, key=self._secret, digest_size=NAME_BYTES, person=_SESSION)
        named.update(name.encode())
        return Session(whose + named.digest())

    def share(self, tenant: str) -> float:
        """Return the part of each worker's cache that is the tenant's own. Tenants with a cache in common have no part
        of it each."""
        terms = self._terms(tenant) if tenant else OwnCache()
        return 0.0 if terms.shared_cache else terms.cache_share

    def _hashed(self, name: str, kind: bytes) -> bytes:
        return blake2b(name.encode(), key=self._secret, digest_size=NAMESPACE_BYTES, person=kind).digest()
