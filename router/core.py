"""The router's decisions: which worker gets a request, and what of a worker's words is believed.

Events in, commands out, time as an argument; no I/O, no clock, no torch. A request moves like this:

    WAITING ──offer──> OFFERED ──Accepted──> RUNNING ──stop string──> FINISHING
       ^                  │ Refused, or lost     │                        │
       └──────────────────┘                      └─ cancel, deadline ─> CLOSING

and is forgotten when its worker says `Ended` (or is lost). CLOSING means that its client has been
answered and its worker has not yet said that it let go. The line of waiting requests is strictly
first come, first served: a refused request keeps its turn, and small ones do not overtake it.

A worker that refused is not asked again before its next report, so re-offers come at the rate of
reports and never spin. Only tokens of the current placement, in order, are passed on.
"""

import heapq
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from engine import identity
from engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Fault,
    Finish,
    Load,
    Place,
    Refused,
    RequestStats,
    Tokens,
)
from engine.types import FinishReason, RequestId, RequestRecord
from router.config import RouterConfig
from router.events import (
    Begin,
    Command,
    Complete,
    Deliver,
    Dropped,
    Event,
    Fail,
    Heard,
    Joined,
    Left,
    Lost,
    SendCancel,
    SendFinish,
    SendPlace,
    StopFound,
    Submit,
    Tick,
)
from router.placement import Placer
from router.policy import RoutingPolicy
from router.prefix_index import PrefixIndex
from router.registry import ModelKey, Registry

DEADLINE = Fault("DEADLINE_EXCEEDED", "the deadline passed before the request ended")


class State(Enum):
    WAITING = "waiting"
    OFFERED = "offered"
    RUNNING = "running"
    FINISHING = "finishing"
    CLOSING = "closing"


_MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.OFFERED}),
    State.OFFERED: frozenset({State.WAITING, State.RUNNING, State.CLOSING}),
    State.RUNNING: frozenset({State.FINISHING, State.CLOSING}),
    State.FINISHING: frozenset({State.CLOSING}),
    State.CLOSING: frozenset(),
}


@dataclass(slots=True)
class Call:
    """One request. `emitted` is what its client was given: the history of a later placement."""

    record: RequestRecord
    turn: int
    deadline_s: float | None
    state: State = State.WAITING
    placement: int = 0
    prefill: str = ""
    decode: str = ""
    key: ModelKey = ("", 1)
    believed_prefill_tokens: int = 0
    believed_decode_blocks: int = 0
    emitted: list[int] = field(default_factory=list)
    chains: dict[ModelKey, list[bytes]] = field(default_factory=dict)

    def move(self, state: State) -> None:
        if state not in _MOVES[self.state]:
            raise AssertionError(f"{self.record.request}: {self.state.name} -> {state.name}")
        self.state = state

    def chain(self, key: ModelKey) -> list[bytes]:
        """Identities of the prompt's full blocks, computed once per kind of worker."""
        chain = self.chains.get(key)
        if chain is None:
            root = identity.root(self.record.namespace, key[0])
            chain = identity.chain(root, self.record.tokens, key[1])
            self.chains[key] = chain
        return chain


class Router:
    """See the module. `handle` is the only way to change it; the router's event loop owns it."""

    # Mutable state: the calls by request, the line and the deadlines as heaps whose stale entries
    # are skipped, the registry and the prefix index.

    def __init__(self, config: RouterConfig, policy: RoutingPolicy) -> None:
        self._config = config
        self._calls: dict[RequestId, Call] = {}
        self._line: list[tuple[int, RequestId]] = []
        self._deadlines: list[tuple[float, RequestId]] = []
        self._turns = 0
        self._placeable_s: float | None = None
        self.registry = Registry(config.worker_silent_s)
        self.index = PrefixIndex()
        self._placer = Placer(policy, self.registry, self.index)

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
            case Joined():
                self._lost(event.peer.name, out)
                if self.registry.join(event.peer, event.info, now):
                    self.index.add(event.peer.name, event.info.blocks)
                self._advance(now, out)
            case Lost():
                self._lost(event.worker, out)
                if event.for_good:
                    self.registry.forget(event.worker)
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
        call = Call(record, self._turns, event.deadline_s)
        self._calls[record.request] = call
        heapq.heappush(self._line, (call.turn, record.request))
        if call.deadline_s is not None:
            heapq.heappush(self._deadlines, (call.deadline_s, record.request))
        self._advance(now, out)
        if call.state is State.WAITING and self.waiting > self._config.max_waiting:
            del self._calls[record.request]
            full = Fault(
                "RESOURCE_EXHAUSTED", f"{self._config.max_waiting} requests wait already; try later"
            )
            out.append(
                Fail(record.request, full, FinishReason.REJECTED, self._config.retry_after_s)
            )

    def _advance(self, now: float, out: list[Command]) -> None:
        """Offer requests from the head of the line while some worker may have room."""
        while self._line:
            turn, request = self._line[0]
            call = self._calls.get(request)
            if call is None or call.state is not State.WAITING or call.turn != turn:
                heapq.heappop(self._line)
                continue
            if not self._offer(call, now, out):
                return
            heapq.heappop(self._line)

    def _offer(self, call: Call, now: float, out: list[Command]) -> bool:
        placed = self._placer.choose(call.record, call.chain, now)
        if placed is None:
            return False
        choice, demand, key = placed
        call.move(State.OFFERED)
        call.placement += 1
        call.key = key
        call.prefill, call.decode = choice.prefill.name, choice.decode.name
        call.believed_prefill_tokens = choice.prefill.cached_tokens
        call.believed_decode_blocks = choice.decode.cached_blocks
        request = call.record.request
        uncached = call.record.prompt_tokens - choice.prefill.cached_tokens
        self.registry.dispatched(call.prefill, request, uncached, 0)
        blocks = demand.blocks - choice.decode.cached_blocks
        self.registry.dispatched(call.decode, request, 0, blocks)
        record = call.record
        if call.deadline_s is not None:
            left_s = max(call.deadline_s - now, 0.0)
            record = msgspec.structs.replace(record, remaining_s=left_s)
        prefill = self.registry.get(call.prefill)
        assert prefill is not None
        place = Place(record=record, placement=call.placement, prefill=prefill.peer)
        out.append(SendPlace(call.decode, place, choice.reason))
        return True

    # ---- what workers say

    def _heard(self, event: Heard, now: float, out: list[Command]) -> None:
        record = event.record
        if isinstance(record, Load):
            self.registry.report(event.worker, record, now)
            self.index.evict(event.worker, record.evicted)
            self._advance(now, out)
            return
        call = self._calls.get(record.request)
        if call is None or call.placement != record.placement or call.decode != event.worker:
            out.append(Dropped("stale", len(record.ids) if isinstance(record, Tokens) else 0))
            return
        match record:
            case Accepted():
                self._accepted(call, record, out)
            case Refused():
                self._refused(call, now, out)
            case Tokens():
                self._tokens(call, record, out)
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
        chain = call.chain(call.key)
        actual_blocks = record.cached_tokens // call.key[1]
        if actual_blocks < call.believed_decode_blocks:
            self.index.correct(call.decode, chain, actual_blocks)
        self.index.insert(call.decode, chain)
        self.index.insert(call.prefill, chain)
        out.append(Begin(record.request))

    def _refused(self, call: Call, now: float, out: list[Command]) -> None:
        worker = self.registry.get(call.decode)
        if worker is not None:
            worker.refused = True
        if call.state is State.CLOSING:
            self._forget(call)
        elif call.state is State.OFFERED:
            self._requeue(call)
        else:
            out.append(Dropped("duplicate", 0))
        self._advance(now, out)

    def _tokens(self, call: Call, record: Tokens, out: list[Command]) -> None:
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

    def _ended(self, call: Call, record: Ended, out: list[Command]) -> None:
        stats, reason, state = record.stats, record.reason, call.state
        self._forget(call)
        if state is State.CLOSING:
            return
        well = record.fault is None and reason in (FinishReason.STOP, FinishReason.LENGTH)
        if well or state is State.FINISHING:
            if state is State.RUNNING and stats.output_tokens != len(call.emitted):
                message = (
                    f"worker {call.decode} counts {stats.output_tokens} output tokens, "
                    f"{len(call.emitted)} arrived"
                )
                out.append(Fail(record.request, Fault("INTERNAL", message), FinishReason.ERROR))
                return
            if state is State.OFFERED:
                message = f"worker {call.decode} ended a request that it had not accepted"
                out.append(Fail(record.request, Fault("INTERNAL", message), FinishReason.ERROR))
                return
            self._learn(call, stats)
            out.append(self._complete(call, state, reason, stats))
            return
        if reason is FinishReason.DEADLINE:
            out.append(Fail(record.request, DEADLINE, reason))
            return
        unexplained = Fault("INTERNAL", f"worker {call.decode} ended it with {reason.value!r}")
        out.append(Fail(record.request, record.fault or unexplained, _outcome(reason)))

    def _complete(
        self, call: Call, state: State, reason: FinishReason, stats: RequestStats
    ) -> Complete:
        if state is State.FINISHING:
            reason = FinishReason.STOP
            stats = msgspec.structs.replace(stats, output_tokens=len(call.emitted))
        return Complete(call.record.request, reason, stats, call.believed_prefill_tokens)

    def _learn(self, call: Call, stats: RequestStats) -> None:
        """Both workers have committed their blocks: correct the trees, then extend them."""
        chain = call.chain(call.key)
        size = call.key[1]
        if stats.prefill_cached_tokens < call.believed_prefill_tokens:
            self.index.correct(call.prefill, chain, stats.prefill_cached_tokens // size)
            self.index.insert(call.prefill, chain)
        parent = chain[-1] if chain else identity.root(call.record.namespace, call.key[0])
        written = (call.record.tokens + call.emitted)[len(chain) * size : -1]
        self.index.insert(call.decode, chain + identity.chain(parent, written, size))

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
        fault = (
            DEADLINE
            if reason is FinishReason.DEADLINE
            else Fault("CANCELLED", "the client left before the request ended")
        )
        out.append(Fail(request, fault, reason))
        if call.state is State.WAITING:
            self._forget(call)
            self._advance(now, out)
            return
        call.move(State.CLOSING)
        out.append(SendCancel(call.decode, Cancel(request, call.placement, reason)))

    def _lost(self, name: str, out: list[Command]) -> None:
        self.registry.leave(name)
        for call in [c for c in self._calls.values() if c.decode == name]:
            request = call.record.request
            if call.state is State.OFFERED:
                self._requeue(call)
                continue
            self._forget(call)
            if call.state is State.RUNNING:
                fault = Fault("UNAVAILABLE", f"decode worker {name} was lost during the request")
                out.append(Fail(request, fault, FinishReason.ERROR))
            elif call.state is State.FINISHING:
                stats = RequestStats(
                    prompt_tokens=call.record.prompt_tokens,
                    prefill_worker=call.prefill,
                    decode_worker=name,
                )
                out.append(self._complete(call, call.state, FinishReason.STOP, stats))

    def _tick(self, now: float, out: list[Command]) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request = heapq.heappop(self._deadlines)
            self._close(request, FinishReason.DEADLINE, now, out)
        if self.registry.live("prefill", now) and self.registry.live("decode", now):
            self._placeable_s = None
            self._advance(now, out)
            return
        if self._placeable_s is None:
            self._placeable_s = now
        if now - self._placeable_s < self._config.unplaceable_s:
            return
        fault = Fault("UNAVAILABLE", "no live prefill and decode worker")
        for call in [c for c in self._calls.values() if c.state is State.WAITING]:
            self._forget(call)
            out.append(
                Fail(call.record.request, fault, FinishReason.ERROR, self._config.retry_after_s)
            )

    def _requeue(self, call: Call) -> None:
        call.move(State.WAITING)
        self._release(call)
        call.prefill = call.decode = ""
        heapq.heappush(self._line, (call.turn, call.record.request))

    def _forget(self, call: Call) -> None:
        del self._calls[call.record.request]
        self._release(call)

    def _release(self, call: Call) -> None:
        self.registry.released(call.prefill, call.record.request)
        self.registry.released(call.decode, call.record.request)

    def check(self) -> None:
        """Raise AssertionError if what is kept twice disagrees."""
        self.index.check()
        in_line = {request for turn, request in self._line}
        for request, call in self._calls.items():
            if call.state is State.WAITING:
                assert request in in_line, f"{request} waits outside the line"
                assert not call.decode
            else:
                worker = self.registry.get(call.decode)
                assert worker is not None and request in worker.own, f"{request} is nowhere"
        for worker in self.registry:
            for request in worker.own:
                held = self._calls[request]
                assert worker.name in (held.prefill, held.decode), f"{request} is misfiled"


def _outcome(reason: FinishReason) -> FinishReason:
    """Stop and length are no outcomes of a request that failed."""
    ended_well = reason in (FinishReason.STOP, FinishReason.LENGTH)
    return FinishReason.ERROR if ended_well else reason
