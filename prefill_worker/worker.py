"""A prefill worker: the shell around `PrefillScheduler`.

Three threads: the engine (here), the asyncio loop of `transfer.rpc`, and the transfer thread of `transfer.mover`. All
state belongs to the engine thread; the others put what they hear into its inbox and carry out what it hands them.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from engine.device import Device, open_device
from engine.loop import Engine, EngineThread
from engine.messages import (
    FirstToken,
    Handoff,
    Hello,
    Load,
    Record,
    WorkerInfo,
    decode_to_prefill_frame,
    encode,
)
from engine.types import Incarnation, host_port
from prefill_worker.config import PrefillConfig
from prefill_worker.events import FromPeer, PeerDead, PeerLost, PeerUp
from prefill_worker.scheduler import Event, PrefillScheduler
from prefill_worker.service import FrameIn, Link, LinkLost, Watching, serve
from telemetry.audit import Auditor
from telemetry.metrics import WorkerMetrics
from transfer.commands import (
    Command,
    Connect,
    Emit,
    MoverCommand,
    MoverDied,
    Posted,
    PostSend,
    Sent,
    Unreachable,
)
from transfer.liveness import ProcessWatch, host_id
from transfer.mover import Mover
from transfer.negotiation import NegotiationError, negotiate
from transfer.registry import choose, open_transports
from transfer.rpc import RpcLoop, dialable
from transfer.sender import KVSender
from transfer.silence import Silence
from transfer.watchdog import Watchdog

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
REPORT_S = 0.05
"""Least time between two reports while steps run."""
SPEED_WEIGHT = 0.2
"""Share of the newest step in the running mean of seconds per token."""


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
        self._links: dict[Incarnation, Link] = {}
        self._lost: dict[Incarnation, ProcessWatch] = {}
        self._watches: dict[Incarnation, ProcessWatch] = {}
        self._watchers: list[Link] = []
        self._silence = Silence(config.transfer.escalate_s)
        self._watchdog = Watchdog(config.transfer.stuck_s)
        self._reported_at = 0.0
        self._s_per_token = 0.0
        self._digesting: set[tuple[Handoff, int]] = set()

    def start(self) -> WorkerInfo:
        """Load the model, open the pool, serve. Raises what `open_device` raises, and OSError for a taken port."""
        device = open_device(self._config.engine, self._config.step_limits)
        self._device: Device = device
        self._closers.append(device.kv.close)
        self._scheduler = PrefillScheduler(
            self._config,
            device.manager(),
            KVSender(),
            fingerprint=device.fingerprint,
            vocab=device.vocab,
            context_tokens=device.context_tokens,
            stop_ids=device.stop_ids,
        )
        self._engine = Engine(self._scheduler, device.runner, time.monotonic, self._publish)
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
        self._closers.append(self._metrics.close)
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
            block_size=device.layout.block_size,
            blocks=device.blocks,
            context_tokens=device.context_tokens,
            pid=os.getpid(),
            host=host_id(),
            metrics_address=host_port(self._host, self._metrics.serve(self._host)),
            memory=device.memory,
        )
        self._mover.start()
        self._thread.start()
        return self.info

    def wait(self) -> None:
        """Block until the worker has stopped; raises what its engine died of."""
        self._thread.ended.wait()
        if self._thread.failure is not None:
            raise self._thread.failure

    def stop(self, grace_s: float = 5.0) -> None:
        """End everything. Requests under way are lost; their decode workers notice."""
        self._thread.stop(grace_s)
        self._rpc.stop(min(grace_s, 0.5))
        while self._closers:
            self._closers.pop()()

    # what the engine thread calls

    def hear(self, items: list[object]) -> None:
        for item in items:
            self._engine.receive(self._events(item))

    def is_settling(self) -> bool:
        return bool(self._digesting)

    def step(self) -> bool:
        self._bury_the_dead()
        started = time.monotonic()
        plan = self._engine.step()
        now = time.monotonic()
        if plan is not None:
            tokens = plan.computed_tokens
            self._metrics.step(tokens, now - started)
            self._metrics.prompt_tokens(computed=tokens, prefix_hit=0)
            latest = (now - started) / max(1, tokens)
            known = self._s_per_token or latest
            self._s_per_token = known + SPEED_WEIGHT * (latest - known)
        else:
            self._auditor.idle()
        if self._watchdog.is_stuck(self._mover.beat, now):
            raise RuntimeError(f"the transfer thread is stuck in one call: {self._watchdog!r}")
        if now - self._reported_at >= (HEARTBEAT_S if plan is None else REPORT_S):
            self._report(now)
        return plan is not None

    def _events(self, item: object) -> Sequence[Event]:
        match item:
            case FrameIn(link, data):
                return self._frame(link, data)
            case LinkLost(link, why):
                return self._link_lost(link, why)
            case Watching(link):
                self._watchers.append(link)
                link.send(encode([self.info, self._load(evicted=[])]))
                return ()
            case Posted(handoff, seq) | Sent(handoff, seq):
                self._digesting.discard((handoff, seq))
                return (item,)
            case MoverDied(error):
                raise RuntimeError(f"the transfer thread has died: {error}")
            case Unreachable(peer, error):
                log.error("decode worker %x cannot be reached: %s", peer, error)
                return ()
        raise TypeError(f"not an item: {item!r}")

    def _frame(self, link: Link, data: bytes) -> list[Event]:
        try:
            records = decode_to_prefill_frame(data)
        except msgspec.MsgspecError as error:
            log.error("a frame is not of this protocol, and is dropped: %s", error)
            return []
        events: list[Event] = []
        for record in records:
            if isinstance(record, Hello):
                events += self._hello(link, record)
            elif link.peer is None or self._links.get(link.peer) is not link:
                log.info("%s on a stream that is not a peer's: dropped", type(record).__name__)
            else:
                events.append(FromPeer(link.peer, record))
        return events

    def _hello(self, link: Link, hello: Hello) -> list[Event]:
        """Answer with this worker's own hello. Both sides compare the two; a decode worker that does not fit leaves."""
        peer = hello.info.incarnation
        known = self._links.get(peer)
        if known is not None and known.stream > hello.stream:
            link.send(None)
            return []
        name = choose(self._config.transfer, self.info.host, hello.info.host)
        transport = self._transports[name]
        answer = Hello(
            info=self.info,
            layout=self._device.layout.describe(),
            endpoints=[transport.describe()],
            digest_share=self._config.transfer.digest_share,
        )
        try:
            agreement = negotiate(answer, hello)
        except NegotiationError as error:
            log.error("decode worker %s is refused: %s", hello.info.name, error)
            link.send(encode([answer]))
            return []
        if known is not None:
            # The end of the older stream has not been heard of yet. What was said on it may be lost.
            known.send(None)
            self._engine.receive([PeerLost(peer)])
        link.peer, link.stream = peer, hello.stream
        self._links[peer] = link
        for endpoint in hello.endpoints:
            if endpoint.transport == name:
                self._mover.submit(Connect(peer, endpoint, agreement))
        if hello.info.host == self.info.host:
            self._watches[peer] = ProcessWatch(hello.info.pid)
        self._lost.pop(peer, None)
        link.send(encode([answer]))
        return [PeerUp(peer, transport.reads_remotely, tuple(hello.unfinished))]

    def _link_lost(self, link: Link, why: str) -> list[Event]:
        if link in self._watchers:
            self._watchers.remove(link)
            return []
        peer = link.peer
        if peer is None or self._links.get(peer) is not link:
            return []
        log.info("decode worker %x left: %s", peer, why)
        del self._links[peer]
        watch = self._watches.pop(peer, None)
        if watch is not None:
            self._lost[peer] = watch
        return [PeerLost(peer)]

    def _bury_the_dead(self) -> None:
        for peer, watch in list(self._lost.items()):
            if watch.is_dead():
                del self._lost[peer]
                self._engine.receive([PeerDead(peer)])

    def _publish(self, commands: Sequence[Command]) -> None:
        """Carry out what the scheduler asks: one frame per peer, the rest to the transfer thread."""
        frames: dict[Incarnation, list[Record]] = {}
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
            link = self._links.get(peer)
            if link is not None:
                link.send(encode(records))

    def _report(self, now: float) -> None:
        self._reported_at = now
        self._metrics.blocks(self._scheduler.kv.pool.counts())
        self._metrics.handoffs_dropped("sender", self._scheduler.sender.dropped)
        done, scrapped = self._mover.digests, self._mover.scrapped_bytes
        self._metrics.transferred(done.made, done.verified, done.mismatched, scrapped)
        for since in self._scheduler.take_quarantined():
            self._metrics.quarantined(now - since)
        load = self._load(self._scheduler.kv.take_evicted())
        if self._watchers:
            data = encode([load])
            for link in self._watchers:
                link.send(data)

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
            silent=self._silence.overdue(self._scheduler.sender.quarantined, time.monotonic()),
        )
