"""Decides which requests a decode worker takes, and what its next step computes. Owns a request's life. Pure.

    taken --> handoff --every block and the first token are here--> READY --room in the batch--> RUNNING --> ended
    a lost or useless prefill worker: --> ASKING --the router names another--> handoff
                                                 --none is left--> LOCAL --last chunk--> READY
    a further sample of a prompt that is here, or on its way: FORKING --the prompt is here--> LOCAL, one token of it
    any state --end (stop, length, cancel, deadline, fault)--> ENDING until no copy of ours is under way --> gone
    a worker that leaves takes nothing new: READY, RUNNING --Yield--> DEPARTED
    the pool is exhausted: READY, RUNNING, LOCAL, FORKING --> PREEMPTED --room--> handoff, LOCAL, FORKING or LOADING
    a lower tier has some of its blocks: LOADING --they are here--> handoff or LOCAL

All legal moves are in one table (`decode_worker.scheduler.request`). Each part owns a piece of the state, and uses only
those above it:

    batch       the lines of those that are computed, the step, and beam searches (`beams`)
    prefills    how the KV of a request gets here: handoffs (`handoffs`), samples that share (`forks`), loads, chunks
    admission   which requests are taken, with how much room
    preemption  who gives way when the pool is exhausted, and comes back; what is copied meanwhile is `swapping`
    departures  what goes on elsewhere
    endings     what becomes of a request that ends, or whose router is gone (`orphans`)

The first token is sent on as soon as the prefill worker names it; the gap until the second is inter-token latency.
"""

from collections.abc import Sequence

from decode_worker.scheduler.admission import Admission
from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.endings import Endings
from decode_worker.scheduler.events import (
    Command,
    Event,
    FromPeer,
    FromRouter,
    PeerDown,
    PeerUp,
    RouterLost,
    Tell,
)
from decode_worker.scheduler.handoffs import Handoffs, Migrated
from decode_worker.scheduler.leaving.departures import Departures
from decode_worker.scheduler.leaving.orphans import Orphans
from decode_worker.scheduler.preemption import Preemption
from decode_worker.scheduler.prefills import Prefills
from decode_worker.scheduler.request import Request, RequestState
from decode_worker.scheduler.samples.forks import Forks
from decode_worker.scheduler.swapping import Resumed, Swapping
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import DiskHung, Loaded, Spilled, Stored, TierEvent
from engine.messages import (
    Cancel,
    Ended,
    Finish,
    FirstToken,
    Place,
    Release,
    RequestStats,
    RouterHello,
    UsePrefill,
    Yield,
    Yielded,
)
from engine.step import Candidates, Drawn, StepPlan
from engine.types import FinishReason, Incarnation, RequestId
from transfer.handoff.commands import (
    FromReader,
    Leave,
    Posted,
    ReaderDead,
    ReaderLost,
    ReaderUp,
    Received,
    Sent,
)
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender
from worker.config import DecodeConfig


class DecodeScheduler:
    """Mutable state, all of it: `_requests`, `leaving`, and what `kv` and the parts own. Owner: the engine thread."""

    def __init__(
        self,
        *,
        config: DecodeConfig,
        kv: KVCacheManager,
        receiver: KVReceiver,
        name: str,
        incarnation: Incarnation,
        fingerprint: str,
        vocab: int,
        context_tokens: int,
        stop_ids: frozenset[int],
        block_bytes: int,
    ) -> None:
        self.kv = kv
        self.receiver = receiver
        self.leaving = False
        self._name = name
        self._block_bytes = block_bytes
        self._requests: dict[RequestId, Request] = {}
        requests, batch, forks = self._requests, Batch(config, kv, stop_ids), Forks(kv)
        handoffs = Handoffs(kv, receiver, incarnation, fingerprint)
        orphans, departures = Orphans(config.orphan_s), Departures(kv, fingerprint)
        swapping = Swapping(config, kv)
        prefills = Prefills(name, config, kv, handoffs, forks, batch, swapping)
        admission = Admission(name, config, kv, vocab, context_tokens, requests, prefills)
        preemption = Preemption(config, kv, requests, batch, swapping, prefills, admission)
        self.batch, self.swapping, self.prefills = batch, swapping, prefills
        self.admission, self.preemption, self.departures = admission, preemption, departures
        self.endings = Endings(
            name=name,
            block_bytes=block_bytes,
            kv=kv,
            requests=requests,
            batch=batch,
            prefills=prefills,
            admission=admission,
            preemption=preemption,
            departures=departures,
            orphans=orphans,
        )

    @property
    def sender(self) -> KVSender:
        return self.departures.sender

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody, nobody reads or is read from, and no router is to be told of an end."""
        held = self._requests or len(self.prefills) or len(self.departures)
        return not (held or self.swapping.under_way or self.endings.orphans.is_untold)

    @property
    def running_requests(self) -> int:
        return len(self.batch.running)

    @property
    def waiting_requests(self) -> int:
        """Accepted, and not yet in the batch."""
        return len(self._requests) - len(self.batch.running)

    @property
    def slots(self) -> tuple[int, int]:
        """Token slots that requests hold: those with a token's KV in them, and all. Shared blocks count for each."""
        size, requests = self.kv.block_size, self._requests.values()
        live = sum(r.known if r.arrived else r.have_blocks * size for r in requests)
        return live, sum(len(r.lease.blocks) for r in requests) * size

    def take_migrated(self) -> list[Migrated]:
        """Migrations that ended since the last call."""
        handoffs = self.prefills.handoffs
        taken, handoffs.migrated = handoffs.migrated, []
        return taken

    def take_resumed(self) -> list[Resumed]:
        """Preempted requests that have come back since the last call."""
        taken, self.swapping.resumed = self.swapping.resumed, []
        return taken

    # events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns what the shell must do. Nothing else changes the state, but `plan`, `complete`."""
        match event:
            case FromRouter(link, Place() as message):
                return self._place(link, message, now)
            case FromRouter(link, Cancel() as message):
                return self._cancel(link, message, now)
            case FromRouter(_, UsePrefill(name, placement, worker)):
                request = self._current(name, placement)
                if request is not None:
                    return self.endings.settle(self.prefills.use_worker(request, worker, now), now)
            case FromRouter(_, Finish(name, placement, kept)):
                request = self._current(name, placement)
                if request is not None:
                    return self.endings.end(request, FinishReason.STOP, now, kept=kept)
            case FromRouter(_, Yield(name, placement)):
                request = self._current(name, placement)
                if request is not None:
                    # A search has no KV that one row at a time could go on from.
                    request.yielding = self.leaving and request.record.beams is None
            case FromRouter(_, Release(name, placement)):
                self.departures.release(name, placement, now)
            case FromRouter(link, RouterHello(router)):
                return self.endings.router_joined(link, router, now)
            case RouterLost(link):
                return self.endings.router_lost(link, now)
            case FromPeer(_, FirstToken() as message):
                return self._first_token(message, now)
            case FromPeer() | PeerUp() | PeerDown() | Received():
                return self.endings.settle(self.prefills.handle(event, now), now)
            case FromReader() | ReaderUp() | ReaderLost() | ReaderDead() | Posted() | Sent():
                return [*self.departures.handle(event, now)]
            case Stored() | Loaded() | Spilled() | DiskHung():
                return self._copied(event, now)
            case Leave():
                self.leaving = True
            case _:
                raise TypeError(f"not an event: {event!r}")
        return []

    def tick(self, now: float) -> list[Command]:
        """End requests whose time is over."""
        self.departures.tick(now)
        return self.endings.tick(now)

    def _place(self, link: int, message: Place, now: float) -> list[Command]:
        """A router offers a request. One that is placed again ends first where it was; twice the same is said once."""
        record, commands = message.record, list[Command]()
        known = self._requests.get(record.request)
        if known is not None and known.placement >= message.placement:
            return []
        if known is not None:
            commands = self.endings.end(known, FinishReason.CANCELLED, now)
        self.endings.orphans.forget(record.request)
        barred = self.leaving or self.preemption.bars(record)
        router = self.endings.orphans.router(link)
        placed = self.admission.place(link, message, router, barred, now)
        return commands + self.endings.settle(placed, now)

    def _cancel(self, link: int, message: Cancel, now: float) -> list[Command]:
        """Always answered: a router waits for the word that its request holds nothing here any more."""
        name, placement, reason = message.request, message.placement, message.reason
        self.departures.release(name, placement, now)
        known = self._current(name, placement)
        if known is not None:
            return self.endings.end(known, reason, now)
        stats = RequestStats(decode_worker=self._name)
        ended = Ended(request=name, placement=placement, reason=reason, stats=stats)
        return [Tell(link, ended)]

    def _first_token(self, message: FirstToken, now: float) -> list[Command]:
        """A prefill worker has named it."""
        request, commands = self.prefills.handoffs.first_token(message), list[Command]()
        if request is None:
            return []
        if request.record.beams is None:
            commands = self.endings.emit(request, message.token, now)
        if request.arrived and request.state is not RequestState.ENDING:
            self.prefills.ready(request, now)
        return commands

    def _copied(self, event: TierEvent, now: float) -> list[Command]:
        """Copies to a lower tier, or from one, have ended."""
        assert self.kv.tiers is not None
        self.kv.tiers.handle(event)
        match event:
            case Stored():
                self.swapping.stored(event, list(self._requests.values()))
            case Loaded():
                return self.endings.settle(self.prefills.loaded(event, now), now)
        return []

    def _current(self, name: RequestId, placement: int) -> Request | None:
        request = self._requests.get(name)
        return None if request is None or request.placement != placement else request

    # steps

    def plan(self, now: float) -> tuple[StepPlan | None, list[Command]]:
        """The next step: every running request's next token and chunks of prompts that are prefilled here (None:
        nothing to compute), and commands to carry out."""
        commands = self.endings.settle(self.preemption.resume(now), now)
        self.batch.fill(len(self.departures.incomplete), now)
        while self.preemption.make_room(now):
            self.batch.fill(len(self.departures.incomplete), now)
        for request in [*self.batch.running, *self.batch.ready]:
            if request.yielding and not self.kv.shortage(request.lease, len(request.tokens)):
                commands.append(self._depart(request, now))
        return self.batch.plan(self.departures.incomplete), commands

    def _depart(self, request: Request, now: float) -> Command:
        """Out of the batch: all KV but the newest token's is here, for whoever goes on."""
        name = request.record.request
        del self._requests[name]
        self.batch.remove(request)
        request.move(RequestState.DEPARTED)
        self.departures.add(request)
        stats = request.stats(now, self._name, self._block_bytes, None)
        yielded = Yielded(request=name, placement=request.placement, stats=stats)
        return Tell(request.link, yielded)

    def complete(self, plan: StepPlan, drawn: Sequence[Drawn], now: float) -> list[Command]:
        """The step has run: what follows each row is sent on, searched on, or named to who goes on elsewhere. Who was
        computed here, and does not end with its first token, is ready."""
        commands: list[Command] = []
        for request, token in self.batch.complete(plan, drawn):
            if not isinstance(token, int):
                commands += self._searched(request, token, now)
                continue
            if request.state is RequestState.DEPARTED:
                commands += self.departures.complete(request, token, now)
                continue
            is_local = request.state is RequestState.LOCAL
            if request.record.beams is None:
                commands += self.endings.emit(request, token, now)
            if is_local and request.state is RequestState.LOCAL:
                self.batch.remove(request)
                self.prefills.ready(request, now)
        return commands

    def _searched(self, request: Request, candidates: Candidates, now: float) -> list[Command]:
        """What may follow one hypothesis is known; the last one's may end the search."""
        answers = self.batch.search(request, candidates)
        if answers is None:
            return []
        kept = sum(len(beam.ids) for beam in answers)
        return self.endings.end(request, answers[0].reason, now, kept=kept, beams=answers)

    def check(self) -> None:
        """Recompute the invariants."""
        requests = list(self._requests.values())
        self.kv.check()
        self.batch.check(requests)
        self.prefills.check(requests)
        self.preemption.check()
        self.swapping.check(requests)
        self.departures.check()
        self.endings.check()

    def __repr__(self) -> str:
        batch = self.batch
        return (
            f"DecodeScheduler({len(batch.running)} running, {len(batch.ready)} ready, "
            f"{len(batch.local)} local, {len(self.preemption.line)} preempted, "
            f"{len(self.prefills.handoffs)} handoffs, {len(self.departures)} departures, {self.kv!r})"
        )
