"""A cluster's life: prepare the model, start workers and router, watch them, stop everything.

The order is the same for every launcher. Workers and router start at the same time, and the router
learns its workers once they are up. Nobody is restarted here: when one process dies, the cluster
ends with the reason.
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from cluster.config import ClusterConfig, with_model_dir
from cluster.spec import FACTORIES, Child, ChildReady, ChildSpec, Launcher, LaunchError
from engine.messages import PeerAddress

POLL_S = 0.05
WATCH_S = 0.5


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a running cluster is reached. `http` is empty without an HTTP front."""

    grpc: str
    http: str
    workers: tuple[ChildReady, ...]


def make_launcher(name: str) -> Launcher:
    """The launcher of that name; Ray is imported only if it is asked for."""
    if name == "process":
        from cluster.process_launcher import ProcessLauncher

        return ProcessLauncher()
    from cluster.ray_launcher import RayLauncher

    return RayLauncher()


def prepare_model(config: ClusterConfig) -> str:
    """Convert the model unless the cache has it; the prepared folder. Raises engine's ModelError."""
    from engine.model.cache import prepare

    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else None
    return str(prepare(config.model or None, cache_dir, config.prefill.engine.dtype))


def specs(
    config: ClusterConfig, model_dir: str, factories: Mapping[str, str] = FACTORIES
) -> list[ChildSpec]:
    """The processes of a cluster, the router last."""
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
        self._children: list[Child] = []
        self._opened = False

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Addresses:
        """Block until the router can serve. Raises LaunchError, or ModelError about the model."""
        deadline_s = time.monotonic() + self._config.start_timeout_s
        with ThreadPoolExecutor(1, thread_name_prefix="prepare") as pool:
            prepared = pool.submit(lambda: self._model_dir or prepare_model(self._config))
            self._opened = True
            self._launcher.open()
            model_dir = prepared.result()
        for spec in specs(self._config, model_dir, self._factories):
            self._children.append(self._launcher.launch(spec))
        ready = self._wait_started(deadline_s)
        *workers, router = self._children
        peers: dict[str, list[PeerAddress]] = {"prefill": [], "decode": []}
        for worker in workers:
            up = ready[worker.spec.name]
            peers[worker.spec.kind].append(PeerAddress(up.name, up.address))
        router.set_workers(peers["prefill"], peers["decode"])
        while not router.ready():
            self._raise_failure()
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"the router saw no full set of workers in {self._config.start_timeout_s:.0f} s"
                )
            time.sleep(POLL_S)
        front = ready[router.spec.name]
        return Addresses(
            grpc=front.address,
            http=front.http,
            workers=tuple(ready[worker.spec.name] for worker in workers),
        )

    def watch(self, stop: threading.Event | None = None) -> None:
        """Block until `stop` is set. Raises LaunchError when a process ends first."""
        stop = stop or threading.Event()
        while not stop.wait(WATCH_S):
            self._raise_failure()

    def stop(self) -> None:
        """Stop the router, then the workers, then the launcher. Safe to repeat. Raises LaunchError if
        something of it is left."""
        children, self._children = self._children, []
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
        waiting = {child.spec.name: child for child in self._children}
        while waiting:
            for name, child in list(waiting.items()):
                up = child.started_within(POLL_S)
                if up is not None:
                    ready[name] = up
                    del waiting[name]
            self._raise_failure()
            if waiting and time.monotonic() > deadline_s:
                raise LaunchError(
                    f"{', '.join(waiting)}: not started in {self._config.start_timeout_s:.0f} s"
                )
        return ready

    def _raise_failure(self) -> None:
        for child in self._children:
            reason = child.failure()
            if reason is not None:
                raise LaunchError(f"{child.spec.name}: {reason}")


def _stop_all(children: list[Child], grace_s: float) -> None:
    if children:
        with ThreadPoolExecutor(len(children), thread_name_prefix="stop") as pool:
            list(pool.map(lambda child: child.stop(grace_s), children))
