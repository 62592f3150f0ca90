"""A cluster's life: prepare the model, start workers and router, watch them, stop everything.

The order is the same for every launcher. Workers and router start at the same time, and the router
learns its workers once they are up. While the cluster is watched, whoever dies is replaced as
`cluster.processes.supervisor` decides, the router on the ports that it had; a death during the start ends the
cluster with the reason.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from access.config import AccessError
from access.page import guard_page
from access.tls import ends_s
from cluster.config import ClusterConfig, problem
from cluster.processes.events import (
    Accused,
    Announce,
    AskToLeave,
    Command,
    Discard,
    EndCluster,
    Event,
    KillProcess,
    Launch,
    LeaveWanted,
    ProcessEnded,
    Refuse,
    Resize,
    RouterProbed,
    TimePassed,
    Up,
)
from cluster.processes.fronts import shared_fronts
from cluster.processes.orders import Orders
from cluster.processes.prepare import (
    Addresses,
    make_launcher,
    model_source,
    prepare_draft,
    prepare_model,
    served_name,
    specs,
)
from cluster.processes.signals import check, shielded
from cluster.processes.slots import SlotState, SlotView
from cluster.processes.spec import (
    FACTORIES,
    Child,
    ChildReady,
    ChildSpec,
    Kind,
    Launcher,
    LaunchError,
    Sealed,
)
from cluster.processes.supervisor import Supervisor
from cluster.secret import drawn, opened
from engine.handshake import Keyring
from engine.messages import PeerAddress
from telemetry.supervisor_metrics import SupervisorMetrics

__all__ = ["Addresses", "Cluster", "make_launcher", "prepare_draft", "prepare_model", "specs"]

POLL_S = 0.05
WATCH_S = 0.1

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and how much there is."""

log = logging.getLogger(__name__)


class Cluster:
    """Routers and their workers, started together and stopped together. Use it as a context manager."""

    def __init__(
        self,
        config: ClusterConfig,
        launcher: Launcher,
        factories: Mapping[str, str] = FACTORIES,
        model_dir: str = "",
        progress: Progress | None = None,
    ) -> None:
        """`model_dir`, when given, is a prepared model; otherwise `start` prepares `config.model`. `progress` hears how
        the start goes, from whichever thread does the work. Raises ConfigError for a secret file of no use."""
        # A router that is started again must find the tenants' blocks again.
        key = config.router.namespace_key or secrets.token_hex(32)
        router = msgspec.structs.replace(config.router, namespace_key=key)
        self._config = msgspec.structs.replace(config, router=router)
        self._launcher = launcher
        self._factories = factories
        self._model_dir = model_dir
        # Mutable state, owned by the thread that starts, watches and stops in turn.
        self._children: dict[str, Child] = {}
        self._ready: dict[str, ChildReady] = {}
        self._specs: dict[str, ChildSpec] = {}
        self._kinds: dict[str, ChildSpec] = {}
        self._supervisor: Supervisor | None = None
        self._metrics: SupervisorMetrics | None = None
        self.supervisor_metrics_port = 0
        self._fronts: list[socket.socket] = []
        self._opened = False
        self.keys = opened(config.secret_file)
        """The secrets by which its processes know each other. From any thread."""
        self._rotating = threading.Lock()
        self._orders = Orders()
        self._progress = progress or (lambda what, done, total: None)

    @property
    def workers(self) -> dict[str, ChildReady]:
        """Return the latest process of every worker by name, dead or alive. May be called from any thread."""
        return {name: up for name, up in self._ready.items() if self._specs[name].kind != "router"}

    @property
    def router(self) -> ChildReady:
        """Return the latest process of the first router, dead or alive. May be called from any thread."""
        return next(iter(self.routers.values()))

    @property
    def routers(self) -> dict[str, ChildReady]:
        """Return the latest process of every router by name, dead or alive. May be called from any thread."""
        return {name: up for name, up in self._ready.items() if self._specs[name].kind == "router"}

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Addresses:
        """Block until the router can serve. Raises LaunchError, or ModelError about the model."""
        with shielded():
            return self._start()

    def _start(self) -> Addresses:
        deadline_s = time.monotonic() + self._config.start_timeout_s
        with ThreadPoolExecutor(1, thread_name_prefix="prepare") as pool:
            prepared = pool.submit(
                lambda: self._model_dir or prepare_model(self._config, self._progress)
            )
            self._opened = True
            self._launcher.open()
            model_dir = prepared.result()
            draft_dir = prepare_draft(self._config, model_dir, self._progress)
        check()
        source = None if self._model_dir else model_source(self._config)
        self._metrics = SupervisorMetrics(served_name(model_dir))
        try:
            guard = guard_page(self._config.access, self._config.router.host, "the supervisor's page of metrics")
            self._metrics.certificates(partial(ends_s, guard.certificates if guard else None, None))
            port = self.supervisor_metrics_port = self._metrics.serve(self._config.router.host, guard=guard)
        except (OSError, AccessError) as error:
            raise LaunchError(f"no page of metrics on {self._config.router.host}: {error}") from error
        self._fronts, config = shared_fronts(self._config)
        some = msgspec.structs.replace(config, prefill_workers=max(1, config.prefill_workers))
        made = specs(some, model_dir, self._factories, source, port, draft_dir)
        self._kinds = {spec.kind: spec for spec in made}
        is_one_pool = not self._config.prefill_workers
        self._specs = {s.name: s for s in made if not (is_one_pool and s.kind == "prefill")}
        for name, spec in self._specs.items():
            self._children[name] = self._launched(spec)
        self._ready = self._wait_started(deadline_s)
        routers = [child for child in self._children.values() if child.spec.kind == "router"]
        workers = [child for child in self._children.values() if child.spec.kind != "router"]
        self._supervisor = Supervisor(
            self._config.restart,
            self._config.start_timeout_s,
            {name: (spec.kind, self._ready[name]) for name, spec in self._specs.items()},
        )
        self._progress("router meets workers", 0, 1)
        self._carry_out([self._supervisor.announcement()])
        while not all(router.ready() for router in routers):
            check()
            self._raise_failure()
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"the router saw no full set of workers in {self._config.start_timeout_s:.0f} s"
                )
            time.sleep(POLL_S)
        self._progress("router meets workers", 1, 1)
        front = self._ready[routers[0].spec.name]
        return Addresses(
            grpc=front.address,
            http=front.http,
            workers=tuple(self._ready[worker.spec.name] for worker in workers),
        )

    def watch(self, stop: threading.Event | None = None) -> None:
        """Block until `stop` is set, replacing whoever dies. Raises LaunchError when one dies too often."""
        stop = stop or threading.Event()
        supervisor = self._supervisor
        if supervisor is None:
            raise RuntimeError("the cluster has not been started")
        self._orders.open()
        why = "nobody watches the cluster any more"
        try:
            while not stop.wait(WATCH_S):
                with shielded():
                    for event in self._news(supervisor):
                        self._carry_out(supervisor.handle(event, time.monotonic()))
                    if self._metrics is not None:
                        self._metrics.deaths(supervisor.deaths)
                    if supervisor.is_steady:
                        self._orders.carried_out()
        except LaunchError as error:
            why = str(error)
            raise
        finally:
            self._orders.close(why)

    def roll(self, timeout_s: float | None = None) -> None:
        """Replace every worker, one after the other, while the cluster serves; requests are finished or moved. Blocks
        while another thread watches. Raises LaunchError if that takes over `timeout_s`, or the watch ends before."""
        self._leave(tuple(self.workers), again=True, timeout_s=timeout_s)

    def drain(self, name: str, timeout_s: float | None = None, again: bool = False) -> None:
        """Take one worker away for good, as `roll` does; with `again`, replace it. Raises LaunchError also where there
        is none of that name."""
        if name not in {slot.name for slot in self.slots() if slot.kind != "router"}:
            raise LaunchError(f"there is no worker {name}")
        self._leave((name,), again=again, timeout_s=timeout_s)

    def scale(self, kind: Kind, count: int, timeout_s: float | None = None) -> None:
        """Give a pool `count` workers and block until it has them, as `roll` does. Who leaves is drained. Raises
        LaunchError, also as `check_size` does."""
        check_size(kind, count)
        order = Resize(kind, count, self._config.leave_grace_s)
        self._orders.give(order, f"{kind}={count}", timeout_s)

    def rotate(self, note: Callable[[tuple[bytes, ...]], None]) -> None:
        """Replace the secret, or take over what its file says now; every process is told, and so is `note`. A new one
        is valid beside the old one until all have it, so that no stream is refused. Streams that are open go on. From
        any thread. Raises LaunchError with those that could not be told: both stay valid then, and the next call gives
        out the same two. Raises ConfigError, and tells nobody, where the file cannot be used."""
        with self._rotating:
            if isinstance(self.keys, Keyring):
                # Whoever was not told the last time has the older of two alone: a third would shut it out.
                if len(self.keys.valid()) == 1:
                    self.keys.replace((drawn(), *self.keys.valid()))
                self._entrust_all(note, self.keys.valid())
                new = self.keys.valid()[:1]
                self._entrust_all(note, new)
                self.keys.replace(new)
            else:
                self.keys.reread()
                self._entrust_all(note, self.keys.valid())

    def _entrust_all(self, note: Callable[[tuple[bytes, ...]], None], secrets: tuple[bytes, ...]) -> None:
        failed: list[str] = []
        note(secrets)
        for child in list(self._children.values()):
            try:
                child.set_secrets(Sealed.of(secrets))
            except LaunchError as error:
                failed.append(str(error))
        if failed:
            raise LaunchError("; ".join(failed))

    def _launched(self, spec: ChildSpec) -> Child:
        """Launch a process with the secrets of now: no rotation comes between."""
        if self._metrics is not None:
            self._metrics.started(spec.name, spec.kind)
        with self._rotating:
            child = self._launcher.launch(msgspec.structs.replace(spec, secrets=Sealed.of(self.keys.valid())))
            self._children[spec.name] = child
        return child

    def _leave(self, names: tuple[str, ...], *, again: bool, timeout_s: float | None) -> None:
        order = LeaveWanted(names, self._config.leave_grace_s, again)
        self._orders.give(order, f"{', '.join(names)} to leave", timeout_s)

    def slots(self) -> list[SlotView]:
        """Return the state of every process that there is to be. From any thread; empty before the start."""
        return [] if self._supervisor is None else self._supervisor.view()

    def processes(self) -> dict[str, ChildReady]:
        """Return the latest process of every slot by name, dead or alive. From any thread."""
        return dict(self._ready)

    def ask(self, name: str, what: str, argument: str = "") -> bytes:
        """Ask one process a question (`cluster.processes.hosting.QUESTIONS`); returns the answer as JSON. From any
        thread. Raises LaunchError if there is no such process, or it does not answer."""
        child = self._children.get(name)
        if child is None:
            raise LaunchError(f"{name}: there is no such process now")
        return child.ask(what, argument)

    def stop(self) -> None:
        """Stop the router, then the workers, then the launcher. Safe to repeat. Raises LaunchError if
        something of it is left."""
        with shielded():
            self._stop()

    def _stop(self) -> None:
        children, self._children = list(self._children.values()), {}
        opened, self._opened = self._opened, False
        grace_s = self._config.stop_grace_s
        try:
            routers = [child for child in children if child.spec.kind == "router"]
            workers = [child for child in children if child.spec.kind != "router"]
            for group in (routers, workers):
                _stop_all(group, grace_s)
        finally:
            fronts, self._fronts = self._fronts, []
            for front in fronts:
                front.close()
            if self._metrics is not None:
                self._metrics.close()
            if opened:
                self._launcher.close()

    def _wait_started(self, deadline_s: float) -> dict[str, ChildReady]:
        """Wait for all of them. The first failure ends the wait, whoever else is still starting."""
        ready: dict[str, ChildReady] = {}
        waiting = dict(self._children)
        while waiting:
            self._progress("processes", len(ready), len(self._children))
            self._report_loading()
            for name, child in list(waiting.items()):
                up = child.started_within(POLL_S)
                if up is not None:
                    ready[name] = up
                    del waiting[name]
            check()
            self._raise_failure()
            if waiting and time.monotonic() > deadline_s:
                raise LaunchError(
                    f"{', '.join(waiting)}: not started in {self._config.start_timeout_s:.0f} s"
                )
        self._progress("processes", len(ready), len(ready))
        self._report_loading()
        return ready

    def _report_loading(self) -> None:
        """Report what all workers together have loaded; nothing where none loads."""
        said = [child.loading() for child in self._children.values()]
        loads = [load for load in said if load is not None]
        if loads:
            done, total = (sum(figures) for figures in zip(*loads, strict=True))
            self._progress("loading", done, total)

    def _raise_failure(self) -> None:
        for name, child in self._children.items():
            reason = child.failure()
            if reason is not None:
                raise LaunchError(f"{name}: {reason}")

    def _news(self, supervisor: Supervisor) -> list[Event]:
        """Return what has been ordered, and what has happened to the processes, since the last look."""
        news: list[Event] = [*self._orders.take()]
        for name, child in list(self._children.items()):
            why = child.failure()
            if why is None and supervisor.state(name) is SlotState.STARTING:
                try:
                    up = child.started_within(0.0)
                except LaunchError as error:
                    why = str(error).removeprefix(f"{name}: ")
                else:
                    if up is not None:
                        self._ready = {**self._ready, name: up}
                        news.append(Up(up))
            if why is not None:
                news.append(ProcessEnded(name, why, child.left()))
            elif self._specs[name].kind == "router" and supervisor.state(name) is SlotState.UP:
                verdicts = child.condemned()
                news.append(RouterProbed(name, verdicts is not None))
                news += [Accused(v.name, v.incarnation, v.why) for v in verdicts or ()]
        return [*news, TimePassed()]

    def _carry_out(self, commands: list[Command]) -> None:
        """Do what the supervisor decided. Raises LaunchError where it gave up."""
        for command in commands:
            match command:
                case Discard(name):
                    child = self._children.pop(name, None)
                    why = None if child is None else child.failure()
                    level = logging.INFO if child is not None and child.left() else logging.WARNING
                    log.log(level, "%s is gone: %s", name, why or self._cause(name))
                    if child is not None:
                        child.stop(0.0)
                    if self._supervisor is not None and name not in self._supervisor:
                        self._ready = {n: up for n, up in self._ready.items() if n != name}
                case AskToLeave(name, grace_s):
                    log.info("%s is asked to leave", name)
                    self._ask_to_leave(name, grace_s)
                case KillProcess(name, why):
                    log.error("%s is killed: %s", name, why)
                    self._children[name].kill()
                case Launch(name):
                    self._launch_again(name)
                case Announce(prefill, decode, routers):
                    for name in self._supervisor.routers() if self._supervisor is not None else ():
                        self._tell_router(name, list(prefill), list(decode), list(routers))
                case Refuse(order, why):
                    self._orders.refuse(order, why)
                case EndCluster(reason):
                    raise LaunchError(reason)

    def _cause(self, name: str) -> str:
        """Return why a process is taken away that has not ended by itself."""
        known = [slot.why for slot in self.slots() if slot.name == name]
        return known[0] if known and known[0] else "it was asked to leave"

    def _launch_again(self, name: str) -> None:
        spec = self._specs.get(name) or self._another(name)
        self._specs = {**self._specs, name: spec}
        try:
            self._children[name] = self._launched(_again(spec, self._ready.get(name)))
        except LaunchError as error:
            self._has_ended(name, error)

    def _another(self, name: str) -> ChildSpec:
        """Return the spec of a worker that its pool has not had before: that of any other, under its own name."""
        assert self._supervisor is not None
        return msgspec.structs.replace(self._kinds[self._supervisor.kind(name)], name=name)

    def _ask_to_leave(self, name: str, grace_s: float) -> None:
        try:
            self._children[name].leave(grace_s)
        except LaunchError as error:  # it has died; that it has is seen by the next look
            log.info("%s: %s", name, error)

    def _tell_router(
        self, name: str, prefill: list[PeerAddress], decode: list[PeerAddress], routers: list[PeerAddress]
    ) -> None:
        """Announce the workers to a router, and to one of several all routers. One that cannot be told is treated as
        dead."""
        try:
            if len(routers) > 1:
                self._children[name].set_routers(routers)
            self._children[name].set_workers(prefill, decode)
        except LaunchError as error:
            self._has_ended(name, error)

    def _has_ended(self, name: str, error: LaunchError) -> None:
        assert self._supervisor is not None
        why = str(error).removeprefix(f"{name}: ")
        self._carry_out(self._supervisor.handle(ProcessEnded(name, why), time.monotonic()))


def check_size(kind: Kind, count: int) -> None:
    """Raises LaunchError for a pool that cannot have `count` workers, whoever asks for them."""
    if kind == "router" or count < (kind == "decode"):
        raise LaunchError(f"the decode pool has at least one worker: {kind}={count} is not possible")
    if (reason := problem(f"{kind}_workers", count)) is not None:
        raise LaunchError(f"{kind}: {reason}")


def _again(spec: ChildSpec, was: ChildReady | None) -> ChildSpec:
    """Return the spec of a slot's next process: of a router, on the ports that it had, where its clients look."""
    if spec.kind != "router" or was is None:
        return spec
    ports = {"grpc_port": _port(was.address)}
    if was.http:
        ports["http_port"] = _port(was.http)
    if was.own:
        ports["own_port"] = _port(was.own)
    return msgspec.structs.replace(spec, config={**spec.config, **ports})


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _stop_all(children: list[Child], grace_s: float) -> None:
    if children:
        with ThreadPoolExecutor(len(children), thread_name_prefix="stop") as pool:
            list(pool.map(lambda child: child.stop(grace_s), children))
