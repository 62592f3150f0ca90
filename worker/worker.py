"""A worker: the shell around a role's scheduler, the same for prefill and decode workers.

Three threads: the engine (here), the asyncio loop of `worker.rpc`, and the transfer thread of `transfer.mover`; with
lower tiers a fourth. All state belongs to the engine thread; the others put what they hear into its inbox and carry out
what it hands them. What differs between the two is `decode_worker/role.py` and `prefill_worker/role.py`.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

import msgspec

from engine.handshake import PartyRole, Secrets
from engine.identity import SHORT_BYTES
from engine.kv.cache_ledger import CacheLedger
from engine.kv.groups import group_names
from engine.kv.ledger import BlockLedger
from engine.kv.tiers.commands import TierEvent, TiersDied
from engine.loop import Engine, EngineThread, RequestLedger
from engine.messages import (
    PROTOCOL,
    READS_TOLD,
    SESSIONS_TOLD,
    CachedTold,
    FirstToken,
    Handoff,
    HeldRun,
    Load,
    Offer,
    PrefillFailed,
    ProcessesTold,
    ReadTold,
    Record,
    RouterHello,
    SessionTold,
    TenantsTold,
    WorkerInfo,
    encode,
)
from engine.messages import frames as split_frames
from engine.model.config import Progress
from engine.ranks.sums import RankError
from engine.types import Incarnation
from telemetry.audit import BLOCK_LEDGERS, AuditError, Auditor, Ledger
from telemetry.flight import Flight
from telemetry.tier_metrics import TierMetrics
from transfer.handoff.commands import (
    Emit,
    Leave,
    MoverCommand,
    MoverDied,
    Posted,
    PostRecv,
    PostSend,
    Received,
    Sent,
    Unreachable,
)
from transfer.liveness import Watchdog
from worker.backlog import RECORDS_PER_TURN, Backlog, RecordsIn, StreamItem
from worker.config import DecodeConfig, PrefillConfig
from worker.opening import Parts, open_parts
from worker.role import Role, SharedEvent
from worker.rpc import StreamEnded
from worker.streams import ReaderStream, RouterStream
from worker.telling import Tellings

log = logging.getLogger(__name__)

E = TypeVar("E")

HEARTBEAT_S = 0.25
EVICTED_AT_ONCE = 32_768
HELD_AT_ONCE = 4096
"""Cached blocks that a router which has attached is told of in one turn."""
REPORT_S = 0.05
"""Least time between two reports while steps run."""
RECOUNT_SHARE = 0.002
"""Part of the time that goes into counting blocks for the metrics page: of 30,000, twice a second."""


def open_worker(
    role: PartyRole,
    name: str,
    config: PrefillConfig | DecodeConfig,
    host: str,
    port: int,
    secrets: Secrets,
    make_role: Callable[[Parts], Role[E]],
    progress: Progress | None = None,
) -> "Worker[E]":
    """Return a worker that serves, once it is started, those who have one of `secrets`. `progress` hears of weights
    that are loaded, in bytes. Raises what `open_parts` raises."""
    with ExitStack() as closing:
        parts = open_parts(role, name, config, host, port, secrets, closing, progress)
        return Worker(parts, make_role(parts), closing.pop_all())


class Worker(Generic[E]):
    """Start it, wait for it, stop it."""

    # Mutable state: what waits to be heard, what is settling, what routers are still to be told of its cache, when it
    # must have left and has reported, `parts.routers`, and what its parts and its role own.

    def __init__(self, parts: Parts, role: Role[E], closing: ExitStack) -> None:
        self.name = parts.info.name
        self.info: WorkerInfo = msgspec.structs.replace(parts.info, growth_tokens=role.growth_tokens)
        self.parts = parts
        self.scheduler = role.scheduler
        self._role = role
        self._closing = closing
        device, mover = parts.device, parts.tier_mover
        self._engine: Engine[SharedEvent | E, object] = Engine(
            role.scheduler, device.runner, time.monotonic, self._publish, mover, device.plans_ahead
        )
        parts.metrics.engine(self._engine.busy.seconds)
        self._thread = EngineThread(f"{self.name}-engine", parts.inbox, self, HEARTBEAT_S)
        self._groups = group_names(parts.kv.groups)
        self._tier_metrics = None if parts.kv.tiers is None else TierMetrics(parts.metrics.families)
        ledgers: dict[str, Ledger] = {"kv": BlockLedger(parts.kv), "cache": CacheLedger(parts.kv)}
        ledgers["scheduler"] = RequestLedger(role.scheduler)
        self._auditor = Auditor(ledgers, time.monotonic, parts.metrics.audited)
        self._watchdog = Watchdog(parts.transfer.stuck_s)
        self._tier_watchdog = Watchdog(parts.transfer.stuck_s)
        self._backlog = Backlog()
        self._tellings = Tellings(parts.kv)
        self._copying = 0
        self._digesting: set[tuple[Handoff, int]] = set()
        self._report_now = False
        self._reported_at = self._ran_at = self._recount_at = 0.0
        self._leave_by: float | None = None

    def start(self) -> WorkerInfo:
        """Serve. A request waits for whatever is compiled from now on."""
        self.parts.device.compilations.serve()
        if self.parts.tier_mover is not None:
            self.parts.tier_mover.start()
        self.parts.mover.start()
        self._thread.start()
        return self.info

    def leave(self, grace_s: float) -> None:
        """Take no new work, finish what has begun or yield it, serve all reads, then end, at the latest in `grace_s`
        seconds; `wait` returns. From any thread."""
        self.parts.inbox.put(Leave(grace_s))

    @property
    def is_leaving(self) -> bool:
        return self._leave_by is not None

    def flights(self, request: str) -> list[Flight]:
        """Return what is remembered of a request, or of the latest ones. From any thread."""
        return self._role.journal.recorder.told(request)

    def wait(self) -> None:
        """Block until the worker has stopped, or left; raises what its engine died of."""
        self._thread.ended.wait()
        if self._thread.failure is not None:
            self._role.journal.engine_failed()
            self._audit_blocks(self._thread.failure)
            raise self._thread.failure
        if self._leave_by is not None:
            self.stop()

    def _audit_blocks(self, failure: BaseException) -> None:
        """A block with two owners may end the engine before its audit is due, by whatever it runs into first. Raises
        AuditError if that was it. A scheduler's own books prove nothing where it was ended in the middle of a plan."""
        if not isinstance(failure, AuditError):
            self._auditor.audit(*BLOCK_LEDGERS)

    def stop(self, grace_s: float = 5.0) -> None:
        """End everything. Requests under way are lost; who has them notices."""
        self._thread.stop(grace_s)
        if self._thread.ended.is_set():
            self._engine.drain()
        self.parts.rpc.stop(min(grace_s, 0.5))
        self._closing.close()

    # what the engine thread calls

    def hear(self, items: list[object]) -> None:
        left = RECORDS_PER_TURN
        for item in items:
            if not isinstance(item, StreamItem):
                self._take(item)
                continue
            self._backlog.add(item)
            left -= self._hear_streams(left)
        if self._backlog:
            self._hear_streams(left)

    def _hear_streams(self, limit: int) -> int:
        """Hear what waits of the streams, up to `limit` records; return how many they were."""
        heard = 0
        for part in self._backlog.take(limit):
            heard += len(part.records) if isinstance(part, RecordsIn) else 1
            self._take(part)
        return heard

    def is_settling(self) -> bool:
        """What lands while a step is under way is waited for by nobody: it may be in the next but one."""
        if self._engine.is_busy:
            return False
        return self._copying > 0 or bool(self._digesting)

    def rest_s(self) -> float:
        return max(0.0, self._role.due - time.monotonic())

    def step(self) -> bool:
        self.parts.readers.tick(self._tell, time.monotonic())
        self._engine.receive(self.parts.readers.deaths())
        ran = self._engine.step()
        now = time.monotonic()
        if ran is not None:
            self.parts.metrics.step(ran.plan.computed_tokens, ran.seconds, ran.idle_s)
        self._auditor.look()
        self._look_at_threads(now)
        self._role.turned(ran, now)
        is_busy = ran is not None or self._engine.is_busy
        interval_s = REPORT_S if is_busy else HEARTBEAT_S
        if ran is not None:
            self._ran_at = now
        # One that has become idle, and holds no step, says so: until the next report its work would seem to be there.
        has_ended = not is_busy and self._role.due == math.inf and self._reported_at < self._ran_at
        # Before it is told what is held: what is evicted, comes back and is told must not be reported as gone then.
        if self._report_now or has_ended or now - self._reported_at >= interval_s or self._tellings:
            self._report(now)
        for link, told in self._tellings.take(HELD_AT_ONCE, now):
            self.parts.routers[link].say([told])
        is_idle = self.scheduler.is_idle and not self._engine.is_busy
        if self._leave_by is not None and (is_idle or now >= self._leave_by):
            self._end()
        return is_busy or bool(self._backlog) or bool(self._tellings)

    def _look_at_threads(self, now: float) -> None:
        """End the worker where its transfer thread, or another rank, is stuck; give the disk tier up where its is."""
        if self._watchdog.is_stuck(self.parts.mover.beat, now):
            raise RuntimeError(f"the transfer thread is stuck in one call: {self._watchdog!r}")
        self.parts.mover.check_ranks(now)
        tier_mover = self.parts.tier_mover
        if tier_mover is not None and self._tier_watchdog.is_stuck(beat := tier_mover.beat, now):
            tier_mover.abandon(beat, f"no call has come back: {self._tier_watchdog!r}")

    def _end(self) -> None:
        """End every stream, behind what was said on it: the worker has left."""
        log.info("%s has left: %r", self.name, self.scheduler)
        self.parts.readers.close()
        self._role.close()
        for router in self.parts.routers.values():
            router.send(None)
        self._thread.end()

    def _take(self, item: object) -> None:
        """Tell the scheduler what an item of the inbox means: the shell's own items first, the rest is the role's."""
        parts = self.parts
        match item:
            case RecordsIn(ReaderStream() as reader, records):
                parts.readers.records(reader, records, self._tell, time.monotonic())
            case StreamEnded(ReaderStream() as reader, why):
                parts.readers.ended(reader, why, self._tell)
            case RouterStream():
                parts.routers[item.link] = item
                parts.kv.tells_cached = len(parts.routers) > 1
                item.say([self.info, self._load([], time.monotonic())])
                self._tellings.attached(item.link, item.router, time.monotonic())
            case RecordsIn(RouterStream(link=link) as router, records):
                for told in records:
                    if isinstance(told, RouterHello):
                        self._greeted(router, told)
                    elif isinstance(told, ProcessesTold):
                        parts.readers.listed(link, told.processes, self._tell)
                    elif isinstance(told, TenantsTold | ReadTold | SessionTold):
                        self._pass_on(link, told)
                self._role.hear(item, self._tell)
            case StreamEnded(RouterStream(link=link), why):
                log.info("router stream %d ended: %s", link, why)
                del parts.routers[link]
                parts.kv.tells_cached = len(parts.routers) > 1
                self._tellings.lost(link, time.monotonic())
                parts.readers.router_lost(link)
                self._role.hear(item, self._tell)
            case Leave(grace_s):
                self._leave_by = time.monotonic() + grace_s
                self._report_now = True
                self._tell(item)
            case Posted(handoff, seq) | Sent(handoff, seq):
                self._digesting.discard((handoff, seq))
                self._tell(item)
            case Received():
                self._copying -= 1
                self._role.hear(item, self._tell)
            case _ if isinstance(item, TierEvent):
                self._tell(item)
            case RankError() if self.parts.device.ranks is not None:
                raise self.parts.device.ranks.explained(item)
            case Unreachable(peer, error):
                parts.readers.drop(peer, f"its memory cannot be reached: {error}", self._tell)
                self._role.hear(item, self._tell)
            case MoverDied(error) | TiersDied(error):
                raise RuntimeError(f"a thread that moves KV has died: {error}")
            case _:
                self._role.hear(item, self._tell)

    def _greeted(self, router: RouterStream, hello: RouterHello) -> None:
        """Note what a router understands, and what it has heard."""
        router.protocol = hello.protocol
        self._tellings.greeted(router.link, hello.heard)
        if self.info.role == "decode" and hello.protocol < SESSIONS_TOLD:  # which passes these on
            log.warning(
                "router %s is of an older release (protocol %d, here %d): it is not told all of what others are about "
                "to have read, and where conversations are",
                *(hello.name, hello.protocol, PROTOCOL),
            )

    def _pass_on(self, link: int, told: TenantsTold | ReadTold | SessionTold) -> None:
        """Tell the other routers what one says to them: of tenants, in the name that it has proven."""
        sender = self.parts.routers[link].router
        if isinstance(told, TenantsTold):
            told = msgspec.structs.replace(told, router=sender.name, incarnation=sender.incarnation)
        needed = {ReadTold: READS_TOLD, SessionTold: SESSIONS_TOLD}.get(type(told), 1)
        for router in self.parts.routers.values():
            if router.router.incarnation != sender.incarnation and router.protocol >= needed:
                router.say([told])

    def _tell(self, event: SharedEvent | E) -> None:
        self._role.journal.heard(event, time.monotonic())
        self._engine.receive((event,))

    def _publish(self, commands: Sequence[object]) -> None:
        """Carry out what the scheduler asks: one frame per reader, copies to the transfer thread, the rest to the
        role."""
        self._role.journal.said(commands, time.monotonic())
        to_readers: dict[Incarnation, list[Record]] = {}
        rest: list[object] = []
        for command in commands:
            match command:
                case Emit(peer, Offer() | FirstToken() | PrefillFailed() as record):
                    to_readers.setdefault(peer, []).append(record)
                case _ if isinstance(command, MoverCommand):
                    self._copying += isinstance(command, PostRecv)
                    if isinstance(command, PostSend):
                        self._digesting.add((command.move.handoff, command.move.seq))
                    self.parts.mover.submit(command)
                case _:
                    rest.append(command)
        for peer, records in to_readers.items():
            self.parts.readers.send(peer, records)
        self._report_now |= self._role.carry_out(rest)

    def _report(self, now: float) -> None:
        self._reported_at, self._report_now = now, False
        evicted = self.parts.kv.take_evicted()
        self._tellings.evicted(evicted)
        self._tellings.tick(now)
        tiers = self.parts.kv.take_moved(EVICTED_AT_ONCE).items()
        moved = {tier: b"".join(one[:SHORT_BYTES] for one in blocks) for tier, blocks in tiers}
        load = self._load(evicted, now)
        # Of a tier that was dropped, a report would be larger than a frame may be.
        pieces = [evicted[at : at + EVICTED_AT_ONCE] for at in range(0, len(evicted), EVICTED_AT_ONCE)] or [[]]
        frames = [encode([msgspec.structs.replace(load, evicted=piece)]) for piece in pieces[:-1]]
        frames.append(encode([msgspec.structs.replace(load, evicted=pieces[-1], moved=moved)]))
        if cached := self.parts.kv.take_cached():
            # Before what was evicted: some of it may be gone again.
            runs = [HeldRun(parent[:SHORT_BYTES], b"".join(one[:SHORT_BYTES] for one in run)) for parent, run in cached]
            frames = [*split_frames([CachedTold(runs)]), *frames]
        for router in self.parts.routers.values():
            for frame in frames:
                router.send(frame)

    def _load(self, evicted: list[bytes], now: float) -> Load:
        """Return how the worker stands, with the blocks evicted since the last report; tell the metrics all of it."""
        scheduler, source, kv = self.scheduler, self._role.source, self.parts.kv
        mover, metrics, counts = self.parts.mover, self.parts.metrics, kv.pool.counts()
        held = dict(zip(self._groups, kv.pool.held(), strict=True))
        if now >= self._recount_at:
            began = time.monotonic()
            metrics.blocks(kv.pool.recount(), held)
            self._recount_at = now + (time.monotonic() - began) / RECOUNT_SHARE
        metrics.slots(*scheduler.slots)
        metrics.evicted(len(evicted))
        metrics.load(scheduler.waiting_requests, scheduler.running_requests, mover.outstanding)
        metrics.handoffs_dropped("sender", source.sender.dropped)
        metrics.transferred(mover.digests.made, mover.digests.verified, mover.digests.mismatched, mover.scrapped_bytes)
        for since in source.take_quarantined():
            metrics.quarantined(now - since)
        if self._tier_metrics is not None and kv.tiers is not None:
            self._tier_metrics.seen(kv.tiers)
        load = Load(
            step=self._engine.steps,
            free_blocks=counts["free"],
            cached_blocks=counts["cached"],
            active_blocks=counts["active"],
            reserved_blocks=counts["reserved"],
            quarantined_blocks=counts["quarantined"],
            promised_blocks=kv.promised,
            group_blocks=held if len(held) > 1 else {},
            waiting_requests=scheduler.waiting_requests,
            running_requests=scheduler.running_requests,
            s_per_loaded_block={} if kv.tiers is None else kv.tiers.cost.s_per_block,
            evicted=evicted,
            leaving=scheduler.leaving,
            silent=source.silent(self.parts.transfer.escalate_s, now),
        )
        return self._role.load(load, now)
