"""Decides which requests a decode worker takes, and what its next step computes. Owns a request's life. Pure.

    CONNECTING --peer up--> HANDOFF --all blocks verified--> READY --room in the batch--> RUNNING --> gone
    any state --end (stop, length, cancel, deadline, fault)--> gone, or ENDING until no copy of ours is under way
    HANDOFF --a chunk fails--> RETRY until fenced --> HANDOFF under the next attempt

A request is taken only with a lease for its whole prompt and the promise of room to grow to `max_tokens`; otherwise the
answer is no, at once, and the router keeps it. So a running request can always go on, and nothing here ever waits for
blocks. The first token is sent on as soon as the prefill worker names it; the gap until the second is inter-token
latency. The end of a request is told at once; its blocks follow when the receiver says that they are fenced.
"""

from dataclasses import dataclass, field

import msgspec

from decode_worker.config import DecodeConfig
from decode_worker.events import (
    ConnectPeer,
    FromPeer,
    FromRouter,
    PeerDown,
    PeerUp,
    RouterLost,
    Tell,
)
from decode_worker.request import Migrated, Peer, Request, State
from engine import identity
from engine.kv.manager import KVCacheManager, Lease
from engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Fault,
    Finish,
    FirstToken,
    Handoff,
    Offer,
    Place,
    PrefillFailed,
    Refused,
    RequestStats,
    StartPrefill,
    Tokens,
)
from engine.plan import StageClock, banned_tokens, check_record, finish_reason
from engine.step import Row, StepPlan
from engine.types import (
    FieldError,
    FinishReason,
    Incarnation,
    RequestId,
    RequestRecord,
    TooLongError,
)
from transfer.commands import Arrived, Broken, Emit, ExpectedBlock, Fenced, Received
from transfer.commands import Command as TransferCommand
from transfer.receiver import KVReceiver

Event = FromRouter | RouterLost | PeerUp | PeerDown | FromPeer | Received
Command = TransferCommand | Tell | ConnectPeer

MAX_ATTEMPTS = 2
"""Handoffs tried for one placement before the request fails."""


@dataclass(slots=True)
class DecodeScheduler:
    """Mutable state, all of it: `_requests` with `_handoffs` and `_running` over it, `_peers`, and what `kv` and
    `receiver` own. Owner: the engine thread."""

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
    migrated: list[Migrated] = field(default_factory=list)
    generated_tokens: int = 0
    _requests: dict[RequestId, Request] = field(default_factory=dict)
    _handoffs: dict[Handoff, Request] = field(default_factory=dict)
    _running: list[Request] = field(default_factory=list)
    _ready: list[Request] = field(default_factory=list)
    _stepping: list[Request] = field(default_factory=list)
    _peers: dict[str, Peer] = field(default_factory=dict)
    _steps: int = 0

    @property
    def running_requests(self) -> int:
        return len(self._running)

    @property
    def waiting_requests(self) -> int:
        """Accepted, and not yet in the batch."""
        return len(self._requests) - len(self._running)

    @property
    def open_requests(self) -> int:
        """All that still hold blocks, ending ones included."""
        return len({id(r) for r in (*self._requests.values(), *self._handoffs.values())})

    # events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns what the shell must do. Nothing else changes the state, but `plan`, `complete`."""
        match event:
            case FromRouter(link, Place() as message):
                return self._place(link, message, now)
            case FromRouter(_, Cancel(name, placement, reason)):
                return self._end_if_current(name, placement, reason, now)
            case FromRouter(_, Finish(name, placement, tokens_kept)):
                return self._end_if_current(
                    name, placement, FinishReason.STOP, now, kept=tokens_kept
                )
            case FromPeer(_, FirstToken() as message):
                return self._first_token(message, now)
            case FromPeer(_, Offer() as message):
                return self._carry_out(self.receiver.offer(message), now)
            case FromPeer(_, PrefillFailed(handoff, fault)):
                return self._prefill_failed(handoff, fault, now)
            case Received():
                return self._received(event, now)
            case PeerUp(incarnation, address, transport):
                return self._peer_up(Peer(incarnation, transport, address), now)
            case PeerDown():
                return self._peer_down(event, now)
            case RouterLost(link):
                lost = [r for r in self._requests.values() if r.link == link]
                return self._end_all(lost, FinishReason.CANCELLED, now)
        raise TypeError(f"not an event: {event!r}")

    def tick(self, now: float) -> list[Command]:
        """End requests whose time is over."""
        late = [r for r in self._requests.values() if now >= r.deadline]
        return self._end_all(late, FinishReason.DEADLINE, now)

    # taking a request

    def _place(self, link: int, message: Place, now: float) -> list[Command]:
        record, name = message.record, message.record.request
        if name in self._requests:
            return []  # idempotent: the placement is under way, and a newer one never comes to the same worker
        fault = self._refusal(record)
        if fault is not None:
            reason = FinishReason.REJECTED
            stats = RequestStats(decode_worker=self.name)
            return [
                Tell(
                    link,
                    Ended(
                        request=name,
                        placement=message.placement,
                        reason=reason,
                        stats=stats,
                        fault=fault,
                    ),
                )
            ]
        lease = None
        if len(self._handoffs) < self.config.max_handoffs:
            lease = self._acquire(record, record.tokens)
        if lease is None:
            return [Tell(link, Refused(name, message.placement, self._blocks_wanted(record)))]
        deadline = float("inf") if record.remaining_s is None else now + record.remaining_s
        request = Request(
            link=link,
            record=record,
            placement=message.placement,
            prefill=message.prefill,
            tokens=list(record.tokens),
            lease=lease,
            clock=StageClock("prefill", now),
            deadline=deadline,
            decode_cached_tokens=min(lease.cached_tokens, record.prompt_tokens),
        )
        self._requests[name] = request
        accepted = Tell(link, Accepted(name, message.placement, lease.cached_tokens))
        return [accepted, *self._start(request)]

    def _refusal(self, record: RequestRecord) -> Fault | None:
        try:
            check_record(record, self.vocab, self.context_tokens)
        except TooLongError as error:
            return Fault("OUT_OF_RANGE", str(error), error.field)
        except FieldError as error:
            return Fault("INVALID_ARGUMENT", str(error), error.field)
        if self._blocks_wanted(record) > self.kv.pool.total:
            return Fault("OUT_OF_RANGE", "prompt and answer do not fit the decode worker's pool", "max_tokens")
        return None

    def _blocks_wanted(self, record: RequestRecord) -> int:
        return self.kv.blocks_for(record.prompt_tokens + record.max_tokens)

    def _acquire(self, record: RequestRecord, tokens: list[int]) -> Lease | None:
        return self.kv.acquire(
            record.namespace,
            tokens,
            match_limit=len(tokens) - 1,
            room_tokens=len(tokens),
            grow_tokens=record.prompt_tokens + record.max_tokens,
            migrating=True,
        )

    # the handoff

    def _start(self, request: Request) -> list[Command]:
        """Ask the prefill worker for what the lease does not have yet."""
        peer = self._peers.get(request.prefill.name)
        if peer is None or peer.address != request.prefill:
            request.state = State.CONNECTING
            return [ConnectPeer(request.prefill)]
        record, lease = request.record, request.lease
        handoff = Handoff(
            record.request, request.placement, request.attempt, self.incarnation, peer.incarnation
        )
        request.state, request.handoff = State.HANDOFF, handoff
        request.first, request.arrived, request.transport = None, False, peer.transport
        self._handoffs[handoff] = request
        have = lease.cached_tokens
        self.receiver.expect(handoff, self._targets(request))
        if len(request.tokens) > len(record.tokens):
            record = msgspec.structs.replace(record, tokens=list(request.tokens))
        return [Emit(peer.incarnation, StartPrefill(handoff=handoff, record=record, have_tokens=have))]

    def _targets(self, request: Request) -> dict[int, ExpectedBlock]:
        """The blocks still to land by index, each with the identity its bytes must have."""
        size, tokens, lease = self.kv.block_size, request.tokens, request.lease
        root = identity.root(request.record.namespace, self.fingerprint)
        identities = identity.blocks(root, tokens, size)
        first = lease.cached_tokens // size
        return {
            at: ExpectedBlock(lease.blocks[at], identities[at], min(size, len(tokens) - at * size))
            for at in range(first, len(identities))
        }

    def _peer_up(self, peer: Peer, now: float) -> list[Command]:
        self._peers[peer.address.name] = peer
        commands: list[Command] = []
        for request in list(self._requests.values()):
            if request.state is State.CONNECTING and request.prefill == peer.address:
                commands += self._start(request)
        return commands

    def _peer_down(self, event: PeerDown, now: float) -> list[Command]:
        peer = self._peers.get(event.address.name)
        if peer is not None and peer.incarnation == event.peer:
            del self._peers[event.address.name]
        commands: list[Command] = []
        if event.peer is not None:
            commands += self._carry_out(self.receiver.peer_lost(event.peer), now)
        fault = Fault("UNAVAILABLE", f"prefill worker {event.address.name}: {event.why}")
        for request in list(self._requests.values()):
            hit = {
                State.CONNECTING: request.prefill == event.address,
                State.HANDOFF: _is_served_by(request, event.peer),
            }
            if hit.get(request.state):
                commands += self._end(request, FinishReason.ERROR, now, fault)
        return commands

    def _first_token(self, message: FirstToken, now: float) -> list[Command]:
        request = self._handoffs.get(message.handoff)
        if request is None or request.state is not State.HANDOFF or request.first is not None:
            return []
        request.first = message
        request.prefill_cached_tokens = message.cached_tokens
        commands = self._emit(request, message.token)
        reason = finish_reason(request.record, request.output_tokens, message.token, self.stop_ids)
        if reason is not None:
            return commands + self._end(request, reason, now)
        if request.arrived:
            self._admit(request, now)
        return commands

    def _received(self, event: Received, now: float) -> list[Command]:
        request = self._handoffs.get(event.handoff)
        if request is not None and not event.error:
            request.migration_s += event.seconds
        return self._carry_out(
            self.receiver.received(event.handoff, event.seq, event.error), now
        )

    def _carry_out(self, commands: list[TransferCommand], now: float) -> list[Command]:
        """What the receiver says of a handoff is acted on here; everything else goes to the shell."""
        rest: list[Command] = []
        for command in commands:
            match command:
                case Arrived(handoff):
                    rest += self._landed(self._handoffs[handoff], now)
                case Broken(handoff, why):
                    rest += self._broken(self._handoffs[handoff], why, now)
                case Fenced(handoff):
                    rest += self._fenced(self._handoffs.pop(handoff), now)
                case _:
                    rest.append(command)
        return rest

    def _landed(self, request: Request, now: float) -> list[Command]:
        request.arrived = True
        blocks = len(request.lease.blocks) - request.lease.cached_tokens // self.kv.block_size
        request.migrated_blocks += blocks
        self.migrated.append(Migrated("ok", request.prefill.name, request.transport, request.migration_s, blocks))
        self.kv.landed(request.lease)
        if request.state is State.ENDING:
            self._let_go(request)
        else:
            self.kv.commit(request.lease, request.tokens[: request.known_tokens])
            if request.first is not None:
                self._admit(request, now)
        return []

    def _let_go(self, request: Request) -> None:
        """Keep what is worth keeping in the cache; the handoff, if it was still open, is over."""
        self._handoffs.pop(request.handoff, None)  # type: ignore[arg-type]
        if request.arrived:
            self.kv.commit(request.lease, request.tokens[: request.known_tokens], tail=True)
        self.kv.release(request.lease)

    def _admit(self, request: Request, now: float) -> None:
        """Blocks and first token are both here."""
        assert request.first is not None and request.handoff is not None
        del self._handoffs[request.handoff]
        request.clock.split(request.first.queue_s, request.first.run_s, now)
        request.clock.enter("decode_queue", now)
        request.state = State.READY
        self._ready.append(request)

    def _prefill_failed(self, handoff: Handoff, fault: Fault, now: float) -> list[Command]:
        request = self._handoffs.get(handoff)
        if request is None:
            return []
        if request.state is not State.HANDOFF or request.arrived:
            return self._stop_receiving(handoff, now)
        reason = FinishReason.ERROR
        if fault.code == "DEADLINE_EXCEEDED":
            reason = FinishReason.DEADLINE
        return self._end(request, reason, now, fault)

    def _broken(self, request: Request, why: str, now: float) -> list[Command]:
        """A chunk did not arrive as it was sent: fence the attempt, then try again or give up."""
        assert request.handoff is not None
        self.migrated.append(Migrated("failed", request.prefill.name, request.transport, 0.0, 0))
        if request.state is not State.HANDOFF:
            return self._stop_receiving(request.handoff, now)
        if request.attempt + 1 >= MAX_ATTEMPTS:
            fault = Fault("UNAVAILABLE", f"the prompt's KV blocks could not be moved: {why}")
            return self._end(request, FinishReason.ERROR, now, fault)
        request.state = State.RETRY
        return self._stop_receiving(request.handoff, now)

    def _stop_receiving(self, handoff: Handoff, now: float) -> list[Command]:
        if not self.receiver.is_expected(handoff):
            return []
        return self._carry_out(self.receiver.stop(handoff), now)

    def _fenced(self, request: Request, now: float) -> list[Command]:
        """No copy of ours is under way any more: the blocks may be let go."""
        self.kv.release(request.lease)
        if request.state is not State.RETRY:
            return []
        lease = self._acquire(request.record, request.tokens)
        if lease is None:
            request.state = State.ENDING
            fault = Fault("UNAVAILABLE", "no room for another try at moving the prompt's KV blocks")
            return self._tell_end(request, FinishReason.ERROR, now, fault)
        request.lease = lease
        request.attempt += 1
        return self._start(request)

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
        commands = self._tell_end(request, reason, now, fault, kept)
        state = request.state
        request.state = State.ENDING
        if state is State.RUNNING:
            self._running.remove(request)
        elif state is State.READY:
            self._ready.remove(request)
        landing = state in (State.HANDOFF, State.RETRY) and not request.arrived
        if not landing:
            self._let_go(request)
        elif request.first is None or state is State.RETRY or fault is not None:
            assert request.handoff is not None
            commands += self._stop_receiving(request.handoff, now)
        return commands

    def _tell_end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        fault: Fault | None,
        kept: int | None = None,
    ) -> list[Command]:
        del self._requests[request.record.request]
        stats = request.stats(now, self.name, self.block_bytes, kept)
        ended = Ended(
            request=request.record.request,
            placement=request.placement,
            reason=reason,
            stats=stats,
            fault=fault,
        )
        return [Tell(request.link, ended)]

    # steps

    def plan(self, now: float) -> tuple[StepPlan | None, list[Command]]:
        """The next step: every running request's next token (None: nothing to compute), and commands to carry out."""
        while self._ready and len(self._running) < self.config.max_batch:
            request = self._ready.pop(0)
            request.state = State.RUNNING
            request.clock.enter("decode_run", now)
            self._running.append(request)
        if not self._running:
            return None, []
        rows = []
        for request in self._running:
            end = len(request.tokens)
            self.kv.extend(request.lease, end)
            rows.append(
                Row(
                    request=request.record.request,
                    record=request.record,
                    tokens=request.tokens,
                    start=end - 1,
                    end=end,
                    blocks=request.lease.blocks,
                    draw=True,
                    banned=banned_tokens(request.record, request.output_tokens, self.stop_ids),
                )
            )
        self._stepping = list(self._running)
        self._steps += 1
        return StepPlan(tuple(rows), (), self._steps), []

    def complete(self, plan: StepPlan, drawn: list[int], now: float) -> list[Command]:
        """The step has run: send the tokens on, end what is over."""
        commands: list[Command] = []
        for request, token in zip(self._stepping, drawn, strict=True):
            commands += self._emit(request, token)
            reason = finish_reason(request.record, request.output_tokens, token, self.stop_ids)
            if reason is not None:
                commands += self._end(request, reason, now)
        self._stepping = []
        return commands

    def _emit(self, request: Request, token: int) -> list[Command]:
        index = request.output_tokens
        request.tokens.append(token)
        self.generated_tokens += 1
        record = Tokens(request.record.request, request.placement, index, [token])
        return [Tell(request.link, record)]

    def check(self) -> None:
        """Recompute the invariants."""
        self.kv.check()
        self.receiver.check()
        states = {
            State.READY: self._ready,
            State.RUNNING: self._running,
        }
        for state, line in states.items():
            assert all(request.state is state for request in line)
            assert sum(r.state is state for r in self._requests.values()) == len(line)
        for handoff, request in self._handoffs.items():
            assert request.handoff == handoff and not request.lease.released
        for request in self._requests.values():
            assert not request.lease.released
            if request.state is State.HANDOFF:
                assert request.handoff in self._handoffs

    def __repr__(self) -> str:
        return (
            f"DecodeScheduler({len(self._running)} running, {len(self._ready)} ready, "
            f"{len(self._handoffs)} handoffs, {self.kv!r})"
        )


def _is_served_by(request: Request, peer: Incarnation | None) -> bool:
    return request.handoff is not None and request.handoff.prefill == peer
