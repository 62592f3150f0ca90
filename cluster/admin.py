"""The admin surface: what operators ask of a running cluster, as HTTP with JSON on a Unix socket (docs/operations.md).

    GET  /status              Status
    GET  /overview            router.status.overview.Overview, asked of every router
    GET  /traffic             router.status.traffic.Traffic, asked of every router
    GET  /flights?request=R   the timelines of a request, or of the latest, of every process
    GET  /config              every setting with its value and origin; secrets as set or not
    POST /drain               Drain    answered when the worker has left
    POST /scale               Scale    answered when the pools have their sizes
    POST /rotate              answered when every process has a new secret, or what its file says now
    POST /down                answered at once; the supervisor then stops everything

Both sides prove with every word that they have the cluster's secret (`cluster.admin_proof`), which the run folder keeps
for the verbs. Errors are `{"error": text}`: 400 for what cannot be asked, 401 for whoever does not have the secret, 409
for what could not be done, 413 for what is too long.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.admin_proof import CODE_HEADER, NONCE_HEADER, RequestCheck, answer_code
from cluster.config import ConfigError
from cluster.processes.launch import Addresses, Cluster, check_size
from cluster.processes.leftovers import descendants
from cluster.processes.spec import Kind, LaunchError, OrderLateError
from cluster.resolve import Setting
from cluster.rundir import ProcessIdentity, RunDir
from engine.messages import RankUse, guarded
from router.config import FrontLimits
from router.status.overview import Overview, merged
from router.status.traffic import Traffic, together
from telemetry.flight import Flight

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_BODY_BYTES = 64 << 10
CONNECTIONS = 64
"""Operators' connections; the one that has said nothing for longest goes when there is another."""
ORDERS = 16
"""Orders under way at once. Each keeps one of the server's threads, of which there are 40, until it is done, though its
caller may have gone; the others are for questions, and for `down`."""
ASKED_AT_ONCE = 16
"""Processes that one question is put to at once: one that hangs is given up after ten seconds."""
NOTE_S = 0.5
"""How often the list of processes is brought up to date."""
ALIVE = ("up", "leaving")
"""States of slots whose latest process runs."""


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator is told of one slot. `state`: starting, up, leaving, pausing (waits for its next start) or
    failed. `pid` is that of the latest process, 0 before the first; `why` is the cause of its last death; `ranks` are
    the processes of a tensor-parallel worker that is there, this one first."""

    name: str
    kind: Kind
    state: str
    pid: int = 0
    address: str = ""
    incarnation: str = ""
    deaths: int = 0
    why: str = ""
    ranks: list[RankUse] = []


class Status(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: Literal["starting", "running", "stopping"]
    pid: int
    launcher: str
    model: str
    up_s: float
    grpc: str = ""
    http: str = ""
    processes: list[ProcessStatus] = []


LONGEST_WAIT_S = 30 * 24 * 3600.0
"""How long an order may ask to be waited for."""
Patience = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_WAIT_S)]


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    worker: str
    replace: bool = False
    timeout_s: Patience | None = None


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes that the pools are to have; None leaves a pool as it is."""

    prefill: int | None = None
    decode: int | None = None
    timeout_s: Patience | None = None


class Flights(msgspec.Struct, frozen=True, kw_only=True):
    """The timelines of a request, or of the latest ones. `silent`: processes that could not be asked, and why."""

    flights: list[Flight]
    silent: dict[str, str] = {}


class AdminServer:
    """Serves one cluster, in a thread of its own, from before its start until after its end.

    Mutable state: what the main thread says of the cluster's life. `down` is set once somebody has asked for the end.
    """

    def __init__(
        self,
        cluster: Cluster,
        rundir: RunDir,
        settings: tuple[Setting, ...],
        launcher: str,
        end: Callable[[], None],
    ) -> None:
        """`end` makes the main thread stop the cluster and, at last, this server."""
        self._cluster = cluster
        self._rundir = rundir
        self._settings = settings
        self._launcher = launcher
        self._end = end
        self._began_s = time.monotonic()
        self._addresses: Addresses | None = None
        self._noted: list[ProcessIdentity] = []
        self._check = RequestCheck(cluster.keys)
        self._places = threading.BoundedSemaphore(ORDERS)
        self._ended = threading.Event()
        self.down = threading.Event()

    def start(self) -> None:
        """Start to listen. Raises OSError, and ConfigError where the verbs cannot be given the secret."""
        # Imported here: the verbs that only ask need no server.
        import uvicorn

        from router.http.protocol import SharedFront

        self._entrusted = self._cluster.keys.valid()
        self._rundir.entrust(self._entrusted)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._rundir.socket))
        settings = uvicorn.Config(
            self._app(),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        limits = FrontLimits(connections=CONNECTIONS, connections_per_address=CONNECTIONS)
        SharedFront(limits, CONNECTIONS).install(settings)
        # On a Unix socket, those who find no place in this line are turned away.
        settings.backlog = 2 * CONNECTIONS
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="admin", daemon=True
        )
        self._thread.start()
        self._noting = threading.Thread(target=self._note, name="processes", daemon=True)
        self._noting.start()

    def ready(self, addresses: Addresses) -> None:
        self._addresses = addresses

    def stop(self) -> None:
        self._ended.set()
        self._noting.join()
        self._server.should_exit = True
        self._thread.join()

    def status(self) -> Status:
        up = self._cluster.processes()
        processes = [
            ProcessStatus(
                name=slot.name,
                kind=slot.kind,
                state=slot.state.value,
                pid=up[slot.name].pid if slot.name in up else 0,
                address=(up[slot.name].own or up[slot.name].address) if slot.name in up else "",
                incarnation=f"{up[slot.name].incarnation:016x}" if slot.name in up else "",
                deaths=slot.deaths,
                why=slot.why,
                ranks=up[slot.name].ranks if slot.name in up and slot.state in ALIVE else [],
            )
            for slot in self._cluster.slots()
        ]
        addresses = self._addresses
        running: Literal["starting", "running"] = "running" if addresses else "starting"
        model = next((s.value for s in self._settings if s.key == "model"), "")
        return Status(
            name=self._rundir.name,
            state="stopping" if self.down.is_set() else running,
            pid=os.getpid(),
            launcher=self._launcher,
            model=str(model) or "the demo model",
            up_s=time.monotonic() - self._began_s,
            grpc=addresses.grpc if addresses else "",
            http=addresses.http if addresses else "",
            processes=processes,
        )

    def overview(self) -> Overview:
        """Return what all routers say together, and which do not answer. Raises LaunchError where none does."""
        told, silent = self._ask_routers("overview", Overview)
        return msgspec.structs.replace(merged(told), silent=silent)

    def traffic(self) -> Traffic:
        """Return the latest requests of all routers, and which do not answer. Raises LaunchError where none does."""
        told, silent = self._ask_routers("traffic", Traffic)
        return msgspec.structs.replace(together(told), silent=silent)

    def _ask_routers(self, question: str, kind: type[T]) -> tuple[list[T], dict[str, str]]:
        """Ask every router; return at least one answer, and why each of the others gave none. Raises LaunchError where
        none answers."""
        told: list[T] = []
        failed: dict[str, LaunchError] = {}
        for name, answer in self._ask(list(self._cluster.routers), question).items():
            if isinstance(answer, LaunchError):
                failed[name] = answer
            else:
                told.append(msgspec.json.decode(answer, type=kind))
        if failed and not told:
            raise list(failed.values())[-1]
        return told, {name: str(why) for name, why in failed.items()}

    def _ask(self, names: Sequence[str], question: str, about: str = "") -> dict[str, bytes | LaunchError]:
        """Ask processes side by side: those that hang take the time of one. Return what each answers, or why it does
        not."""

        def one(name: str) -> bytes | LaunchError:
            try:
                return self._cluster.ask(name, question, about)
            except LaunchError as error:
                return error

        with ThreadPoolExecutor(min(len(names), ASKED_AT_ONCE) or 1, "ask") as threads:
            return dict(zip(names, threads.map(one, names), strict=True))

    def flights(self, request: str) -> Flights:
        """Ask every process for its timelines, the router first."""
        found: list[Flight] = []
        silent: dict[str, str] = {}
        slots = sorted(self._cluster.slots(), key=lambda slot: slot.kind != "router")
        for name, told in self._ask([slot.name for slot in slots], "flights", request).items():
            if isinstance(told, LaunchError):
                silent[name] = str(told)
            else:
                found += msgspec.json.decode(told, type=list[Flight])
        return Flights(flights=found, silent=silent)

    def drain(self, order: Drain) -> Status:
        """Take the worker away, or replace it; return when it has left. Raises LaunchError."""
        slots = {slot.name: slot for slot in self._cluster.slots()}
        slot = slots.get(order.worker)
        if slot is not None and slot.kind != "router" and not order.replace:
            others = [s for s in slots.values() if s.kind == slot.kind and s.name != slot.name]
            if not others:
                instead = "scale prefill=0" if slot.kind == "prefill" else "take all down"
                raise LaunchError(f"{slot.name} is the last {slot.kind} worker: replace it, or {instead}")
        self._cluster.drain(order.worker, order.timeout_s, again=order.replace)
        return self.status()

    def scale(self, order: Scale) -> Status:
        """Give the pools these sizes; return when they have them. Raises LaunchError; where a size is not possible,
        before either pool has changed. The order's time is that of both together, and both are ordered when it is
        over."""
        asked: list[tuple[Kind, int | None]] = [("prefill", order.prefill), ("decode", order.decode)]
        sizes = [(kind, count) for kind, count in asked if count is not None]
        for kind, count in sizes:
            check_size(kind, count)
        began_s, late = time.monotonic(), list[str]()
        for kind, count in sizes:
            took_s = time.monotonic() - began_s
            left_s = None if order.timeout_s is None else max(0.0, order.timeout_s - took_s)
            try:
                self._cluster.scale(kind, count, left_s)
            except OrderLateError:
                late.append(f"{kind}={count}")
        if late:
            raise OrderLateError(f"{', '.join(late)}: not done in {order.timeout_s:g} s")
        return self.status()

    def rotate(self) -> Status:
        """Replace the secret; return when every process has the new one. Raises LaunchError."""
        self._cluster.rotate(self._rundir.entrust)
        return self.status()

    def _carry_out(self, order: Callable[..., Status], *what: object) -> Status:
        """Carry out one of few orders. Raises LaunchError, also where ORDERS are under way."""
        if not self._places.acquire(blocking=False):
            raise LaunchError(f"{ORDERS} orders are under way: ask again when one of them is done")
        try:
            return order(*what)
        finally:
            self._places.release()

    def config(self) -> dict[str, dict[str, object]]:
        return {s.key: {"value": s.public, "origin": s.origin} for s in self._settings}

    def take_down(self) -> Status:
        self.down.set()
        self._end()
        return self.status()

    def _note(self) -> None:
        """Keep the list of processes up to date: whatever becomes of this process, `down` finds them. What cannot be
        written, or looked up, is tried again; the last list stays."""
        told = ""
        while True:
            try:
                self._note_once()
                told = ""
            except (OSError, ConfigError) as error:
                if str(error) != told:
                    log.warning("the list of processes cannot be kept, and is as it was: %s", error)
                told = str(error)
            if self._ended.wait(NOTE_S):
                return

    def _note_once(self) -> None:
        if (valid := self._cluster.keys.valid()) != self._entrusted:
            self._rundir.entrust(valid)
            self._entrusted = valid
        # Those below this one: a pid of another host may be anybody's here.
        names = {up.pid: name for name, up in self._cluster.processes().items()}
        below = {pid: names.get(pid, name) for pid, name in descendants().items()}
        below[os.getpid()] = "supervisor"
        found = [ProcessIdentity.of(name, pid) for pid, name in below.items()]
        processes = [process for process in found if process is not None]
        if processes != self._noted:
            self._rundir.write(processes)
            self._noted = processes

    def _app(self) -> Starlette:
        def get(answer: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
            async def endpoint(request: Request) -> Response:
                return await self._proven(request, lambda body: answer(request))

            return endpoint

        def post(
            kind: Any, answer: Callable[[Any], Any]
        ) -> Callable[[Request], Awaitable[Response]]:
            read = guarded(msgspec.json.Decoder(kind).decode)

            async def endpoint(request: Request) -> Response:
                return await self._proven(request, lambda body: answer(read(body)))

            return endpoint

        return Starlette(
            routes=[
                Route("/status", get(lambda _: self.status())),
                Route("/overview", get(lambda _: self.overview())),
                Route("/traffic", get(lambda _: self.traffic())),
                Route("/flights", get(lambda r: self.flights(r.query_params.get("request", "")))),
                Route("/config", get(lambda _: self.config())),
                Route("/drain", post(Drain, partial(self._carry_out, self.drain)), methods=["POST"]),
                Route("/scale", post(Scale, partial(self._carry_out, self.scale)), methods=["POST"]),
                Route("/rotate", get(lambda _: self._carry_out(self.rotate)), methods=["POST"]),
                Route("/down", get(lambda _: self.take_down()), methods=["POST"]),
            ]
        )

    async def _proven(self, request: Request, answer: Callable[[bytes], object]) -> Response:
        """Answer who has the cluster's secret, and prove that we have it too."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                return _error("it is too long", 413)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        nonce, code = (request.headers.get(name, "") for name in (NONCE_HEADER, CODE_HEADER))
        secret = self._check.secret_of(request.method, target, nonce, code, bytes(body))
        if secret is None:
            return _error("the secret of this cluster is needed", 401)
        response = await _answered(lambda: answer(bytes(body)))
        response.headers[CODE_HEADER] = answer_code(secret, nonce, response.status_code, bytes(response.body))
        return response


def _error(why: str, status: int) -> Response:
    return Response(msgspec.json.encode({"error": why}), status, media_type="application/json")


async def _answered(answer: Callable[[], object]) -> Response:
    """Return as JSON what `answer` returns. It may take as long as a drain does, so it runs in a thread of its own."""
    try:
        told, status = await run_in_threadpool(answer), 200
    except msgspec.MsgspecError as error:
        told, status = {"error": f"not what is asked for here: {error}"}, 400
    except (LaunchError, ConfigError) as error:
        told, status = {"error": str(error)}, 409
    return Response(msgspec.json.encode(told), status, media_type="application/json")
