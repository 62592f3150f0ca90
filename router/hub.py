"""Carries the core's commands out: to the workers' streams on one side, to the clients' on the other.

A new request goes on in the core (`router/core/core.py`); what the core wants told to workers leaves by
`router/dispatch.py`, and the tokens that come back reach the client through its `Sink` (`router/front/stream.py`).
Lives on the router's event loop and never waits: a client's side is a `Sink` that only takes notes,
a worker's side is a function that only queues. Every record is handled inside its own error barrier,
so that what goes wrong with one request stays with it.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from engine.messages import (
    PROTOCOL,
    SESSIONS_TOLD,
    CachedTold,
    ClaimTold,
    DecodeRecord,
    Fault,
    HoldingTold,
    Load,
    Orphan,
    OrphansTold,
    PeerAddress,
    Place,
    ReadTold,
    RouterRecord,
    SessionTold,
    TenantsTold,
    Tokens,
    UsePrefill,
    WorkerInfo,
)
from engine.types import FinishReason, RequestId, RequestRecord, TokenLogprobs
from router.core import events
from router.core.core import Router
from router.core.endings import ROUTER_FAILED
from router.core.registry import Life, ModelKey
from router.core.sessions import Session
from router.roster import Roster
from router.status.journal import RouterJournal
from router.status.observer import Observer
from telemetry.router_metrics import WorkerView

log = logging.getLogger(__name__)

_OF_NO_REQUEST = (
    WorkerInfo
    | Load
    | OrphansTold
    | HoldingTold
    | CachedTold
    | ClaimTold
    | TenantsTold
    | ReadTold
    | SessionTold
)


class Sink(Protocol):
    """The client's side of one request. `now` is the router's clock."""

    def offered(self, now: float) -> None: ...

    def accepted(self, now: float) -> None: ...

    def interrupted(self, now: float) -> None:
        """Note that its decode worker was lost: it will be offered and accepted once more, and goes on where it was."""

    def moved(self, stages: dict[str, float], now: float) -> None:
        """Note that its leaving decode worker has yielded it after `stages`: it will be offered and accepted once
        more."""

    def tokens(
        self,
        ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> int | None:
        """Take output, with the log probabilities of each token, and with the first of all those of the prompt, where
        they are asked for. Return the number of tokens kept if they complete a stop string."""

    def completed(self, end: events.Complete, now: float) -> None: ...

    def failed(self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float) -> None: ...


class AdoptedSink(Sink, Protocol):
    def replayed(self, ids: list[int], now: float, logprobs: Sequence[TokenLogprobs] = ()) -> int | None:
        """Take all output that another router had of the request, as `tokens` takes what follows: token by token, since
        a front that makes an event of each makes the same events again."""


Send = Callable[[str, RouterRecord], None]
Sever = Callable[[str], None]
HearSibling = Callable[[TenantsTold, float], None]
GiveOver = Callable[[RequestRecord], None]
"""Takes note that another router goes on with a request."""
Revive = Callable[[Orphan, float], AdoptedSink | None]
"""Makes the client's side of an adopted request, to which its output so far is then given; None if nobody can."""


class Hub:
    # Mutable state: the sinks of requests whose clients have not been answered, who waits for the answers to a claim,
    # and the roster of workers.

    def __init__(
        self,
        core: Router,
        clock: Callable[[], float],
        observer: Observer,
        journal: RouterJournal | None = None,
    ) -> None:
        self.core = core
        self.journal = journal or RouterJournal()
        self._clock = clock
        self._observer = observer
        self.roster = Roster()
        self._sinks: dict[RequestId, Sink] = {}
        self._claims: dict[bytes, dict[Callable[[], object], None]] = {}
        # Until `connect` and `adopt_with`: no streams to workers, and nobody to go on for.
        self._send: Send = _nowhere
        self._sever: Sever = lambda worker: None
        self._revive: Revive = lambda orphan, now: None
        self._give_over: GiveOver = lambda record: None
        self._hear_sibling: HearSibling = lambda told, now: None

    def __repr__(self) -> str:
        return f"Hub({len(self._sinks)} clients, {self.core!r})"

    def connect(self, send: Send, sever: Sever | None = None) -> None:
        """Send records for workers with `send`, and end a worker's stream with `sever`; neither may block."""
        self._send, self._sever = send, sever or self._sever

    def adopt_with(self, revive: Revive, give_over: GiveOver = lambda record: None) -> None:
        """Get the sinks of other routers' requests from `revive`; tell `give_over` of ours that others go on with."""
        self._revive, self._give_over = revive, give_over

    def hear_siblings_with(self, hear: HearSibling) -> None:
        """Tell `hear` what other routers say of their tenants."""
        self._hear_sibling = hear

    def has_siblings(self) -> bool:
        """Return True where other routers serve beside this one."""
        return len(self.roster.routers) > 1

    def claim(self, key: bytes, namespace: bytes | None, answered: Callable[[], object]) -> None:
        """Ask the decode workers for the requests of a token's key, whichever router has them. `answered` is called
        when the last of them has answered, or is lost: at once where there are none."""
        self._claims.setdefault(key, {})[answered] = None
        self._handle(events.ClaimWanted(key, namespace))
        self._look_at_claims([key])

    @property
    def kinds(self) -> tuple[ModelKey, ...]:
        """The kinds of the workers that are connected, by which blocks are named."""
        return self.core.registry.keys

    def is_settled(self) -> bool:
        """Return whether no more requests of an earlier router can turn up."""
        return self.core.is_settled(self._clock())

    def ready(self) -> bool:
        """True while a decode worker is alive, and a prefill worker if there is to be any."""
        now = self._clock()
        registry = self.core.registry
        if self.roster.has("prefill") and not registry.live("prefill", now):
            return False
        return bool(registry.live("decode", now))

    # ---- from clients

    def submit(self, event: events.Submit, sink: Sink) -> None:
        """Hand a request to the core."""
        request = event.record.request
        self._sinks[request] = sink
        begin_s = self._clock()
        self.journal.submitted(event.record, begin_s)
        try:
            commands = self.core.handle(event, begin_s)
        except Exception:
            log.exception("a request could not be taken in", extra={"request": request})
            self._give_up(request)
            return
        self._observer.decided(self._clock() - begin_s)
        self._apply(commands)

    def charge(self, request: RequestId, tenant: str, weight: float, session: Session | None = None) -> None:
        """Tell the core whose an adopted request is, and of which conversation."""
        self._handle(events.Owned(request, tenant, weight, session))

    def leave(self, request: RequestId) -> None:
        """The client is gone; nothing more reaches its sink."""
        if self._sinks.pop(request, None) is not None:
            self.journal.left(request, self._clock())
            self._handle(events.ClientLeft(request))

    # ---- from workers

    def named(self, decode: Sequence[str], lives: Sequence[Life] = ()) -> None:
        """Take in the names of all decode workers, and the lives of all workers as far as they are known."""
        self._handle(events.WorkersNamed(tuple(decode), tuple(lives)))

    def expect_only(self, role: str, names: Collection[str]) -> None:
        """These are all workers that a pool is to have: one that is lost, and not among them, will not be back."""
        self.roster.expect_only(role, names)

    def expect(self, worker: str, role: str) -> None:
        """A worker is dialled for the first time, or at another address."""
        self.roster.named(worker, role)
        self._observer.expected_worker(worker, role)

    def joined(self, peer: PeerAddress, info: WorkerInfo) -> None:
        if self.roster.joined(info):
            self._observer.joined(info.name, info.role)
        self._handle(events.Connected(peer, info))
        self._look_at_claims(list(self._claims))
        if info.role == "decode" and info.protocol < SESSIONS_TOLD:
            log.warning(
                "worker %s is of an older release (protocol %d, here %d): by it, others do not hear all of what is "
                "about to be read, and where conversations are",
                *(info.name, info.protocol, PROTOCOL),
            )
        for other in self.core.registry.computing_otherwise(info)[:1]:
            log.warning(
                "worker %s computes with %s, %s with %s: where two tokens are nearly as likely, an answer that goes "
                "from one to the other may go on with another of them",
                *(info.name, info.arithmetic, other.name, other.arithmetic),
            )

    def lost(self, worker: str, for_good: bool = False) -> None:
        known = self.core.registry.get(worker)
        self._gone(worker, "left" if known is not None and known.leaving else "lost")
        if for_good:
            self.roster.unnamed(worker)
        self._handle(events.Lost(worker, for_good))
        self._look_at_claims(list(self._claims))

    def heard(self, worker: str, records: Sequence[DecodeRecord]) -> None:
        """Take in one frame of a worker."""
        next_tokens, sinks, now = self.core.next_tokens, self._sinks, self._clock()
        for record in records:
            try:
                if isinstance(record, Tokens) and (ids := next_tokens(worker, record)):
                    sink = sinks.get(record.request)
                    if sink is not None and (kept := sink.tokens(ids, now, record.logprobs)) is not None:
                        self._handle(events.StopFound(record.request, kept))
                        now = self._clock()
                elif isinstance(record, TenantsTold):
                    self._hear_sibling(record, now)
                    self._handle(events.WorkerSaid(worker, record))
                    now = self._clock()
                else:
                    self._handle(events.WorkerSaid(worker, record))
                    if isinstance(record, ClaimTold):
                        self._look_at_claims([record.key])
                    now = self._clock()  # later than what has just been told
            except Exception:
                log.exception("a record of worker %s could not be handled", worker)
                if isinstance(record, Orphan):
                    self._give_up(record.record.request)
                elif not isinstance(record, _OF_NO_REQUEST):
                    self._give_up(record.request)

    def _look_at_claims(self, keys: Iterable[bytes]) -> None:
        """Tell who waits for the answers to those of these claims that all have answered."""
        for key in keys:
            if key in self._claims and not self.core.is_claiming(key):
                for answered in self._claims.pop(key):
                    answered()

    def tick(self) -> None:
        self._handle(events.Tick())

    # ---- for those who watch

    def observe(self) -> tuple[int, int, list[WorkerView]]:
        """Return how the cluster stands now, for `Observer.cluster`: requests that wait, those that some worker holds,
        and the workers."""
        core = self.core
        workers = self.roster.views(core.registry, core.index, self._clock())
        return core.waiting, core.open - core.waiting, workers

    def _gone(self, worker: str, how: str) -> None:
        if self.roster.lost(worker, left=how == "left"):
            self._observer.lost(worker, self.roster.role(worker), how)

    # ---- the core's commands

    def _handle(self, event: events.Event) -> None:
        self._apply(self.core.handle(event, self._clock()))

    def _apply(self, commands: list[events.Command]) -> None:
        for command in commands:
            try:
                self._do(command)
            except Exception:
                orphan = getattr(command, "orphan", None)
                request = getattr(orphan.record if orphan else command, "request", None)
                about = {"request": request or ""}
                log.exception("%s failed", type(command).__name__, extra=about)
                if request is not None:
                    self._give_up(request)

    def _do(self, command: events.Command) -> None:
        now = self._clock()
        self.journal.command(command, now)
        match command:
            case events.TellWorker(_, SessionTold()) if not self.has_siblings():
                pass
            case events.TellWorker(worker, record, reason):
                if isinstance(record, Place):
                    if (sink := self._sinks.get(record.record.request)) is not None:
                        sink.offered(now)
                    self._observer.placed(reason)
                elif isinstance(record, UsePrefill):
                    self._observer.continued("prefill_lost")
                self._send(worker, record)
                if isinstance(record, Place) and self.has_siblings():
                    reading = self.core.reading(record.record.request)
                    if reading is not None:
                        self._send(worker, reading)
            case events.Begin(request):
                if request in self._sinks:
                    self._sinks[request].accepted(now)
            case events.Deliver(request, ids, logprobs, prompt_logprobs):
                self._deliver(request, ids, now, logprobs, prompt_logprobs)
            case events.Moved(request, worker, stages):
                log.info("moves off %s", worker, extra={"request": request})
                self._observer.continued("move")
                if request in self._sinks:
                    self._sinks[request].moved(stages, now)
            case events.DecodeLost(request, worker, emitted):
                self._observer.continued("decode_lost")
                told = "lost its decode worker %s after %d tokens and goes on elsewhere"
                log.warning(told, worker, emitted, extra={"request": request})
                if request in self._sinks:
                    self._sinks[request].interrupted(now)
            case events.Adopt(orphan):
                self._adopt(orphan, now)
            case events.GivenOver(record):
                log.info("goes on at another router", extra={"request": record.request})
                self._give_over(record)
            case events.Complete(request, stats=stats):
                sink = self._sinks.pop(request, None)
                if stats.transport or stats.stages:
                    self._observer.hits(command.expected_tokens, stats.prefill_cached_tokens)
                if sink is not None:
                    sink.completed(command, now)
            case events.Fail(request, fault, outcome, retry_after_s, refusal, cause):
                if cause is not None:
                    log.error("a request could not be placed", exc_info=cause, extra={"request": request})
                if refusal:
                    self._observer.refused(refusal)
                if (sink := self._sinks.pop(request, None)) is not None:
                    sink.failed(fault, outcome, retry_after_s, now)
            case events.Poisonous(request, deaths):
                self._observer.poisonous()
                told = "refused as poisonous: workers were lost while they held it: %s"
                log.error(told, deaths, extra={"request": request})
            case events.Ignored(kind):
                self._observer.dropped(kind)
            case events.Ejected(worker, why, backoff_s):
                log.warning("worker %s gets no requests for %.0f s: %s", worker, backoff_s, why)
                self._observer.ejected(worker, self.roster.role(worker))
            case events.Readmitted(worker):
                log.warning("worker %s takes requests again", worker)
            case events.Condemn(verdict):
                log.warning("worker %s is given up: %s", verdict.name, verdict.why)
                self._gone(verdict.name, "given_up")
                self._sever(verdict.name)

    def _deliver(
        self,
        request: RequestId,
        ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        sink = self._sinks.get(request)
        if sink is not None and (kept := sink.tokens(ids, now, logprobs, prompt_logprobs)) is not None:
            self._handle(events.StopFound(request, kept))

    def _adopt(self, orphan: Orphan, now: float) -> None:
        request = orphan.record.request
        level = logging.INFO if self.core.is_claiming(orphan.record.resume_key) else logging.WARNING
        log.log(level, "goes on behind %d tokens of another router", len(orphan.tokens), extra={"request": request})
        sink = self._revive(orphan, now)
        if sink is None:
            self._handle(events.ClientLeft(request))
        else:
            self._sinks[request] = sink
            self._observer.continued("adopted")
            if orphan.tokens and (kept := sink.replayed(orphan.tokens, now, orphan.logprobs)) is not None:
                self._handle(events.StopFound(request, kept))

    def _give_up(self, request: RequestId) -> None:
        """Our own fault with one request: tell its client, and let its worker go."""
        if (sink := self._sinks.pop(request, None)) is not None:
            sink.failed(ROUTER_FAILED, FinishReason.ERROR, None, self._clock())
        self._handle(events.ClientLeft(request))


def _nowhere(worker: str, record: RouterRecord) -> None:
    raise RuntimeError(f"no stream to worker {worker} for {type(record).__name__}")
