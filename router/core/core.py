"""Decides which worker gets a request, and which of the workers' words are believed.

Events in, commands out, time as an argument; no I/O, no clock, no torch. A new request's way goes on in
`router/core/waiting_queue.py`, where it waits its turn. Its states are those of `router/core/call.py`; all requests are
in `router/core/call_table.py`. Only tokens of the current placement, in order, are passed on.

A request whose decode worker was lost waits again with its old turn, hence at the head of the queue, and goes on behind
the tokens that its client has (`router/core/losses.py`). So does one that a leaving worker has yielded
(`router/core/leaving/moves.py`), whose KV the next worker fetches there; one of an earlier router is taken over where
it is (`router/core/leaving/adoption.py`). Samples of one prompt are requests of their own, each placed, recovered and
ended alone.
"""

from collections import deque

from engine.messages import (
    READS_TOLD,
    SESSIONS_TOLD,
    Accepted,
    CachedTold,
    Cancel,
    ClaimTold,
    Ended,
    Fault,
    Finish,
    HoldingTold,
    Load,
    NeedPrefill,
    Orphan,
    OrphansTold,
    ReadTold,
    Refused,
    Release,
    SessionTold,
    Taken,
    TenantLine,
    TenantsTold,
    Tokens,
    UsePrefill,
    WorkerInfo,
    Yield,
    Yielded,
)
from engine.types import FinishReason, Incarnation, RequestId
from router.config import RouterConfig
from router.core.admission import DeadlineGate
from router.core.call import Call, State
from router.core.call_table import CallTable
from router.core.cluster_view import ClusterView
from router.core.decisions import make_placer
from router.core.ejection import WORKERS_FAULT
from router.core.endings import DEADLINE, LEFT, RESUMED_ELSEWHERE, complete, ending
from router.core.escalation import FailureDetector, Verdict
from router.core.events import (
    Begin,
    ClaimWanted,
    ClientLeft,
    Command,
    Complete,
    Condemn,
    Connected,
    Deliver,
    Ejected,
    Event,
    Fail,
    GivenOver,
    Ignored,
    Lost,
    Moved,
    Owned,
    Readmitted,
    StopFound,
    Submit,
    TellWorker,
    Tick,
    WorkerSaid,
    WorkersNamed,
)
from router.core.leaving.adoption import Adoptions
from router.core.leaving.moves import due_moves, together
from router.core.losses import Losses, poisonous
from router.core.policy import RoutingPolicy
from router.core.recovery import poisoned
from router.core.registry import Life
from router.core.sessions import Pin, Session, Sessions
from router.core.waiting_queue import WaitingQueue

MOVES_S = 0.05
"""How soon it is asked again who could move off a leaving worker, but at that one's own reports."""
PINS_AT_ONCE = 256
"""Sessions that a router which has begun is told at a tick."""
MOST_OVERDUE = 128
"""Requests whose deadline has passed that are ended at a tick: each takes about a tenth of a millisecond."""
_RUNNING = State.RUNNING  # looked up once: every token asks


class Router:
    """Only `handle` changes it; the router's event loop owns it."""

    # Mutable state: the calls, the queue, the view of the workers, losses, verdicts, adoptions, sessions, how long
    # answers are, since when there has been no decode worker, and what is left to tell a router that has begun.

    def __init__(
        self, config: RouterConfig, policy: RoutingPolicy, stop_ids: frozenset[int] = frozenset(), life: int = 0
    ) -> None:
        """`life` is above that of every router before this one: a request that it adopts is placed as `life` + 1 and
        on, so that no two routers give two placements the same name."""
        self._config = config
        self._no_decode_since_s: float | None = None
        self._view = view = ClusterView(config.worker_silent_s)
        self.registry, self.index = view.registry, view.index
        self._table = table = CallTable(view)
        self._calls, self._share = table.calls, table.share
        self._placer = make_placer(
            policy, view.registry, view.index, config.local_prefill, config.unplaceable_s
        )
        self._adoptions = Adoptions(config.settle_s, table, view, life)
        self._sessions = Sessions(config.session_s, life)
        self._moves_s = -MOVES_S
        self._pins_to_tell: deque[tuple[Session, Pin, int, float]] = deque()
        self._queue = WaitingQueue(table, view, self._placer, self._adoptions, self._sessions)
        self._admission = DeadlineGate(config, table, self._placer, self._queue)
        self._losses = Losses(config, table, self._queue, view.registry, stop_ids)
        self._detector = FailureDetector(view.registry, config.escalate_s, config.worker_hung_s)

    def __repr__(self) -> str:
        calls = ", ".join(f"{r}={c.state.value}@{c.placement}" for r, c in self._calls.items())
        return f"Router({calls or 'idle'}; {self.registry})"

    @property
    def waiting(self) -> int:
        return len(self._table.waiting)

    @property
    def open(self) -> int:
        """Requests that some worker may still hold, or that wait."""
        return len(self._calls)

    def reading(self, request: RequestId) -> ReadTold | None:
        """Return what other routers should know of a request that is offered now; None where it is not, where its KV
        is there that was yielded elsewhere, so that nobody reads its prompt, or where its worker, of an older release,
        would not understand what it is to pass on."""
        call = self._calls.get(request)
        if call is None or call.state is not State.OFFERED or call.source is not None:
            return None
        worker = self.registry.get(call.decode)
        if worker is None or worker.info.protocol < READS_TOLD:
            return None
        return self._view.reading(call)

    @property
    def has_charged(self) -> bool:
        """True once a tenant was charged here for what it asked, since nobody last waited."""
        return self._share.has_charged

    def lines(self, now: float, *, is_stopping: bool = False) -> tuple[int, dict[str, TenantLine]]:
        """Return what other routers should know of this one's line that they have not been told yet, and the epoch of
        its sums. While no decode worker takes requests from here, and when it stops, nobody is to wait for it."""
        can_serve = not is_stopping and bool(self.registry.takers("decode", now))
        return self._share.news(can_serve=can_serve)

    def is_settled(self, now: float) -> bool:
        """Return True once no more requests of an earlier router can appear."""
        return self._adoptions.is_settled(now)

    def is_claiming(self, key: bytes) -> bool:
        """Return True while a decode worker has not answered a claim."""
        return self._adoptions.is_claiming(key)

    @property
    def condemned(self) -> tuple[Verdict, ...]:
        """Lives of workers that the supervisor shall end. May be read from any thread."""
        return self._detector.verdicts

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event and return what is to be done, in order."""
        out: list[Command] = []
        match event:
            case Submit():
                self._submit(event, now, out)
            case WorkerSaid():
                self._heard(event, now, out)
            case ClientLeft():
                self._close(event.request, FinishReason.CANCELLED, out)
                self._queue.left(now, out)
            case ClaimWanted(key, namespace):
                self._adoptions.claim(key, namespace, out)
            case Owned(request, tenant, weight, session):
                if (call := self._calls.get(request)) is not None:
                    self._table.share.go_on(request, tenant, weight)
                    call.session = session
                    if session is not None and (pin := self._pinned(call)) is not None:
                        self._sessions.adopted(session, pin, now)
            case StopFound():
                self._stop_found(event, out)
            case WorkersNamed(decode, lives):
                self._adoptions.named(decode)
                self.registry.named(lives)
                self._losses.named(lives, out)
            case Connected():
                self._connected(event, now, out)
            case Lost(name, for_good):
                self._adoptions.lost(name)
                self._losses.lost(name, now, out)
                if for_good:
                    self._losses.removed(name, out)
                    self.registry.forget(name)
                    self._detector.forget(name)
                    self.index.forget(name)
                self._queue.advance(now, out)
            case Tick():
                self._tick(now, out)
        return out

    def _connected(self, event: Connected, now: float, out: list[Command]) -> None:
        name, info = event.peer.name, event.info
        life = (name, info.incarnation)
        if self._detector.is_condemned(life):
            out.append(Condemn(Verdict(*life, "it is back after it was given up")))
            return
        self._adoptions.lost(name)
        # Its last stream is broken, whether that was told or not; and it was no victim of any request: it lives.
        self._losses.lost(name, now, out, back=life)
        self._losses.back(life, out)
        if self.registry.join(event.peer, info, now):
            self.index.add(name, info.blocks, info.host_blocks, info.disk_blocks)
        self._queue.advance(now, out)

    def _submit(self, event: Submit, now: float, out: list[Command]) -> None:
        request = event.record.request
        fault = self._placer.impossible(event.record, now)
        if fault is not None:
            out.append(Fail(request, fault, FinishReason.REJECTED))
            return
        self._losses.budget.arrived()
        call = self._table.open(event.record, event.deadline_s)
        refusal = self._admission.refusal(call, event, now)
        if refusal is not None:
            self._table.forget(call, out, refusal)
            return
        self._queue.enter(call, event.tenant, event.weight, event.session)
        self._queue.entered(call, now, out)
        most = self._config.max_waiting
        if call.state is State.WAITING and self.waiting > most:
            last = self._queue.last()
            full = Fault("RESOURCE_EXHAUSTED", f"{most} requests wait already; try later")
            after_s = self._config.retry_after_s
            end = Fail(last.record.request, full, FinishReason.REJECTED, after_s, "full")
            self._table.forget(last, out, end)

    # ---- what workers say

    def _heard(self, event: WorkerSaid, now: float, out: list[Command]) -> None:
        worker, record = event.worker, event.record
        if isinstance(record, WorkerInfo):
            return  # `Connected` has told it
        if isinstance(record, TenantsTold):
            if not self._share.knows(record):
                self._pins_to_tell = deque(self._sessions.pins())
            if self._share.heard(record, now):
                self._queue.advance(now, out)
            return
        if isinstance(record, Load):
            self.registry.report(worker, record, now)
            self.index.evict(worker, record.evicted)
            self._placer.evicted(worker, record.evicted)
            self.index.moved(worker, record.moved)
            self._losses.give_up(self._detector.accused(worker, record.silent, now), now, out)
            self._queue.reported(worker, now, out)
            if record.leaving or now - self._moves_s >= MOVES_S:
                self._moves_s = now
                self._move(now, out)
            return
        if isinstance(record, HoldingTold):
            for run in record.runs:
                self.index.recall(worker, run.parent, run.blocks)
            return
        if isinstance(record, CachedTold):
            for run in record.runs:
                self.index.learn(worker, run.parent, run.blocks)
            return
        if isinstance(record, ReadTold):
            if record.is_new:
                self._placer.told(record, now)
            self._view.told(record)
            return
        if isinstance(record, SessionTold):
            home = self.registry.get(worker)
            if home is not None:
                prefill = (record.prefill, record.prefill_incarnation) if record.prefill else None
                used_s = now - max(record.age_s, 0.0)
                self._sessions.told(Session(record.session), Pin(prefill, home.life), record.turn, used_s)
            return
        if isinstance(record, OrphansTold):
            self._adoptions.told(worker)
            self._queue.advance(now, out)
            return
        if isinstance(record, Orphan):
            self._adoptions.adopt(worker, record, now, out)
            return
        if isinstance(record, ClaimTold):
            self._adoptions.claim_told(worker, record.key)
            return
        call = self._calls.get(record.request)
        if call is None or call.placement != record.placement or call.decode != worker:
            if isinstance(record, Yielded):
                out.append(TellWorker(worker, Release(record.request, record.placement)))
            out.append(Ignored("stale", len(record.ids) if isinstance(record, Tokens) else 0))
            return
        match record:
            case Accepted():
                self._accepted(call, record, now, out)
            case Refused():
                self._refused(call, record, now, out)
            case NeedPrefill():
                self._need_prefill(call, record, now, out)
            case Tokens():
                self._tokens(call, record, now, out)
            case Yielded():
                self._yielded(call, record, now, out)
            case Taken():
                self._taken(call, now, out)
            case Ended():
                self._ended(call, record, now, out)

    def _accepted(self, call: Call, record: Accepted, now: float, out: list[Command]) -> None:
        self.registry.accepted(call.decode, record.request)
        self.registry.accepted(call.prefill, record.request)
        # What a prefill worker computes is known when it has ended; who was placed before pays no more.
        is_known = not call.prefill and call.cached_tokens_bound is None and call.state is State.OFFERED
        self._table.share.began(record.request, len(call.record.tokens) - record.cached_tokens if is_known else None)
        if call.state is State.OFFERED:
            self._table.move(call, State.RUNNING)
            self._view.accepted(call, record)
            out.append(Begin(record.request))
            self._pin(call, now, out)
            self._queue.answered(now, out)
        elif call.state is not State.CLOSING:
            out.append(Ignored("duplicate", 0))

    def _pin(self, call: Call, now: float, out: list[Command]) -> None:
        """Note who serves the conversation of `call`, and tell the other routers, by way of a worker that passes it
        on."""
        pin = self._pinned(call)
        if call.session is not None and pin is not None:
            self._tell_pin(call.session, pin, self._sessions.note(call.session, pin, now), 0.0, out)

    def _pinned(self, call: Call) -> Pin | None:
        """Return the pair that serves a call; None where a life of theirs is not known."""
        home = self.registry.get(call.decode)
        if home is None or (call.prefill and call.prefill_life is None):
            return None
        return Pin(call.prefill_life, home.life)

    def _tell_pin(self, session: Session, pin: Pin, turn: int, age_s: float, out: list[Command]) -> None:
        """Tell the other routers of a pin, by way of its decode worker, which is there in that life still."""
        home = self.registry.get(pin.decode[0])
        if home is not None and home.life == pin.decode and home.info.protocol >= SESSIONS_TOLD:
            name, incarnation = pin.prefill or ("", Incarnation(0))
            out.append(TellWorker(home.name, SessionTold(session, turn, name, incarnation, age_s)))

    def _refused(self, call: Call, record: Refused, now: float, out: list[Command]) -> None:
        worker = self.registry.get(call.decode)
        assert worker is not None, "whoever is lost holds no call"
        worker.refused = True
        if call.state is State.CLOSING:
            self._table.forget(call, out)
        elif call.state is State.OFFERED:
            self._view.refused(call, record)
            self._queue.rejoin(call)
        else:
            out.append(Ignored("duplicate", 0))
        self._queue.advance(now, out)

    def _need_prefill(self, call: Call, record: NeedPrefill, now: float, out: list[Command]) -> None:
        """Name another prefill worker to a decode worker that cannot go on with its own; or none."""
        if call.state is not State.RUNNING or call.prefill != record.failed:
            out.append(Ignored("stale", 0))
            return
        failed = call.prefill_life
        if failed is not None:
            call.failed_prefills[failed] = not record.was_full
            if not record.was_full and not self.registry.was_leaving(failed):
                if not self.registry.is_connected(failed):
                    self._losses.blame(call, failed, now)
                elif failed != call.source:
                    self._failed(failed, f"{call.decode} did not get a prompt from it", now, out)
            if failed == call.source:
                self._table.release(call, out)
        fault = poisoned(call)
        if fault is not None:
            out.append(poisonous(call))
            self._answer(call, fault, FinishReason.ERROR, out)
            return
        peer = self._view.replace_prefill(call, self._placer.choose_prefill(call, now))
        out.append(TellWorker(call.decode, UsePrefill(record.request, call.placement, peer)))

    def next_tokens(self, worker: str, record: Tokens) -> list[int]:
        """Take in what nearly every record is, the next tokens of a request that runs on this worker, and return what
        its client is given. Empty, with nothing changed, for any other record: `handle` decides on that."""
        call, ids = self._calls.get(record.request), record.ids
        if (
            call is None
            or call.state is not _RUNNING
            or call.placement != record.placement
            or call.decode != worker
            or call.source is not None
            or not call.is_prefilled
            or record.index != len(call.emitted)
        ):
            return []
        if record.logprobs or len(ids) != 1:
            call.emit(ids, record.logprobs)
        else:
            call.emitted.append(ids[0])  # as nearly every step's
        self._share.wrote(record.request, len(ids))
        return ids

    def _tokens(self, call: Call, record: Tokens, now: float, out: list[Command]) -> None:
        if call.state is not State.RUNNING:
            kind = "early" if call.state is State.OFFERED else "overrun"
            out.append(Ignored(kind, len(record.ids)))
            return
        known = len(call.emitted) - record.index
        if known < 0:
            out.append(Ignored("gap", len(record.ids)))
            return
        if known and record.ids:
            out.append(Ignored("duplicate", min(known, len(record.ids))))
        fresh = record.ids[known:]
        if fresh:
            if not call.is_prefilled:
                self._view.arrived(call)
            self._prefilled(call, now, out)
            logprobs = record.logprobs[known:]
            call.emit(fresh, logprobs)
            self._table.share.wrote(record.request, len(fresh))
            prompt_logprobs = record.prompt_logprobs if not known and not record.index else ()
            out.append(Deliver(record.request, fresh, logprobs or (), prompt_logprobs or ()))
            if call.source is not None:
                self._table.release(call, out)
                self._move(now, out)

    def _ended(self, call: Call, record: Ended, now: float, out: list[Command]) -> None:
        end = None if call.state is State.CLOSING else ending(call, record)
        if isinstance(end, Complete):
            self._paid(call, end)
        self._table.forget(call, out, end)
        if isinstance(end, Complete):
            self._view.ended(call, record.stats)
            if call.decode_life is not None:
                self._succeeded(call.decode_life, now, out)
            self._prefilled(call, now, out)
        elif isinstance(end, Fail) and end.fault.code in WORKERS_FAULT and call.decode_life is not None:
            self._failed(call.decode_life, f"it ended a request with {end.fault.code}", now, out)
        self._queue.advance(now, out)

    def _taken(self, call: Call, now: float, out: list[Command]) -> None:
        """Another router goes on with a request: whoever reads it here is sent away."""
        is_answered = call.state is State.CLOSING
        self._adoptions.taken(call.record.request)
        end = None if is_answered else Fail(call.record.request, RESUMED_ELSEWHERE, FinishReason.CANCELLED)
        if not is_answered:
            out.append(GivenOver(call.record))
        self._table.forget(call, out, end)
        self._queue.advance(now, out)

    def _paid(self, call: Call, end: Complete) -> None:
        """Put right what its tenant is charged for a request that has ended well, unless it was placed twice."""
        self._admission.answered(end.stats.output_tokens)
        if call.cached_tokens_bound is not None:
            return
        self._table.share.began(call.record.request, call.record.prompt_tokens - end.stats.prefill_cached_tokens)
        self._table.share.wrote(call.record.request, end.stats.output_tokens - len(call.emitted))

    # ---- workers that fail

    def _failed(self, life: Life, why: str, now: float, out: list[Command]) -> None:
        backoff_s = self.registry.failed(life, now)
        if backoff_s is not None:
            out.append(Ejected(life[0], why, backoff_s))

    def _succeeded(self, life: Life, now: float, out: list[Command]) -> None:
        if self.registry.ejections.succeeded(life, now):
            out.append(Readmitted(life[0]))

    def _prefilled(self, call: Call, now: float, out: list[Command]) -> None:
        """Note, once for each placement, that its prompt has been read: it has given output, or has ended well."""
        if call.is_prefilled:
            return
        call.is_prefilled = True
        self.registry.prefilled(call.prefill, call.record.request)
        if call.prefill_life is not None:
            self._succeeded(call.prefill_life, now, out)

    # ---- workers that leave

    def _move(self, now: float, out: list[Command]) -> None:
        """Ask leaving decode workers for requests that others could go on with."""
        leaving = [worker for worker in self.registry.role("decode") if worker.leaving]
        if not leaving:
            return
        near = self._table.around(leaving)
        for call in due_moves(near, leaving, self._placer, self._config.moves_at_once, now):
            if not self._adoptions.is_unsure(call.record.request, now):
                call.yielding = True
                self._table.moves(call)
                out.append(TellWorker(call.decode, Yield(call.record.request, call.placement)))

    def _yielded(self, call: Call, record: Yielded, now: float, out: list[Command]) -> None:
        worker, life = call.decode, call.decode_life
        # 1. It was not even accepted.
        if call.state is State.OFFERED:
            out.append(Ignored("early", 0))
            return
        # 2. It goes on elsewhere, with the KV that the worker keeps until then.
        if call.state is State.RUNNING:
            call.moved(together(call.earlier, record.stats))
            self._queue.rejoin(call)
            call.source, call.source_placement = life, record.placement
            self._table.moves(call)
            out.append(Moved(record.request, worker, record.stats.stages))
        # 3. Its end has crossed the yield: nothing is left to do, and its client hears of it if it has not yet.
        else:
            end = complete(call, FinishReason.STOP, record.stats) if call.state is State.FINISHING else None
            out.append(TellWorker(worker, Release(record.request, record.placement)))
            self._table.forget(call, out, end)
        self._queue.advance(now, out)

    # ---- endings that are not a worker's word

    def _stop_found(self, event: StopFound, out: list[Command]) -> None:
        call = self._calls.get(event.request)
        if call is None or call.state is not State.RUNNING:
            return
        self._table.move(call, State.FINISHING)
        del call.emitted[event.tokens_kept :]
        out.append(TellWorker(call.decode, Finish(event.request, call.placement, event.tokens_kept)))

    def _close(self, request: RequestId, reason: FinishReason, out: list[Command]) -> None:
        call = self._calls.get(request)
        if call is None or call.state is State.CLOSING:
            return
        self._adoptions.close(request)
        self._answer(call, DEADLINE if reason is FinishReason.DEADLINE else LEFT, reason, out)

    def _answer(self, call: Call, fault: Fault, reason: FinishReason, out: list[Command]) -> None:
        """Tell the client that its request is over, and the worker, if there is one."""
        request = call.record.request
        out.append(Fail(request, fault, reason))
        if call.state is State.WAITING:
            self._table.forget(call, out)
            return
        self._table.move(call, State.CLOSING)
        told = reason if reason is FinishReason.DEADLINE else FinishReason.CANCELLED
        out.append(TellWorker(call.decode, Cancel(request, call.placement, told)))

    # ---- time

    def _tick(self, now: float, out: list[Command]) -> None:
        if self._detector.has_slept(now):
            self._table.forgive(now)
        self._losses.give_up(self._detector.look(now), now, out)
        self._share.tick(now)
        for _ in range(min(PINS_AT_ONCE, len(self._pins_to_tell))):
            session, pin, turn, used_s = self._pins_to_tell.popleft()
            self._tell_pin(session, pin, turn, now - used_s, out)
        for call in self._table.unanswered(now - self._config.worker_silent_s):
            if call.decode_life is not None:
                self._failed(call.decode_life, "it left an offer unanswered", now, out)
        for call in self._table.overdue(now, MOST_OVERDUE):
            self._close(call.record.request, FinishReason.DEADLINE, out)
        if self.registry.live("decode", now):
            self._no_decode_since_s = None
            self._queue.advance(now, out)
            return
        if self._no_decode_since_s is None:
            self._no_decode_since_s = now
        if now - self._no_decode_since_s < self._config.unplaceable_s:
            return
        fault = Fault("UNAVAILABLE", "no live decode worker")
        for call in self._table.waiting_in_turn():
            request = call.record.request
            self._table.forget(call, out, Fail(request, fault, FinishReason.ERROR, self._config.retry_after_s))
        self._queue.advance(now, out)  # nobody stands in the line any more

    def check(self) -> None:
        """Raise AssertionError if what is kept twice disagrees."""
        self.index.check()
        self.check_requests()

    def check_requests(self) -> None:
        """Check all but what workers are believed to hold, which may be millions of blocks: `PrefixIndex.checks` goes
        through them step by step."""
        self._table.check()
        self._queue.check()
