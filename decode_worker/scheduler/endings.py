"""Ends requests, and knows whose they are while they last: the router is told at once, their blocks follow. Pure.

A request ends by its last token, its router's word, its deadline, a fault, or the loss of its router. It is gone, and
what it has computed is cached, when no copy of ours is under way. A resumable request outlives its router: which
requests are orphans, and what is remembered of ended ones, is the business of
`decode_worker.scheduler.leaving.orphans`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from decode_worker.scheduler.admission import Admission
from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.events import Command, Freed, Result, Tell, Unloaded, Unservable
from decode_worker.scheduler.leaving.departures import Departure, Departures
from decode_worker.scheduler.leaving.orphans import Orphans, orphan
from decode_worker.scheduler.pace import Allowance
from decode_worker.scheduler.preemption import Preemption
from decode_worker.scheduler.prefills import Prefills
from decode_worker.scheduler.request import NO_ROUTER, NOBODY, Request, RequestState
from engine.kv.manager import KVCacheManager
from engine.messages import Cancel, Claim, ClaimTold, Ended, Fault, OrphansTold, RequestStats, Taken, Tokens, Yielded
from engine.step import DeadEnd
from engine.types import Beam, DrawnToken, FinishReason, Incarnation, RequestRecord

MAX_FREED_BLOCKS = 4096
"""Where those that ended in one turn have as many, the blocks of the rest go in the next ones, or as soon as somebody
who runs lacks them: it takes about 10 ms."""


@dataclass(eq=False, repr=False)
class Endings:
    """Mutable state: `_ended`, what is left of the turn's allowance, and what `departures` and `orphans` own. Who ends
    is taken out of every other part, by that part's own methods. Owner: the scheduler."""

    block_bytes: int
    kv: KVCacheManager
    batch: Batch
    prefills: Prefills
    admission: Admission
    preemption: Preemption
    departures: Departures
    orphans: Orphans
    _ended: deque[Request] = field(default_factory=deque)
    """Those to whose blocks nothing of ours writes any more, and that still hold them."""
    _allowance: Allowance = field(default_factory=lambda: Allowance(MAX_FREED_BLOCKS))

    @property
    def has_put_off(self) -> bool:
        """True where blocks of requests that have ended are to go in the next turn."""
        return bool(self._ended)

    def settle(self, results: Iterable[Result], now: float) -> list[Command]:
        """Act on what other parts say of requests that end, in turn; everything else goes to the shell."""
        commands: list[Command] = []
        for result in results:
            match result:
                case Freed(request):
                    if request.arrived:
                        self.prefills.handoffs.done(request)
                    self._ended.append(request)
                    commands += self._let_go(now)
                case Unloaded(request):
                    commands += self._begin(request, now)
                case Unservable(request, fault):
                    late = fault.code == "DEADLINE_EXCEEDED"
                    reason = FinishReason.DEADLINE if late else FinishReason.ERROR
                    commands += self.end(request, reason, now, fault)
                case _:
                    commands.append(result)
        return commands

    def follow(self, request: Request, drawn: Sequence[DrawnToken], now: float) -> list[Command]:
        """Send on the tokens that follow those of `request`, at least one, and end it where one of them is the last.
        Else a prompt that is all here is ready. A search says nothing before it is over."""
        commands: list[Command] = []
        if request.record.beams is None:
            name, index = request.record.request, request.output_tokens
            taken, reason = self.batch.append(request, drawn)
            self.batch.hold.followed(request, now)
            told = Tokens(name, request.placement, index, request.tokens[-len(taken) :])
            if request.record.logprobs is not None:
                logprobs = [token for token in taken if not isinstance(token, int)]
                told = msgspec.structs.replace(told, logprobs=logprobs)
                request.keep(logprobs)
            if request.record.prompt_logprobs is not None:
                told = msgspec.structs.replace(told, prompt_logprobs=request.take_scores())
            commands.append(Tell(request.link, told))
            if reason is not None:
                return commands + self.end(request, reason, now)
        if request.arrived and request.state in (RequestState.HANDOFF, RequestState.LOCAL):
            self.prefills.ready(request, now)
        return commands

    def end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        fault: Fault | None = None,
        kept: int | None = None,
        beams: Sequence[Beam] = (),
    ) -> list[Command]:
        """Tell the router, and let the blocks go as soon as nothing of ours can still write to them. `kept`: how many
        output tokens are its answer, where that is not all."""
        self.admission.forget(request)
        ended = Ended(
            request=request.record.request,
            placement=request.placement,
            reason=reason,
            stats=self._stats(request, now, kept),
            fault=fault,
            beams=list(beams),
        )
        if request.record.context and reason is not FinishReason.CANCELLED:
            self.orphans.remember(request, ended, request.output[:kept], now)
        told = Tell(request.link, ended)
        self.preemption.leave(request)
        is_well = reason in (FinishReason.STOP, FinishReason.LENGTH) and fault is None
        return [told, *self.settle(self.prefills.end(request, is_well, now), now)]

    def give_up(self, request: Request, why: DeadEnd, now: float) -> list[Command]:
        """End a request for which no token can be drawn, whichever worker it runs on."""
        if request.state is RequestState.DEPARTED:
            return [*self.departures.give_up(request, why, now)]
        return self.end(request, FinishReason.ERROR, now, Fault(why.code, why.message, "constraint"))

    def end_all(self, requests: Iterable[Request], reason: FinishReason, now: float) -> list[Command]:
        return [command for request in requests for command in self.end(request, reason, now)]

    def cancel(self, link: int, message: Cancel, now: float) -> list[Command]:
        """Always answer: a router waits for the word that its request holds nothing here any more."""
        name, placement, reason = message.request, message.placement, message.reason
        self.departures.release(name, placement, now)
        known = self.admission.current(name, placement)
        if known is not None and known.link == link:
            return self.end(known, reason, now)
        stats = RequestStats(decode_worker=self.admission.name)
        return [Tell(link, Ended(request=name, placement=placement, reason=reason, stats=stats))]

    def depart(self, request: Request, now: float) -> Command:
        """Take a request out of the batch: all KV but the newest token's is here, for whoever goes on."""
        name, placement = request.record.request, request.placement
        self.admission.forget(request)
        self.batch.remove(request)
        request.move(RequestState.DEPARTED)
        self.departures.add(request)
        return Tell(request.link, Yielded(request=name, placement=placement, stats=self._stats(request, now)))

    def _stats(self, request: Request, now: float, kept: int | None = None) -> RequestStats:
        return request.stats(now, self.admission.name, self.block_bytes, kept)

    def _let_go(self, now: float) -> list[Command]:
        """Let blocks of requests that have ended go, of as many as this turn has time for."""
        return self._free_while(lambda request: self._allowance.takes(len(request.lease.blocks)), now)

    def make_room(self, now: float) -> list[Command]:
        """Let blocks of requests that have ended go while those that run lack some: nobody gives way for them."""
        return self._free_while(lambda _: not self.preemption.has_room, now)

    def make_room_for(self, record: RequestRecord, now: float) -> list[Command]:
        """Do so while a new request would lack some: nobody is refused for them."""
        wanted = self.admission.blocks(record)
        return self._free_while(lambda _: self.kv.available < wanted, now)

    def _free_while(self, goes_on: Callable[[Request], bool], now: float) -> list[Command]:
        """Let the blocks of each of those that have ended go, the first first, while that is so; but for those whose
        blocks are being shared in parts."""
        commands: list[Command] = []
        for request in [r for r in self._ended if not self.prefills.forks.is_sharing(r)]:
            if not goes_on(request):
                break
            if request in self._ended:  # another one's end may have gone on with it
                self._ended.remove(request)
                commands += self._free(request, now)
        return commands

    def _free(self, request: Request, now: float) -> list[Command]:
        """Keep in the cache what is worth it, and let the blocks go, once those have begun that share them. If others
        still wait for its prompt, the first of them takes its place, and room."""
        if request.arrived:
            self.prefills.share(request)
            if self.prefills.forks.is_sharing(request):
                self._ended.append(request)
                return []
            self.kv.commit(request.lease, request.tokens[: request.known], tail=True)
        self.kv.release(request.lease)
        heir = self.prefills.forks.heir(request)
        return [] if heir is None else self._begin(heir, now)

    def _begin(self, request: Request, now: float) -> list[Command]:
        """Have all that is not cached of a request filled in, in another lease than it has; it is preempted, with those
        that wait for its prompt, where there is no room for it now."""
        self.kv.release(request.lease)
        lease = self.admission.acquire(request.record, request.tokens, match_limit=request.match_limit)
        if lease is None:
            self.preemption.preempt([request, *self.prefills.forks.waiting(request)], now)
            return []
        request.lease, request.have_blocks = lease, lease.cached_tokens // self.kv.block_size
        if request.preempted is None:
            cached_tokens = min(lease.cached_tokens, request.record.prompt_tokens)
            request.origin.decode_cached_tokens = cached_tokens
        return self.settle(self.prefills.begin(request, now), now)

    def tick(self, now: float) -> list[Command]:
        """Go on with what was put off, and end requests whose time is over."""
        requests = self.admission.requests
        self._allowance.renew()
        self.departures.tick(now)
        self.orphans.tick(now)
        commands: list[Command] = []
        if late := [r for r in requests.values() if now >= r.deadline]:
            commands = self.end_all(late, FinishReason.DEADLINE, now)
        if alone := [r for r in requests.values() if now >= r.owner.orphan_until]:
            self.orphans.expired += len(alone)
            commands += self.end_all(alone, FinishReason.CANCELLED, now)
        for request in self.prefills.handoffs.overdue(now):
            commands += self.settle(self.prefills.abandon(request, now), now)
        return commands + self.settle(self.prefills.tick(now), now) + self._let_go(now)

    # routers

    def router_lost(self, link: int, now: float) -> list[Command]:
        """End the requests of a router that is gone; those whose clients may come back go on for a while."""
        heir = self.orphans.left(link)
        lost = [r for r in self.admission.requests.values() if r.link == link]
        unwanted = [r for r in lost if not r.record.context]
        commands = self.end_all(unwanted, FinishReason.CANCELLED, now)
        self._orphan([r for r in lost if r.record.context], now)
        for departure in self.departures.router_lost(link, now):
            commands += self._take_back(departure, now)
        if heir != NOBODY:
            commands += self._hand_over(heir, now)
        return commands

    def router_joined(self, link: int, router: Incarnation, name: str, now: float) -> list[Command]:
        """Give a router what others of its name left. An incarnation that was here before has placed its own requests
        again."""
        former = [r for r in self.admission.requests.values() if r.owner.router == router and r.link != link]
        placed_again = [r for r in former if not r.owner.is_handed]
        commands = self.end_all(placed_again, FinishReason.CANCELLED, now)
        self._orphan([r for r in former if r.owner.is_handed], now)
        self.orphans.joined(link, router, name)
        return commands + self._hand_over(link, now)

    def claim(self, link: int, claim: Claim, now: float) -> list[Command]:
        """Give what a client has come back for to the router that it has come to."""
        if self.orphans.router(link) == NO_ROUTER or not claim.key:
            return []
        commands: list[Command] = []
        for request in [r for r in self.admission.by_key.find(claim) if r.link != link]:
            if request.link != NOBODY:
                commands.append(Tell(request.link, Taken(request.record.request, request.placement)))
                self._orphan([request], now)
            commands += self._give(request, link, now)
        for one in self.orphans.claim_ended(link, claim):
            commands += [Tell(link, orphan(one.request, one.tokens, now)), Tell(link, one.ended)]
        return [*commands, Tell(link, ClaimTold(claim.key))]

    def _orphan(self, requests: list[Request], now: float) -> None:
        for request in requests:
            self.orphans.leave(request, now)
            if request.state is RequestState.ASKING:
                self.prefills.compute_prompt(request)

    def _take_back(self, departure: Departure, now: float) -> list[Command]:
        """Run a request on as an orphan: its router is gone before anybody went on with it."""
        request = departure.request
        self.admission.take_back(request)
        self.orphans.leave(request, now)
        request.clock.resume("decode_queue", now)
        self.batch.add_ready(request)
        return self.follow(request, departure.drawn, now) if departure.drawn else []

    def _hand_over(self, link: int, now: float) -> list[Command]:
        """Give the router on `link` what belonged to routers of its name that are gone."""
        commands: list[Command] = []
        for request in [r for r in self.admission.requests.values() if r.link == NOBODY]:
            if self.orphans.is_heir(link, request.owner.router):
                commands += self._give(request, link, now)
        for one in self.orphans.adopt_ended(link):
            commands += [Tell(link, orphan(one.request, one.tokens, now)), Tell(link, one.ended)]
        if self.orphans.is_alone(link):
            commands.append(Tell(link, OrphansTold()))
        return commands

    def _give(self, request: Request, link: int, now: float) -> list[Command]:
        """Tell the router on `link` of an orphan, which is its own now."""
        if self.orphans.adopt(request, link):
            return [Tell(link, orphan(request, request.output, now))]
        return self.end(request, FinishReason.CANCELLED, now)

    def check(self) -> None:
        self.departures.check()
        self.orphans.check()
        assert len(self._ended) == len(set(self._ended))
        for request in self._ended:
            assert request.state is RequestState.ENDING and not request.lease.released
        assert len(self.admission.by_key) == sum(bool(r.record.resume_key) for r in self.admission.requests.values())
        for request in self.admission.requests.values():
            assert not request.lease.released and request.state is not RequestState.ENDING
            assert (request.link == NOBODY) == (request.owner.orphan_until < float("inf"))
            assert request.link != NOBODY or request.state is not RequestState.ASKING
