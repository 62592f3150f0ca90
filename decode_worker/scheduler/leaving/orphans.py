"""Tracks which routers are attached, whose each request is, and what is kept for the router that comes after a lost
one. Pure.

A resumable request whose router's stream has ended is an orphan: it runs on until the next router of that name is told
of it, or another one claims it, or its time is over. A router claims what a client has come to it for, from whichever
router has it. One that ended while its router lived is remembered as long, without blocks, since its router may
die before the client has read the end. A router that comes back as the same incarnation gets none that it had placed
here: it never lost its side, and has placed them again. What it was handed over it is told once more, since it may not
have heard; it refuses what it knows.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from decode_worker.scheduler.request import NO_ROUTER, NOBODY, Request
from engine.identity import owner
from engine.messages import Claim, Ended, Orphan
from engine.types import Incarnation, RequestId, RequestRecord

MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 16 * 1024 * 1024
TOKEN_BYTES = 52
"""The memory that a token id is taken to cost: an int, and its place in the record, the request and the output."""
VALUE_BYTES = 20
"""The memory that a log probability is taken to cost, packed, with the token that it is of and where it begins."""
MAX_NAMES = 4096
"""Lives of routers whose names are remembered."""
MAX_HANDOVERS = 3
"""Routers that are told of one request after its first; what kills routers is not handed on for ever."""


@dataclass(slots=True)
class Remembered:
    """A request that has ended: what a router is told of it, and whose it is."""

    request: Request
    ended: Ended
    tokens: list[int]
    until: float

    @property
    def size(self) -> int:
        request = self.request
        held = TOKEN_BYTES * len(request.tokens) + VALUE_BYTES * request.logprobs.values
        return held + len(request.record.context)


T = TypeVar("T")


class ResumeIndex(Generic[T]):
    """What is kept of requests, by the key that their clients come back with. A lookup by a digest tells no more of
    the token than a comparison in constant time."""

    # Mutable state: records and what is kept of them, by key and request.

    def __init__(self) -> None:
        self._kept: dict[bytes, dict[RequestId, tuple[RequestRecord, T]]] = {}

    def __len__(self) -> int:
        return sum(len(found) for found in self._kept.values())

    def add(self, record: RequestRecord, kept: T) -> None:
        if record.resume_key:
            self._kept.setdefault(record.resume_key, {})[record.request] = record, kept

    def drop(self, record: RequestRecord) -> None:
        found = self._kept.get(record.resume_key, {})
        if found.pop(record.request, None) is not None and not found:
            del self._kept[record.resume_key]

    def find(self, claim: Claim) -> list[T]:
        """Return what is kept of the requests that a router claims, the oldest first."""
        found = self._kept.get(claim.key, {}).values()
        return [kept for record, kept in found if claim.namespace in (None, owner(record.namespace))]


class Orphans:
    """Mutable state: `_routers` (incarnation by stream, oldest stream first), `_names` of these and of those whose
    requests are kept, `_ended` (oldest first) with its size in
    bytes, the same by resume key, and who owns each request (`Request.owner`, and its `link`). Owner: the scheduler."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._routers: dict[int, Incarnation] = {}
        self._names: dict[Incarnation, str] = {}
        self._ended: OrderedDict[RequestId, Remembered] = OrderedDict()
        self._by_key = ResumeIndex[Remembered]()
        self._bytes = 0
        self.expired = 0
        """Orphans that nobody took in time."""

    def __len__(self) -> int:
        """Return the number of ended requests that are remembered."""
        return len(self._ended)

    @property
    def is_untold(self) -> bool:
        """True while ended requests are remembered for a router that is yet to come."""
        attached = set(self._routers.values())
        return any(one.request.owner.router not in attached for one in self._ended.values())

    def joined(self, link: int, router: Incarnation, name: str) -> None:
        self._routers[link] = router
        self._names.pop(router, None)
        self._names[router] = name
        attached = set(self._routers.values())
        gone = [known for known in self._names if known not in attached] if len(self._names) > MAX_NAMES else []
        for known in gone[: len(self._names) - MAX_NAMES]:
            del self._names[known]

    def left(self, link: int) -> int:
        """Forget a stream that has ended. Return the newest that remains of a router of that name; NOBODY if none does,
        or it was no router."""
        was = self._routers.pop(link, None)
        if was is None:
            return NOBODY
        return next((other for other in reversed(self._routers) if self.is_heir(other, was)), NOBODY)

    def is_heir(self, link: int, router: Incarnation) -> bool:
        """Say if the router on `link` has the name of this one: it has come in its place, or is the same. One that
        has never told its name, or whose name is forgotten, has every name."""
        return self._names.get(router) in (None, self._names[self._routers[link]])

    def router(self, link: int) -> Incarnation:
        return self._routers.get(link, NO_ROUTER)

    def is_alone(self, link: int) -> bool:
        """Say if no other router of this name is attached, so that nothing more can be left by one."""
        router = self._routers[link]
        return not any(self.is_heir(other, router) for other, held in self._routers.items() if held != router)

    def leave(self, request: Request, now: float) -> None:
        """Make the request an orphan: its router is gone."""
        request.link = NOBODY
        request.owner.orphan_until = now + self._keep_s
        # Who asked for it is gone: were it to depart, its next router would never be told of it.
        request.yielding = False

    def remember(self, request: Request, ended: Ended, tokens: list[int], now: float) -> None:
        """Keep what a later router is to be told of a request that has ended with these output tokens."""
        if not self._keep_s:
            return
        self.forget(request.record.request)
        one = Remembered(request, ended, tokens, now + self._keep_s)
        self._ended[request.record.request] = one
        self._by_key.add(request.record, one)
        self._bytes += one.size
        while len(self._ended) > MAX_REMEMBERED or self._bytes > MAX_REMEMBERED_BYTES:
            self.forget(next(iter(self._ended)))

    def forget(self, name: RequestId) -> None:
        one = self._ended.pop(name, None)
        if one is not None:
            self._by_key.drop(one.request.record)
            self._bytes -= one.size

    def tick(self, now: float) -> None:
        """Forget what ended too long ago."""
        while self._ended:
            name, oldest = next(iter(self._ended.items()))
            if now < oldest.until:
                return
            self.forget(name)

    def adopt(self, request: Request, link: int) -> bool:
        """Give an orphan to the router on `link`. Return False if it was left by too many."""
        router = self._routers[link]
        request.owner.is_handed = True
        if request.owner.router != router and request.owner.router not in self._routers.values():
            if request.owner.handovers >= MAX_HANDOVERS:
                return False
            request.owner.handovers += 1
        request.link, request.owner.router = link, router
        request.owner.orphan_until = float("inf")
        return True

    def adopt_ended(self, link: int) -> list[Remembered]:
        """Return what the router on `link` is to be told of requests that have ended: those of routers that are gone,
        and those that it was told of on an earlier stream. The end of that earlier stream may not have been noticed
        here yet."""
        router, attached = self._routers[link], set(self._routers.values())
        told = [
            one
            for one in self._ended.values()
            if (one.request.owner.router not in attached and self.is_heir(link, one.request.owner.router))
            or (one.request.owner.is_handed and one.request.owner.router == router and one.request.link != link)
        ]
        return [one for one in told if self.adopt(one.request, link)]

    def claim_ended(self, link: int, claim: Claim) -> list[Remembered]:
        """Return what the router on `link` is to be told of requests that have ended, and that it claims."""
        return [one for one in self._by_key.find(claim) if self.adopt(one.request, link)]

    def check(self) -> None:
        assert self._bytes == sum(one.size for one in self._ended.values())
        assert len(self._by_key) == sum(1 for one in self._ended.values() if one.request.record.resume_key)
        untils = [one.until for one in self._ended.values()]
        assert untils == sorted(untils), "not the oldest first"


def orphan(request: Request, tokens: list[int], now: float) -> Orphan:
    """Return what its next router is told, with all `tokens` of its output so far."""
    remaining_s = None if request.record.remaining_s is None else max(0.0, request.deadline - now)
    return Orphan(
        record=msgspec.structs.replace(request.record, emitted_logprobs=()),  # they are said once
        placement=request.placement,
        prefill=request.prefill.worker.name,
        tokens=tokens,
        logprobs=list(request.logprobs.part(0, len(tokens))),
        age_s=now - request.accepted,
        remaining_s=remaining_s,
        losses=request.owner.losses,
    )
