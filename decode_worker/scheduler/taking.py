"""Whether a request that a router offers is taken, and what it begins with. Pure.

It is taken with a lease for its whole prompt and the promise of some room to grow, or as the fork of one that is here;
otherwise the answer is no, at once, and the router keeps it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from decode_worker.scheduler.admission import Admission
from decode_worker.scheduler.events import Tell
from decode_worker.scheduler.filling import Filling
from decode_worker.scheduler.forks import Forks, shared_tokens
from decode_worker.scheduler.orphans import Orphans
from decode_worker.scheduler.outcomes import Over, Result
from decode_worker.scheduler.preemption import Preemption
from decode_worker.scheduler.request import Request, RequestState
from engine.kv.manager import KVCacheManager, Lease
from engine.messages import Accepted, Ended, Place, Refused, RequestStats
from engine.plan import StageClock
from engine.types import FinishReason, RequestId


@dataclass(slots=True, eq=False, repr=False)
class Taking:
    """Mutable state: `accepted`; all else that it changes belongs to the parts that it is given."""

    name: str
    """This worker's."""
    requests: dict[RequestId, Request]
    """All that there are; who is taken is put in."""
    kv: KVCacheManager
    forks: Forks
    """Take a further sample of a prompt that is here, or on its way."""
    orphans: Orphans
    """Know whose a request is."""
    admission: Admission
    preemption: Preemption
    """Bars who would stand behind those that wait for room."""
    filling: Filling
    accepted: int = 0
    """Requests that were taken."""

    def place(self, link: int, message: Place, leaving: bool, now: float) -> Iterator[Result]:
        """Each result is to be acted on before the next is asked for. `leaving`: this worker takes nothing new."""
        record, name = message.record, message.record.request
        known = self.requests.get(name)
        if known is not None and known.placement >= message.placement:
            return  # idempotent: it is under way
        if known is not None:
            yield Over(known)
        self.orphans.forget(name)
        fault = self.admission.refusal(record)
        if fault is not None:
            ended = Ended(
                request=name,
                placement=message.placement,
                reason=FinishReason.REJECTED,
                stats=RequestStats(decode_worker=self.name),
                fault=fault,
            )
            yield Tell(link, ended)
            return
        parent = self._parent(message)
        lease = None
        if not (leaving or self.preemption.bars(record)):
            lease = self._lease(message, parent)
        if lease is None:
            yield Tell(link, Refused(name, message.placement, self.admission.blocks(record)))
            return
        request = self._take(link, message, lease, now)
        cached_tokens = lease.cached_tokens if parent is None else shared_tokens(record)
        request.decode_cached_tokens = min(cached_tokens, record.prompt_tokens)
        yield Tell(link, Accepted(name, message.placement, cached_tokens))
        if parent is None:
            if not self.filling.lift(request, here=not request.prefill.name):
                yield from self.filling.begin(request, now)
            return
        self.forks.wait(request, parent)
        if parent.state in (RequestState.READY, RequestState.RUNNING):
            self.filling.fork(parent, now)

    def _parent(self, message: Place) -> Request | None:
        """Whose fork it can be."""
        other = None if message.fork_of is None else self.requests.get(message.fork_of)
        if other is None or other.state is RequestState.PREEMPTED:
            return None
        return self.forks.parent(message.record, other)

    def _lease(self, message: Place, parent: Request | None) -> Lease | None:
        record = message.record
        if parent is not None:
            room_tokens = self.admission.room_tokens(record, len(record.tokens))
            return self.forks.promise(record, room_tokens)
        if self.filling.is_busy:
            return None
        return self.admission.acquire(record, record.tokens)

    def _take(self, link: int, message: Place, lease: Lease, now: float) -> Request:
        record = message.record
        self.accepted += 1
        request = Request(
            link=link,
            record=record,
            placement=message.placement,
            prefill=message.prefill,
            tokens=list(record.tokens),
            lease=lease,
            clock=StageClock("prefill", now),
            accepted=now,
            deadline=float("inf") if record.remaining_s is None else now + record.remaining_s,
            have_blocks=lease.cached_tokens // self.kv.block_size,
            losses=message.losses,
            router=self.orphans.router(link),
            number=self.accepted,
            era=self._era(message),
            sought=now,
        )
        self.requests[record.request] = request
        return request

    def _era(self, message: Place) -> int:
        group = message.record.group
        eras = [r.era for r in self.requests.values() if group and r.record.group == group]
        return min(eras, default=self.accepted)
