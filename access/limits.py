"""How much a tenant may use: tokens per second, by a bucket that may go into debt, and samples at once.

Prompts are charged when they are counted, answers as their tokens come: what a request will write is not known before.
So a request is let in while the bucket is not empty, and what it takes beyond is a debt, which later requests wait for.
Over time a tenant gets its rate; at once, its burst and what its running samples write.

Several routers keep a bucket each, and tell each other what they take from it (`access/elsewhere.py`): all are as full,
but for what the others have taken since they last told. Pure: time is an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

from access.elsewhere import UsageElsewhere, Use
from access.siblings import MOST_NAMED
from access.tenants import Tenant

TELL_ALL_S = 1.0
"""The least time between two reports to other routers of what has not changed."""
LOOKED_AT = 512
"""Tenants of which it is seen at each tick whether they can be forgotten."""
TELL_AFTER_S = 3.0
"""For so long what a tenant has used is told once a second after it owes nothing more and runs nothing: one report, or
two, may be lost."""


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

    Mutable state: the usage of every tenant that has a limit and has something running, or is not at its full burst,
    the one that was looked at longest ago first; the tokens that each has used since the beginning, which are kept as
    they are counted from there; what other routers have told; what they were told, of whom longest ago first, and who
    is to be told of again; and when each tenant was last seen with a usage.
    """

    def __init__(self, tenant: Callable[[str], Tenant], retry_after_s: float) -> None:
        """`tenant` tells the limits as they are now; `retry_after_s` is told to who has too much running."""
        self._tenant = tenant
        self._retry_after_s = retry_after_s
        self._usage: dict[str, _Usage] = {}
        self._spent: dict[str, int] = {}
        self._told: dict[str, tuple[int, int]] = {}
        self._again: set[str] = set()
        self._used_s: dict[str, float] = {}
        self._told_all_s = float("-inf")
        self.elsewhere = UsageElsewhere(self._spent_elsewhere)

    def __repr__(self) -> str:
        used = ", ".join(f"{name}={usage.running}" for name, usage in self._usage.items())
        return f"TenantLimits({used or 'idle'})"

    @property
    def has_spent(self) -> bool:
        """True once a tenant with a limit has used something here."""
        return bool(self._spent)

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
        usage = self._of(name, tenant, now)
        if tenant.concurrency and samples > tenant.concurrency:
            raise LimitedError(f"n: {samples} samples; at most {tenant.concurrency} may run at once", None)
        running = usage.running + self.elsewhere.running(name)
        if tenant.concurrency and running + samples > tenant.concurrency:
            raise LimitedError(f"{running} of {tenant.concurrency} samples run already", self._retry_after_s)
        if tenant.tokens_per_s:
            usage.bucket.fill(tenant, now)
            if usage.bucket.level <= 0:
                wait_s = (1.0 - usage.bucket.level) / tenant.tokens_per_s
                raise LimitedError(f"more than {tenant.tokens_per_s:g} tokens per second were used", wait_s)
        return self._begin(name, usage, samples, now)

    def take_over(self, name: str, paid_tokens: int, now: float) -> "TenantAdmission":
        """Count a sample that another router let in, and that goes on here: it is refused nothing. Its next
        `paid_tokens` were charged there."""
        tenant = self._tenant(name)
        if not (tenant.concurrency or tenant.tokens_per_s):
            return TenantAdmission(None, 1)
        return self._begin(name, self._of(name, tenant, now), 1, now, paid_tokens)

    def _begin(self, name: str, usage: _Usage, samples: int, now: float, paid_tokens: int = 0) -> "TenantAdmission":
        usage.running += samples
        self._used_s[name] = now
        return TenantAdmission(usage, samples, partial(self._note_spent, name), paid_tokens)

    def _of(self, name: str, tenant: Tenant, now: float) -> _Usage:
        usage = self._usage.get(name)
        if usage is None:
            usage = self._usage[name] = _Usage(TokenBucket(tenant.burst, now))
        return usage

    def _note_spent(self, name: str, tokens: int) -> None:
        self._spent[name] = self._spent.get(name, 0) + tokens

    def _spent_elsewhere(self, name: str, tokens: float, most: float, now: float) -> None:
        """Take from the bucket what another router's tenant has used; it holds no more than `most`."""
        tenant = self._tenant(name)
        if tenant.tokens_per_s:
            bucket = self._of(name, tenant, now).bucket
            bucket.fill(tenant, now)
            bucket.level = min(bucket.level - tokens, most)

    def news(self, now: float) -> dict[str, Use] | None:
        """Return what other routers are to be told: of tenants whose use has changed since they were told of it, and
        once a second of all that use something, or did lately; None where there is nothing to tell.

        At most MOST_NAMED are named: first those of whom more or less runs, then whoever was not named for longest."""
        # What has just been used may be forgotten here already, and is to be told: also that it runs no more.
        self._used_s.update(dict.fromkeys(self._usage, now))
        used = self._used_s = {name: at for name, at in self._used_s.items() if now - at <= TELL_AFTER_S}
        is_due = now - self._told_all_s >= TELL_ALL_S
        if is_due:
            self._told_all_s = now
            self._told = {name: use for name, use in self._told.items() if name in used}
            self._again = set(used)
        usage, told, spent = self._usage, self._told, self._spent
        named: list[str] = []
        for name in used:
            use = told.get(name)
            if (use[1] if use else -1) != (usage[name].running if name in usage else 0):
                named.append(name)
        del named[MOST_NAMED:]
        if len(named) < MOST_NAMED:
            others = set(named)
            changed = (
                name
                for name, (tokens, _) in told.items()
                if name in used and (name in self._again or tokens != max(spent.get(name, 0), 0)) and name not in others
            )
            named += islice(changed, MOST_NAMED - len(named))
        if not named and not is_due:
            return None
        return {name: self._tell(name, now) for name in named}

    def _tell(self, name: str, now: float) -> Use:
        """Return what is told of a tenant, and note that it is."""
        if name in self._used_s:
            self._used_s[name] = self._used_s.pop(name)  # it stands last now
        usage = self._usage.get(name)
        # Told, it is never below 0; what a router before this one was charged may have been given back here.
        use = max(self._spent.get(name, 0), 0), usage.running if usage is not None else 0
        self._told.pop(name, None)
        self._told[name] = use
        self._again.discard(name)
        return (*use, self._left(name, now))

    def _left(self, name: str, now: float) -> float:
        tenant, usage = self._tenant(name), self._usage.get(name)
        if usage is None:
            return tenant.burst
        usage.bucket.fill(tenant, now)
        return usage.bucket.level

    def tick(self, now: float) -> None:
        """Forget tenants that use nothing and owe nothing, and routers that say nothing more."""
        self.elsewhere.tick(now)
        for name, usage in list(islice(self._usage.items(), LOOKED_AT)):
            tenant = self._tenant(name)
            usage.bucket.fill(tenant, now)
            del self._usage[name]
            if usage.running or usage.bucket.level < tenant.burst:
                self._usage[name] = usage


class TenantAdmission:
    """One request that was let in: a part of what its tenant uses, until all of its samples have ended."""

    __slots__ = ("_left", "_not_refused", "_note", "_paid_tokens", "_usage")

    def __init__(
        self,
        usage: _Usage | None,
        samples: int,
        note: Callable[[int], None] = lambda tokens: None,
        paid_tokens: int = 0,
    ) -> None:
        """`usage` is None where there are no limits. `note` is told of tokens that are used, and, below 0, given back;
        the first `paid_tokens` are charged already."""
        self._usage = usage
        self._note = note
        self._left = samples
        self._not_refused = samples
        self._paid_tokens = paid_tokens

    @property
    def is_limited(self) -> bool:
        """True where anything is counted that it spends."""
        return self._usage is not None

    def spend(self, tokens: int) -> None:
        paid = min(tokens, self._paid_tokens)
        self._paid_tokens -= paid
        self._charge(tokens - paid)

    def sample_refused(self, prompt_tokens: int) -> None:
        """Note that no worker has seen a sample. The prompt, which all samples share, is given back with the last."""
        self._not_refused -= 1
        if not self._not_refused:
            self._charge(-prompt_tokens)

    def _charge(self, tokens: int) -> None:
        if self._usage is not None:
            self._usage.bucket.level -= tokens
            self._note(tokens)

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
