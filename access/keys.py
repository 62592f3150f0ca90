"""API keys: how they are made, and compared with what is kept of them.

    hr_5f0c2a9b_Zk3…   the id, by which it is found, and 256 random bits

Only the digest of the whole key is kept.
"""

import hmac
import secrets
from hashlib import sha256

from access.tenants import ApiKey, Role

PREFIX = "hr_"
MAX_KEY_CHARS = 256


def make_key(tenant: str, role: Role, made: str) -> tuple[str, ApiKey]:
    """Return a new key, and what is kept of it."""
    name = secrets.token_hex(4)
    key = f"{PREFIX}{name}_{secrets.token_urlsafe(32)}"
    return key, ApiKey(id=name, sha256=digest(key), tenant=tenant, role=role, made=made)


def digest(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_id(key: str) -> str:
    """Return the id in a key; empty where it has the form of none."""
    if not key.startswith(PREFIX) or len(key) > MAX_KEY_CHARS:
        return ""
    name, underscore, _ = key.removeprefix(PREFIX).partition("_")
    return name if underscore else ""


def is_key(shown: str, kept: ApiKey) -> bool:
    """Compare in a time that does not depend on how much agrees."""
    return hmac.compare_digest(digest(shown), kept.sha256)


def bearer(authorization: str) -> str:
    """Return the key in the value of an `authorization` header; empty where there is none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
