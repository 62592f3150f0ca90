"""The HTTP front: OpenAI's routes, health, readiness, metrics and discovery, over the frontend that gRPC uses too.

Bodies are read under a limit before anything parses them. Every error, Starlette's own included, leaves in OpenAI's
envelope. Requests are named by the server; a caller's `x-request-id` travels along as a label and is sent back. A
generation goes on in `router/front/frontend.py`.
"""

import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.front.access import as_tenant, tenant_of
from router.front.api import SESSION_HEADER, ApiError, ModelFacts, Position, invalid
from router.front.frontend import Frontend
from router.front.outlet import Outlet
from router.front.resume import unknown_token
from router.http.adapters.messages_request import parse_messages
from router.http.adapters.responses_request import parse_response
from router.http.answers import StreamedAnswer, WholeAnswer, error_response, json_response, while_connected
from router.http.bodies import Bodies, BodyRefusal
from router.http.formats import early_envelope
from router.http.gate import caller_of
from router.http.openai import Parsed, parse_chat, parse_completion, timeout_from
from router.http.openai_stream import FIELD, positions
from router.http.page import PAGE_PATH, ChatPage
from router.http.several import generate_all
from router.http.tokens import TokenRoutes
from router.roster import ScrapeTarget
from telemetry.tracing import HEADER, sound

LABEL_LIMIT_CHARS = 128
RESUMABLE_HEADER = "x-headrace-resumable"


class ServerState(Protocol):
    """The state that the routes beside generation report (`router.app.RouterApp`): whether at least one prefill and one
    decode worker can take requests, the names of the model and the facts about it, all metric families in Prometheus'
    text format, and what Prometheus is to scrape, with the router itself at `router_address`, host:port, and what else
    is on its host at `host`."""

    def ready(self) -> bool: ...

    def models(self) -> list[str]: ...

    def model_facts(self) -> ModelFacts: ...

    async def metrics_text(self) -> bytes: ...

    def targets(self, router_address: str, host: str) -> list[ScrapeTarget]: ...


def build_app(
    frontend: Frontend, state: ServerState, bodies_bytes: int = 64 * 1024 * 1024, *, chat_page: bool = True
) -> Starlette:
    """The ASGI application. `frontend` and `state` must live on the event loop that serves it; `bodies_bytes` bounds
    what is being received of all bodies together. `chat_page`: whether there is a page at `/`."""
    started = int(time.time())
    bodies = Bodies(bodies_bytes)
    tokens = TokenRoutes(frontend, bodies)

    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "headrace",
            **msgspec.to_builtins(state.model_facts()),
        }

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [card(name) for name in state.models()]})

    async def model(request: Request) -> Response:
        name: str = request.path_params["name"]
        if name in state.models():
            return json_response(card(name))
        return error_response(ApiError("NOT_FOUND", f"the model {name!r} is not served here", "model"))

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        is_ready = state.ready()
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(await state.metrics_text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def discovery(request: Request) -> Response:
        # Whoever asks has just reached the router there, whatever address it listens on.
        return json_response(msgspec.to_builtins(state.targets(request.url.netloc, request.scope["server"][0])))

    async def show_version(request: Request) -> Response:
        return json_response({"version": _version()})

    page = ChatPage()

    async def show_page(request: Request) -> Response:
        return page.response()

    return Starlette(
        routes=[
            *([Route(PAGE_PATH, show_page)] if chat_page else []),
            Route("/v1/chat/completions", _Generate(frontend, parse_chat, bodies), methods=["POST"]),
            Route("/v1/completions", _Generate(frontend, parse_completion, bodies), methods=["POST"]),
            Route("/v1/messages", _Generate(frontend, parse_messages, bodies, "messages"), methods=["POST"]),
            Route("/v1/messages/count_tokens", tokens.count, methods=["POST"]),
            Route("/v1/responses", _Generate(frontend, parse_response, bodies), methods=["POST"]),
            Route("/v1/streams/{token}", _Streams(frontend), methods=["GET", "DELETE"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/sd", discovery),
            Route("/version", show_version),
        ],
        exception_handlers={HTTPException: _on_http_exception, Exception: _on_fault},
    )


class _Generate:
    """The endpoint of a generating route: body and headers in, then an answer takes over the connection.

    A plain ASGI callable, because a Starlette function endpoint cannot watch for the client's disconnect.
    """

    def __init__(self, frontend: Frontend, parse: Callable[..., Parsed], bodies: Bodies, api: str = "") -> None:
        """`api` is the shape of the route's errors."""
        self._api = api
        self._frontend = frontend
        self._parse = parse
        self._bodies = bodies
        self._token_bytes = partial(_token_bytes, frontend)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        label = _label(request.headers.get("x-request-id", ""))
        try:
            body = await self._bodies.read(request)
        except ClientDisconnect:
            return
        except BodyRefusal as refusal:
            await refusal.response(scope["path"], label)(scope, receive, send)
            return
        try:
            header = request.headers.get("x-request-timeout-s")
            timeout_s = None if header is None else timeout_from(header, "x-request-timeout-s")
            parse = partial(self._parse, label=label, timeout_s=timeout_s, created=int(time.time()))
            parsed = await self._bodies.large.parse(parse, body)
            call = as_tenant(parsed.call, caller_of(request))
            if parsed.form.api and request.headers.get(RESUMABLE_HEADER, "") == "1":
                raise invalid(RESUMABLE_HEADER, "is for /v1/chat/completions and /v1/completions")
        except ApiError as error:
            await error_response(error, label, self._api)(scope, receive, send)
            return
        finally:
            del body  # parsed, it may be as large again; and this lasts as long as the answer
        asked = parsed.can_resume and request.headers.get(RESUMABLE_HEADER, "") == "1"
        resumable = parsed.call.resumable or asked
        trace = sound(request.headers.get(HEADER, ""))
        session = request.headers.get(SESSION_HEADER, "")
        call = msgspec.structs.replace(call, resumable=resumable, traceparent=trace, session=session)
        outlet = Outlet()
        if len(parsed.prompts) > 1:
            calls = [msgspec.structs.replace(call, prompt=prompt) for prompt in parsed.prompts]
            events = generate_all(self._frontend.generate, calls)
        else:
            events = self._frontend.generate(call, outlet)
        answer: ASGIApp = WholeAnswer(events, parsed.form, self._token_bytes, outlet)
        if parsed.stream:
            answer = StreamedAnswer(events, parsed.form, self._token_bytes, outlet=outlet)
        await while_connected(answer(scope, receive, send), receive)


class _Streams:
    """The endpoint `/v1/streams/TOKEN`: GET goes on with a resumable stream behind the event that `Last-Event-ID`
    names, or the query's `last_event_id`, as a browser's `EventSource` cannot set the header itself; DELETE ends it."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._token_bytes = partial(_token_bytes, frontend)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        token: str = request.path_params["token"]
        try:
            tenant = tenant_of(caller_of(request))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        if scope["method"] == "DELETE":
            try:
                known = await self._frontend.cancel(token, tenant)
                gone = Response(status_code=204) if known else error_response(unknown_token())
            except ApiError as error:
                gone = error_response(error)
            await gone(scope, receive, send)
            return
        if scope["method"] != "GET":  # a HEAD would take the stream over from whoever reads it
            raise HTTPException(405, headers={"Allow": "GET, DELETE"})
        named = request.headers.get(FIELD) or request.query_params.get("last_event_id", "")
        try:
            at = positions(named, token)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        had = [Position(one.next_index, one.text_bytes) for one in at]
        outlet = Outlet()
        events = self._frontend.resume(token, had, tenant, outlet)
        answer = StreamedAnswer(events, None, self._token_bytes, at, outlet)
        await while_connected(answer(scope, receive, send), receive)


def _token_bytes(frontend: Frontend, token: int) -> tuple[bytes, bool]:
    return frontend.model.token_bytes(token)


def _label(value: str) -> str:
    """The caller's name for a request, if it is one that can be logged and sent back."""
    usable = len(value) <= LABEL_LIMIT_CHARS and value.isascii() and value.isprintable()
    return value if usable else ""


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method) in the same envelope."""
    assert isinstance(error, HTTPException)
    code = error.detail.lower().replace(" ", "_")
    body = early_envelope(request.url.path, error.status_code, error.detail, "invalid_request_error", code)
    return json_response(body, error.status_code, dict(error.headers or {}))


async def _on_fault(request: Request, error: Exception) -> Response:
    """Our own fault, before there was an answer; the server logs it."""
    body = early_envelope(request.url.path, 500, "the server failed on this request", "server_error", "internal")
    return json_response(body, 500, {"connection": "close"})


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was never installed
