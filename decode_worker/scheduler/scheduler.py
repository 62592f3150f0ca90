"""Decides which requests a decode worker takes, and what its next step computes. Owns a request's life. Pure.

    (taken) --handoff--> READY --room in the batch--> RUNNING --> gone
    a lost or useless prefill worker: --> ASKING --the router names another--> handoff
                                                 --none is left--> LOCAL --last chunk--> READY
    a further sample of a prompt that is here, or on its way: FORKING --the prompt is here--> LOCAL, one token of it any
    state --end (stop, length, cancel, deadline, fault)--> gone, or ENDING until no copy of ours is under way a worker
    that leaves takes nothing new: READY, RUNNING --Yield--> DEPARTED, which `decode_worker.scheduler.departures` owns
    the pool is exhausted: READY, RUNNING, LOCAL, FORKING --> PREEMPTED --room--> handoff, LOCAL, FORKING or LOADING a
    lower tier has some of its blocks: LOADING --they are here--> handoff or LOCAL

It is decided in parts, whose results are acted on here:

    taking, admission           which requests are taken, with how much room
    filling, handoffs, forks    how the KV of a request gets here
    batch, beams                what a step holds
    drawing                     what becomes of the tokens that it draws
    room, preemption            who gives way when the pool is exhausted, and comes back
    swapping, costs, loading    what is copied to lower tiers, and comes back from them
    departures                  what goes on elsewhere
    routers, orphans            whose a request is
    ending                      what becomes of its blocks

The first token is sent on as soon as the prefill worker names it; the gap until the second is inter-token latency.
"""

from collections.abc import Iterable, Sequence

from decode_worker.config import DecodeConfig
from decode_worker.scheduler.admission import Admission
from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.beams import Beams
from decode_worker.scheduler.departures import Departures
from decode_worker.scheduler.drawing import Drawing
from decode_worker.scheduler.ending import Ending
from decode_worker.scheduler.events import (
    ConnectPeer,
    FromPeer,
    FromRouter,
    PeerDown,
    PeerUp,
    RouterLost,
    Tell,
)
from decode_worker.scheduler.filling import Filling
from decode_worker.scheduler.forks import Forks
from decode_worker.scheduler.handoffs import Handoffs
from decode_worker.scheduler.loading import Loading
from decode_worker.scheduler.orphans import NOBODY, Orphans
from decode_worker.scheduler.outcomes import Drawn as TokenDrawn
from decode_worker.scheduler.outcomes import (
    Finished,
    Freed,
    Hopeless,
    Landed,
    Lifted,
    Over,
    Result,
    Unserved,
)
from decode_worker.scheduler.preemption import Preemption, Resumed
from decode_worker.scheduler.request import Migrated, Request, RequestState
from decode_worker.scheduler.room import Room
from decode_worker.scheduler.routers import Routers
from decode_worker.scheduler.swapping import Swapping
from decode_worker.scheduler.taking import Taking
from engine.kv.manager import KVCacheManager
from engine.kv.tier_io import DiskHung, Loaded, Spilled, Stored, TierEvent
from engine.messages import (
    Cancel,
    Ended,
    Fault,
    Finish,
    FirstToken,
    Offer,
    Place,
    PrefillFailed,
    Release,
    RequestStats,
    RouterHello,
    UsePrefill,
    Yield,
    Yielded,
)
from engine.step import Drawn, StepPlan
from engine.types import Beam, FinishReason, Incarnation, RequestId
from transfer.handoff.commands import Command as TransferCommand
from transfer.handoff.commands import (
    FromReader,
    Leave,
    Posted,
    ReaderDead,
    ReaderEvent,
    ReaderLost,
    ReaderUp,
    Received,
    Sent,
)
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender

OfSource = PeerUp | PeerDown | FromPeer | Received
OfReader = ReaderEvent | Posted | Sent
Event = FromRouter | RouterLost | OfSource | OfReader | Leave | TierEvent
Command = TransferCommand | Tell | ConnectPeer


class DecodeScheduler:
    """Mutable state, all of it: `_requests`, `leaving`, and what `kv`, `batch`, `beams`, `handoffs`, `departures`,
    `forks`, `loading`, `preemption`, `swapping` and `orphans` own; `taking` and `drawing` count; `filling`, `room`,
    `ending` and `routers` change these and keep nothing. Owner: the engine thread."""

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
        self.admission = Admission(config, kv, vocab, context_tokens)
        self.beams = Beams(kv, stop_ids)
        self.batch = Batch(kv, self.beams, config.max_batch, config.local_chunk_tokens, stop_ids)
        self.preemption = Preemption()
        self.handoffs = Handoffs(kv, receiver, incarnation, fingerprint)
        self.departures = Departures(kv, fingerprint)
        self.forks = Forks(kv)
        self.orphans = Orphans(config.orphan_s)
        self.loading = Loading(kv)
        self.swapping = Swapping(config, kv)
        self.filling = Filling(
            name=name,
            config=config,
            kv=kv,
            batch=self.batch,
            beams=self.beams,
            handoffs=self.handoffs,
            forks=self.forks,
            loading=self.loading,
            preemption=self.preemption,
            swapping=self.swapping,
        )
        self.room = Room(
            config=config,
            requests=self._requests,
            kv=kv,
            batch=self.batch,
            beams=self.beams,
            forks=self.forks,
            admission=self.admission,
            preemption=self.preemption,
            swapping=self.swapping,
            filling=self.filling,
        )
        self.ending = Ending(
            name=name,
            block_bytes=block_bytes,
            requests=self._requests,
            kv=kv,
            handoffs=self.handoffs,
            forks=self.forks,
            orphans=self.orphans,
            admission=self.admission,
            room=self.room,
            filling=self.filling,
        )
        self.routers = Routers(
            requests=self._requests,
            orphans=self.orphans,
            departures=self.departures,
            batch=self.batch,
            filling=self.filling,
        )
        self.taking = Taking(
            name=name,
            requests=self._requests,
            kv=kv,
            forks=self.forks,
            orphans=self.orphans,
            admission=self.admission,
            preemption=self.preemption,
            filling=self.filling,
        )
        self.drawing = Drawing(
            stop_ids=stop_ids,
            batch=self.batch,
            beams=self.beams,
            handoffs=self.handoffs,
            departures=self.departures,
            filling=self.filling,
        )

    @property
    def sender(self) -> KVSender:
        return self.departures.sender

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody, nobody reads or is read from, and no router is to be told of an end."""
        held = self._requests or len(self.handoffs) or len(self.departures)
        copied = len(self.loading) or self.swapping.under_way
        return not (held or copied or self.orphans.is_untold)

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
        taken, self.handoffs.migrated = self.handoffs.migrated, []
        return taken

    def take_resumed(self) -> list[Resumed]:
        """Preempted requests that have come back since the last call."""
        taken, self.preemption.resumed = self.preemption.resumed, []
        return taken

    # events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns what the shell must do. Nothing else changes the state, but `plan`, `complete`."""
        match event:
            case FromRouter(link, Place() as message):
                return self._place(link, message, now)
            case FromRouter(_, UsePrefill() as answer):
                return self._use_prefill(answer, now)
            case FromRouter(link, Cancel() as message):
                return self._cancel(link, message, now)
            case FromRouter(_, Finish(name, placement, kept)):
                request = self._current(name, placement)
                return [] if request is None else self._end(request, FinishReason.STOP, now, kept=kept)
            case FromRouter(_, Yield(name, placement)):
                request = self._current(name, placement)
                if request is not None:
                    # A search has no KV that one row at a time could go on from.
                    request.yielding = self.leaving and request.record.beams is None
                return []
            case FromRouter(_, Release(name, placement)):
                self.departures.release(name, placement, now)
                return []
            case FromRouter(link, RouterHello(router)):
                return self._settle(self.routers.joined(link, router, now), now)
            case FromPeer(_, FirstToken() as message):
                return self._settle(self.drawing.first(message, now), now)
            case FromPeer(_, Offer() as message):
                return self._settle(self.handoffs.offer(message, now), now)
            case FromPeer(_, PrefillFailed() as message):
                return self._settle(self.handoffs.failed(message, now), now)
            case Received():
                return self._settle(self.handoffs.received(event, now), now)
            case PeerUp():
                return self._settle(self.handoffs.peer_up(event, now), now)
            case PeerDown():
                return self._settle(self.handoffs.peer_down(event, now), now)
            case FromReader() | ReaderUp() | ReaderLost() | ReaderDead() | Posted() | Sent():
                return [*self.departures.handle(event, now)]
            case Stored() | Loaded() | Spilled() | DiskHung():
                return self._moved(event, now)
            case Leave():
                self.leaving = True
                return []
            case RouterLost(link):
                return self._settle(self.routers.lost(link, now), now)
        raise TypeError(f"not an event: {event!r}")

    def _moved(self, event: TierEvent, now: float) -> list[Command]:
        """Copies to a lower tier, or from one, have ended."""
        assert self.kv.tiers is not None
        self.kv.tiers.handle(event)
        match event:
            case Stored():
                self.swapping.stored(event, list(self._requests.values()))
            case Loaded():
                return self._settle(self.loading.loaded(event), now)
        return []

    def tick(self, now: float) -> list[Command]:
        """End requests whose time is over."""
        self.departures.tick(now)
        self.orphans.tick(now)
        commands: list[Command] = []
        late = [r for r in self._requests.values() if now >= r.deadline]
        if late:
            commands += self._end_all(late, FinishReason.DEADLINE, now)
        alone = [r for r in self._requests.values() if now >= r.orphan_until]
        if alone:
            self.orphans.expired += len(alone)
            commands += self._end_all(alone, FinishReason.CANCELLED, now)
        for request in self.handoffs.overdue(now):
            commands += self._settle(self.handoffs.abandon(request, now), now)
        return commands

    def _place(self, link: int, message: Place, now: float) -> list[Command]:
        return self._settle(self.taking.place(link, message, self.leaving, now), now)

    # what comes of it

    def _settle(self, results: Iterable[Result], now: float) -> list[Command]:
        """Act on each of what the parts say, in turn; everything else goes to the shell."""
        commands: list[Command] = []
        for result in results:
            match result:
                case Landed(request):
                    self.filling.landed(request, now)
                    if request.state is RequestState.ENDING:
                        commands += self._settle(self.ending.let_go(request, now), now)
                case Unserved(request) if request.state is RequestState.ENDING:
                    commands += self._settle(self.ending.let_go(request, now), now)
                case Unserved(request):
                    commands += self._settle(self.filling.unserved(request, now), now)
                case Hopeless(request, fault):
                    late = fault.code == "DEADLINE_EXCEEDED"
                    reason = FinishReason.DEADLINE if late else FinishReason.ERROR
                    commands += self._end(request, reason, now, fault)
                case Lifted():
                    commands += self._settle(self.filling.lifted(result, now), now)
                case Freed(request):
                    commands += self._settle(self.ending.release(request, now), now)
                case Over(request):
                    commands += self._end(request, FinishReason.CANCELLED, now)
                case TokenDrawn(request, token):
                    commands += self._settle(self.drawing.drawn(request, token), now)
                case Finished(request, reason, kept, beams):
                    commands += self._end(request, reason, now, kept=kept, beams=beams)
                case _:
                    commands.append(result)
        return commands

    def _use_prefill(self, answer: UsePrefill, now: float) -> list[Command]:
        request = self._current(answer.request, answer.placement)
        if request is None:
            return []
        return self._settle(self.filling.use_prefill(request, answer.prefill, now), now)

    def _current(self, name: RequestId, placement: int) -> Request | None:
        request = self._requests.get(name)
        return None if request is None or request.placement != placement else request

    def _cancel(self, link: int, message: Cancel, now: float) -> list[Command]:
        """Always answered: a router waits for the word that its request holds nothing here any more."""
        name, placement, reason = message.request, message.placement, message.reason
        self.departures.release(name, placement, now)
        known = self._current(name, placement)
        if known is not None:
            return self._end(known, reason, now)
        stats = RequestStats(decode_worker=self._name)
        ended = Ended(request=name, placement=placement, reason=reason, stats=stats)
        return [Tell(link, ended)]

    def _end_all(
        self, requests: list[Request], reason: FinishReason, now: float
    ) -> list[Command]:
        return [command for request in requests for command in self._end(request, reason, now)]

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        fault: Fault | None = None,
        kept: int | None = None,
        beams: Sequence[Beam] = (),
    ) -> list[Command]:
        return self._settle(self.ending.end(request, reason, now, fault, kept, beams), now)

    # steps

    def plan(self, now: float) -> tuple[StepPlan | None, list[Command]]:
        """The next step: every running request's next token and chunks of prompts that are prefilled here (None:
        nothing to compute), and commands to carry out."""
        commands = self._settle(self.room.resume(now), now)
        self.batch.fill(len(self.departures.incomplete), now)
        while self.room.make(now):
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
        """The step has run: send the tokens on, end what is over."""
        return self._settle(self.drawing.complete(plan, drawn, now), now)

    def check(self) -> None:
        """Recompute the invariants."""
        self.kv.check()
        self.handoffs.check()
        self.departures.check()
        self.forks.check({r for r in self._requests.values() if r.state is RequestState.FORKING})
        self.orphans.check()
        self.batch.check(list(self._requests.values()))
        self.beams.check(list(self._requests.values()))
        self.preemption.check(list(self._requests.values()))
        self.swapping.check(list(self._requests.values()))
        self.loading.check({r for r in self._requests.values() if r.state is RequestState.LOADING})
        for request in self._requests.values():
            assert not request.lease.released and request.state is not RequestState.ENDING
            assert (request.link == NOBODY) == (request.orphan_until < float("inf"))
            assert request.link != NOBODY or request.state is not RequestState.ASKING

    def __repr__(self) -> str:
        batch = self.batch
        return (
            f"DecodeScheduler({len(batch.running)} running, {len(batch.ready)} ready, "
            f"{len(batch.local)} local, {len(self.preemption.line)} preempted, "
            f"{len(self.handoffs)} handoffs, {len(self.departures)} departures, {self.kv!r})"
        )
