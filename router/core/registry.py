"""The workers that the router knows, and their load as far as it knows.

A report is a moment old when it arrives, and several requests may be sent before the next one. So each worker carries,
on top of its last report, the router's own dispatches that this cannot have counted. Time is an argument.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.messages import Load, PeerAddress, WorkerInfo
from engine.types import Incarnation, RequestId
from router.core.ejection import Ejections
from router.core.fitting import Coefficients
from router.core.overtaking import ReadingLine
from router.core.policy import DecodeView

Life = tuple[str, Incarnation]
"""One life of a worker: a name that comes back as another process is another life."""
ModelKey = tuple[str, int]
"""Fingerprint and block size: what the identities of a worker's blocks depend on. Workers of one fingerprint can hand
blocks over to each other, whatever their size."""
Room = tuple[int, int | None]
"""Block size and promised growth: what the demand of a request depends on."""


KEPT_ENDS = 4096
"""Workers that had announced their end, the latest ones: so many are remembered."""


@dataclass(slots=True)
class InFlight:
    """One request of ours on a worker, and what it adds until a report counts it."""

    tokens: int
    blocks: int
    accepted: bool = False
    counted: bool = False
    is_prefilled: bool = False


@dataclass(slots=True, eq=False)
class WorkerEntry:
    """A worker and what is known of its load. What every placement asks all workers for is kept ready, and changed
    where a report, a dispatch or an end changes it: only the registry does that."""

    peer: PeerAddress
    info: WorkerInfo
    seen_s: float
    load: Load | None = None
    least_s_per_block: float = 0.0  # the time for a block over the quickest way to it, of those that it reports
    refused: bool = False  # said no since its last report: not asked again before the next one
    leaving: bool = False  # it drains
    has_evicted: bool = False  # its cache is full: what it caches more takes the place of something else
    own: dict[RequestId, InFlight] = field(default_factory=dict)
    reading: ReadingLine = field(init=False)
    name: str = field(init=False)
    life: Life = field(init=False)
    key: ModelKey = field(init=False)
    room: Room = field(init=False)
    queue_tokens: int = 0
    prefilled_requests: int = 0
    """Those of its own whose prompts it has read, where others write the answers."""
    others_tokens: int = 0
    """Those of its queue that other routers have told of since its last report."""
    freed_blocks: int = 0
    """Those of its own requests that have ended since its last report, which had counted them."""
    used_blocks: int = 0
    """Blocks that no eviction can free, or that are promised to what runs."""
    decode_view: DecodeView | None = None
    """How a placement saw it last, as long as nothing but what it holds of a prompt has changed since."""

    def __post_init__(self) -> None:
        # Every placement asks every worker for these, and a life never changes them.
        self.name, self.life = self.peer.name, (self.peer.name, self.info.incarnation)
        self.key = (self.info.fingerprint, self.info.block_size)
        self.room = (self.info.block_size, self.info.growth_tokens)
        self.reading = ReadingLine(self.info.chunk_tokens)

    def adds(self, tokens: int, blocks: int) -> None:
        """Count so much more, or less, beyond its last report."""
        self.queue_tokens += tokens
        self.used_blocks += blocks
        self.decode_view = None

    @property
    def unfinished(self) -> int:
        """How many of its own requests it has still something to do for."""
        return len(self.own) - self.prefilled_requests

    def reported(self, load: Load) -> None:
        """Take a report, which counts all that had been accepted when it was made."""
        self.load, self.refused, self.leaving = load, False, load.leaving
        self.has_evicted = self.has_evicted or bool(load.evicted)
        self.least_s_per_block = min(load.s_per_block.values(), default=0.0)
        for dispatch in self.own.values():
            dispatch.counted = dispatch.accepted
        self.others_tokens = self.freed_blocks = 0
        self.queue_tokens, self.used_blocks = self._beyond(load)
        self.decode_view = None

    def _beyond(self, load: Load | None) -> tuple[int, int]:
        """A report, and what it did not count: queued tokens, used blocks."""
        tokens = self.others_tokens + (load.waiting_tokens if load else 0)
        blocks = -self.freed_blocks
        if load:
            blocks += load.active_blocks + load.reserved_blocks + load.quarantined_blocks + load.promised_blocks
        uncounted = [d for d in self.own.values() if not d.counted]
        return tokens + sum(d.tokens for d in uncounted), blocks + sum(d.blocks for d in uncounted)

    def check(self) -> None:
        """Raise AssertionError if what is kept ready is not what the report and the dispatches say."""
        assert (self.queue_tokens, self.used_blocks) == self._beyond(self.load), f"{self.name} is miscounted"
        assert self.prefilled_requests == sum(d.is_prefilled for d in self.own.values()), f"{self.name} is miscounted"
        assert set(self.reading) <= {r for r, d in self.own.items() if not d.is_prefilled}, f"{self.name} is miscounted"
        self.reading.check()
        view = self.decode_view
        if view is not None:
            assert (view.used_blocks, view.outstanding) == (self.used_blocks, len(self.own)), f"{self.name} is stale"
            assert self.load is None or view.s_per_step == self.load.s_per_token, f"{self.name} is stale"


class Registry:
    """Workers by name. The router core owns it."""

    # Mutable state: the connected workers, and of every worker the life it is said to have, the last life seen, and
    # the last seen leaving; what those said that were lost, and since when they are; the kinds of those that are
    # connected and the roles of all that ever were; who has failed; and what is fitted of them.

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._workers: dict[str, WorkerEntry] = {}
        self._roles: dict[str, dict[str, WorkerEntry]] = {}
        self._named: dict[str, Incarnation] = {}
        self._lives: dict[str, Incarnation] = {}
        self._left: dict[str, Incarnation] = {}
        self._absent: dict[str, tuple[WorkerInfo, float]] = {}
        self._met_roles: set[str] = set()
        self.keys: tuple[ModelKey, ...] = ()
        """The kinds of the connected workers."""
        self.openings = 0
        """How often a worker has begun to take requests: it connected, was heard again, or leaves no more. One that is
        ejected no more is not counted."""
        self.ejections = Ejections()
        self.fitted = Coefficients()

    def __repr__(self) -> str:
        return f"Registry({', '.join(self._workers) or 'empty'})"

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(self._workers.values())

    def get(self, name: str) -> WorkerEntry | None:
        return self._workers.get(name)

    def lives(self) -> list[Life]:
        """The last life of every worker, connected or not, or never reached and only named."""
        return list({**self._named, **self._lives}.items())

    def has_met(self, life: Life) -> bool:
        """Return True if it was ever connected."""
        return self._lives.get(life[0]) == life[1]

    def computing_otherwise(self, info: WorkerInfo) -> list[WorkerInfo]:
        """Workers of the same model whose results differ from this one's in their last bits."""
        others = (worker.info for worker in self._workers.values())
        return [o for o in others if o.fingerprint == info.fingerprint and o.arithmetic != info.arithmetic]

    def has_met_any(self, role: str) -> bool:
        """Return True if a worker of this role was ever connected."""
        return role in self._met_roles

    def is_connected(self, life: Life) -> bool:
        worker = self._workers.get(life[0])
        return worker is not None and worker.life == life

    def lost_since(self, role: str, since_s: float) -> list[WorkerInfo]:
        """What workers of a role had said of themselves that were lost at `since_s` or later, and may be started
        again: not those that left."""
        return [info for info, lost_s in self._absent.values() if info.role == role and lost_s >= since_s]

    def role(self, role: str) -> list[WorkerEntry]:
        return list(self._roles.get(role, {}).values())

    def live(self, role: str, now: float) -> list[WorkerEntry]:
        """Workers of a role that reported within `silent_s`."""
        since_s = now - self._silent_s
        return [w for w in self._roles.get(role, {}).values() if w.seen_s >= since_s]

    def takers(self, role: str, now: float) -> list[WorkerEntry]:
        """Live workers of a role that take new requests: of each model those that are not ejected, or, where they all
        are, all of them."""
        found = [w for w in self.live(role, now) if not w.leaving]
        if not self.ejections:
            return found
        sound = {w.name for w in found if self.ejections.takes(w.life, w.unfinished, now)}
        served = {w.info.fingerprint for w in found if w.name in sound}
        return [w for w in found if w.name in sound or w.info.fingerprint not in served]

    def failed(self, life: Life, now: float) -> float | None:
        """Note that a worker has failed a request; return for how many seconds it is ejected, if it is: never more than
        half of the live workers of its role and model."""
        worker = self._workers.get(life[0])
        if worker is None or worker.life != life:
            return None
        pool = [w for w in self.live(worker.info.role, now) if w.info.fingerprint == worker.info.fingerprint]
        others = sum(self.ejections.is_ejected(w.life) for w in pool if w is not worker)
        return self.ejections.failed(life, now, may_eject=2 * (others + 1) <= len(pool))

    def was_leaving(self, life: Life) -> bool:
        """Return True if this life had announced its end, for which nobody is to blame then."""
        return self._left.get(life[0]) == life[1]

    def named(self, lives: Iterable[Life]) -> None:
        """Note all workers that the supervisor knows. One that was frozen before we began never says so itself."""
        self._named = dict(lives)

    def join(self, peer: PeerAddress, info: WorkerInfo, now: float) -> bool:
        """Note that a worker is connected; True if this is a new life of it, with an empty cache."""
        worker, known = WorkerEntry(peer, info, now), self._workers.get(peer.name)
        self._workers[peer.name] = worker
        if known is not None and known.info.role != info.role:
            del self._roles[known.info.role][peer.name]
        self._roles.setdefault(info.role, {})[peer.name] = worker
        self._met_roles.add(info.role)
        self._sort()
        self.openings += 1
        self._absent.pop(peer.name, None)
        fresh = self._lives.get(peer.name) != info.incarnation
        self._lives[peer.name] = info.incarnation
        self.ejections.forget(peer.name, but=info.incarnation)
        if fresh:
            self.fitted.joined(peer.name, info.role, info.host)
        return fresh

    def leave(self, name: str, now: float) -> None:
        """Note that a worker is not connected any more; it may come back with its cache."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            if not self.was_leaving(worker.life):
                self._absent[name] = worker.info, now
            del self._roles[worker.info.role][name]
            self._sort()

    def _sort(self) -> None:
        self.keys = tuple({w.key: None for w in self._workers.values()})

    def forget(self, name: str) -> None:
        """Drop what is known of a worker that was taken away, and is not connected any more."""
        for known in (self._lives, self._named, self._absent):
            known.pop(name, None)
        self.ejections.forget(name)
        self.fitted.forget(name)

    def report(self, name: str, load: Load, now: float) -> None:
        """Take a worker's report; what it had accepted by then is counted in it."""
        worker = self._workers.get(name)
        if worker is None:
            return
        takes_again = worker.leaving and not load.leaving
        if takes_again or worker.seen_s < now - self._silent_s:
            self.openings += 1
        worker.seen_s = now
        worker.reported(load)
        self.fitted.reported(name, load)
        if load.leaving:
            self._left.pop(name, None)
            self._left[name] = worker.info.incarnation
            if len(self._left) > KEPT_ENDS:  # its last stream may end after it was forgotten
                del self._left[next(iter(self._left))]

    def forgive(self, now: float) -> None:
        """Count all silence from now: nobody could have been heard until here."""
        self.openings += 1
        for worker in self._workers.values():
            worker.seen_s = now

    def dispatched(self, name: str, request: RequestId, tokens: int, blocks: int) -> None:
        """Note a request that is sent to a worker, and what it adds there: uncached tokens, new blocks."""
        worker = self._workers[name]
        before = worker.own.get(request)
        if before is not None:
            worker.prefilled_requests -= before.is_prefilled
        if before is not None and not before.counted:
            worker.adds(-before.tokens, -before.blocks)
        worker.own[request] = InFlight(tokens, blocks)
        worker.adds(tokens, blocks)

    def reads(self, name: str, request: RequestId, tokens: int, first: int, block: bytes) -> None:
        """Note that a request that is sent to a worker has so many tokens to compute there, from the block `first` of
        its prompt on, of the name `block`."""
        self._workers[name].reading.enter(request, tokens, first, block)

    def told(self, name: str, tokens: int) -> None:
        """Note that another router sends a worker so many uncached tokens: its next report counts them."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.others_tokens += tokens
            worker.adds(tokens, 0)

    def accepted(self, name: str, request: RequestId) -> None:
        """Note that the worker has said yes: its next report counts the request."""
        worker = self._workers.get(name)
        if worker is not None and request in worker.own:
            worker.own[request].accepted = True

    def prefilled(self, name: str, request: RequestId) -> None:
        """Note that the worker has read the prompt of a request that another one goes on with."""
        worker = self._workers.get(name)
        dispatch = None if worker is None else worker.own.get(request)
        if worker is not None and dispatch is not None and not dispatch.is_prefilled:
            dispatch.is_prefilled = True
            worker.reading.leave(request)
            worker.prefilled_requests += 1

    def released(self, name: str, request: RequestId) -> None:
        worker = self._workers.get(name)
        dispatch = None if worker is None else worker.own.pop(request, None)
        if worker is not None and dispatch is not None:
            worker.prefilled_requests -= dispatch.is_prefilled
            worker.reading.leave(request)
            if dispatch.counted:
                worker.freed_blocks += dispatch.blocks
            worker.adds(0 if dispatch.counted else -dispatch.tokens, -dispatch.blocks)
