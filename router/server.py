"""Runs the router in a thread with an event loop of its own, behind synchronous calls."""

import asyncio
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from engine.handshake import Secrets
from engine.messages import PeerAddress
from router.app import RouterAddresses, RouterApp
from router.config import RouterConfig
from router.core.escalation import Verdict
from router.front.output import ServedModel
from router.status.journal import RouterJournal
from router.status.observer import Observer
from router.status.overview import Overview
from router.status.traffic import Traffic
from telemetry import tracing
from telemetry.flight import Flight
from telemetry.router_metrics import RouterMetrics

CALL_TIMEOUT_S = 30.0
OVERVIEW_TIMEOUT_S = 5.0
HUNG_S = 1.0
"""The loop ticks many times a second. If it has not for this long, it hangs, or the whole process was stopped."""
ASK_AGAIN_S = 0.05

ARENAS, M_ARENA_MAX = 2, -8
"""Heaps of the C library. By itself it makes one for each of gRPC's threads, up to eight a core, which all grow to the
most that ever lay in them: a third of what a router's memory grew by."""

_libc = ctypes.CDLL(None)

log = logging.getLogger(__name__)


class RouterServer:
    """`secrets` are those that workers must have; `text` and `observer` replace the model in `model_dir` and the
    Prometheus metrics.

    `start` raises OSError if an address cannot be bound, and what loading the model raises.
    """

    def __init__(
        self,
        config: RouterConfig,
        model_dir: str,
        secrets: Secrets,
        observer: Observer | None = None,
        text: ServedModel | None = None,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._secrets = secrets
        self._observer = observer
        self._text = text
        self._started: Future[RouterAddresses] = Future()
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._app: RouterApp | None = None
        self._grace_s = 0.0
        self._journal = RouterJournal(tracing.current(), config.name)

    def start(self) -> RouterAddresses:
        """Serve; returns once both fronts listen. Workers come with `set_workers`."""
        with suppress(AttributeError):  # another C library than glibc
            _libc.mallopt(M_ARENA_MAX, ARENAS)
        self._thread.start()
        return self._started.result()

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        """Name all workers; those no longer named are left."""
        loop, app = self._running()
        change = app.set_workers(prefill, decode)
        asyncio.run_coroutine_threadsafe(change, loop).result(CALL_TIMEOUT_S)

    def set_routers(self, routers: list[PeerAddress]) -> None:
        """Name all routers that serve behind the same ports."""
        loop, app = self._running()
        loop.call_soon_threadsafe(app.set_routers, routers)

    def ready(self) -> bool:
        """True while a prefill and a decode worker are connected and alive."""
        loop, app = self._loop, self._app
        if loop is None or app is None or not self._thread.is_alive():
            return False

        async def ask() -> bool:
            return app.hub.ready()

        return asyncio.run_coroutine_threadsafe(ask(), loop).result(CALL_TIMEOUT_S)

    def condemned(self) -> tuple[Verdict, ...]:
        """Return the lives of workers that are given up; not while the router's thread hangs: who asks shall notice."""
        app = self._app
        if app is None:
            return ()
        while self._thread.is_alive() and time.monotonic() - app.ticked_s > HUNG_S:
            time.sleep(ASK_AGAIN_S)
        return app.hub.core.condemned

    def overview(self, _: str = "") -> Overview:
        """Report to operators. Raises TimeoutError while the router's loop hangs."""
        loop, app = self._running()
        return asyncio.run_coroutine_threadsafe(app.overview(), loop).result(OVERVIEW_TIMEOUT_S)

    def traffic(self, _: str = "") -> Traffic:
        """Return the shapes of the latest requests. Raises TimeoutError while the router's loop hangs."""
        loop, app = self._running()
        return asyncio.run_coroutine_threadsafe(app.traffic(), loop).result(OVERVIEW_TIMEOUT_S)

    def flights(self, request: str) -> list[Flight]:
        """Return what is remembered of a request, or of the latest ones. May be called from any thread."""
        return self._journal.recorder.told(request)

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

    def _running(self) -> tuple[asyncio.AbstractEventLoop, RouterApp]:
        if self._loop is None or self._app is None:
            raise RuntimeError("the router has not been started")
        return self._loop, self._app

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_fast_loop()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._started.done():
                self._failure = error
                log.exception("the router ended")
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        stopping = self._stopping = asyncio.Event()
        if self._text is not None:
            text, model = self._text, ""
        else:
            text, model = await asyncio.to_thread(_load, self._model_dir, self._config.chat_template)
        config = self._config
        observer = self._observer or RouterMetrics(
            text.name,
            config.name,
            policy=config.policy,
            shadows=config.shadow_policies,
            slo_ttft_s=config.slo_ttft_s,
            slo_itl_s=config.slo_itl_s,
        )
        app = self._app = RouterApp(config, text, observer, self._secrets, self._journal, model)
        if isinstance(observer, RouterMetrics):
            observer.certificates(app.certificate_ends_s)
        try:
            addresses = await app.start()
            with suppress(AttributeError):
                _libc.malloc_trim(0)  # a tokenizer is read by way of several times its size
            self._started.set_result(addresses)
            await app.run(stopping)
        finally:
            await app.stop(self._grace_s)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loops where it is installed (`pip install headrace[fast]`); None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _load(model_dir: str, template: str) -> tuple[ServedModel, str]:
    """The text side of a prepared model, with another chat template if one is named, and its fingerprint."""
    from engine.text.bundle import TextModel, fingerprint

    return TextModel.load(Path(model_dir), Path(template) if template else None), fingerprint(Path(model_dir))
