"""A decode worker: the shell around `DecodeScheduler`.

Three threads: the engine (here), the asyncio loop of `worker.rpc`, and the transfer thread of `transfer.mover`. All
state belongs to the engine thread; the others put what they hear into its inbox and carry out what it hands them.
One frame per engine step and router carries every request's new tokens.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import msgspec

from decode_worker.account import Account
from decode_worker.config import DecodeConfig
from decode_worker.journal import Journal
from decode_worker.peer import REDIAL_S, PeerFrame, PeerGone, Peers
from decode_worker.scheduler.events import ConnectPeer, FromRouter, RouterLost, Tell
from decode_worker.scheduler.scheduler import Command, DecodeScheduler, Event
from decode_worker.service import RouterFrame, RouterGone, RouterUp, serve
from engine.device import open_device
from engine.device_memory import device_memory
from engine.kv.tier_io import DiskHung, Loaded, Spilled, Stored, TiersDied
from engine.loop import Engine, EngineThread
from engine.messages import (
    Ended,
    FirstToken,
    Handoff,
    Hello,
    Offer,
    PrefillFailed,
    Record,
    WorkerInfo,
    decode_router_frame,
    encode,
)
from engine.tiering import open_tiers
from engine.types import Incarnation, host_port
from telemetry import tracing
from telemetry.audit import Auditor
from telemetry.flight import Flight
from telemetry.gpu_metrics import GpuMetrics, Nccl
from telemetry.metrics import WorkerMetrics
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
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.silence import Silence
from transfer.liveness import host_id
from transfer.mover import Mover
from transfer.registry import open_transports
from transfer.watchdog import Watchdog
from worker.readers import FrameIn, LinkLost, Readers
from worker.rpc import RpcLoop, Send, dialable

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
REPORT_S = 0.05
"""Least time between two reports while steps run."""


class DecodeWorker:
    """Start it, wait for it, stop it. `start` blocks until the worker serves."""

    def __init__(
        self, name: str, config: DecodeConfig, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.name = name
        self._config = config
        self._host, self._port = dialable(host), port
        self._closers: list[Callable[[], None]] = []
        self._incarnation = Incarnation(int.from_bytes(os.urandom(8), "little"))
        self._rpc = RpcLoop(f"{name}-rpc")
        self._thread = EngineThread(f"{name}-engine", self, HEARTBEAT_S)
        self._routers: dict[int, Send] = {}
        self._watchdog = Watchdog(config.transfer.stuck_s)
        self._tier_watchdog = Watchdog(config.transfer.stuck_s)
        self._reported_at = self._redialled_at = 0.0
        self._report_now = False
        self._leave_by: float | None = None
        self._copying = 0
        self._digesting: set[tuple[Handoff, int]] = set()
        self._journal = Journal(name, tracing.current())

    def start(self) -> WorkerInfo:
        """Load the model, open the pool, serve. Raises what `open_device` raises, and OSError for a taken port."""
        config = self._config
        device = open_device(config.engine, config.step_limits, config.tiers.host_bytes)
        self._closers.append(device.kv.close)
        tiering = open_tiers(config.tiers, device, self.name, self._thread.put)
        self._scheduler = DecodeScheduler(
            config=config,
            kv=device.manager(None if tiering is None else tiering.tiers),
            receiver=KVReceiver(),
            name=self.name,
            incarnation=self._incarnation,
            fingerprint=device.fingerprint,
            vocab=device.vocab,
            context_tokens=device.context_tokens,
            stop_ids=device.stop_ids,
            block_bytes=device.layout.block_bytes,
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
        self._metrics = WorkerMetrics(device.model, self.name, "decode")
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
        self._account = Account(
            self._scheduler,
            self._metrics,
            self._mover,
            Silence(config.transfer.escalate_s),
            device.layout.block_bytes,
        )
        self._auditor = Auditor(
            {"kv": self._scheduler.kv, "scheduler": self._scheduler},
            time.monotonic,
            self._metrics.audit_failed,
        )
        port = serve(self._rpc, self._host, self._port, self._thread.put)
        self.info = WorkerInfo(
            name=self.name,
            role="decode",
            incarnation=self._incarnation,
            address=host_port(self._host, port),
            model=device.model,
            fingerprint=device.fingerprint,
            arithmetic=device.arithmetic,
            block_size=device.layout.block_size,
            blocks=device.blocks,
            context_tokens=device.context_tokens,
            growth_tokens=self._scheduler.admission.growth_tokens,
            pid=os.getpid(),
            host=host_id(),
            metrics_address=host_port(self._host, self._metrics.serve(self._host)),
            memory=device.memory,
        )
        hello = Hello(
            info=self.info,
            layout=device.layout.describe(),
            endpoints=[transport.describe() for transport in self._transports.values()],
            digest=self._config.transfer.digest_on(device.kv.device),
            digest_share=self._config.transfer.digest_share,
            wire=self._config.transfer.wire,
        )
        self._peers = Peers(
            self._rpc,
            hello,
            self._thread.put,
            self._mover.submit,
            lambda: self._scheduler.receiver.unfinished,
        )
        self._readers = Readers(hello, self._transports, self._mover.submit)
        self._mover.start()
        self._thread.start()
        return self.info

    def leave(self, grace_s: float) -> None:
        """Take no new work, finish the running requests or yield them, serve all reads, then end, at the latest in
        `grace_s` seconds; `wait` returns. From any thread."""
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
        """End everything. Requests under way are lost; the router notices."""
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
        return self._copying > 0 or bool(self._digesting)

    def step(self) -> bool:
        self._engine.receive(self._readers.deaths())
        started = time.monotonic()
        plan = self._engine.step()
        now = time.monotonic()
        if plan is not None:
            self._account.stepped(plan.computed_tokens, now - started)
        else:
            self._auditor.idle()
        if self._watchdog.is_stuck(self._mover.beat, now):
            raise RuntimeError(f"the transfer thread is stuck in one call: {self._watchdog!r}")
        if self._tier_mover is not None:
            beat = self._tier_mover.beat
            if self._tier_watchdog.is_stuck(beat, now):
                self._tier_mover.abandon(beat, f"no call has come back: {self._tier_watchdog!r}")
        if now - self._redialled_at >= REDIAL_S:
            self._redialled_at = now
            self._peers.redial()
        self._account.count()
        interval = HEARTBEAT_S if plan is None else REPORT_S
        if self._report_now or now - self._reported_at >= interval:
            self._report(now)
        if self._leave_by is not None and (self._scheduler.is_idle or now >= self._leave_by):
            self._end()
        return plan is not None

    def _end(self) -> None:
        """Left: what was said is still delivered, then every stream ends."""
        log.info("%s has left: %r", self.name, self._scheduler)
        self._readers.close()
        self._peers.close()
        for send in self._routers.values():
            send(None)
        self._thread.end()

    def _events(self, item: object) -> Iterable[Event]:
        match item:
            case RouterFrame(link, data):
                return self._router_frame(link, data)
            case PeerFrame() | PeerGone():
                return self._peers.events(item)
            case Received():
                self._copying -= 1
                return (item,)
            case FrameIn() | LinkLost():
                return self._readers.events(item)
            case Posted(handoff, seq) | Sent(handoff, seq):
                self._digesting.discard((handoff, seq))
                return (item,)
            case Leave(grace_s):
                self._leave_by = time.monotonic() + grace_s
                self._report_now = True
                return (item,)
            case RouterUp(link, send):
                self._routers[link] = send
                load = self._account.load(self._engine.steps, [], time.monotonic())
                send(encode([self.info, load]))
                return ()
            case RouterGone(link, why):
                log.info("router stream %d ended: %s", link, why)
                del self._routers[link]
                return (RouterLost(link),)
            case Unreachable(peer, error):
                return self._peers.drop(peer, f"its memory cannot be reached: {error}")
            case Stored() | Loaded() | Spilled() | DiskHung():
                return (item,)
            case MoverDied(error) | TiersDied(error):
                raise RuntimeError(f"a thread that moves KV has died: {error}")
        raise TypeError(f"not an item: {item!r}")

    def _router_frame(self, link: int, data: bytes) -> list[Event]:
        try:
            return [FromRouter(link, record) for record in decode_router_frame(data)]
        except msgspec.MsgspecError as error:
            log.error("a frame is not of this protocol, and is dropped: %s", error)
            return []

    def _publish(self, commands: Sequence[Command]) -> None:
        """Carry out what the scheduler asks: one frame per router and per peer, the rest to the transfer thread."""
        to_routers: dict[int, list[Record]] = {}
        to_readers: dict[Incarnation, list[Record]] = {}
        to_peers: dict[Incarnation, list[Record]] = {}
        self._journal.said(commands, time.monotonic())
        for command in commands:
            match command:
                case Tell(link, record):
                    to_routers.setdefault(link, []).append(record)
                    self._report_now |= isinstance(record, Ended)
                case Emit(peer, Offer() | FirstToken() | PrefillFailed() as record):
                    to_readers.setdefault(peer, []).append(record)
                case Emit(peer, record):
                    to_peers.setdefault(peer, []).append(record)
                case ConnectPeer(address):
                    self._peers.connect(address)
                case _ if isinstance(command, MoverCommand):
                    self._copying += isinstance(command, PostRecv)
                    if isinstance(command, PostSend):
                        self._digesting.add((command.move.handoff, command.move.seq))
                    self._mover.submit(command)
                case _:
                    raise TypeError(f"not a command for the shell: {command!r}")
        for peer, records in to_readers.items():
            self._readers.send(peer, records)
        for peer, records in to_peers.items():
            self._peers.send(peer, records)
        for link, records in to_routers.items():
            if link in self._routers:
                self._routers[link](encode(records))

    def _report(self, now: float) -> None:
        self._reported_at, self._report_now = now, False
        evicted = self._scheduler.kv.take_evicted()
        self._account.observe(now, len(evicted))
        data = encode([self._account.load(self._engine.steps, evicted, now)])
        for send in self._routers.values():
            send(data)
