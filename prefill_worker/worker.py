"""A prefill worker: the shell around `PrefillScheduler`.

Three threads: the engine (here), the asyncio loop of `worker.rpc`, and the transfer thread of `transfer.mover`. All
state belongs to the engine thread; the others put what they hear into its inbox and carry out what it hands them.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import msgspec

from engine.device import open_device
from engine.device_memory import device_memory
from engine.kv.tier_io import DiskHung, Loaded, Spilled, TiersDied
from engine.loop import Engine, EngineThread
from engine.measure import mean
from engine.messages import (
    FirstToken,
    Handoff,
    Hello,
    Load,
    Record,
    WorkerInfo,
    encode,
)
from engine.tiering import open_tiers
from engine.types import Incarnation, host_port
from prefill_worker.config import PrefillConfig
from prefill_worker.journal import Journal
from prefill_worker.scheduler.scheduler import Event, PrefillScheduler
from prefill_worker.service import Watcher, WatcherLeft, Watching, serve
from telemetry import tracing
from telemetry.audit import Auditor
from telemetry.flight import Flight
from telemetry.gpu_metrics import GpuMetrics, Nccl
from telemetry.metrics import WorkerMetrics
from telemetry.tier_metrics import TierMetrics
from transfer.handoff.commands import (
    Command,
    Emit,
    Leave,
    MoverCommand,
    MoverDied,
    Posted,
    PostSend,
    Sent,
    Unreachable,
)
from transfer.handoff.silence import Silence
from transfer.liveness import host_id
from transfer.mover import Mover
from transfer.registry import open_transports
from transfer.watchdog import Watchdog
from worker.readers import FrameIn, LinkLost, Readers
from worker.rpc import RpcLoop, dialable

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
REPORT_S = 0.05
"""Least time between two reports while steps run."""


class PrefillWorker:
    """Start it, wait for it, stop it. `start` blocks until the worker serves."""

    def __init__(
        self, name: str, config: PrefillConfig, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.name = name
        self._config = config
        self._host, self._port = dialable(host), port
        self._closers: list[Callable[[], None]] = []
        self._incarnation = Incarnation(int.from_bytes(os.urandom(8), "little"))
        self._rpc = RpcLoop(f"{name}-rpc")
        self._thread = EngineThread(f"{name}-engine", self, HEARTBEAT_S)
        self._watchers: list[Watcher] = []
        self._leave_by: float | None = None
        self._silence = Silence(config.transfer.escalate_s)
        self._watchdog = Watchdog(config.transfer.stuck_s)
        self._tier_watchdog = Watchdog(config.transfer.stuck_s)
        self._reported_at = 0.0
        self._s_per_token = 0.0
        self._digesting: set[tuple[Handoff, int]] = set()
        self._tier_metrics: TierMetrics | None = None
        self._journal = Journal(name, tracing.current())

    def start(self) -> WorkerInfo:
        """Load the model, open the pool, serve. Raises what `open_device` raises, and OSError for a taken port."""
        config = self._config
        device = open_device(config.engine, config.step_limits, config.tiers.host_bytes)
        self._closers.append(device.kv.close)
        tiering = open_tiers(config.tiers, device, self.name, self._thread.put)
        self._scheduler = PrefillScheduler(
            config,
            device.manager(None if tiering is None else tiering.tiers),
            fingerprint=device.fingerprint,
            vocab=device.vocab,
            context_tokens=device.context_tokens,
            stop_ids=device.stop_ids,
        )
        self._tier_mover = None if tiering is None else tiering.mover
        self._engine = Engine(
            self._scheduler, device.runner, time.monotonic, self._publish, self._tier_mover
        )
        if self._tier_mover is not None:
            self._tier_mover.start()
            self._closers.append(self._tier_mover.stop)
        self._transports = open_transports(
            device.kv, self._incarnation, self._config.transfer, self._host
        )
        self._mover = Mover(
            self._transports,
            device.kv,
            device.layout,
            self._thread.put,
        )
        self._closers.append(self._mover.stop)
        self._metrics = WorkerMetrics(device.model, self.name, "prefill")
        self._metrics.opened(
            block_size=device.layout.block_size,
            blocks=device.blocks,
            dtype=device.layout.dtype,
            transport=self._config.transfer.transport,
            memory=msgspec.structs.asdict(device.memory),
        )
        GpuMetrics(
            self._metrics.families,
            partial(device_memory, device.kv.device),
            cast("Nccl | None", self._transports.get("nccl")),
        )
        self._closers.append(self._metrics.close)
        if tiering is not None:
            self._tier_metrics = TierMetrics(self._metrics.families)
        self._auditor = Auditor(
            {"kv": self._scheduler.kv, "scheduler": self._scheduler},
            time.monotonic,
            self._metrics.audit_failed,
        )
        port = serve(self._rpc, self._host, self._port, self._thread.put)
        self.info = WorkerInfo(
            name=self.name,
            role="prefill",
            incarnation=self._incarnation,
            address=host_port(self._host, port),
            model=device.model,
            fingerprint=device.fingerprint,
            arithmetic=device.arithmetic,
            block_size=device.layout.block_size,
            blocks=device.blocks,
            context_tokens=device.context_tokens,
            pid=os.getpid(),
            host=host_id(),
            metrics_address=host_port(self._host, self._metrics.serve(self._host)),
            memory=device.memory,
        )
        hello = Hello(
            info=self.info,
            layout=device.layout.describe(),
            endpoints=[],
            digest=self._config.transfer.digest_on(device.kv.device),
            digest_share=self._config.transfer.digest_share,
            wire=self._config.transfer.wire,
        )
        self._readers = Readers(hello, self._transports, self._mover.submit)
        self._mover.start()
        self._thread.start()
        return self.info

    def leave(self, grace_s: float) -> None:
        """Take no new work, finish what has begun, serve all reads, then end, at the latest in `grace_s` seconds;
        `wait` returns. From any thread."""
        self._thread.put(Leave(grace_s))

    @property
    def is_leaving(self) -> bool:
        return self._leave_by is not None

    def flights(self, request: str) -> list[Flight]:
        """What is remembered of a request, or of the latest ones. From any thread."""
        return self._journal.recorder.told(request)

    def wait(self) -> None:
        """Block until the worker has stopped, or left; raises what its engine died of."""
        self._thread.ended.wait()
        if self._thread.failure is not None:
            self._journal.engine_failed()
            raise self._thread.failure
        if self._leave_by is not None:
            self.stop()

    def stop(self, grace_s: float = 5.0) -> None:
        """End everything. Requests under way are lost; their decode workers notice."""
        self._thread.stop(grace_s)
        self._rpc.stop(min(grace_s, 0.5))
        while self._closers:
            self._closers.pop()()

    # what the engine thread calls

    def hear(self, items: list[object]) -> None:
        for item in items:
            events = list(self._events(item))
            self._journal.heard(events, time.monotonic())
            self._engine.receive(events)

    def is_settling(self) -> bool:
        return bool(self._digesting)

    def step(self) -> bool:
        self._engine.receive(self._readers.deaths())
        started = time.monotonic()
        plan = self._engine.step()
        now = time.monotonic()
        if plan is not None:
            tokens, again = plan.computed_tokens, plan.recomputed_tokens
            self._metrics.step(tokens, now - started)
            self._metrics.prompt_tokens(computed=tokens - again, prefix_hit=0, recomputed=again)
            self._s_per_token = mean(self._s_per_token, (now - started) / max(1, tokens))
        else:
            self._auditor.idle()
        if self._watchdog.is_stuck(self._mover.beat, now):
            raise RuntimeError(f"the transfer thread is stuck in one call: {self._watchdog!r}")
        if self._tier_mover is not None:
            beat = self._tier_mover.beat
            if self._tier_watchdog.is_stuck(beat, now):
                self._tier_mover.abandon(beat, f"no call has come back: {self._tier_watchdog!r}")
        if now - self._reported_at >= (HEARTBEAT_S if plan is None else REPORT_S):
            self._report(now)
        if self._leave_by is not None and (self._scheduler.is_idle or now >= self._leave_by):
            self._end()
        return plan is not None

    def _end(self) -> None:
        """Left: what was said is still delivered, then every stream ends."""
        log.info("%s has left: %r", self.name, self._scheduler)
        self._readers.close()
        for watcher in self._watchers:
            watcher.send(None)
        self._thread.end()

    def _events(self, item: object) -> Iterable[Event]:
        match item:
            case FrameIn() | LinkLost():
                return self._readers.events(item)
            case Watching(watcher):
                self._watchers.append(watcher)
                watcher.send(encode([self.info, self._load(evicted=[])]))
                return ()
            case WatcherLeft(watcher):
                self._watchers.remove(watcher)
                return ()
            case Leave(grace_s):
                self._leave_by = time.monotonic() + grace_s
                self._reported_at = float("-inf")
                return (item,)
            case Posted(handoff, seq) | Sent(handoff, seq):
                self._digesting.discard((handoff, seq))
                return (item,)
            case Loaded() | Spilled() | DiskHung():
                return (item,)
            case MoverDied(error) | TiersDied(error):
                raise RuntimeError(f"a thread that moves KV has died: {error}")
            case Unreachable(peer, error):
                log.error("decode worker %x cannot be reached: %s", peer, error)
                return ()
        raise TypeError(f"not an item: {item!r}")

    def _publish(self, commands: Sequence[Command]) -> None:
        """Carry out what the scheduler asks: one frame per peer, the rest to the transfer thread."""
        frames: dict[Incarnation, list[Record]] = {}
        self._journal.said(commands, time.monotonic())
        for command in commands:
            if isinstance(command, Emit):
                frames.setdefault(command.peer, []).append(command.record)
                if isinstance(command.record, FirstToken):
                    self._metrics.prompt_tokens(
                        computed=0, prefix_hit=command.record.cached_tokens
                    )
            elif isinstance(command, MoverCommand):
                if isinstance(command, PostSend):
                    self._digesting.add((command.move.handoff, command.move.seq))
                self._mover.submit(command)
            else:
                raise TypeError(f"not a command for the shell: {command!r}")
        for peer, records in frames.items():
            self._readers.send(peer, records)

    def _report(self, now: float) -> None:
        self._reported_at = now
        evicted = self._scheduler.kv.take_evicted()
        self._observe(now, len(evicted))
        if self._watchers:
            data = encode([self._load(evicted)])
            for watcher in self._watchers:
                watcher.send(data)

    def _observe(self, now: float, evicted_blocks: int) -> None:
        """Tell the metrics how the worker stands."""
        scheduler, metrics = self._scheduler, self._metrics
        metrics.blocks(scheduler.kv.pool.counts())
        metrics.slots(*scheduler.slots)
        metrics.evicted(evicted_blocks)
        metrics.load(
            scheduler.waiting_requests, scheduler.running_requests, 0, self._mover.outstanding
        )
        metrics.handoffs_dropped("sender", scheduler.sender.dropped)
        done, scrapped = self._mover.digests, self._mover.scrapped_bytes
        metrics.transferred(done.made, done.verified, done.mismatched, scrapped)
        for since in scheduler.source.take_quarantined():
            metrics.quarantined(now - since)
        if self._tier_metrics is not None and scheduler.kv.tiers is not None:
            self._tier_metrics.seen(scheduler.kv.tiers)

    def _load(self, evicted: list[bytes]) -> Load:
        counts = self._scheduler.kv.pool.counts()
        return Load(
            step=self._engine.steps,
            free_blocks=counts["free"],
            cached_blocks=counts["cached"],
            active_blocks=counts["active"],
            reserved_blocks=counts["reserved"],
            quarantined_blocks=counts["quarantined"],
            waiting_requests=self._scheduler.waiting_requests,
            waiting_tokens=self._scheduler.backlog_tokens,
            running_requests=self._scheduler.running_requests,
            s_per_token=self._s_per_token,
            evicted=evicted,
            leaving=self._scheduler.leaving,
            silent=self._silence.overdue(self._scheduler.sender.quarantined, time.monotonic()),
        )
