"""A frontend and a server state that follow a script, for the tests of the HTTP front."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx
import uvicorn
from starlette.types import ASGIApp

from engine.messages import RequestStats
from engine.types import FinishReason, SamplingParams
from router.app import LISTEN_BACKLOG
from router.config import FrontLimits
from router.front.api import (
    ApiError,
    Delta,
    Finished,
    GenerateCall,
    GenerateEvent,
    ModelFacts,
    Position,
    Started,
)
from router.front.outlet import Outlet
from router.front.resume import unknown_token
from router.http.protocol import SharedFront
from router.http.routes import build_app
from router.roster import ScrapeTarget

LIMITS = FrontLimits()
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
STARTED = Started("r1", "tiny", 5)
FINISHED = Finished(
    reason=FinishReason.LENGTH,
    prompt_tokens=5,
    output_tokens=3,
    cached_tokens=4,
    stats=RequestStats(
        stages={"admit": 0.001, "unattributed": 0.0},
        prefill_cached_tokens=4,
        migrated_blocks=2,
        migrated_bytes=1024,
        migration_s=0.01,
        transport="shm",
        prefill_worker="prefill-0",
        decode_worker="decode-0",
    ),
    ttft_s=0.1,
    itl_mean_s=0.02,
    itl_p99_s=0.03,
    e2e_s=0.2,
)
ANSWER: list[GenerateEvent] = [
    STARTED,
    Delta("Hé", (7,)),
    Delta("", (8,)),
    Delta("llo", (9,)),
    FINISHED,
]


def token_bytes(token: int) -> tuple[bytes, bool]:
    """Stand for a vocabulary of bytes and one control token."""
    return (bytes([token]), True) if token < 256 else (b"<end>", False)


class FakeModel:
    token_bytes = staticmethod(token_bytes)


class FakeFrontend:
    """Plays `script`: an event is yielded, an exception raised, a number slept.

    `calls` are the calls it got; `open` counts iterators that have begun and not been closed;
    `yielded` is how many events were taken.
    """

    def __init__(self, *script: GenerateEvent | Exception | float) -> None:
        self.script = script or tuple(ANSWER)
        self.calls: list[GenerateCall] = []
        self.open = 0
        self.yielded = 0
        self.model = FakeModel()

    async def generate(self, call: GenerateCall, outlet: Outlet | None = None) -> AsyncGenerator[GenerateEvent, None]:
        self.calls.append(call)
        self.open += 1
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, int | float):
                    await asyncio.sleep(step)
                else:
                    yield step
                    self.yielded += 1
        finally:
            self.open -= 1

    def resume(
        self, token: str, positions: Sequence[Position] = ()
    ) -> AsyncGenerator[GenerateEvent, None]:
        raise unknown_token()

    def cancel(self, token: str) -> bool:
        return False


class FakeState:
    def __init__(self, ready: bool = True) -> None:
        self.is_ready = ready

    def ready(self) -> bool:
        return self.is_ready

    def models(self) -> list[str]:
        return ["tiny", "org/tiny"]

    def model_facts(self) -> ModelFacts:
        return ModelFacts("tiny", 512, SamplingParams(temperature=0.5))

    async def metrics_text(self) -> bytes:
        return b"headrace_requests_total 1.0\n"

    def targets(self, router_address: str, host: str) -> list[ScrapeTarget]:
        assert host == "test", "the address at which this host was reached, whatever name the client used"
        return [ScrapeTarget([router_address], {"worker": "router"})]


def ask(
    frontend: FakeFrontend,
    method: str,
    path: str,
    *,
    state: FakeState | None = None,
    **request: object,
) -> httpx.Response:
    """One request to the app in this process."""

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(frontend, state or FakeState()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **request)  # type: ignore[arg-type]

    return asyncio.run(go())


def events(body: str) -> list[str]:
    """The data of a streamed answer, event by event."""
    parts = body.split("\n\n")
    assert parts[-1] == ""
    return [part.removeprefix("data: ") for part in parts[:-1]]


def refusal(code: str, **more: object) -> ApiError:
    return ApiError(code, "because", **more)  # type: ignore[arg-type]


@contextmanager
def serving(
    frontend: FakeFrontend,
    limits: FrontLimits = LIMITS,
    connections: int = 100,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    context: ssl.SSLContext | None = None,
) -> Iterator[int]:
    """The port of a server that runs in a thread of this process for the length of the block; `around` puts something
    before the routes, `context` TLS."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = around(build_app(frontend, FakeState(), limits.bodies_bytes))
    settings = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=2)
    SharedFront(limits, connections).install(settings, context)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        wait_for(lambda: server.started)
        listener.listen(LISTEN_BACKLOG)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], limit_s: float = 5.0) -> float:
    """Seconds until `condition` held; fails after `limit_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "did not happen in time"
        time.sleep(0.005)
    return time.monotonic() - began
