"""Runs the real worker shells in virtual time: what they import of the outside is replaced while a world runs.

Workers are opened by `open_worker` and started by their own `start`. Their device is shadow memory, their gRPC loop the
simulated wire, their transfer thread `SimMover`, their engine thread events on the clock, and clock, random numbers and
process table are the world's. Nothing of what they decide is written a second time here.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import decode_worker.role
import engine.device
import engine.loop
import engine.storage.tiers.opening
import prefill_worker.role
import router.hub  # noqa: F401  (its log is listened to)
import telemetry.audit
import telemetry.gpu_metrics
import telemetry.metrics
import telemetry.rank_metrics
import telemetry.swap_metrics
import telemetry.tier_metrics
import transfer.liveness
import transfer.mover
import transfer.registry
import worker.opening
import worker.rpc
from access.config import AccessConfig
from engine.drafts import EachAlone
from engine.handshake import Keyring, Party, Secrets
from engine.kv.tiers.commands import TierEvent
from engine.loop import Shell
from tests.sim import ranks, shadow, tiering
from tests.sim.clock import Process, Violation
from tests.sim.drafting import Scripted
from tests.sim.mover import SimMover
from tests.sim.network import Open
from tests.sim.pipes import SimTransport
from worker.config import DecodeConfig, PrefillConfig
from worker.rpc import ServedStream

if TYPE_CHECKING:
    from tests.sim.world import World

_world: "World" = None  # type: ignore[assignment]
"""The world that runs now; set by `inside`. One at a time."""


class SimInbox:
    """Stands in for `engine.loop.Inbox`."""

    def __init__(self) -> None:
        self._items: list[object] = []
        self.wake: Callable[[], None] = lambda: None

    def put(self, item: object) -> None:
        self._items.append(item)
        self.wake()

    def take(self) -> list[object]:
        items, self._items = self._items, []
        return [item for item in items if item is not None]


class SimThread:
    """Stands in for `engine.loop.EngineThread`: hears, lingers while copies settle, steps, sleeps."""

    def __init__(
        self, name: str, inbox: SimInbox, shell: Shell, idle_s: float, linger_s: float = 0.005
    ) -> None:
        self._world = _world
        self.process = _world.starting
        self._inbox = inbox
        inbox.wake = self._heard
        self.shell = shell
        self._idle_s = idle_s
        self._linger_s = linger_s
        self._linger_until: float | None = None
        self._turns = 0
        self._due = float("inf")
        self._busy = False
        self._ended = False
        self.in_turn = False
        """True while its state may be half changed: whoever is killed in the middle of a step proves nothing."""
        self.failure: BaseException | None = None
        _world.threads[self.process.pid] = self

    def _heard(self) -> None:
        if not self._busy:
            self._wake(0.00001 + 0.00019 * self._world.clock.random())

    def start(self) -> None:
        self._wake(0.0)

    def end(self) -> None:
        self._ended = True

    def _wake(self, seconds: float) -> None:
        clock = self._world.clock
        due = clock.now + seconds
        if due < self._due:
            self._due = due
            self._turns += 1
            clock.at(seconds, partial(self._turn, self._turns), self.process)

    def _turn(self, number: int) -> None:
        if number != self._turns:
            return
        self._due, self._busy = float("inf"), False
        items = self._inbox.take()
        shell, world = self.shell, self._world
        now = world.clock.now
        self.in_turn = True
        try:
            shell.hear(items)
            if items:
                world.audit.check(self.process)
            if shell.is_settling():
                if self._linger_until is None:
                    self._linger_until = now + world.rng.uniform(0, self._linger_s)
                if now < self._linger_until:
                    self.in_turn = False
                    self._wake(self._linger_until - now)
                    return
            self._linger_until = None
            self._busy = shell.step()
        except Violation:
            raise
        except Exception as error:
            what = f"{self.process}: the engine dies of {type(error).__name__}: {error}"
            raise Violation(what) from error
        self.in_turn = False
        if self._busy:
            world.audit.check(self.process)
        if self._ended:
            world.left(self.process)
            return
        if shell.rest_s() < self._idle_s:
            world.note("step held")
        rest_s = max(min(self._idle_s, shell.rest_s()), 0.0001)
        self._wake(0.0004 + 0.0026 * world.clock.random() if self._busy else rest_s)


SECRETS = Keyring((bytes(32),))


class SimRpc:
    """Stands in for `worker.rpc.RpcLoop`."""

    def __init__(self, name: str, me: Party, secrets: Secrets, certificates: object = None) -> None:
        self._process = _world.starting

    def start(self, host: str, port: int, streams: dict[str, ServedStream]) -> int:
        _world.wire.listen(f"{host}:{port}", self._process, streams)
        return port

    def stop(self, grace_s: float) -> None:
        """Do nothing: a process of the simulator ends with all that it has."""

    def connect(self, address: str, method: str, open_session: Open) -> None:
        world, process = _world, self._process
        process.later(0.0, lambda: world.wire.connect(process, address, method, open_session))


class SimWatch:
    """Stands in for `transfer.liveness.ProcessWatch`: the process table is the world's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_dead(self) -> bool:
        return not _world.processes[self.pid].alive


class NullAuditor:
    """Does nothing: the world recomputes the ledgers, more often than an auditor would."""

    def __init__(self, *args: object) -> None:
        pass

    def look(self) -> bool:
        return False


class NullMetrics:
    """Counts nothing, whatever it is asked to count."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def serve(self, host: str, **more: object) -> int:
        return 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        setattr(NullMetrics, name, _nothing)
        return _nothing


LARGE = "decode-0"
"""The worker that may have a larger pool than the others of its role."""
_nothing: Callable[..., Any] = "".format
"""Takes whatever it is given, without a call of Python."""


def _open_device(config: object, limits: object, *rest: object) -> SimpleNamespace:
    plan, process = _world.plan, _world.starting
    blocks, size = plan.blocks[process.role], plan.block_size[process.role]
    if process.name == LARGE:
        blocks = max(blocks, plan.large_blocks)
    drafter = EachAlone(Scripted) if plan.drafts else None
    windows = plan.windows, plan.masked
    opened = shadow.device(process, blocks, size, plan.context_tokens, plan.ahead, drafter, *windows)
    _world.memories[process.pid] = opened.kv
    return opened


def _open_tiers(
    config: object, device: Any, name: str, on_event: Callable[[TierEvent], None], needed_by: str = ""
) -> SimpleNamespace | None:
    return tiering.open_tiers(_world, device.kv, on_event)


def _open_transports(memory: shadow.ShadowKV, *rest: object) -> dict[str, SimTransport]:
    return {_world.plan.transport: SimTransport(_world.plan.transport, memory)}


def _urandom(count: int) -> bytes:
    return _world.starting.incarnation.to_bytes(count, "little")


_OS = SimpleNamespace(urandom=_urandom, getpid=lambda: _world.starting.pid)
_TIME = SimpleNamespace()
"""Its clocks are the world's; set by `inside`."""
_REPLACED: list[tuple[Any, Any]] = [
    (os, _OS),
    (time, _TIME),
    (engine.loop.EngineThread, SimThread),
    (engine.loop.Inbox, SimInbox),
    (engine.device.open_device, _open_device),
    (engine.storage.tiers.opening.open_tiers, _open_tiers),
    (telemetry.audit.Auditor, NullAuditor),
    (telemetry.gpu_metrics.GpuMetrics, NullMetrics),
    (telemetry.rank_metrics.RankMetrics, NullMetrics),
    (telemetry.metrics.WorkerMetrics, NullMetrics),
    (telemetry.swap_metrics.SwapMetrics, NullMetrics),
    (telemetry.tier_metrics.TierMetrics, NullMetrics),
    (transfer.liveness.ProcessWatch, SimWatch),
    (transfer.liveness.host_id, lambda: "sim"),
    (transfer.mover.Mover, lambda *args: SimMover(_world, *args)),
    (transfer.registry.open_transports, _open_transports),
    (transfer.registry.choose, lambda *args: _world.plan.transport),
    (worker.opening.open_movers, lambda *args: ranks.open_movers(_world, *args)),
    (worker.rpc.RpcLoop, SimRpc),
]


@cache
def _seams() -> list[tuple[Any, str, Any, Any]]:
    """(module, name, real, simulated) for every name a shell module has imported of what is replaced; every shell
    module is imported by then."""
    found = []
    for module_name, module in sorted(sys.modules.items()):
        is_shell = module_name.partition(".")[0] in ("decode_worker", "prefill_worker", "worker")
        if not is_shell and module_name != "transfer.ranks.movers":
            continue
        for name, value in list(vars(module).items()):
            for real, simulated in _REPLACED:
                if value is real:
                    found.append((module, name, real, simulated))
    return found


class _Loud(logging.Handler):
    """Turns whatever a shell or the hub logs as an error into a violation: they survive it, a simulation must not."""

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        if isinstance(cause, Violation):
            raise cause
        if cause is None and "cannot be reached" in record.msg:
            return  # a peer that died while its memory was being mapped: nobody's bug
        if cause is None and "poisonous" in record.msg:
            _world.note("refused as poisonous")
            return
        if not _world.plan.strict and "speaks before its hello" in record.msg and _world.breaks:
            _world.note("dropped: a stream that was replaced")
            return
        raise Violation(f"logged as an error: {record.getMessage()}: {cause!r}") from cause


_LOUD = _Loud(logging.ERROR)
Role = TypeVar("Role", PrefillConfig, DecodeConfig)


def _reachable(config: Role) -> Role:
    """Let a worker listen in the simulated network, which is no loopback."""
    return msgspec.structs.replace(config, access=AccessConfig(insecure="open"))


_LOGGERS = ("decode_worker", "prefill_worker", "router", "engine", "telemetry", "transfer", "worker")


@contextmanager
def loud() -> Iterator[None]:
    """Make an error in the log of what is simulated a violation inside this block. Many worlds may run inside it."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    if _LOUD in loggers[0].handlers:
        yield
        return
    kept = [(logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.addHandler(_LOUD)
        logger.propagate = False
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, (propagate, level) in zip(loggers, kept, strict=True):
            logger.removeHandler(_LOUD)
            logger.propagate = propagate
            logger.setLevel(level)


@contextmanager
def inside(world: "World") -> Iterator[None]:
    """Let shells live in `world` inside this block."""
    global _world
    before, _world = _world, world
    clocks = vars(_TIME).copy()
    vars(_TIME).update(dict.fromkeys(("monotonic", "perf_counter", "time"), world.clock.read))
    seams = _seams()
    for module, name, _, simulated in seams:
        setattr(module, name, simulated)
    try:
        with loud():
            yield
    finally:
        for module, name, real, _ in seams:
            setattr(module, name, real)
        vars(_TIME).update(clocks)
        _world = before


def start_worker(process: Process, port: int) -> Any:
    """Start one new life of a worker."""
    plan = _world.plan
    _world.starting = process
    if process.role == "decode":
        worker: Any = decode_worker.role.open_decode_worker(process.name, _reachable(plan.decode), "sim", port, SECRETS)
    else:
        worker = prefill_worker.role.open_prefill_worker(process.name, _reachable(plan.prefill), "sim", port, SECRETS)
    worker.start()
    return worker
