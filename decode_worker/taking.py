"""Whether a request that a router offers is taken, and what it begins with. Pure.

It is taken with a lease for its whole prompt and the promise of some room to grow, or as the fork of one that is here;
otherwise the answer is no, at once, and the router keeps it.
"""

from collections.abc import Iterator

from decode_worker.admission import Admission
from decode_worker.config import DecodeConfig
from decode_worker.costs import Costs
from decode_worker.events import Tell
from decode_worker.filling import Filling
from decode_worker.forks import Forks, shared_tokens
from decode_worker.handoffs import Handoffs
from decode_worker.loading import Loading
from decode_worker.orphans import Orphans
from decode_worker.outcomes import Over, Result
from decode_worker.preemption import Preemption
from decode_worker.request import Request, State
from engine.kv.manager import KVCacheManager, Lease
from engine.messages import Accepted, Ended, Place, Refused, RequestStats
from engine.plan import StageClock
from engine.types import FinishReason, RequestId


class Taking:
    """Puts requests into `requests`. Mutable state: `_accepted`, how many that were. `name` is this worker's."""

    def __init__(
        self,
        config: DecodeConfig,
        requests: dict[RequestId, Request],
        kv: KVCacheManager,
        handoffs: Handoffs,
        forks: Forks,
        loading: Loading,
        orphans: Orphans,
        admission: Admission,
        preemption: Preemption,
        filling: Filling,
        costs: Costs,
        name: str,
    ) -> None:
        self._config = config
        self._requests = requests
        self._kv = kv
        self._handoffs = handoffs
        self._forks = forks
        self._loading = loading
        self._orphans = orphans
        self._admission = admission
        self._preemption = preemption
        self._filling = filling
        self._costs = costs
        self._name = name
        self._accepted = 0

    def place(self, link: int, message: Place, leaving: bool, now: float) -> Iterator[Result]:
        """Each result is to be acted on before the next is asked for. `leaving`: this worker takes nothing new."""
        record, name = message.record, message.record.request
        known = self._requests.get(name)
        if known is not None and known.placement >= message.placement:
            return  # idempotent: it is under way
        if known is not None:
            yield Over(known)
        self._orphans.forget(name)
        fault = self._admission.refusal(record)
        if fault is not None:
            ended = Ended(
                request=name,
                placement=message.placement,
                reason=FinishReason.REJECTED,
                stats=RequestStats(decode_worker=self._name),
                fault=fault,
            )
            yield Tell(link, ended)
            return
        parent = self._parent(message)
        lease = None
        if not (leaving or self._preemption.bars(record)):
            lease = self._lease(message, parent)
        if lease is None:
            yield Tell(link, Refused(name, message.placement, self._admission.blocks(record)))
            return
        request = self._take(link, message, lease, now)
        cached_tokens = lease.cached_tokens if parent is None else shared_tokens(record)
        request.decode_cached_tokens = min(cached_tokens, record.prompt_tokens)
        yield Tell(link, Accepted(name, message.placement, cached_tokens))
        if parent is None:
            speed = self._costs.tokens_per_s(here=not request.prefill.name)
            found = self._loading.find(lease, request.tokens, speed)
            if found is None:
                yield from self._filling.begin(request, now)
            else:
                self._loading.begin(request, found)
            return
        self._forks.wait(request, parent)
        if parent.state in (State.READY, State.RUNNING):
            self._filling.fork(parent, now)

    def _parent(self, message: Place) -> Request | None:
        """Whose fork it can be."""
        other = None if message.fork_of is None else self._requests.get(message.fork_of)
        if other is None or other.state is State.PREEMPTED:
            return None
        return self._forks.parent(message.record, other)

    def _lease(self, message: Place, parent: Request | None) -> Lease | None:
        record = message.record
        if parent is not None:
            room_tokens = self._admission.room_tokens(record, len(record.tokens))
            return self._forks.promise(record, room_tokens)
        if len(self._handoffs) + len(self._loading) >= self._config.max_handoffs:
            return None
        return self._admission.acquire(record, record.tokens)

    def _take(self, link: int, message: Place, lease: Lease, now: float) -> Request:
        record = message.record
        self._accepted += 1
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
            have_blocks=lease.cached_tokens // self._kv.block_size,
            losses=message.losses,
            router=self._orphans.router(link),
            number=self._accepted,
            era=self._era(message),
            sought=now,
        )
        self._requests[record.request] = request
        return request

    def _era(self, message: Place) -> int:
        group = message.record.group
        eras = [r.era for r in self._requests.values() if group and r.record.group == group]
        return min(eras, default=self._accepted)
