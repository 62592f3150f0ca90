"""A cluster in simulated time: one or several real router cores before workers that take as long as they are told to.

Steps take measured or given times (`benchmarks.routing.workers`); messages take `latency_s`; nothing reads a clock.
What a router believes is never asked: hits are counted at the workers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from benchmarks.routers.policy import PeerPolicy
from benchmarks.routing.lower_tiers import NO_TIERS, TierShape
from benchmarks.routing.workers import (
    FINGERPRINT,
    Clockwork,
    ClusterShape,
    RoutingOutcome,
    SimulatedDecode,
    SimulatedPrefill,
)
from benchmarks.routing.workloads import BLOCK, TOKEN_SCALE, PromptTurn, Workload
from engine.kv.holding import Holding
from engine.kv.manager import KVCacheManager
from engine.messages import (
    PROTOCOL,
    CachedTold,
    DecodeRecord,
    HeldRun,
    HoldingTold,
    Load,
    PeerAddress,
    Place,
    ReadTold,
    WorkerInfo,
)
from engine.types import Incarnation, RequestId, RequestRecord
from router.config import RouterConfig
from router.core.core import Router
from router.core.events import Connected, Event, Fail, Submit, TellWorker, WorkerSaid
from router.core.policy import RoutingPolicy

HEARTBEAT_S = 0.25
PATIENCE_S = 60.0
"""A run is ended once a prompt has waited so long for its first token: its queue would only grow."""
TOLD_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class RoutingFaults:
    """What goes wrong between workers and router."""

    reports_lost: float = 0.0
    """The share of the workers' reports, evictions included, that never arrive."""
    restart_at: float = 0.0
    """The share of the prompts after which the (first) router is restarted; 0: it is not."""
    is_told: bool = True
    """Workers tell the new router what they hold, and each of several routers what is cached for others' requests."""


NO_FAULTS = RoutingFaults()


def stand_in(
    name: str,
    role: str,
    incarnation: int,
    block_size: int,
    blocks: int,
    tiers: TierShape = NO_TIERS,
    chunk_tokens: int = 0,
) -> WorkerInfo:
    """Return what a worker of no process says of itself; all are of one model."""
    return WorkerInfo(
        name=name,
        role=role,
        incarnation=Incarnation(incarnation),
        address="",
        model="m",
        fingerprint=FINGERPRINT,
        block_size=block_size,
        blocks=blocks,
        context_tokens=1 << 20,
        chunk_tokens=chunk_tokens,
        pid=0,
        host="",
        host_blocks=tiers.host_blocks,
        disk_blocks=tiers.disk_blocks,
        protocol=PROTOCOL,
    )


@dataclass(slots=True, eq=False)
class SimulatedRouter:
    """One router: its policy, the requests that it has placed, and those that it has offered to nobody yet. Mutable;
    owned by the cluster."""

    core: Router
    policy: RoutingPolicy
    placed: set[RequestId] = field(default_factory=set)
    unplaced: dict[RequestId, RequestRecord] = field(default_factory=dict)


class SimulatedCluster:
    """Routers and their workers, and the sessions that come to them. Of several routers each prompt reaches the next
    one, whatever its session: so what another has placed is known only from the workers' reports."""

    # Mutable state: everything.

    def __init__(
        self,
        shape: ClusterShape,
        make_policy: Callable[[], RoutingPolicy],
        faults: RoutingFaults = NO_FAULTS,
        seed: int = 0,
    ) -> None:
        """`make_policy` is called for every router that begins; `seed` draws the reports that are lost."""
        self.shape = shape
        self.time = Clockwork()
        self.outcome = RoutingOutcome()
        self.turns: dict[RequestId, tuple[PromptTurn, float]] = {}
        self.prefills: dict[str, SimulatedPrefill] = {}
        self.decodes: dict[str, SimulatedDecode] = {}
        self._make_policy, self._faults, self._random = make_policy, faults, Random(seed)
        self._then: dict[RequestId, Callable[[], None]] = {}
        # Those that wait for their first token, in the order in which they came, and since when.
        self._hopeful: dict[RequestId, float] = {}
        self._open = self._come_in = self._all = 0
        self._names = count(1)
        for number in range(shape.prefill):
            name = f"prefill-{number}"
            slow = shape.slow if number == 0 else 1.0
            self.prefills[name] = SimulatedPrefill(name, shape, slow, self.time, partial(self.say, name))
        for number in range(shape.decode):
            self.decodes[f"decode-{number}"] = SimulatedDecode(f"decode-{number}", self)
        self.s_per_block = dict.fromkeys(self.prefills, shape.speeds.move_block_s)
        if shape.routers > 1 and faults.is_told:
            for kv in self._caches().values():
                kv.tells_cached = True
        self.routers = [self._begin() for _ in range(shape.routers)]

    @property
    def router(self) -> Router:
        """The first router's core."""
        return self.routers[0].core

    def _caches(self) -> dict[str, KVCacheManager]:
        held = {name: worker.kv for name, worker in self.prefills.items()}
        return held | {name: worker.kv for name, worker in self.decodes.items()}

    def _begin(self) -> SimulatedRouter:
        """Start a router, which knows nobody's requests and nothing of what workers hold."""
        policy = self._make_policy()
        router = SimulatedRouter(Router(RouterConfig(max_waiting=1_000_000), policy), policy)
        for number, name in enumerate([*self.prefills, *self.decodes], 1):
            role, blocks, tiers = "prefill", self.shape.prefill_blocks, self.shape.tiers
            if name in self.decodes:
                role, blocks, tiers = "decode", self.shape.decode_blocks, NO_TIERS
            info = stand_in(name, role, number, BLOCK, blocks, tiers, self.shape.chunk_tokens)
            self._tell(router, Connected(PeerAddress(name, ""), info))
        return router

    def _restart(self) -> None:
        """Put another router in the place of the first. What runs goes on where it is, unknown to the new one but for
        the workers' reports; what waited is submitted again."""
        self.outcome.restarted_s = self.time.now
        waiting = list(self.routers[0].unplaced.values())
        self.routers[0] = router = self._begin()
        if self._faults.is_told:
            for name, kv in self._caches().items():
                for told in _holding(kv):
                    self._tell(router, WorkerSaid(name, told))
        for record in waiting:
            self._submit(router, record)

    def run(self, workload: Workload) -> RoutingOutcome:
        """Let all sessions come and end, or the queue grow past all patience; return what became of them."""
        self._all = sum(len(session.turns) for session in workload)
        for session in workload:
            self._open += 1
            self.time.after(session.begins_s, partial(self._come, session.turns, 0))
        self._beat()
        self.time.run(lambda: self._open == 0 or self.outcome.diverged)
        self.outcome.busy_s = sum(worker.busy_s for worker in self.prefills.values())
        self.outcome.span_s = self.time.now
        for worker in self.prefills.values():
            if worker.kv.tiers is not None:
                for tier, blocks in worker.kv.tiers.counts.loaded_blocks.items():
                    self.outcome.loaded_blocks[tier] = self.outcome.loaded_blocks.get(tier, 0) + blocks
        return self.outcome

    def say(self, worker: str, record: DecodeRecord) -> None:
        """Send a worker's record to the router that it is for: of what it reports, to all."""
        if not isinstance(record, Load | CachedTold):
            self.time.after(self.shape.latency_s, lambda: self._hear(worker, record))
            return
        for number in range(len(self.routers)):
            if self._random.random() < self._faults.reports_lost:
                self.outcome.reports_lost += 1
            else:
                self.time.after(self.shape.latency_s, partial(self._report, number, worker, record))

    def _report(self, number: int, worker: str, record: DecodeRecord) -> None:
        self._tell(self.routers[number], WorkerSaid(worker, record))

    def _hear(self, worker: str, record: DecodeRecord) -> None:
        # A router hears of no request that another one has placed.
        for router in self.routers:
            if getattr(record, "request", None) in router.placed:
                self._tell(router, WorkerSaid(worker, record))

    def _tell_siblings(self, sender: SimulatedRouter, worker: str, told: ReadTold) -> None:
        """Let a worker pass on to all other routers what one has said."""
        for router in self.routers:
            if router is not sender:
                self.time.after(self.shape.latency_s, partial(self._tell, router, WorkerSaid(worker, told)))

    def has_begun(self, request: RequestId, ttft_s: float) -> None:
        """Hear that a request has had its first token, after so many seconds."""
        del self._hopeful[request]
        self.outcome.ttft_s.append(ttft_s)
        for router in self.routers:
            if isinstance(router.policy, PeerPolicy):
                router.policy.computed(request)

    def ended(self, request: RequestId) -> None:
        """Hear that a request has had its last token: the session goes on."""
        del self.turns[request]
        self._then.pop(request)()

    def _come(self, turns: tuple[PromptTurn, ...], at: int) -> None:
        turn = turns[at]
        self.outcome.came.append(turn)
        request = RequestId(f"r{next(self._names)}")
        answer = max(1, -(-turn.output_tokens // TOKEN_SCALE))
        tokens = turn.tokens()
        record = RequestRecord(
            request=request,
            tokens=tokens,
            prompt_tokens=len(tokens),
            max_tokens=answer,
            seed=0,
            namespace=turn.tenant,
        )
        self.turns[request] = (turn, self.time.now)
        self._then[request] = lambda: self._go_on(turns, at + 1)
        self._hopeful[request] = self.time.now
        router = self.routers[self._come_in % len(self.routers)]
        self._come_in += 1
        if isinstance(router.policy, PeerPolicy):
            router.policy.comes(request, tokens, turn.tenant)
        self._submit(router, record)
        if self._come_in == int(self._all * self._faults.restart_at):
            self._restart()

    def _go_on(self, turns: tuple[PromptTurn, ...], at: int) -> None:
        if at < len(turns):
            self.time.after(turns[at].think_s, lambda: self._come(turns, at))
        else:
            self._open -= 1

    def _beat(self) -> None:
        """Report for workers without work; lose patience."""
        for prefill in self.prefills.values():
            prefill.report()
        for decode in self.decodes.values():
            decode.report()
        first = next(iter(self._hopeful.values()), self.time.now)
        self.outcome.diverged = self.time.now - first > PATIENCE_S
        self.time.after(HEARTBEAT_S, self._beat)

    def _submit(self, router: SimulatedRouter, record: RequestRecord) -> None:
        router.unplaced[record.request] = record
        self._tell(router, Submit(record))

    def _tell(self, router: SimulatedRouter, event: Event) -> None:
        for command in router.core.handle(event, self.time.now):
            match command:
                case TellWorker(worker, Place() as place):
                    request = place.record.request
                    router.placed.add(request)
                    router.unplaced.pop(request, None)
                    self.time.after(self.shape.latency_s, partial(self.decodes[worker].place, place))
                    told = router.core.reading(request)
                    if len(self.routers) > 1 and self._faults.is_told and told is not None:
                        # Its decode worker passes it on when it hears of the request.
                        self.time.after(self.shape.latency_s, partial(self._tell_siblings, router, worker, told))
                case Fail(request):
                    self.outcome.failed += 1
                    self._hopeful.pop(request, None)
                    router.unplaced.pop(request, None)
                    if request in self.turns:
                        self.ended(request)


def _holding(kv: KVCacheManager) -> Iterator[HoldingTold]:
    """Return what a worker tells a router that has attached."""
    holding = Holding(kv)
    while holding:
        yield HoldingTold([HeldRun(parent, blocks) for parent, blocks in holding.take(TOLD_BLOCKS)])
