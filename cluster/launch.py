"""A cluster's life: prepare the model, start workers and router, watch them, stop everything.

The order is the same for every launcher. Workers and router start at the same time, and the router
learns its workers once they are up. While the cluster is watched, whoever dies is replaced as
`cluster.supervisor` decides, the router on the ports that it had; a death during the start ends the
cluster with the reason.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from cluster.config import ClusterConfig, with_model_dir
from cluster.hosting import prepared
from cluster.placement import RayConfig
from cluster.signals import check, shielded
from cluster.spec import FACTORIES, Child, ChildReady, ChildSpec, Launcher, LaunchError, ModelSource
from cluster.supervisor import (
    Accused,
    Announce,
    Asked,
    AskToLeave,
    Command,
    Discard,
    Ended,
    Event,
    GiveUp,
    Kill,
    Launch,
    Leave,
    State,
    Supervisor,
    Tick,
    Up,
)
from engine.messages import PeerAddress

POLL_S = 0.05
WATCH_S = 0.1

log = logging.getLogger(__name__)


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a running cluster is reached. `http` is empty without an HTTP front."""

    grpc: str
    http: str
    workers: tuple[ChildReady, ...]


def make_launcher(name: str, ray: RayConfig | None = None) -> Launcher:
    """The launcher of that name; Ray is imported only if it is asked for."""
    if name == "process":
        from cluster.process_launcher import ProcessLauncher

        return ProcessLauncher()
    if ray is not None and ray.address != "local":
        from cluster.ray_cluster import RayClusterLauncher

        return RayClusterLauncher(ray)
    from cluster.ray_launcher import RayLauncher

    return RayLauncher()


def model_source(config: ClusterConfig) -> ModelSource:
    """The model as the configuration names it."""
    return ModelSource(
        model=config.model, cache_dir=config.cache_dir, dtype=config.prefill.engine.dtype
    )


def prepare_model(config: ClusterConfig) -> str:
    """Convert the model unless the cache has it; the prepared folder. Raises engine's ModelError."""
    return prepared(model_source(config))


def specs(
    config: ClusterConfig,
    model_dir: str,
    factories: Mapping[str, str] = FACTORIES,
    source: ModelSource | None = None,
) -> list[ChildSpec]:
    """The processes of a cluster, the router last. `source`: where other hosts get `model_dir` from."""
    prefill = msgspec.structs.replace(
        config.prefill, engine=with_model_dir(config.prefill.engine, model_dir)
    )
    decode = msgspec.structs.replace(
        config.decode, engine=with_model_dir(config.decode.engine, model_dir)
    )

    def spec(kind: str, name: str, part: msgspec.Struct, threads: int) -> ChildSpec:
        return msgspec.convert(
            {
                "kind": kind,
                "name": name,
                "factory": factories[kind],
                "config": msgspec.to_builtins(part),
                "host": config.worker_host,
                "model_dir": model_dir,
                "source": source,
                "threads": threads,
                "log_level": config.log_level,
                "log_json": config.log_json,
            },
            ChildSpec,
        )

    return [
        *(
            spec("prefill", f"prefill-{slot}", prefill, prefill.engine.threads)
            for slot in range(config.prefill_workers)
        ),
        *(
            spec("decode", f"decode-{slot}", decode, decode.engine.threads)
            for slot in range(config.decode_workers)
        ),
        spec("router", "router", config.router, 1),
    ]


class Cluster:
    """One router and its workers, started together and stopped together. Use it as a context manager."""

    def __init__(
        self,
        config: ClusterConfig,
        launcher: Launcher,
        factories: Mapping[str, str] = FACTORIES,
        model_dir: str = "",
    ) -> None:
        """`model_dir`, when given, is a prepared model; otherwise `start` prepares `config.model`."""
        self._config = config
        self._launcher = launcher
        self._factories = factories
        self._model_dir = model_dir
        # Mutable state, owned by the thread that starts, watches and stops in turn.
        self._children: dict[str, Child] = {}
        self._ready: dict[str, ChildReady] = {}
        self._specs: dict[str, ChildSpec] = {}
        self._supervisor: Supervisor | None = None
        self._opened = False
        self._orders: queue.SimpleQueue[tuple[Leave, Future[None]]] = queue.SimpleQueue()
        self._awaited: list[Future[None]] = []
        self._unwatched = ""
        """Why the last watch ended; empty before the first one, and while there is one."""

    @property
    def workers(self) -> dict[str, ChildReady]:
        """The latest process of every worker by name, dead or alive. May be read from any thread."""
        return {name: up for name, up in self._ready.items() if self._specs[name].kind != "router"}

    @property
    def router(self) -> ChildReady:
        """The latest process of the router, dead or alive. May be read from any thread."""
        return next(up for name, up in self._ready.items() if self._specs[name].kind == "router")

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
            prepared = pool.submit(lambda: self._model_dir or prepare_model(self._config))
            self._opened = True
            self._launcher.open()
            model_dir = prepared.result()
        check()
        source = None if self._model_dir else model_source(self._config)
        self._specs = {s.name: s for s in specs(self._config, model_dir, self._factories, source)}
        for name, spec in self._specs.items():
            self._children[name] = self._launcher.launch(spec)
        self._ready = self._wait_started(deadline_s)
        *workers, router = self._children.values()
        self._supervisor = Supervisor(
            self._config.restart,
            self._config.start_timeout_s,
            {name: (spec.kind, self._ready[name]) for name, spec in self._specs.items()},
        )
        self._carry_out([self._supervisor.announcement()])
        while not router.ready():
            check()
            self._raise_failure()
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"the router saw no full set of workers in {self._config.start_timeout_s:.0f} s"
                )
            time.sleep(POLL_S)
        front = self._ready[router.spec.name]
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
        self._unwatched, why = "", "nobody watches the cluster any more"
        try:
            while not stop.wait(WATCH_S):
                with shielded():
                    for event in self._news(supervisor):
                        self._carry_out(supervisor.handle(event, time.monotonic()))
                    if supervisor.is_steady:
                        while self._awaited:
                            self._awaited.pop().set_result(None)
        except LaunchError as error:
            why = str(error)
            raise
        finally:
            self._unwatched = why
            self._end_orders()
            while self._awaited:
                self._awaited.pop().set_exception(LaunchError(why))

    def roll(self, timeout_s: float | None = None) -> None:
        """Replace every worker, one after the other, while the cluster serves; requests are finished or moved. Blocks
        while another thread watches. Raises LaunchError if that takes over `timeout_s`, or the watch ends before."""
        self._order(tuple(self.workers), again=True, timeout_s=timeout_s)

    def drain(self, name: str, timeout_s: float | None = None) -> None:
        """Take one worker away for good, as `roll` does. Raises LaunchError also where there is none of that name."""
        if name not in self.workers:
            raise LaunchError(f"there is no worker {name}")
        self._order((name,), again=False, timeout_s=timeout_s)

    def _order(self, names: tuple[str, ...], *, again: bool, timeout_s: float | None) -> None:
        done: Future[None] = Future()
        self._orders.put((Leave(names, self._config.leave_grace_s, again), done))
        if self._unwatched:
            self._end_orders()
        try:
            done.result(timeout_s)
        except TimeoutError as error:
            raise LaunchError(f"{', '.join(names)}: not left in {timeout_s:.0f} s") from error

    def _end_orders(self) -> None:
        """Nobody will carry out what has been ordered: say so to those who wait. From any thread."""
        while True:
            try:
                _, done = self._orders.get_nowait()
            except queue.Empty:
                return
            done.set_exception(LaunchError(self._unwatched))

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
            if opened:
                self._launcher.close()

    def _wait_started(self, deadline_s: float) -> dict[str, ChildReady]:
        """The first failure ends the wait, whoever else is still starting."""
        ready: dict[str, ChildReady] = {}
        waiting = dict(self._children)
        while waiting:
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
        return ready

    def _raise_failure(self) -> None:
        for name, child in self._children.items():
            reason = child.failure()
            if reason is not None:
                raise LaunchError(f"{name}: {reason}")

    def _news(self, supervisor: Supervisor) -> list[Event]:
        """What has been ordered, and has happened to the processes, since the last look."""
        news: list[Event] = []
        while not self._orders.empty():
            order, done = self._orders.get()
            news.append(order)
            self._awaited.append(done)
        for name, child in list(self._children.items()):
            why = child.failure()
            if why is None and supervisor.state(name) is State.STARTING:
                try:
                    up = child.started_within(0.0)
                except LaunchError as error:
                    why = str(error).removeprefix(f"{name}: ")
                else:
                    if up is not None:
                        self._ready = {**self._ready, name: up}
                        news.append(Up(up))
            if why is not None:
                news.append(Ended(name, why, child.left()))
            elif self._specs[name].kind == "router" and supervisor.state(name) is State.UP:
                verdicts = child.condemned()
                news.append(Asked(name, verdicts is not None))
                news += [Accused(v.name, v.incarnation, v.why) for v in verdicts or ()]
        return [*news, Tick()]

    def _carry_out(self, commands: list[Command]) -> None:
        """Do what the supervisor decided. Raises LaunchError where it gave up."""
        for command in commands:
            match command:
                case Discard(name):
                    log.warning("%s is gone", name)
                    if name in self._children:
                        self._children.pop(name).stop(0.0)
                    if self._supervisor is not None and name not in self._supervisor:
                        self._ready = {n: up for n, up in self._ready.items() if n != name}
                case AskToLeave(name, grace_s):
                    log.info("%s is asked to leave", name)
                    self._ask_to_leave(name, grace_s)
                case Kill(name, why):
                    log.error("%s is killed: %s", name, why)
                    self._children[name].kill()
                case Launch(name):
                    self._launch_again(name)
                case Announce(prefill, decode):
                    self._tell_router(list(prefill), list(decode))
                case GiveUp(reason):
                    raise LaunchError(reason)

    def _launch_again(self, name: str) -> None:
        try:
            self._children[name] = self._launcher.launch(_again(self._specs[name], self._ready[name]))
        except LaunchError as error:
            self._has_ended(name, error)

    def _ask_to_leave(self, name: str, grace_s: float) -> None:
        try:
            self._children[name].leave(grace_s)
        except LaunchError as error:  # it has died; that it has is seen by the next look
            log.info("%s: %s", name, error)

    def _tell_router(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        """One that cannot be told is as good as dead."""
        name = self.router.name
        try:
            self._children[name].set_workers(prefill, decode)
        except LaunchError as error:
            self._has_ended(name, error)

    def _has_ended(self, name: str, error: LaunchError) -> None:
        assert self._supervisor is not None
        why = str(error).removeprefix(f"{name}: ")
        self._carry_out(self._supervisor.handle(Ended(name, why), time.monotonic()))


def _again(spec: ChildSpec, was: ChildReady) -> ChildSpec:
    """The same once more: of a router, on the ports that it had, where its clients look for it."""
    if spec.kind != "router":
        return spec
    ports = {"grpc_port": _port(was.address)}
    if was.http:
        ports["http_port"] = _port(was.http)
    return msgspec.structs.replace(spec, config={**spec.config, **ports})


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _stop_all(children: list[Child], grace_s: float) -> None:
    if children:
        with ThreadPoolExecutor(len(children), thread_name_prefix="stop") as pool:
            list(pool.map(lambda child: child.stop(grace_s), children))
