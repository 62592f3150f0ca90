"""Decides which requests a decode worker takes, and what its next step computes. Owns a request's life. Pure.

    taken --> handoff --every block and the first token are here--> READY --room in the batch--> RUNNING --> ended
    a lost or useless prefill worker: --> ASKING --the router names another--> handoff
                                                 --none is left--> LOCAL --last chunk--> READY
    a further sample of a prompt that is here, or on its way: FORKING --the prompt is here--> LOCAL, one token of it
    any state --end (stop, length, cancel, deadline, fault)--> ENDING until no copy of ours is under way --> gone
    a worker that leaves takes nothing new: RUNNING --Yield--> DEPARTED
    the pool is exhausted: READY, RUNNING, LOCAL, FORKING --> PREEMPTED --room--> handoff, LOCAL, FORKING or LOADING
    a lower tier has some of its blocks: LOADING --they are here--> handoff or LOCAL

All legal moves are in one table (`decode_worker.scheduler.request`). Each part owns a piece of the state, and uses only
those above it:

    batch       the lines of those that are computed, the step, and beam searches (`beams`)
    swapping    copies of preempted requests in host memory, and what a swap costs
    prefills    how the KV of a request gets here: handoffs (`handoffs`), samples that share (`forks`), loads, chunks
    admission   which requests are taken, with how much room, and the table of all that were
    preemption  who gives way when the pool is exhausted, and comes back
    endings     what ends, goes on elsewhere (`departures`), or has lost its router (`orphans`)

The first token is sent on as soon as the prefill worker names it; the gap until the second is inter-token latency.
"""

from collections.abc import Sequence

from decode_worker.scheduler.admission import Admission
from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.endings import Endings
from decode_worker.scheduler.events import Command, Event, FromPeer, FromRouter, PeerDown, PeerUp, RouterLost, Tell
from decode_worker.scheduler.handoffs import Handoffs
from decode_worker.scheduler.leaving.departures import Departures
from decode_worker.scheduler.leaving.orphans import Orphans
from decode_worker.scheduler.preemption import Preemption
from decode_worker.scheduler.prefills import Prefills
from decode_worker.scheduler.request import NOBODY, RequestState
from decode_worker.scheduler.samples.forks import Forks
from decode_worker.scheduler.swapping import Swapping
from engine.drafts import Drafter
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import DiskHung, Loaded, Spilled, Stored
from engine.messages import (
    Cancel,
    Claim,
    DecodeOrder,
    Finish,
    FirstToken,
    Place,
    PrefillFailed,
    Release,
    RouterHello,
    Taken,
    UsePrefill,
    Yield,
)
from engine.plan import CompiledConstraint
from engine.step import DeadEnd, Drawn, StepPlan, run_of
from engine.types import FinishReason, Incarnation, TokenLogprobs
from transfer.handoff.commands import FromReader, Leave, Posted, ReaderDead, ReaderLost, ReaderUp, Received, Sent
from transfer.handoff.receiver import KVReceiver
from worker.config import DecodeConfig


class DecodeScheduler:
    """Mutable state: `leaving`, and what `kv` and the parts own. Owner: the engine thread."""

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
        compiled: CompiledConstraint | None = None,
        adapters: frozenset[str] = frozenset(),
        drafter: Drafter | None = None,
    ) -> None:
        self.kv, self.receiver, self.leaving = kv, receiver, False
        self.batch, self.swapping = Batch(config, kv, stop_ids, compiled, drafter), Swapping(config, kv)
        handoffs = Handoffs(kv, receiver, incarnation, fingerprint, vocab)
        self.prefills = Prefills(name, config, kv, handoffs, Forks(kv), self.batch, self.swapping)
        self.admission = Admission(name, config, kv, vocab, context_tokens, self.prefills, compiled, adapters)
        self.preemption = Preemption(config, kv, self.batch, self.swapping, self.prefills, self.admission)
        self.departures, orphans = Departures(kv, fingerprint), Orphans(config.orphan_s)
        self.sender = self.departures.sender
        self.endings = Endings(
            block_bytes, kv, self.batch, self.prefills, self.admission, self.preemption, self.departures, orphans
        )
        self._requests = self.admission.requests

    @property
    def is_idle(self) -> bool:
        """True when it holds no request, serves no reader, and owes no router an end."""
        held = self._requests or len(self.prefills) or len(self.departures)
        return not (held or self.has_put_off or self.swapping.under_way or self.endings.orphans.is_untold)

    @property
    def has_put_off(self) -> bool:
        """True where something waits for the next turn, which should come though nothing arrives."""
        return self.endings.has_put_off or self.prefills.has_put_off

    @property
    def running_requests(self) -> int:
        return len(self.batch.running)

    @property
    def waiting_requests(self) -> int:
        """The number of requests accepted and not yet in the batch."""
        return len(self._requests) - len(self.batch.running)

    @property
    def slots(self) -> tuple[int, int]:
        """Token slots that requests hold: those with a token's KV in them, and all. Shared blocks count for each."""
        size, requests = self.kv.block_size, self._requests.values()
        live = sum(r.known if r.arrived else r.have_blocks * size for r in requests)
        return live, sum(len(r.lease.blocks) for r in requests) * size

    # events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns what the shell must do. The state changes here, by `plan`,
        `complete` and `tick`; what is counted, the shell takes."""
        match event:
            case FromRouter(link, message):
                return self._from_router(link, message, now)
            case RouterLost(link):
                return self.endings.router_lost(link, now)
            case FromPeer(peer, FirstToken() as message):
                fault = self.prefills.handoffs.fault(message)
                if fault is not None:
                    return self.handle(FromPeer(peer, PrefillFailed(message.handoff, fault)), now)
                request = self.prefills.handoffs.first_token(message)
                if request is None:
                    return []
                if request.record.prompt_logprobs is not None:
                    request.scores = message.prompt_logprobs
                return self.endings.follow(request, message.drawn, now)
            case FromPeer() | PeerUp() | PeerDown() | Received():
                return self.endings.settle(self.prefills.handle(event, now), now)
            case FromReader() | ReaderUp() | ReaderLost() | ReaderDead() | Posted() | Sent():
                return [*self.departures.source.handle(event, now)]
            case Stored() | Loaded() | Spilled() | DiskHung():
                assert self.kv.tiers is not None
                self.kv.tiers.handle(event)
                if isinstance(event, Stored):
                    self.swapping.stored(event, self._requests.values())
                return self.endings.settle(self.prefills.loaded(event, now), now) if isinstance(event, Loaded) else []
            case Leave():
                self.leaving = True
                return []
        raise TypeError(f"not an event: {event!r}")

    def _from_router(self, link: int, message: DecodeOrder, now: float) -> list[Command]:
        match message:
            case Place():
                return self._place(link, message, now)
            case RouterHello(router, name):
                return self.endings.router_joined(link, router, name, now)
            case Claim():
                return self.endings.claim(link, message, now)
            case Cancel():
                return self.endings.cancel(link, message, now)
            case Release(name, placement):
                self.departures.release(name, placement, now)
                return []
        request = self.admission.current(message.request, message.placement)
        if request is not None and request.link != link:
            return []  # another router has taken it over
        match message:
            case UsePrefill(prefill=worker) if request is not None:
                return self.endings.settle(self.prefills.use_worker(request, worker, now), now)
            case Finish(tokens_kept=kept) if request is not None:
                return self.endings.end(request, FinishReason.STOP, now, kept=kept)
            case Yield() if request is not None:
                # A search has no KV that one row at a time could go on from.
                request.yielding = self.leaving and request.record.beams is None
        return []

    def _place(self, link: int, message: Place, now: float) -> list[Command]:
        """Take a request, or say no. One that is placed again ends first where it was; twice the same is said once."""
        record, commands = message.record, list[Command]()
        known = self._requests.get(record.request)
        is_said = known is not None and known.placement >= message.placement
        # Routers count placements each from a life of its own: another one's may have any number.
        if known is not None and known.link != link and (is_said or known.link != NOBODY):
            return [Tell(link, Taken(record.request, message.placement))]
        if is_said:
            return []
        if known is not None:
            commands = self.endings.end(known, FinishReason.CANCELLED, now)
        self.endings.orphans.forget(record.request)
        commands += self.endings.make_room_for(record, now)
        barred = self.leaving or self.preemption.bars(record)
        router = self.endings.orphans.router(link)
        return commands + self.endings.settle(self.admission.place(link, message, router, barred, now), now)

    def tick(self, now: float) -> list[Command]:
        """Begin a turn: go on with what was put off, and end requests whose time is over."""
        return self.endings.tick(now)

    # steps

    def plan(self, now: float) -> tuple[StepPlan | None, list[Command]]:
        """Return the next step (every running request's next token, and chunks of prompts that are prefilled here), and
        commands to carry out. It may be called again before `complete`: that step is planned behind the first, and None
        may mean that it can be planned when the first has ended."""
        commands = self.endings.settle(self.preemption.resume(now), now)
        departing = len(self.departures.incomplete)
        self.batch.fill(now, departing)
        if self.batch.waits(not self.departures.incomplete and self.prefills.is_landing(now), now):
            return None, commands
        if self.batch.is_under_way:
            # Of a run of whoever departs, a step may have had no room for all.
            goes_on = not self.departures.incomplete and self.batch.goes_on()
            return (self.batch.plan([], now) if goes_on else None), commands
        commands += self.endings.make_room(now)
        while self.preemption.make_room(now):
            self.batch.fill(now, departing)
        # Whoever departs has a row once more: one that is only ready waits until there is one for it.
        for request in list(self.batch.running):
            if self.prefills.forks.is_sharing(request):
                continue
            if request.yielding and not self.kv.shortage(request.lease, len(request.tokens)):
                commands.append(self.endings.depart(request, now))
        return self.batch.plan(self.departures.incomplete, now), commands

    def scored(self, plan: StepPlan, scores: Sequence[Sequence[TokenLogprobs]]) -> None:
        """Keep what a step says of the tokens of prompts."""
        self.batch.scored(plan, scores)

    def complete(self, plan: StepPlan, drawn: Sequence[Drawn], now: float) -> list[Command]:
        """Send on what follows each row of the step, search on, or name it to the worker that goes on with it."""
        commands: list[Command] = []
        followed = self.batch.complete(plan, drawn)
        self.batch.hold.stepped((request for request, _ in followed), now)
        for request, token in followed:
            if isinstance(token, DeadEnd):
                commands += self.endings.give_up(request, token, now)
            elif isinstance(token, tuple):
                answers = self.batch.search(request, token)
                if answers is not None:
                    kept, reason = sum(len(beam.ids) for beam in answers), answers[0].reason
                    commands += self.endings.end(request, reason, now, kept=kept, beams=answers)
            elif request.state is RequestState.DEPARTED:
                commands += self.departures.complete(request, run_of(token), now)
            else:
                commands += self.endings.follow(request, run_of(token), now)
        return commands

    def check(self) -> None:
        """Recompute the invariants."""
        self.kv.check()
        self.check_requests()

    def check_requests(self) -> None:
        """Do so but for the blocks."""
        requests = list(self._requests.values())
        self.batch.check(requests)
        self.prefills.check(requests)
        self.preemption.check()
        self.swapping.check(requests)
        self.endings.check()

    def __repr__(self) -> str:
        batch = self.batch
        return (
            f"DecodeScheduler({len(batch.running)} running, {len(batch.ready)} ready, "
            f"{len(batch.local)} local, {len(self.preemption.line)} preempted, "
            f"{len(self.prefills.handoffs)} handoffs, {len(self.departures)} departures, {self.kv!r})"
        )
