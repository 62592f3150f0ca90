"""Remembers which pair of workers served a conversation that its client has named, so that it goes on there. Pure.

A session belongs to its tenant: two tenants' sessions of one name are two, and a tenant that names many drives out only
its own. What is pinned is a life of a worker, not its name: a new life has none of the conversation's KV.
"""

from collections import OrderedDict
from typing import NamedTuple

from router.core.registry import Life

MAX_SESSIONS = 65_536
"""Sessions remembered in all; beyond it those go first of the tenant that has named none for longest."""
MAX_PER_TENANT = 4_096

Session = tuple[str, str]
"""The tenant, and the session's name there."""


class Pin(NamedTuple):
    """The workers that served a conversation last. `prefill` is None where the decode worker read the prompt."""

    prefill: Life | None
    decode: Life


class Sessions:
    """The router core owns it."""

    # Mutable state: by tenant, the last used one last, its sessions, likewise: each a pin and when it was last used.

    def __init__(self, kept_s: float) -> None:
        """A session is forgotten when it has not been used for `kept_s` seconds."""
        self._kept_s = kept_s
        self._tenants: OrderedDict[str, OrderedDict[str, tuple[Pin, float]]] = OrderedDict()
        self._count = 0

    def __repr__(self) -> str:
        return f"Sessions({self._count} of {len(self._tenants)} tenants)"

    def __len__(self) -> int:
        return self._count

    def find(self, session: Session | None, now: float) -> Pin | None:
        """Return where a conversation was served last, None if that is not known any more."""
        if session is None or (sessions := self._tenants.get(session[0])) is None:
            return None
        pin, used_s = sessions.get(session[1], (None, 0.0))
        if pin is not None and now - used_s >= self._kept_s:
            self._drop(session[0], session[1])
            return None
        return pin

    def note(self, session: Session | None, pin: Pin, now: float) -> None:
        """A pair has taken a conversation on."""
        if session is None:
            return
        tenant, name = session
        sessions = self._tenants.setdefault(tenant, OrderedDict())
        self._count += name not in sessions
        sessions[name] = (pin, now)
        sessions.move_to_end(name)
        self._tenants.move_to_end(tenant)
        if len(sessions) > MAX_PER_TENANT:
            self._drop(tenant, next(iter(sessions)))
        if self._count > MAX_SESSIONS:
            longest_ago = next(iter(self._tenants))
            self._drop(longest_ago, next(iter(self._tenants[longest_ago])))
        self._expire(now)

    def _expire(self, now: float) -> None:
        """Drop the oldest session of the tenant that has named none for longest, if its time is over."""
        tenant = next(iter(self._tenants), None)
        if tenant is not None:
            name, (_, used_s) = next(iter(self._tenants[tenant].items()))
            if now - used_s >= self._kept_s:
                self._drop(tenant, name)

    def _drop(self, tenant: str, name: str) -> None:
        sessions = self._tenants[tenant]
        del sessions[name]
        self._count -= 1
        if not sessions:
            del self._tenants[tenant]
