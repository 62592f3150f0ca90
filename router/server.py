"""The router as a process part: everything of `router/` put together on one event loop in a thread.

From outside it is synchronous: start, set_workers, ready, wait, stop.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import msgspec

from engine.messages import PeerAddress
from router.config import RouterConfig
from router.core import Router
from router.dispatch import Links
from router.frontend import Frontend, TextModel
from router.hub import Hub
from router.observer import Observer
from router.policy import make_policy
from router.service import Service
from telemetry.metrics import RouterMetrics

TICK_S = 0.05
CALL_TIMEOUT_S = 30.0

AppFactory = Callable[[Frontend, "ServerState"], Any]
"""Makes the HTTP front, an ASGI application; `router.http.build_app` by default."""

log = logging.getLogger(__name__)


class RouterAddresses(msgspec.Struct, frozen=True):
    """host:port of each front; `http` is empty if it is off."""

    grpc: str
    http: str


class ServerState:
    """What the HTTP front reports besides answers."""

    def __init__(self, hub: Hub, text: TextModel, observer: Observer) -> None:
        self._hub = hub
        self._text = text
        self._observer = observer

    def ready(self) -> bool:
        return self._hub.ready()

    def models(self) -> list[str]:
        return [self._text.name]

    def metrics_text(self) -> bytes:
        return self._observer.render()


class RouterServer:
    """`text` and `observer` replace the model in `model_dir` and the Prometheus metrics.

    `start` raises OSError if an address cannot be bound, and what loading the model raises.
    """

    def __init__(
        self,
        config: RouterConfig,
        model_dir: str,
        app_factory: AppFactory | None = None,
        observer: Observer | None = None,
        text: TextModel | None = None,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._app_factory = app_factory
        self._observer = observer
        self._text = text
        self._started: Future[RouterAddresses] = Future()
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._hub: Hub | None = None
        self._links: Links | None = None
        self._grace_s = 0.0

    def start(self) -> RouterAddresses:
        """Serve; returns once both fronts listen. Workers come with `set_workers`."""
        self._thread.start()
        return self._started.result()

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        """Name all workers; those no longer named are left."""
        loop, links = self._loop, self._links
        if loop is None or links is None:
            raise RuntimeError("the router has not been started")
        change = links.set_workers(prefill, decode)
        asyncio.run_coroutine_threadsafe(change, loop).result(CALL_TIMEOUT_S)

    def ready(self) -> bool:
        """Whether a prefill and a decode worker are connected and alive."""
        loop, hub = self._loop, self._hub
        if loop is None or hub is None or not self._thread.is_alive():
            return False

        async def ask() -> bool:
            return hub.ready()

        return asyncio.run_coroutine_threadsafe(ask(), loop).result(CALL_TIMEOUT_S)

    def wait(self) -> None:
        """Block until stopped; raises what ended the router, if it failed."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new requests, give those under way `grace_s`, then end; may be called twice."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and self._thread.is_alive():
            self._grace_s = grace_s
            try:
                loop.call_soon_threadsafe(stopping.set)
            except RuntimeError:
                log.debug("the router's loop has just closed")
        if self._thread.is_alive():
            self._thread.join(grace_s + CALL_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                self._failure = error
                log.exception("the router ended")
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        config = self._config
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        text = self._text
        if text is None:
            text = await asyncio.to_thread(_load, self._model_dir)
        observer = self._observer or RouterMetrics(text.name)
        clock = time.monotonic
        core = Router(config, make_policy(config.policy, config.seed))
        hub = self._hub = Hub(core, clock, observer)
        links = self._links = Links(hub)
        frontend = Frontend(text, hub, config, clock, observer)
        service = Service(frontend, hub.ready)
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.so_reuseport", 0),
            ]
        )
        service.register(server)
        try:
            port = server.add_insecure_port(f"{config.host}:{config.grpc_port}")
        except RuntimeError as error:
            where = f"{config.host}:{config.grpc_port}"
            raise OSError(f"cannot listen on {where} for gRPC: {error}") from error
        http = None
        if config.http_port >= 0:
            http = _Http(config, self._make_app(frontend, ServerState(hub, text, observer)))
        await server.start()
        ticking = asyncio.create_task(_tick(hub, service), name="router tick")
        try:
            http_address = await http.start() if http is not None else ""
            self._started.set_result(RouterAddresses(f"{config.host}:{port}", http_address))
            stopped = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({stopped, ticking}, return_when=asyncio.FIRST_COMPLETED)
            if ticking.done():
                ticking.result()
        finally:
            ticking.cancel()
            if http is not None:
                await http.stop(self._grace_s)
            await server.stop(self._grace_s)
            await links.close()

    def _make_app(self, frontend: Frontend, state: ServerState) -> Any:
        if self._app_factory is not None:
            return self._app_factory(frontend, state)
        from router.http import build_app

        return build_app(frontend, state)


class _Http:
    """uvicorn inside this event loop."""

    def __init__(self, config: RouterConfig, app: Any) -> None:
        # Imported here, because a router without the HTTP front needs no HTTP server.
        import uvicorn

        self._socket = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((config.host, config.http_port))
        except OSError as error:
            self._socket.close()
            where = f"{config.host}:{config.http_port}"
            raise OSError(f"cannot listen on {where} for HTTP: {error}") from error
        self._address = f"{config.host}:{self._socket.getsockname()[1]}"
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(settings)
        self._settings = settings

    async def start(self) -> str:
        self._settings.load()
        self._server.lifespan = self._settings.lifespan_class(self._settings)
        await self._server.startup(sockets=[self._socket])
        self._loop = asyncio.create_task(self._server.main_loop(), name="router http")
        return self._address

    async def stop(self, grace_s: float) -> None:
        self._settings.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        if hasattr(self, "_loop"):
            await self._loop
            await self._server.shutdown(sockets=[self._socket])
        self._socket.close()


def _load(model_dir: str) -> TextModel:
    from engine.text.bundle import TextModel as Bundle

    return Bundle.load(Path(model_dir))


async def _tick(hub: Hub, service: Service) -> None:
    """Deadlines and health; a broken invariant ends the router."""
    idle_s = 0.0
    while True:
        await asyncio.sleep(TICK_S)
        hub.tick()
        await service.update_health()
        idle_s = 0.0 if hub.core.open else idle_s + TICK_S
        if idle_s >= 10.0:
            hub.core.check()
            idle_s = 0.0
