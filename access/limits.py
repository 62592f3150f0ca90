"""How much a tenant may use: tokens per second, by a bucket that may go into debt, and samples at once.

Prompts are charged when they are counted, answers as their tokens come: what a request will write is not known before.
So a request is let in while the bucket is not empty, and what it takes beyond is a debt, which later requests wait for.
Over time a tenant gets its rate; at once, its burst and what its running samples write. Pure: time is an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass

from access.tenants import Tenant


class LimitedError(Exception):
    """A tenant has used what it may; it can come back after `retry_after_s`, None where that would not help."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class TokenBucket:
    """Tokens left at a time; below 0 in debt."""

    level: float
    at_s: float

    def fill(self, tenant: Tenant, now: float) -> None:
        """Add what has come in since. Without a rate nothing is owed either."""
        earned = tenant.tokens_per_s * max(0.0, now - self.at_s)
        self.level = min(tenant.burst, self.level + earned) if tenant.tokens_per_s else 0.0
        self.at_s = now


@dataclass(slots=True)
class _Usage:
    """What a tenant has in use."""

    bucket: TokenBucket
    running: int = 0


class TenantLimits:
    """Lets requests in, or not. The router's event loop owns it.

    Mutable state: the usage of every tenant that has a limit and has something running, or is not at its full burst.
    """

    def __init__(self, tenant: Callable[[str], Tenant], retry_after_s: float) -> None:
        """`tenant` tells the limits as they are now; `retry_after_s` is told to who has too much running."""
        self._tenant = tenant
        self._retry_after_s = retry_after_s
        self._usage: dict[str, _Usage] = {}

    def __repr__(self) -> str:
        used = ", ".join(f"{name}={usage.running}" for name, usage in self._usage.items())
        return f"TenantLimits({used or 'idle'})"

    def tenant(self, name: str) -> Tenant:
        """Return the tenant's record as it is now."""
        return self._tenant(name)

    def weight(self, name: str) -> float:
        return self._tenant(name).weight

    def admit(self, name: str, samples: int, now: float) -> "TenantAdmission":
        """Let a request of so many samples in; they run from now on. Raises LimitedError."""
        tenant = self._tenant(name)
        if not (tenant.concurrency or tenant.tokens_per_s):
            return TenantAdmission(None, samples)
        usage = self._usage.get(name)
        if usage is None:
            usage = self._usage[name] = _Usage(TokenBucket(tenant.burst, now))
        if tenant.concurrency and samples > tenant.concurrency:
            raise LimitedError(f"n: {samples} samples; at most {tenant.concurrency} may run at once", None)
        if tenant.concurrency and usage.running + samples > tenant.concurrency:
            raise LimitedError(f"{usage.running} of {tenant.concurrency} samples run already", self._retry_after_s)
        if tenant.tokens_per_s:
            usage.bucket.fill(tenant, now)
            if usage.bucket.level <= 0:
                wait_s = (1.0 - usage.bucket.level) / tenant.tokens_per_s
                raise LimitedError(f"more than {tenant.tokens_per_s:g} tokens per second were used", wait_s)
        usage.running += samples
        return TenantAdmission(usage, samples)

    def tick(self, now: float) -> None:
        """Forget tenants that use nothing and owe nothing."""
        for name, usage in list(self._usage.items()):
            tenant = self._tenant(name)
            usage.bucket.fill(tenant, now)
            if not usage.running and usage.bucket.level >= tenant.burst:
                del self._usage[name]


class TenantAdmission:
    """One request that was let in: a part of what its tenant uses, until all of its samples have ended."""

    def __init__(self, usage: _Usage | None, samples: int) -> None:
        """`usage` is None where there are no limits."""
        self._usage = usage
        self._left = samples

    def spend(self, tokens: int) -> None:
        if self._usage is not None:
            self._usage.bucket.level -= tokens

    def sample_ended(self) -> None:
        if self._left:
            self._left -= 1
            if self._usage is not None:
                self._usage.running -= 1

    def close(self) -> None:
        """End every sample that has not."""
        if self._usage is not None:
            self._usage.running -= self._left
        self._left = 0
