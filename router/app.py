"""Puts the router together on the running event loop: fronts, core, links to workers."""

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from access.authenticator import Authenticator
from access.config import check_exposed
from access.internal import internal_certificates
from access.limits import TenantLimits
from access.tls import ServerCertificates, ends_s
from engine.handshake import Secrets
from engine.messages import PeerAddress, TenantsTold
from engine.types import Incarnation, host_port
from router.config import RouterConfig
from router.core.core import Router
from router.core.decisions import RecordedPolicy, RepeatablePolicy
from router.core.policies import make_policy
from router.core.policy import RoutingPolicy
from router.decision_log import DecisionLog
from router.descriptors import connections_now, grpc_options
from router.dispatch import Links
from router.front.api import ModelFacts
from router.front.frontend import Frontend
from router.front.output import ServedModel
from router.grpc.service import Service, check_vllm
from router.hub import Hub
from router.idle_check import IdleCheck
from router.roster import ScrapeTarget
from router.shadows import ShadowPolicy
from router.status.journal import RouterJournal
from router.status.observer import Observer
from router.status.overview import Overview, overview
from router.status.traffic import Traffic, traffic
from telemetry.router_metrics import WorkerView
from telemetry.tracing import unix_offset_s

TICK_S = 0.05
LISTEN_BACKLOG = 4096


class RouterAddresses(msgspec.Struct, frozen=True):
    """host:port of each front; `http` is empty if it is off, and begins with https:// where it has TLS."""

    grpc: str
    http: str
    own: str = ""
    """Where this router alone serves HTTP, if it shares the others' ports with other routers."""


class RouterApp:
    """Lives on one event loop: `start`, `set_workers`, and `stop`, which may follow a failed start. Fulfils
    `router.http.routes.ServerState`."""

    def __init__(
        self,
        config: RouterConfig,
        text: ServedModel,
        observer: Observer,
        secrets: Secrets,
        journal: RouterJournal | None = None,
        fingerprint: str = "",
    ) -> None:
        """`secrets` are what workers must have, `fingerprint` is that of the model whose text side this is: others are
        refused. Raises AccessError where `config.access` cannot be used, or its host may not be listened on, and
        ValueError for an unknown policy, and for a protocol whose messages are not installed."""
        check_vllm(config.vllm_protocol)
        check_exposed(config.host, config.access, "the router")
        clock = time.monotonic
        self._model = text.name
        self._config = config
        started_ms = time.time_ns() // 1_000_000
        policy: RoutingPolicy = make_policy(config.policy, config.seed)
        self._listeners = _listeners(config, observer)
        if self._listeners:
            policy = RecordedPolicy(config.policy, config.seed, [listener.put for listener in self._listeners])
        core = Router(config, policy, text.stop_ids, started_ms)
        self.hub = Hub(core, clock, observer, journal)
        incarnation = Incarnation(int.from_bytes(os.urandom(8), "little"))
        internal = self._internal = internal_certificates(config.access)
        self._links = Links(self.hub, incarnation, secrets, fingerprint, config.name, internal)
        self._authenticator = Authenticator(config.access)
        self._certificates = ServerCertificates(config.access.front_files) if config.access.has_tls else None
        self._limits = TenantLimits(self._authenticator.tenant, config.retry_after_s)
        self.hub.hear_siblings_with(self._hear_sibling)
        self._told, self._is_stopping = 0, False
        self._frontend = Frontend(text, self.hub, config, clock, observer, self._limits)
        self._service = Service(
            self._frontend,
            self.hub.ready,
            self._authenticator,
            self._certificates,
            has_vllm=config.vllm_protocol,
            bodies_bytes=config.limits.bodies_bytes,
        )
        self._observer = observer
        self._pages = ThreadPoolExecutor(1, thread_name_prefix="metrics page")
        self._https: list[_Http] = []
        """The front, and where it has siblings, the same on a port of its own."""
        self._idle_check = IdleCheck(core, clock)
        self._ticking: asyncio.Task[None] | None = None
        self.ticked_s = clock()
        """The time of the loop's latest tick. May be read from any thread."""

    def certificate_ends_s(self) -> Mapping[str, float]:
        """May be called from any thread; see `access.tls.ends_s`."""
        return ends_s(self._certificates, self._internal)

    async def start(self) -> RouterAddresses:
        """Listen on both fronts. Raises OSError if an address cannot be bound."""
        config = self._config
        ports = [config.http_port] if config.http_port >= 0 else []
        is_shared = config.own_port >= 0
        if ports and is_shared:
            ports.append(config.own_port)
        limits = config.limits
        grpc, *of_http = connections_now(
            [limits.grpc_connections or limits.connections, *(limits.connections for _ in ports)]
        )
        if ports:
            from router.http.browsers import BrowserGuard
            from router.http.gate import HttpGate, with_cors
            from router.http.routes import build_app

            inner = build_app(self._frontend, self, limits.bodies_bytes, chat_page=config.chat_page)
            guarded = BrowserGuard(HttpGate(inner, self._authenticator), config.host)
            app = with_cors(guarded, config.cors_origins)
            self._https = [
                _Http(config, port, app, connections, self._certificates, is_shared=is_shared and not at)
                for at, (port, connections) in enumerate(zip(ports, of_http, strict=True))
            ]
        options = grpc_options(limits, grpc)
        port = await self._service.start(
            config.host,
            config.grpc_port,
            config.max_message_bytes,
            options,
            calls_per_address=limits.calls_per_address,
            is_shared=is_shared,
        )
        self._ticking = asyncio.create_task(self._tick(), name="router tick")
        http, own, *_ = [*[await one.start() for one in self._https], "", ""]
        return RouterAddresses(host_port(config.host, port), http, own)

    def set_routers(self, routers: Sequence[PeerAddress]) -> None:
        """Name all routers that serve behind the same ports, this one among them, by where each serves alone."""
        self.hub.roster.routers = {peer.name: int(peer.address.rpartition(":")[2]) for peer in routers}

    async def set_workers(self, prefill: Sequence[PeerAddress], decode: Sequence[PeerAddress]) -> None:
        await self._links.set_workers(prefill, decode)

    def ready(self) -> bool:
        """True while a decode worker is alive, and a prefill worker if there is to be any."""
        return self.hub.ready()

    def models(self) -> list[str]:
        return list(self._frontend.names)

    def model_facts(self) -> ModelFacts:
        model = self._frontend.model
        return ModelFacts(model.name, model.context_tokens, self._frontend.sampling)

    async def metrics_text(self) -> bytes:
        now = self.hub.observe()
        # A page of some hundred lines, or with many workers some thousand: on the loop, every stream would wait for it;
        # in a thread that others use, it would wait for their work.
        return await asyncio.get_running_loop().run_in_executor(self._pages, self._page, *now)

    def _page(self, waiting: int, running: int, workers: Sequence[WorkerView]) -> bytes:
        self._observer.cluster(waiting, running, workers)
        return self._observer.render()

    def targets(self, router_address: str, host: str) -> list[ScrapeTarget]:
        port = self._config.supervisor_metrics_port
        siblings = {name: host_port(host, own) for name, own in self.hub.roster.routers.items()}
        return self.hub.roster.targets(siblings or router_address, host_port(host, port) if port else "")

    async def overview(self) -> Overview:
        return overview(self.hub, self._model, (self._config.slo_ttft_s, self._config.slo_itl_s), time.monotonic())

    async def traffic(self) -> Traffic:
        config, hub = self._config, self.hub
        shapes = hub.journal.traffic.shapes
        limits = config.slo_ttft_s, config.slo_itl_s
        return traffic(shapes, hub.core.registry, config.local_prefill, *limits, time.monotonic())

    async def run(self, stopping: asyncio.Event) -> None:
        """Return once `stopping` is set; raises what ended the router, if it failed."""
        assert self._ticking is not None
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait({stopped, self._ticking}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if self._ticking.done():
            self._ticking.result()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, give those under way `grace_s`, then end them."""
        self._is_stopping = True
        if self.hub.has_siblings():
            self._tell_siblings(time.monotonic())
        await asyncio.gather(self._service.stop(grace_s), *(http.stop(grace_s) for http in self._https))
        if self._ticking is not None:
            self._ticking.cancel()
        await self._links.close()
        self._frontend.close()
        for listener in self._listeners:
            await asyncio.to_thread(listener.close)
        self._pages.shutdown(wait=False, cancel_futures=True)

    async def _tick(self) -> None:
        """Watch deadlines, resume windows and health; a broken invariant ends the router."""
        while True:
            asleep_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.ticked_s = time.monotonic()
            self._observer.lag(max(0.0, self.ticked_s - asleep_s - TICK_S))
            self.hub.tick()
            self._frontend.tick()
            self._limits.tick(self.ticked_s)
            if self.hub.has_siblings():
                self._tell_siblings(self.ticked_s)
            await self._service.update_health()
            self._idle_check.tick(self.ticked_s)

    def _tell_siblings(self, now: float) -> None:
        news = self._limits.news(now)
        epoch, lines = self.hub.core.lines(now, is_stopping=self._is_stopping)
        if news is None and not lines:
            return
        if not self._told and (self._limits.has_spent or self.hub.core.has_charged):
            self._told = 1  # it was alone until now: its first report is none of a router that has just begun
        self._told += 1
        self._links.tell_siblings(TenantsTold(self._told, news or {}, lines=lines, epoch=epoch))

    def _hear_sibling(self, told: TenantsTold, now: float) -> None:
        self._limits.elsewhere.heard(told.router, told.incarnation, told.number, told.uses, now)


def _listeners(config: RouterConfig, observer: Observer) -> list[DecisionLog | ShadowPolicy]:
    """Return who is told of every decision, each with a thread of its own. Raises ValueError for an unknown policy."""
    shadows = [RepeatablePolicy(name, config.seed) for name in dict.fromkeys(config.shadow_policies)]
    listeners: list[DecisionLog | ShadowPolicy] = [ShadowPolicy(shadow, observer.shadowed) for shadow in shadows]
    if config.decision_log:
        most_bytes = config.decision_log_bytes
        listeners.append(DecisionLog(config.decision_log, most_bytes, unix_offset_s(), observer.logged))
    return listeners


class _Http:
    """Runs uvicorn inside this event loop."""

    def __init__(
        self,
        config: RouterConfig,
        port: int,
        app: Any,
        connections: int,
        certificates: ServerCertificates | None,
        *,
        is_shared: bool,
    ) -> None:
        # Imported here, because a router without the HTTP front needs no HTTP server.
        import uvicorn

        from router.http.protocol import SharedFront

        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # By name, since asyncio sends small writes at once only on sockets that say they are TCP: a token would wait
        # for the client's delayed acknowledgement of the one before, some 40 ms.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if is_shared else socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((config.host, port))
        except OSError as error:
            self._socket.close()
            where = host_port(config.host, port)
            raise OSError(f"cannot listen on {where} for HTTP: {error}") from error
        self._address = host_port(config.host, self._socket.getsockname()[1])
        context = None
        if certificates is not None:
            self._address = f"https://{self._address}"
            # A probe has no certificate: the gate refuses who shows none, but for the paths that probes ask.
            context = certificates.context(lets_in=True)
        self._settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            # A page that a browser takes for ours could write them, and say that it came over TLS.
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        self._shared = SharedFront(config.limits, connections)
        self._shared.install(self._settings, context)
        self._server = uvicorn.Server(self._settings)

    async def start(self) -> str:
        self._settings.load()
        self._server.lifespan = self._settings.lifespan_class(self._settings)
        await self._server.startup(sockets=[self._socket])
        # Few are accepted at a time, but many may wait for it.
        self._socket.listen(LISTEN_BACKLOG)
        self._loop = asyncio.create_task(self._server.main_loop(), name="router http")
        return self._address

    async def stop(self, grace_s: float) -> None:
        self._settings.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        self._shared.close()
        if hasattr(self, "_loop"):
            await self._loop
            await self._server.shutdown(sockets=[self._socket])
        self._socket.close()
