"""The router's decisions: which worker gets a request, and what of a worker's words is believed.

Events in, commands out, time as an argument; no I/O, no clock, no torch. The states of a request are those of
`router/call.py`. The line of waiting requests is strictly first come, first served: a refused request keeps its turn,
and small ones do not overtake it. A request whose decode worker was lost is back in line with its old turn, hence at
its head, and goes on behind the tokens that its client has (`router/recovery.py`). So is one that a leaving worker has
yielded (`router/moves.py`), whose KV the next worker fetches there.

Samples of one prompt are requests of their own, placed, recovered and ended each by itself; but one is offered first
to a worker that has another, and shares its blocks there (`router/groups.py`).

A worker that refused is not asked again before its next report, so re-offers come at the rate of reports and never
spin. Only tokens of the current placement, in order, are passed on.
"""

import heapq

import msgspec

from engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Fault,
    Finish,
    Load,
    NeedPrefill,
    Orphan,
    OrphansTold,
    Place,
    Refused,
    Release,
    Tokens,
    UsePrefill,
    Yield,
    Yielded,
)
from engine.types import FinishReason, RequestId
from router.adoption import Adoptions
from router.beliefs import Beliefs
from router.call import Call, State
from router.config import RouterConfig
from router.endings import DEADLINE, LEFT, complete, ending, unreported
from router.escalation import Judge, Verdict
from router.events import (
    Adopt,
    Begin,
    Command,
    Complete,
    Deliver,
    Dropped,
    Event,
    Fail,
    GiveUp,
    Heard,
    Interrupted,
    Joined,
    Left,
    Lost,
    Moved,
    Named,
    Poisonous,
    SendCancel,
    SendFinish,
    SendPlace,
    SendRelease,
    SendUsePrefill,
    SendYield,
    StopFound,
    Submit,
    Tick,
)
from router.groups import Groups
from router.moves import Moves, together
from router.placement import Placer
from router.policy import Choice, Demand, RoutingPolicy
from router.recovery import Again, Done, Hopeless, RetryBudget, judge, poisoned
from router.registry import Life, ModelKey, Worker


class Router:
    """See the module. `handle` is the only way to change it; the router's event loop owns it."""

    # Mutable state: the calls by request and by group, the line and the deadlines as heaps whose stale entries
    # are skipped, the retry budget, the adoptions, the registry and the prefix index.

    def __init__(
        self,
        config: RouterConfig,
        policy: RoutingPolicy,
        stop_ids: frozenset[int] = frozenset(),
        life: int = 0,
    ) -> None:
        """`life` is above that of every router before this one: a request that it adopts is placed as `life` + 1 and
        on, so that no two routers give two placements the same name."""
        self._config = config
        self._life = life
        self._stop_ids = stop_ids
        self._budget = RetryBudget(config.retry_reserve, config.retry_fraction)
        self._calls: dict[RequestId, Call] = {}
        self._groups = Groups()
        self._line: list[tuple[int, RequestId]] = []
        self._unsure: list[tuple[int, RequestId]] = []
        self._deadlines: list[tuple[float, RequestId]] = []
        self._adoptions = Adoptions(config.settle_s)
        self._turns = 0
        self._placeable_s: float | None = None
        self._beliefs = Beliefs(config.worker_silent_s)
        self.registry, self.index = self._beliefs.registry, self._beliefs.index
        self._placer = Placer(policy, self.registry, self.index)
        self._moves = Moves(self.registry, self._placer, config.moves_at_once)
        self._judge = Judge(self.registry, config.escalate_s, config.worker_hung_s)

    def __repr__(self) -> str:
        calls = ", ".join(f"{r}={c.state.value}@{c.placement}" for r, c in self._calls.items())
        return f"Router({calls or 'idle'}; {self.registry})"

    @property
    def waiting(self) -> int:
        return sum(call.state is State.WAITING for call in self._calls.values())

    @property
    def open(self) -> int:
        """Requests that some worker may still hold, or that wait."""
        return len(self._calls)

    def is_settled(self, now: float) -> bool:
        """Whether requests of an earlier router that are not known by now will not be."""
        return self._adoptions.is_settled(now)

    @property
    def condemned(self) -> tuple[Verdict, ...]:
        """Lives of workers that the supervisor shall end. May be read from any thread."""
        return self._judge.verdicts

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event and return what is to be done, in order."""
        out: list[Command] = []
        match event:
            case Submit():
                self._submit(event, now, out)
            case Heard():
                self._heard(event, now, out)
            case Left():
                self._close(event.request, FinishReason.CANCELLED, now, out)
            case StopFound():
                self._stop_found(event, out)
            case Named(decode, lives):
                self._adoptions.named(decode)
                self.registry.named(lives)
            case Joined():
                life = (event.peer.name, event.info.incarnation)
                if self._judge.is_condemned(life):
                    out.append(GiveUp(Verdict(*life, "it is back after it was given up")))
                    return out
                self._lost(event.peer.name, now, out, back=life)
                for call in self._calls.values():
                    call.victims.discard(life)
                if self.registry.join(event.peer, event.info, now):
                    self.index.add(event.peer.name, event.info.blocks)
                self._advance(now, out)
            case Lost():
                self._lost(event.worker, now, out)
                if event.for_good:
                    self.registry.forget(event.worker)
                    self._judge.forget(event.worker)
                    self.index.forget(event.worker)
                self._advance(now, out)
            case Tick():
                self._tick(now, out)
        return out

    # ---- arrivals and the line

    def _submit(self, event: Submit, now: float, out: list[Command]) -> None:
        record = event.record
        fault = self._placer.impossible(record)
        if fault is not None:
            out.append(Fail(record.request, fault, FinishReason.REJECTED))
            return
        self._turns += 1
        self._budget.arrived()
        call = Call(record, self._turns, event.deadline_s)
        self._calls[record.request] = call
        self._groups.add(call)
        heapq.heappush(self._line, (call.turn, record.request))
        if call.deadline_s is not None:
            heapq.heappush(self._deadlines, (call.deadline_s, record.request))
        self._advance(now, out)
        if call.state is State.WAITING and self.waiting > self._config.max_waiting:
            self._forget(call, out)
            full = Fault(
                "RESOURCE_EXHAUSTED", f"{self._config.max_waiting} requests wait already; try later"
            )
            out.append(
                Fail(record.request, full, FinishReason.REJECTED, self._config.retry_after_s)
            )

    def _advance(self, now: float, out: list[Command]) -> None:
        """Offer requests from the head of the line while some worker may have room."""
        if self._unsure and self._adoptions.is_settled(now):
            for entry in self._unsure:
                heapq.heappush(self._line, entry)
            self._unsure.clear()
        while self._line:
            turn, request = self._line[0]
            call = self._calls.get(request)
            if call is None or call.state is not State.WAITING or call.turn != turn:
                heapq.heappop(self._line)
                continue
            if self._is_unsure(call, now):
                self._unsure.append(heapq.heappop(self._line))
                continue
            if not self._offer(call, now, out):
                # It may have come while no worker was known; now that some are, it may be too large for each.
                fault = self._placer.impossible(call.record)
                if fault is None:
                    return
                self._forget(call, out)
                out.append(Fail(request, fault, FinishReason.REJECTED))
            heapq.heappop(self._line)

    def _offer(self, call: Call, now: float, out: list[Command]) -> bool:
        host, placed = self._beside(call, now)
        if placed is None:
            placed = self._placer.choose(call.record, call.chain, now, self._source(call))
        if placed is None:
            return False
        choice, demand, key = placed
        decode = self.registry.get(choice.decode.name)
        assert decode is not None
        call.move(State.OFFERED)
        call.placement = max(call.placement, call.highest) + 1
        call.key = key
        call.decode, call.decode_life = decode.name, decode.life
        call.believed_decode_blocks = choice.decode.cached_blocks
        request = call.record.request
        blocks = demand.blocks - choice.decode.cached_blocks
        self.registry.dispatched(call.decode, request, 0, blocks)
        record = call.record
        if call.deadline_s is not None:
            left_s = max(call.deadline_s - now, 0.0)
            record = msgspec.structs.replace(record, remaining_s=left_s)
        prefill = self._beliefs.use_prefill(call, choice.prefill)
        place = Place(
            record=record,
            placement=call.placement,
            prefill=prefill,
            losses=call.losses,
            fork_of=host,
        )
        out.append(SendPlace(call.decode, place, _reason(call, host, choice)))
        return True

    def _beside(
        self, call: Call, now: float
    ) -> tuple[RequestId | None, tuple[Choice, Demand, ModelKey] | None]:
        """Another sample of its prompt to share blocks with, and the place there."""
        if call.source is None:
            for host in self._groups.hosts(call):
                home = self.registry.get(host.decode)
                assert home is not None
                placed = self._placer.beside(call.record, home, host.prefill, now)
                if placed is not None:
                    return host.record.request, placed
        return None, None

    # ---- what workers say

    def _heard(self, event: Heard, now: float, out: list[Command]) -> None:
        record = event.record
        if isinstance(record, Load):
            self.registry.report(event.worker, record, now)
            self.index.evict(event.worker, record.evicted)
            self._give_up(self._judge.accused(event.worker, record.silent, now), now, out)
            self._advance(now, out)
            self._move(now, out)
            return
        if isinstance(record, OrphansTold):
            self._adoptions.told(event.worker)
            self._advance(now, out)
            return
        if isinstance(record, Orphan):
            self._adopt(event.worker, record, now, out)
            return
        call = self._calls.get(record.request)
        if call is None or call.placement != record.placement or call.decode != event.worker:
            if isinstance(record, Yielded):
                release = Release(record.request, record.placement)
                out.append(SendRelease(event.worker, release))
            out.append(Dropped("stale", len(record.ids) if isinstance(record, Tokens) else 0))
            return
        match record:
            case Accepted():
                self._accepted(call, record, out)
            case Refused():
                self._refused(call, now, out)
            case NeedPrefill():
                self._need_prefill(call, record, now, out)
            case Tokens():
                self._tokens(call, record, now, out)
            case Yielded():
                self._yielded(call, record, now, out)
            case Ended():
                self._ended(call, record, out)
                self._advance(now, out)

    def _accepted(self, call: Call, record: Accepted, out: list[Command]) -> None:
        self.registry.accepted(call.decode, record.request)
        self.registry.accepted(call.prefill, record.request)
        if call.state is not State.OFFERED:
            if call.state is not State.CLOSING:
                out.append(Dropped("duplicate", 0))
            return
        call.move(State.RUNNING)
        self._beliefs.accepted(call, record)
        out.append(Begin(record.request))

    def _refused(self, call: Call, now: float, out: list[Command]) -> None:
        worker = self.registry.get(call.decode)
        if worker is not None:
            worker.refused = True
        if call.state is State.CLOSING:
            self._forget(call, out)
        elif call.state is State.OFFERED:
            self._requeue(call)
        else:
            out.append(Dropped("duplicate", 0))
        self._advance(now, out)

    def _need_prefill(
        self, call: Call, record: NeedPrefill, now: float, out: list[Command]
    ) -> None:
        """Its prefill worker is lost to it: name another, or none. What a dead one had cached died with it."""
        if call.state is not State.RUNNING or call.prefill != record.failed:
            out.append(Dropped("stale", 0))
            return
        failed = call.prefill_life
        if failed is not None:
            call.failed_prefills.add(failed)
            if not self.registry.is_connected(failed) and not self.registry.was_leaving(failed):
                call.victims.add(failed)
            if failed == call.source:
                self._release(call, out)
        fault = poisoned(call)
        if fault is not None:
            out.append(_poisonous(call))
            self._answer(call, fault, FinishReason.ERROR, out)
            return
        decode = self.registry.get(call.decode)
        assert decode is not None
        view = self._placer.choose_prefill(
            call.record, call.chain, decode, call.failed_prefills, now
        )
        peer = self._beliefs.replace_prefill(call, view)
        out.append(SendUsePrefill(call.decode, UsePrefill(record.request, call.placement, peer)))

    def _tokens(self, call: Call, record: Tokens, now: float, out: list[Command]) -> None:
        if call.state is not State.RUNNING:
            kind = "early" if call.state is State.OFFERED else "overrun"
            out.append(Dropped(kind, len(record.ids)))
            return
        known = len(call.emitted) - record.index
        if known < 0:
            out.append(Dropped("gap", len(record.ids)))
            return
        if known and record.ids:
            out.append(Dropped("duplicate", min(known, len(record.ids))))
        fresh = record.ids[known:]
        if fresh:
            call.emitted.extend(fresh)
            out.append(Deliver(record.request, fresh))
            if call.source is not None:
                self._release(call, out)
                self._move(now, out)

    def _ended(self, call: Call, record: Ended, out: list[Command]) -> None:
        self._forget(call, out)
        if call.state is State.CLOSING:
            return
        end = ending(call, record)
        if isinstance(end, Complete):
            self._beliefs.ended(call, record.stats)
        out.append(end)

    # ---- workers that leave

    def _move(self, now: float, out: list[Command]) -> None:
        """Ask leaving decode workers for requests that others could go on with."""
        for call in self._moves.due(self._calls.values(), now):
            if self._is_unsure(call, now):
                continue
            call.yielding = True
            order = Yield(call.record.request, call.placement)
            out.append(SendYield(call.decode, order))

    def _yielded(self, call: Call, record: Yielded, now: float, out: list[Command]) -> None:
        request, worker, life = record.request, call.decode, call.decode_life
        if call.state is State.OFFERED:
            out.append(Dropped("early", 0))
            return
        if call.state is not State.RUNNING:
            self._forget(call, out)
            out.append(SendRelease(worker, Release(request, record.placement)))
            if call.state is State.FINISHING:
                out.append(complete(call, FinishReason.STOP, record.stats))
            self._advance(now, out)
            return
        call.moved(together(call.earlier, record.stats))
        self._requeue(call)
        call.source, call.source_placement = life, record.placement
        out.append(Moved(request, worker, record.stats.stages))
        self._advance(now, out)

    def _source(self, call: Call) -> Worker | None:
        """Who keeps the KV of a request that was yielded to be placed elsewhere."""
        return None if call.source is None else self.registry.get(call.source[0])

    def _release(self, call: Call, out: list[Command]) -> None:
        """The KV that a leaving worker keeps for `call` is not needed any more."""
        if call.source is not None:
            release = Release(call.record.request, call.source_placement)
            out.append(SendRelease(call.source[0], release))
            call.source = None

    def _adopt(self, worker: str, orphan: Orphan, now: float, out: list[Command]) -> None:
        """A decode worker holds this request for a router that is gone: go on with it, or let the worker drop it."""
        request, home = orphan.record.request, self.registry.get(worker)
        known = self._calls.get(request)
        if known is not None:
            known.highest = max(known.highest, orphan.placement)
        if home is None:
            # Its last words before its stream is severed: it was condemned, and what it holds ends with it.
            out.append(Dropped("stale", len(orphan.tokens)))
            return
        is_mine = known is not None and not self._adoptions.knows(request)
        if is_mine or not self._adoptions.takes(orphan, now):
            cancel = Cancel(request, orphan.placement, FinishReason.CANCELLED)
            out.append(SendCancel(worker, cancel))
            return
        highest = self._life
        if known is not None:
            highest = max(highest, known.highest, known.placement)
            if known.state is not State.WAITING:
                cancel = Cancel(request, known.placement, FinishReason.CANCELLED)
                out.append(SendCancel(known.decode, cancel))
            self._forget(known, out)
        self._turns += 1
        left_s = orphan.remaining_s
        deadline_s = None if left_s is None else now + left_s
        call = Call(orphan.record, self._turns, deadline_s, State.RUNNING, orphan.placement)
        call.losses, call.highest = orphan.losses, highest
        call.decode, call.decode_life, call.key = worker, home.life, home.key
        if len(orphan.record.tokens) > orphan.record.prompt_tokens:
            call.cached_tokens_bound = 0
        self._calls[request] = call
        self._groups.add(call)
        self._beliefs.adopted(call, orphan)
        if call.deadline_s is not None:
            heapq.heappush(self._deadlines, (call.deadline_s, request))
        out.append(Adopt(orphan))
        call.emitted.extend(orphan.tokens)
        # One by one, as they came: a front that makes an event of each makes the same events again.
        out.extend(Deliver(request, [token]) for token in orphan.tokens)

    def _is_unsure(self, call: Call, now: float) -> bool:
        """Whether a worker may yet tell of a higher placement of it: until then it stays with whoever has it."""
        return self._adoptions.knows(call.record.request) and not self._adoptions.is_settled(now)

    # ---- endings that are not a worker's word

    def _stop_found(self, event: StopFound, out: list[Command]) -> None:
        call = self._calls.get(event.request)
        if call is None or call.state is not State.RUNNING:
            return
        call.move(State.FINISHING)
        del call.emitted[event.tokens_kept :]
        finish = Finish(event.request, call.placement, event.tokens_kept)
        out.append(SendFinish(call.decode, finish))

    def _close(
        self, request: RequestId, reason: FinishReason, now: float, out: list[Command]
    ) -> None:
        call = self._calls.get(request)
        if call is None or call.state is State.CLOSING:
            return
        self._adoptions.close(request)
        was_waiting = call.state is State.WAITING
        fault = DEADLINE if reason is FinishReason.DEADLINE else LEFT
        self._answer(call, fault, reason, out)
        if was_waiting:
            self._advance(now, out)

    def _answer(self, call: Call, fault: Fault, reason: FinishReason, out: list[Command]) -> None:
        """The client is told that it is over; so is the worker, if there is one."""
        request = call.record.request
        out.append(Fail(request, fault, reason))
        if call.state is State.WAITING:
            self._forget(call, out)
            return
        call.move(State.CLOSING)
        told = reason if reason is FinishReason.DEADLINE else FinishReason.CANCELLED
        out.append(SendCancel(call.decode, Cancel(request, call.placement, told)))

    # ---- workers that are lost

    def _lost(self, name: str, now: float, out: list[Command], back: Life | None = None) -> None:
        """The stream to a worker broke; `back` is the life that has just connected under this name, if any."""
        worker = self.registry.get(name)
        self.registry.leave(name)
        announced = worker is not None and self.registry.was_leaving(worker.life)
        for call in list(self._calls.values()):
            if call.source is not None and call.source[0] == name:
                call.source = None
            # Nobody is taken to have died of a request that it never accepted: a router that was itself frozen hears
            # of all its broken streams one by one, and offers the same request to each in turn.
            took = call.decode == name and call.state is not State.OFFERED
            life = call.decode_life if took else None
            if worker is not None and worker.life in call.failed_prefills:
                life = worker.life
            if life is not None and life != back and not announced:
                call.victims.add(life)
            if call.decode == name:
                self._recover(call, announced, now, out)

    def _give_up(self, verdicts: list[Verdict], now: float, out: list[Command]) -> None:
        for verdict in verdicts:
            self._lost(verdict.name, now, out)
            out.append(GiveUp(verdict))

    def _recover(self, call: Call, announced: bool, now: float, out: list[Command]) -> None:
        """The decode worker of `call` is lost: go on elsewhere, or find that nothing is left to do."""
        request, state = call.record.request, call.state
        if state is State.CLOSING:
            self._forget(call, out)
            return
        if state is State.FINISHING:
            self._forget(call, out)
            out.append(complete(call, FinishReason.STOP, unreported(call)))
            return
        if state is State.OFFERED:
            call.unheard += not announced
        else:
            call.losses += not announced
        match judge(call, self._config, self._stop_ids, self._budget, now, announced):
            case Again():
                if state is State.RUNNING:
                    call.rewrite()
                    out.append(Interrupted(request, call.decode, len(call.emitted)))
                self._requeue(call)
            case Done(reason):
                self._forget(call, out)
                out.append(complete(call, reason, unreported(call)))
            case Hopeless(fault):
                self._forget(call, out)
                if poisoned(call):
                    out.append(_poisonous(call))
                out.append(Fail(request, fault, FinishReason.ERROR))

    # ---- time

    def _tick(self, now: float, out: list[Command]) -> None:
        self._give_up(self._judge.look(now), now, out)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request = heapq.heappop(self._deadlines)
            self._close(request, FinishReason.DEADLINE, now, out)
        if self.registry.live("decode", now):
            self._placeable_s = None
            self._advance(now, out)
            return
        if self._placeable_s is None:
            self._placeable_s = now
        if now - self._placeable_s < self._config.unplaceable_s:
            return
        fault = Fault("UNAVAILABLE", "no live decode worker")
        for call in [c for c in self._calls.values() if c.state is State.WAITING]:
            self._forget(call, out)
            out.append(
                Fail(call.record.request, fault, FinishReason.ERROR, self._config.retry_after_s)
            )

    def _requeue(self, call: Call) -> None:
        call.move(State.WAITING)
        self._beliefs.release(call)
        call.prefill = call.decode = ""
        call.prefill_life = call.decode_life = None
        call.yielding = False
        heapq.heappush(self._line, (call.turn, call.record.request))

    def _forget(self, call: Call, out: list[Command]) -> None:
        del self._calls[call.record.request]
        self._groups.remove(call)
        self._beliefs.release(call)
        self._release(call, out)

    def check(self) -> None:
        """Raise AssertionError if what is kept twice disagrees."""
        self._beliefs.check(self._calls)
        self._groups.check(self._calls)
        in_line = {request for turn, request in self._line + self._unsure}
        for request, call in self._calls.items():
            if call.state is State.WAITING:
                assert request in in_line, f"{request} waits outside the line"
                assert not call.decode


def _reason(call: Call, host: RequestId | None, choice: Choice) -> str:
    """Why a placement is what it is: bound to where its KV is, without any prefill worker, or by the policy."""
    if host is not None or call.source is not None:
        return "pinned"
    return choice.reason if choice.prefill.name else "fallback"


def _poisonous(call: Call) -> Poisonous:
    return Poisonous(call.record.request, sorted(name for name, _ in call.victims))
