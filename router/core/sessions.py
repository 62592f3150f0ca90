"""Remembers which pair of workers served a conversation that its client has named, so that it goes on there. Pure.

A session belongs to its tenant: two tenants' sessions of one name are two, and a tenant that names many drives out only
its own. What is pinned is a life of a worker, not its name: a new life has none of the conversation's KV.

Routers tell each other what they pin, and number it by one clock that no clock of a machine drives (L. Lamport, "Time,
Clocks, and the Ordering of Events in a Distributed System", 1978): each number is above all that its router has
heard. The highest wins, and of equals the one with the higher incarnations, so that all routers that have heard
the same words have the same pins, in whichever order the words came.
"""

from collections import OrderedDict
from math import isfinite
from typing import NamedTuple, NewType

from router.core.registry import Life

MAX_SESSIONS = 65_536
"""Sessions remembered in all; beyond it those go first of the tenant that has named none for longest."""
MAX_PER_TENANT = 4_096

Session = NewType("Session", bytes)
"""Names a conversation to all routers of a cluster, and says nothing to others: whose it is, and what its client calls
it, each hashed with the cluster's key (`router.front.namespaces`)."""
TENANT_BYTES = NAME_BYTES = 16
SESSION_BYTES = TENANT_BYTES + NAME_BYTES
FURTHEST = 1 << 36
"""No router is so far ahead of another: lives are counted in milliseconds, and this is two years of them. What says so
was not said by one."""
MAX_NAME_BYTES = 256
"""A worker that others tell of has no longer name."""


class Pin(NamedTuple):
    """The workers that served a conversation last. `prefill` is None where the decode worker read the prompt."""

    prefill: Life | None
    decode: Life


class _Entry(NamedTuple):
    pin: Pin
    turn: int
    used_s: float

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.turn, self.pin.decode[1], 0 if self.pin.prefill is None else self.pin.prefill[1]


class Sessions:
    """The router core owns it."""

    # Mutable state: by tenant, the last used one last, its sessions, likewise; how many there are, and the highest
    # turn of all that were noted here or elsewhere.

    def __init__(self, kept_s: float, life: int = 0) -> None:
        """A session is forgotten when it has not been used for `kept_s` seconds. `life` is above that of every router
        that began before, so that what this one pins counts at once."""
        self._kept_s = kept_s
        self._tenants: OrderedDict[bytes, OrderedDict[bytes, _Entry]] = OrderedDict()
        self._count = 0
        self._turn = life

    def __repr__(self) -> str:
        return f"Sessions({self._count} of {len(self._tenants)} tenants)"

    def __len__(self) -> int:
        return self._count

    def find(self, session: Session | None, now: float) -> Pin | None:
        """Return where a conversation was served last, None if that is not known any more."""
        if session is None or (entry := self._get(session)) is None:
            return None
        if now - entry.used_s >= self._kept_s:
            self._drop(*_parts(session))
            return None
        return entry.pin

    def note(self, session: Session, pin: Pin, now: float) -> int:
        """A pair has taken a conversation on; return the number of this turn."""
        self._turn += 1
        self._put(session, _Entry(pin, self._turn, now))
        return self._turn

    def adopted(self, session: Session, pin: Pin, now: float) -> None:
        """Note where a request of an earlier router goes on, of a turn whose number nobody knows any more: it counts
        until another router says where the conversation is."""
        if self._get(session) is None:
            self._put(session, _Entry(pin, 0, now))

    def told(self, session: Session, pin: Pin, turn: int, used_s: float) -> None:
        """Another router has noted this turn, at `used_s` of this one's clock. What is later here already stays, as
        does what was used since, where there is no room for both."""
        name = "" if pin.prefill is None else pin.prefill[0]
        is_one = len(session) == SESSION_BYTES and 0 <= turn <= self._turn + FURTHEST and len(name) <= MAX_NAME_BYTES
        if not is_one or not isfinite(used_s):
            return
        self._turn = max(self._turn, turn)
        known, entry = self._get(session), _Entry(pin, turn, used_s)
        if known is None and (oldest := self._in_the_way(session)) is not None and used_s < oldest.used_s:
            return
        if known is None or known.rank < entry.rank:
            self._put(session, entry)

    def pins(self) -> list[tuple[Session, Pin, int, float]]:
        """Return every session with its pin, its turn and when it was used last; of each tenant the oldest first."""
        return [
            (Session(tenant + name), *entry) for tenant, known in self._tenants.items() for name, entry in known.items()
        ]

    def _get(self, session: Session) -> _Entry | None:
        tenant, name = _parts(session)
        sessions = self._tenants.get(tenant)
        return None if sessions is None else sessions.get(name)

    def _in_the_way(self, session: Session) -> _Entry | None:
        """Return what would go first if one more were kept; None where there is room."""
        tenant, _ = _parts(session)
        if len(self._tenants.get(tenant, ())) < MAX_PER_TENANT:
            if self._count < MAX_SESSIONS:
                return None
            tenant = next(iter(self._tenants))
        return next(iter(self._tenants[tenant].values()))

    def _put(self, session: Session, entry: _Entry) -> None:
        tenant, name = _parts(session)
        sessions = self._tenants.setdefault(tenant, OrderedDict())
        self._count += name not in sessions
        sessions[name] = entry
        sessions.move_to_end(name)
        self._tenants.move_to_end(tenant)
        if len(sessions) > MAX_PER_TENANT:
            self._drop(tenant, next(iter(sessions)))
        if self._count > MAX_SESSIONS:
            longest_ago = next(iter(self._tenants))
            self._drop(longest_ago, next(iter(self._tenants[longest_ago])))
        self._expire(entry.used_s)

    def _expire(self, now: float) -> None:
        """Drop the oldest session of the tenant that has named none for longest, if its time is over."""
        tenant = next(iter(self._tenants), None)
        if tenant is not None:
            name, oldest = next(iter(self._tenants[tenant].items()))
            if now - oldest.used_s >= self._kept_s:
                self._drop(tenant, name)

    def _drop(self, tenant: bytes, name: bytes) -> None:
        sessions = self._tenants[tenant]
        del sessions[name]
        self._count -= 1
        if not sessions:
            del self._tenants[tenant]


def _parts(session: Session) -> tuple[bytes, bytes]:
    """Return whose it is, and its name there."""
    return session[:TENANT_BYTES], session[TENANT_BYTES:]
