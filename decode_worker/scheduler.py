"""Decides which requests a decode worker takes, and what its next step computes. Owns a request's life. Pure.

    (taken) --handoff--> READY --room in the batch--> RUNNING --> gone
    a lost or useless prefill worker: --> ASKING --the router names another--> handoff
                                                 --none is left--> LOCAL --last chunk--> READY
    a further sample of a prompt that is here, or on its way: FORKING --the prompt is here--> LOCAL, one token of it
    any state --end (stop, length, cancel, deadline, fault)--> gone, or ENDING until no copy of ours is under way
    a worker that leaves takes nothing new: READY, RUNNING --Yield--> DEPARTED, which `decode_worker.departures` owns
    the pool is exhausted: READY, RUNNING, LOCAL, FORKING --> PREEMPTED --room--> handoff, LOCAL or FORKING again

A request is taken only with a lease for its whole prompt and the promise of some room to grow; otherwise the answer is
no, at once, and the router keeps it. Who needs more room gets it from those that stand behind it
(`decode_worker.preemption`). How blocks get here is the business of `decode_worker.handoffs`, what a step holds that of
`decode_worker.batch`. The first token is sent on as soon as the prefill worker names it; the gap until the second is
inter-token latency. The end of a request is told at once; its blocks follow when they are fenced. A resumable request
outlives its router for a while (`decode_worker.orphans`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from decode_worker.admission import Admission
from decode_worker.batch import Batch
from decode_worker.beams import Beams
from decode_worker.config import DecodeConfig
from decode_worker.departures import Departure, Departures
from decode_worker.events import (
    ConnectPeer,
    FromPeer,
    FromRouter,
    PeerDown,
    PeerUp,
    RouterLost,
    Tell,
)
from decode_worker.forks import Forks, shared_tokens
from decode_worker.handoffs import (
    MAX_ATTEMPTS,
    Freed,
    Handoffs,
    Hopeless,
    Landed,
    Result,
    Unserved,
)
from decode_worker.orphans import NOBODY, Orphans, orphan
from decode_worker.preemption import Preemption, Resumed, order
from decode_worker.request import NO_PREFILL, Migrated, Request, State
from engine.kv.manager import KVCacheManager, Lease
from engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Fault,
    Finish,
    FirstToken,
    NeedPrefill,
    Offer,
    OrphansTold,
    Place,
    PrefillFailed,
    Refused,
    Release,
    RequestStats,
    RouterHello,
    Tokens,
    UsePrefill,
    Yield,
    Yielded,
)
from engine.plan import StageClock, finish_reason
from engine.step import Candidates, Drawn, StepPlan
from engine.types import Beam, FinishReason, Incarnation, RequestId
from transfer.commands import Command as TransferCommand
from transfer.commands import (
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
from transfer.receiver import KVReceiver
from transfer.sender import KVSender

FETCHING = frozenset({State.CONNECTING, State.HANDOFF, State.FENCING, State.ASKING})
"""A prefill worker has the request's prompt, or is looked for."""

OfSource = PeerUp | PeerDown | FromPeer | Received
OfReader = ReaderEvent | Posted | Sent
Event = FromRouter | RouterLost | OfSource | OfReader | Leave
Command = TransferCommand | Tell | ConnectPeer


@dataclass(slots=True)
class DecodeScheduler:
    """Mutable state, all of it: `_requests`, `_accepted`, `leaving`, what is counted, and what `kv`, `batch`,
    `beams`, `handoffs`, `departures`, `forks`, `preemption` and `orphans` own. Owner: the engine thread."""

    config: DecodeConfig
    kv: KVCacheManager
    receiver: KVReceiver
    name: str
    incarnation: Incarnation
    fingerprint: str
    vocab: int
    context_tokens: int
    stop_ids: frozenset[int]
    block_bytes: int
    admission: Admission = field(init=False)
    batch: Batch = field(init=False)
    beams: Beams = field(init=False)
    preemption: Preemption = field(init=False)
    handoffs: Handoffs = field(init=False)
    departures: Departures = field(init=False)
    forks: Forks = field(init=False)
    orphans: Orphans = field(init=False)
    leaving: bool = False
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens computed here."""
    recomputed_tokens: int = 0
    """Prompt tokens computed here because a worker that had computed them, or was to, is lost."""
    _requests: dict[RequestId, Request] = field(default_factory=dict)
    _accepted: int = 0

    def __post_init__(self) -> None:
        config = self.config
        self.admission = Admission(config, self.kv, self.vocab, self.context_tokens)
        self.beams = Beams(self.kv, self.stop_ids)
        self.batch = Batch(
            self.kv, self.beams, config.max_batch, config.local_chunk_tokens, self.stop_ids
        )
        self.preemption = Preemption()
        self.handoffs = Handoffs(self.kv, self.receiver, self.incarnation, self.fingerprint)
        self.departures = Departures(self.kv, self.fingerprint)
        self.forks = Forks(self.kv)
        self.orphans = Orphans(config.orphan_s)

    @property
    def sender(self) -> KVSender:
        return self.departures.sender

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody, nobody reads or is read from, and no router is to be told of an end."""
        held = self._requests or len(self.handoffs) or len(self.departures)
        return not (held or self.orphans.is_untold)

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
                return self._end_if_current(name, placement, FinishReason.STOP, now, kept)
            case FromRouter(_, Yield(name, placement)):
                request = self._requests.get(name)
                if request is not None and request.placement == placement:
                    # A search has no KV that one row at a time could go on from.
                    request.yielding = self.leaving and request.record.beams is None
                return []
            case FromRouter(_, Release(name, placement)):
                self.departures.release(name, placement, now)
                return []
            case FromRouter(link, RouterHello(router)):
                return self._router_joined(link, router, now)
            case FromPeer(_, FirstToken() as message):
                return self._first_token(message, now)
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
            case Leave():
                self.leaving = True
                return []
            case RouterLost(link):
                return self._router_lost(link, now)
        raise TypeError(f"not an event: {event!r}")

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

    # routers that come and go

    def _router_lost(self, link: int, now: float) -> list[Command]:
        """Nobody hears of its requests any more: those whose clients may come back go on for a while."""
        heir = self.orphans.left(link)
        lost = [r for r in self._requests.values() if r.link == link]
        over = [r for r in lost if not r.record.context]
        commands = self._end_all(over, FinishReason.CANCELLED, now)
        self._orphan([r for r in lost if r.record.context], now)
        for departure in self.departures.router_lost(link, now):
            commands += self._take_back(departure, now)
        return commands if heir == NOBODY else commands + self._hand_over(heir, now)

    def _router_joined(self, link: int, router: Incarnation, now: float) -> list[Command]:
        """The same incarnation has placed its requests again since it lost its former stream; another takes over."""
        former = [r for r in self._requests.values() if r.router == router and r.link != link]
        placed = [r for r in former if not r.handovers]
        commands = self._end_all(placed, FinishReason.CANCELLED, now)
        self._orphan([r for r in former if r.handovers], now)
        self.orphans.joined(link, router)
        return commands + self._hand_over(link, now)

    def _orphan(self, requests: list[Request], now: float) -> None:
        for request in requests:
            self.orphans.leave(request, now)
            # Who asked for it is gone: were it to depart, its next router would never be told of it.
            request.yielding = False
            if request.state is State.ASKING:
                self._prefill_here(request, now)

    def _take_back(self, departure: Departure, now: float) -> list[Command]:
        """Its router is gone before anybody went on with it: it runs on here, as an orphan."""
        request = departure.request
        self._requests[request.record.request] = request
        self.orphans.leave(request, now)
        request.yielding = False
        request.clock.resume("decode_queue", now)
        self.batch.add_ready(request, now)
        return [] if departure.token is None else self._drawn(request, departure.token, now)

    def _hand_over(self, link: int, now: float) -> list[Command]:
        """The router on `link` gets what belonged to routers that are gone."""
        commands: list[Command] = []
        for request in [r for r in self._requests.values() if r.link == NOBODY]:
            if self.orphans.adopt(request, link):
                commands.append(Tell(link, orphan(request, request.output, now)))
            else:
                commands += self._end(request, FinishReason.CANCELLED, now)
        for one in self.orphans.adopt_ended(link):
            commands.append(Tell(link, orphan(one.request, one.tokens, now)))
            commands.append(Tell(link, one.ended))
        if self.orphans.is_alone(link):
            commands.append(Tell(link, OrphansTold()))
        return commands

    # taking a request

    def _place(self, link: int, message: Place, now: float) -> list[Command]:
        record, name = message.record, message.record.request
        commands: list[Command] = []
        known = self._requests.get(name)
        if known is not None and known.placement >= message.placement:
            return []  # idempotent: it is under way
        if known is not None:
            commands += self._end(known, FinishReason.CANCELLED, now)
        self.orphans.forget(name)
        fault = self.admission.refusal(record)
        if fault is not None:
            stats = RequestStats(decode_worker=self.name)
            ended = Ended(
                request=name,
                placement=message.placement,
                reason=FinishReason.REJECTED,
                stats=stats,
                fault=fault,
            )
            return [*commands, Tell(link, ended)]
        other = None if message.fork_of is None else self._requests.get(message.fork_of)
        parent = None
        if other is not None and other.state is not State.PREEMPTED:
            parent = self.forks.parent(record, other)
        lease = None
        open_to_it = not (self.leaving or self.preemption.bars(record))
        if open_to_it and parent is not None:
            lease = self.forks.promise(record, self.admission.room_tokens(record, len(record.tokens)))
        elif open_to_it and len(self.handoffs) < self.config.max_handoffs:
            lease = self.admission.acquire(record, record.tokens)
        if lease is None:
            refused = Refused(name, message.placement, self.admission.blocks(record))
            return [*commands, Tell(link, refused)]
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
            have_blocks=lease.cached_tokens // self.kv.block_size,
            losses=message.losses,
            router=self.orphans.router(link),
            number=self._accepted,
            era=self._era(message),
            sought=now,
        )
        self._requests[name] = request
        cached_tokens = lease.cached_tokens if parent is None else shared_tokens(record)
        request.decode_cached_tokens = min(cached_tokens, record.prompt_tokens)
        commands.append(Tell(link, Accepted(name, message.placement, cached_tokens)))
        if parent is None:
            return commands + self._begin(request, now)
        self.forks.wait(request, parent)
        if parent.state in (State.READY, State.RUNNING):
            self._fork(parent, now)
        return commands

    def _begin(self, request: Request, now: float) -> list[Command]:
        """Have the prompt filled in, by its prefill worker or here."""
        if not request.prefill.name:
            self._prefill_here(request, now)
            return []
        return self._settle(self.handoffs.begin(request, now), now)

    def _era(self, message: Place) -> int:
        group = message.record.group
        eras = [r.era for r in self._requests.values() if group and r.record.group == group]
        return min(eras, default=self._accepted)

    # until the prompt's blocks and the first token are here

    def _settle(self, results: Iterable[Result], now: float) -> list[Command]:
        """Act on what became of handoffs; everything else goes to the shell."""
        commands: list[Command] = []
        for result in results:
            match result:
                case Landed(request):
                    commands += self._landed(request, now)
                case Unserved(request):
                    commands += self._unserved(request, now)
                case Hopeless(request, fault):
                    commands += self._hopeless(request, fault, now)
                case Freed(request):
                    commands += self._release(request, now)
                case _:
                    commands.append(result)
        return commands

    def _first_token(self, message: FirstToken, now: float) -> list[Command]:
        request = self.handoffs.first_token(message)
        if request is None:
            return []
        if request.output_tokens == 0:
            request.prefill_cached_tokens = message.cached_tokens
        if request.arrived:
            request.known = len(request.tokens)
        commands: list[Command] = []
        if request.record.beams is None:
            commands = self._drawn(request, message.token, now)
        if request.arrived and request.state is not State.ENDING:
            self._admit(request, now)
        return commands

    def _landed(self, request: Request, now: float) -> list[Command]:
        request.known = len(request.tokens) - (request.first is not None)
        self.kv.landed(request.lease)
        if request.state is State.ENDING:
            return self._let_go(request, now)
        if request.first is not None:
            self._admit(request, now)
        return []

    def _admit(self, request: Request, now: float) -> None:
        """Blocks and first token are both here: from now on others may share the prompt's blocks."""
        self.handoffs.done(request)
        if request.record.beams is not None:
            # The prompt's last token is computed again: what follows it is not drawn, but searched.
            request.known = len(request.tokens) - 1
            self.beams.begin(request)
        self.kv.commit(request.lease, request.tokens[: request.known])
        request.close_prefill(now)
        request.clock.enter("decode_queue", now)
        here = self.name if request.local_since is not None else request.prefill.name
        request.prefilled_by = request.prefilled_by or here
        self.preemption.back(request, now)
        self.batch.add_ready(request, now)
        self._fork(request, now)

    def _fork(self, parent: Request, now: float) -> None:
        """The prompt of `parent` is here: those that wait for it share its blocks, and compute what is their own."""
        for request in self.forks.fork(parent):
            self.batch.add_local(request, now)

    def _unserved(self, request: Request, now: float) -> list[Command]:
        """Keep what has landed, and ask the router for another prefill worker."""
        if request.state is State.ENDING:
            return self._let_go(request, now)
        if request.link == NOBODY:
            self._prefill_here(request, now)
            return []
        request.state = State.ASKING
        name = request.record.request
        return [
            Tell(request.link, NeedPrefill(name, request.placement, request.prefill.name)),
        ]

    def _use_prefill(self, answer: UsePrefill, now: float) -> list[Command]:
        request = self._requests.get(answer.request)
        if (
            request is None
            or request.placement != answer.placement
            or request.state is not State.ASKING
        ):
            return []
        if answer.prefill is None or request.arrived or request.tries >= MAX_ATTEMPTS:
            self._prefill_here(request, now)
            return []
        request.prefill = answer.prefill
        return self._settle(self.handoffs.begin(request, now), now)

    def _prefill_here(self, request: Request, now: float) -> None:
        """No prefill worker will do: compute what is missing in chunks, beside the running batch."""
        self.kv.landed(request.lease)
        if request.prefill.name and not request.arrived:
            self.handoffs.note("fallback", request)
        here = request.have_blocks * self.kv.block_size
        request.known = len(request.tokens) - 1 if request.arrived else here
        if request.output_tokens == 0:
            request.prefill_cached_tokens = min(request.known, request.record.prompt_tokens)
        request.arrived, request.prefill = True, NO_PREFILL
        self.batch.add_local(request, now)

    def _hopeless(self, request: Request, fault: Fault, now: float) -> list[Command]:
        late = fault.code == "DEADLINE_EXCEEDED"
        return self._end(request, FinishReason.DEADLINE if late else FinishReason.ERROR, now, fault)

    # the end of a request

    def _end_if_current(
        self,
        name: RequestId,
        placement: int,
        reason: FinishReason,
        now: float,
        kept: int | None = None,
    ) -> list[Command]:
        request = self._requests.get(name)
        if request is None or request.placement != placement:
            return []
        return self._end(request, reason, now, kept=kept)

    def _cancel(self, link: int, message: Cancel, now: float) -> list[Command]:
        """Always answered: a router waits for the word that its request holds nothing here any more."""
        name, placement, reason = message.request, message.placement, message.reason
        self.departures.release(name, placement, now)
        known = self._requests.get(name)
        if known is not None and known.placement == placement:
            return self._end(known, reason, now)
        stats = RequestStats(decode_worker=self.name)
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
        """Tell the router, and let the blocks go as soon as nothing of ours can still write to them. A request that
        ended with its first token lets its blocks land first: they are worth caching."""
        del self._requests[request.record.request]
        ended = Ended(
            request=request.record.request,
            placement=request.placement,
            reason=reason,
            stats=request.stats(now, self.name, self.block_bytes, kept),
            fault=fault,
            beams=list(beams),
        )
        if request.record.context and reason is not FinishReason.CANCELLED:
            self.orphans.remember(request, ended, request.output[:kept], now)
        commands: list[Command] = [Tell(request.link, ended)]
        state = request.state
        self.batch.remove(request)
        self.beams.drop(request)
        self.preemption.remove(request)
        under_way = state in (State.CONNECTING, State.HANDOFF, State.FENCING)
        if under_way and not request.arrived:
            well = reason in (FinishReason.STOP, FinishReason.LENGTH) and fault is None
            if state is State.HANDOFF and well and request.first is not None:
                request.state = State.ENDING
                return commands
            commands += self._settle(self.handoffs.abandon(request, now), now)
            request.state = State.ENDING
            return commands
        if state is State.FORKING:
            self.forks.leave(request)
        request.state = State.ENDING
        return commands + self._let_go(request, now)

    def _let_go(self, request: Request, now: float) -> list[Command]:
        """Keep what is worth keeping in the cache; the handoff, if it was still open, is over."""
        self.handoffs.done(request)
        self._fork(request, now)
        if request.arrived:
            self.kv.commit(request.lease, request.tokens[: request.known], tail=True)
        return self._release(request, now)

    def _release(self, request: Request, now: float) -> list[Command]:
        """Its blocks are nobody's. If others still wait for its prompt, the first of them takes its place, and room."""
        self.kv.release(request.lease)
        heir = self.forks.heir(request)
        if heir is None:
            return []
        self.kv.release(heir.lease)
        lease = self.admission.acquire(heir.record, heir.tokens)
        if lease is None:
            heir.lease = self._nothing(heir)
            self._preempt([heir, *self.forks.waiting(heir)], now)
            return []
        heir.lease, heir.have_blocks = lease, lease.cached_tokens // self.kv.block_size
        if heir.preempted_at is None:
            heir.decode_cached_tokens = min(lease.cached_tokens, heir.record.prompt_tokens)
        return self._begin(heir, now)

    # when the pool is exhausted

    def _make_room(self, now: float) -> bool:
        """A block for the next token of everybody in the step, as long as somebody can give way. Returns whether
        anybody has: others that are ready may take their rows."""
        before = self.preemption.preempted.total()
        for request in sorted(self.batch.running, key=order):
            if request.state is not State.RUNNING:
                continue  # it has given way to one before it
            wants = self.beams.wants(request)
            while sum(short for _, short in wants) > self.kv.available:
                victims = self.preemption.victims(
                    request, self._requests.values(), self.forks.waiting
                )
                self._preempt(victims, now)
                if not victims or request in victims:
                    break
            else:
                for lease, short in wants:
                    self.kv.grow(lease, short)
        return self.preemption.preempted.total() > before

    def _preempt(self, victims: list[Request], now: float) -> None:
        """They give their blocks away, and stand in line. What was computed stays in the cache until it is needed."""
        for request in victims:
            if request.state is State.FORKING:
                self.forks.leave(request)
            self.batch.remove(request)
            self.beams.drop(request)
            if request.arrived:
                self.kv.commit(request.lease, request.tokens[: request.known], tail=True)
            self.kv.release(request.lease)
            request.lease = self._nothing(request)
            self.preemption.add(request, now)

    def _nothing(self, request: Request) -> Lease:
        lease = self.kv.promise(request.record.namespace, 0)
        assert lease is not None
        return lease

    def _resume(self, now: float) -> list[Command]:
        """Those that were preempted come back in their order, as far as there is room beside the running ones."""
        commands: list[Command] = []
        for request in list(self.preemption.line):
            begun = self._seek(request, now)
            if begun is None:
                break
            commands += begun
        return commands

    def _seek(self, request: Request, now: float) -> list[Command] | None:
        """Get the KV of a preempted request back; None where there is no room for it yet."""
        record, tokens = request.record, request.tokens
        # Who runs wants its next block soon: to take it away would preempt this request again.
        spare = len(self.batch.running)
        parent = self._fetched_sample(request)
        if parent is not None:
            room_tokens = self.admission.room_tokens(record, len(tokens))
            lease = self.forks.promise(record, room_tokens, spare)
            if lease is None:
                return None
            self.preemption.remove(request)
            request.seek(lease, "shared", now)
            self.forks.wait(request, parent)
            return []
        missing = len(tokens) - self.kv.matched_tokens(record.namespace, tokens, len(tokens) - 1)
        here = not request.prefill.name or missing <= self.config.local_chunk_tokens
        if not here and len(self.handoffs) >= self.config.max_handoffs:
            return None
        lease = self.admission.acquire(record, tokens, migrating=not here, spare=spare)
        if lease is None:
            return None
        self.preemption.remove(request)
        request.seek(lease, "here" if here else "pool", now)
        request.have_blocks = lease.cached_tokens // self.kv.block_size
        if not here:
            return self._begin(request, now)
        request.known, request.arrived = lease.cached_tokens, True
        self.batch.add_local(request, now)
        return []

    def _fetched_sample(self, request: Request) -> Request | None:
        """Another sample of its prompt that is being fetched now, which it can share."""
        group = request.record.group
        for other in self._requests.values():
            if group and other.record.group == group and other.state in FETCHING:
                return self.forks.parent(request.record, other)
        return None

    # steps

    def plan(self, now: float) -> tuple[StepPlan | None, list[Command]]:
        """The next step: every running request's next token and chunks of prompts that are prefilled here (None:
        nothing to compute), and commands to carry out."""
        commands = self._resume(now)
        self.batch.fill(len(self.departures.incomplete), now)
        while self._make_room(now):
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
        request.state = State.DEPARTED
        self.departures.add(request)
        stats = request.stats(now, self.name, self.block_bytes, None)
        yielded = Yielded(request=name, placement=request.placement, stats=stats)
        return Tell(request.link, yielded)

    def complete(self, plan: StepPlan, drawn: Sequence[Drawn], now: float) -> list[Command]:
        """The step has run: send the tokens on, end what is over."""
        commands: list[Command] = []
        for request, row, token in self.batch.complete(plan, drawn):
            is_local = request.state is State.LOCAL
            if is_local and request.is_recovering:
                self.recomputed_tokens += row.end - row.start
            elif is_local:
                self.prefilled_tokens += row.end - row.start
            if token is None:
                continue
            if not isinstance(token, int):
                commands += self._searched(request, token, now)
                continue
            if request.state is State.DEPARTED:
                commands += self.departures.complete(request, token, now)
                continue
            if request.record.beams is None:
                commands += self._drawn(request, token, now)
            if is_local and request.state is State.LOCAL:
                self.batch.remove(request)
                self._admit(request, now)
        return commands

    def _searched(
        self, request: Request, candidates: Candidates, now: float
    ) -> list[Command]:
        """What may follow one hypothesis is known; the last one's may end the search."""
        self.generated_tokens += 1
        answers = self.beams.complete(request, candidates)
        if answers is None:
            return []
        kept = sum(len(beam.ids) for beam in answers)
        return self._end(request, answers[0].reason, now, kept=kept, beams=answers)

    def _drawn(self, request: Request, token: int, now: float) -> list[Command]:
        """The next token of a request is known: send it on, and end what is over."""
        index = request.output_tokens
        request.tokens.append(token)
        self.generated_tokens += 1
        record = Tokens(request.record.request, request.placement, index, [token])
        told: list[Command] = [Tell(request.link, record)]
        reason = finish_reason(request.record, request.output_tokens, token, self.stop_ids)
        return told if reason is None else told + self._end(request, reason, now)

    def check(self) -> None:
        """Recompute the invariants."""
        self.kv.check()
        self.handoffs.check()
        self.departures.check()
        self.forks.check({r for r in self._requests.values() if r.state is State.FORKING})
        self.orphans.check()
        self.batch.check(list(self._requests.values()))
        self.beams.check(list(self._requests.values()))
        self.preemption.check(list(self._requests.values()))
        for request in self._requests.values():
            assert not request.lease.released and request.state is not State.ENDING
            assert (request.link == NOBODY) == (request.orphan_until < float("inf"))
            assert request.link != NOBODY or request.state is not State.ASKING

    def __repr__(self) -> str:
        batch = self.batch
        return (
            f"DecodeScheduler({len(batch.running)} running, {len(batch.ready)} ready, "
            f"{len(batch.local)} local, {len(self.preemption.line)} preempted, "
            f"{len(self.handoffs)} handoffs, {len(self.departures)} departures, {self.kv!r})"
        )
