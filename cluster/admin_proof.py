"""How the verbs and the supervisor prove to each other on the admin surface that they have the cluster's secret.

A request carries a nonce, which says when it was made, and a code of method, path, nonce and body; an answer a code of
the same nonce, status and body. A code is an HMAC-SHA-256 under the secret, so neither side ever says the secret; each
nonce is taken once, and for a minute, so that a request that was overheard is worth nothing.
"""

import hmac
import os
import time
from collections import OrderedDict
from hashlib import sha256

from engine.handshake import Secrets

NONCE_HEADER = "x-headrace-nonce"
CODE_HEADER = "x-headrace-code"
VALID_S = 60.0
MAX_SEEN = 4096


def new_nonce() -> str:
    """Draw a nonce of now."""
    return f"{time.time():.3f}-{os.urandom(16).hex()}"


def request_code(secret: bytes, method: str, target: str, nonce: str, body: bytes) -> str:
    """Return the code of a request; `target` is its path with its query."""
    return _code(secret, "request", method, target, nonce, body)


def answer_code(secret: bytes, nonce: str, status: int, body: bytes) -> str:
    return _code(secret, "answer", str(status), "", nonce, body)


def _code(secret: bytes, side: str, what: str, target: str, nonce: str, body: bytes) -> str:
    # Each part by its digest: parts of any bytes cannot be taken for each other.
    parts = (side.encode(), what.encode(), target.encode(), nonce.encode(), body)
    return hmac.digest(secret, b"".join(sha256(part).digest() for part in parts), "sha256").hex()


def is_right(code: str, expected: list[str]) -> bool:
    return any([hmac.compare_digest(code.encode(), one.encode()) for one in expected])


class RequestCheck:
    """Mutable state: the nonces that were taken, oldest first. Owner: the admin server's loop."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._seen: OrderedDict[str, None] = OrderedDict()

    def secret_of(self, method: str, target: str, nonce: str, code: str, body: bytes) -> bytes | None:
        """Return the secret that a request was made with, by which it is answered; None where it was not."""
        if nonce in self._seen or not self._is_of_now(nonce):
            return None
        for secret in self._secrets.valid():
            if is_right(code, [request_code(secret, method, target, nonce, body)]):
                self._seen[nonce] = None
                if len(self._seen) > MAX_SEEN:
                    self._seen.popitem(last=False)
                return secret
        return None

    @staticmethod
    def _is_of_now(nonce: str) -> bool:
        try:
            made_s = float(nonce.partition("-")[0])
        except ValueError:
            return False
        return abs(time.time() - made_s) <= VALID_S
