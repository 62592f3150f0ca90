"""Decides which requests a decode worker takes, and what its next step computes. Owns a request's life. Pure.

    (taken) --handoff--> READY --room in the batch--> RUNNING --> gone
    a lost or useless prefill worker: --> ASKING --the router names another--> handoff
                                                 --none is left--> LOCAL --last chunk--> READY
    a further sample of a prompt that is here, or on its way: FORKING --the prompt is here--> LOCAL, one token of it
    any state --end (stop, length, cancel, deadline, fault)--> gone, or ENDING until no copy of ours is under way
    a worker that leaves takes nothing new: READY, RUNNING --Yield--> DEPARTED, which `decode_worker.departures` owns

A request is taken only with a lease for its whole prompt and the promise of room to grow to `max_tokens`; otherwise the
answer is no, at once, and the router keeps it. So a running request can always go on, and nothing here ever waits for
blocks. How blocks get here is the business of `decode_worker.handoffs`. The first token is sent on as soon as the
prefill worker names it; the gap until the second is inter-token latency. The end of a request is told at once; its
blocks follow when they are fenced. A resumable request outlives its router for a while (`decode_worker.orphans`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

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
from decode_worker.request import Migrated, Request, State
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
from engine.plan import StageClock, banned_tokens, check_record, finish_reason, share_budget
from engine.step import Row, StepPlan
from engine.types import (
    FieldError,
    FinishReason,
    Incarnation,
    RequestId,
    RequestRecord,
    TooLongError,
)
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

OfSource = PeerUp | PeerDown | FromPeer | Received
OfReader = ReaderEvent | Posted | Sent
Event = FromRouter | RouterLost | OfSource | OfReader | Leave
Command = TransferCommand | Tell | ConnectPeer


@dataclass(slots=True)
class DecodeScheduler:
    """Mutable state, all of it: `_requests` with the lines `_ready`, `_running` and `_local` over it, `leaving`, and
    what `kv`, `handoffs`, `departures`, `forks` and `orphans` own. Owner: the engine thread."""

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
    _ready: list[Request] = field(default_factory=list)
    _running: list[Request] = field(default_factory=list)
    _local: list[Request] = field(default_factory=list)
    _stepping: list[Request] = field(default_factory=list)
    _steps: int = 0

    def __post_init__(self) -> None:
        self.handoffs = Handoffs(self.kv, self.receiver, self.incarnation, self.fingerprint)
        self.departures = Departures(self.kv, self.fingerprint)
        self.forks = Forks(self.kv)
        self.orphans = Orphans(self.config.orphan_s)

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
        return len(self._running)

    @property
    def waiting_requests(self) -> int:
        """Accepted, and not yet in the batch."""
        return len(self._requests) - len(self._running)

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
                    request.yielding = self.leaving
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
        request.state = State.READY
        self._ready.append(request)
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
        fault = self._refusal(record)
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
        parent = self.forks.parent(record, other)
        lease = None
        if not self.leaving and parent is not None:
            lease = self.forks.promise(record)
        elif not self.leaving and len(self.handoffs) < self.config.max_handoffs:
            lease = self._acquire(record)
        if lease is None:
            refused = Refused(name, message.placement, self._blocks_wanted(record))
            return [*commands, Tell(link, refused)]
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

    def _refusal(self, record: RequestRecord) -> Fault | None:
        try:
            check_record(record, self.vocab, self.context_tokens)
        except TooLongError as error:
            return Fault("OUT_OF_RANGE", str(error), error.field)
        except FieldError as error:
            return Fault("INVALID_ARGUMENT", str(error), error.field)
        if self._blocks_wanted(record) > self.kv.pool.total:
            why = "prompt and answer do not fit the decode worker's pool"
            return Fault("OUT_OF_RANGE", why, "max_tokens")
        return None

    def _blocks_wanted(self, record: RequestRecord) -> int:
        return self.kv.blocks_for(record.prompt_tokens + record.max_tokens)

    def _acquire(self, record: RequestRecord) -> Lease | None:
        return self.kv.acquire(
            record.namespace,
            record.tokens,
            match_limit=len(record.tokens) - 1,
            room_tokens=len(record.tokens),
            grow_tokens=record.prompt_tokens + record.max_tokens,
            migrating=True,
        )

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
        self.kv.commit(request.lease, request.tokens[: request.known])
        request.close_prefill(now)
        request.clock.enter("decode_queue", now)
        request.state = State.READY
        self._ready.append(request)
        self._fork(request, now)

    def _fork(self, parent: Request, now: float) -> None:
        """The prompt of `parent` is here: those that wait for it share its blocks, and compute what is their own."""
        for request in self.forks.fork(parent):
            self._compute_here(request, now)

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
        if answer.prefill is None or request.arrived or request.attempt >= MAX_ATTEMPTS:
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
        request.arrived = True
        self._compute_here(request, now)

    def _compute_here(self, request: Request, now: float) -> None:
        self.kv.extend(request.lease, len(request.tokens))
        request.state, request.local_since = State.LOCAL, now
        self._local.append(request)

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
        )
        if request.record.context and reason is not FinishReason.CANCELLED:
            self.orphans.remember(request, ended, request.output[:kept], now)
        commands: list[Command] = [Tell(request.link, ended)]
        state = request.state
        for line in (self._ready, self._running, self._local):
            if request in line:
                line.remove(request)
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
        lease = self._acquire(heir.record)
        assert lease is not None, f"no room for {heir} in the place of {request}"
        heir.lease, heir.have_blocks = lease, lease.cached_tokens // self.kv.block_size
        heir.decode_cached_tokens = min(lease.cached_tokens, heir.record.prompt_tokens)
        return self._begin(heir, now)

    # steps

    def plan(self, now: float) -> tuple[StepPlan | None, list[Command]]:
        """The next step: every running request's next token and chunks of prompts that are prefilled here (None:
        nothing to compute), and commands to carry out."""
        yielding = [r for line in (self._running, self._ready) for r in line if r.yielding]
        commands = [self._depart(request, now) for request in yielding]
        departing = self.departures.incomplete
        while self._ready and len(self._running) + len(departing) < self.config.max_batch:
            request = self._ready.pop(0)
            request.state = State.RUNNING
            request.clock.enter("decode_run", now)
            self._running.append(request)
        rows = []
        # In the first step after a fork, before its parent writes on in the block that they share.
        copies = [pair for request in self._local for pair in request.lease.copies]
        self._stepping = []
        for request in self._running:
            self.kv.extend(request.lease, len(request.tokens))
            rows.append(self._row(request, len(request.tokens)))
        for request in departing:
            self.kv.extend(request.lease, len(request.tokens))
            rows.append(self._row(request, len(request.tokens)))
        if self._local:
            # As many as the batch has room for, and always one: for so many rows a step's memory was counted.
            local = self._local[: max(1, self.config.max_batch - len(rows))]
            missing = [len(request.tokens) - request.known for request in local]
            shares = share_budget(missing, self.config.local_chunk_tokens)
            for request, share in zip(local, shares, strict=True):
                if share:
                    rows.append(self._row(request, request.known + share))
        if not rows:
            return None, commands
        self._steps += 1
        return StepPlan(tuple(rows), tuple(copies), self._steps), commands

    def _depart(self, request: Request, now: float) -> Command:
        """Out of the batch: all KV but the newest token's is here, for whoever goes on."""
        name = request.record.request
        del self._requests[name]
        (self._running if request.state is State.RUNNING else self._ready).remove(request)
        request.state = State.DEPARTED
        self.departures.add(request)
        stats = request.stats(now, self.name, self.block_bytes, None)
        yielded = Yielded(request=name, placement=request.placement, stats=stats)
        return Tell(request.link, yielded)

    def _row(self, request: Request, end: int) -> Row:
        self._stepping.append(request)
        return Row(
            request=request.record.request,
            record=request.record,
            tokens=request.tokens,
            start=request.known,
            end=end,
            blocks=request.lease.blocks,
            draw=end == len(request.tokens),
            banned=banned_tokens(request.record, request.output_tokens, self.stop_ids),
        )

    def complete(self, plan: StepPlan, drawn: list[int], now: float) -> list[Command]:
        """The step has run: send the tokens on, end what is over."""
        commands: list[Command] = []
        for request in self._local:
            self.kv.copied(request.lease)
        tokens = iter(drawn)
        for row, request in zip(plan.rows, self._stepping, strict=True):
            request.known = row.end
            if request.state is State.LOCAL:
                if request.is_recovering:
                    self.recomputed_tokens += row.end - row.start
                else:
                    self.prefilled_tokens += row.end - row.start
            if not row.draw:
                continue
            token = next(tokens)
            if request.state is State.DEPARTED:
                commands += self.departures.complete(request, token, now)
                continue
            commands += self._drawn(request, token, now)
            if request.state is State.LOCAL:
                self._local.remove(request)
                self._admit(request, now)
        self._stepping = []
        return commands

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
        lines = {State.READY: self._ready, State.RUNNING: self._running, State.LOCAL: self._local}
        for state, line in lines.items():
            assert all(request.state is state for request in line)
            assert sum(r.state is state for r in self._requests.values()) == len(line)
        for request in self._requests.values():
            assert not request.lease.released and request.state is not State.ENDING
            assert (request.link == NOBODY) == (request.orphan_until < float("inf"))
            assert request.link != NOBODY or request.state is not State.ASKING

    def __repr__(self) -> str:
        return (
            f"DecodeScheduler({len(self._running)} running, {len(self._ready)} ready, "
            f"{len(self._local)} local, {len(self.handoffs)} handoffs, "
            f"{len(self.departures)} departures, {self.kv!r})"
        )
