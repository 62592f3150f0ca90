"""Stands before the HTTP routes: nobody without a credential gets past it, nor has a body read.

`/health` and `/ready` are open, for probes that have no credential, and so is the page at `/`, which asks for one.
Metrics, and where they are, are for monitors. Browsers let pages of other origins read answers where `with_cors` says
so: it stands before the gate, since a browser asks whether it may before it shows a credential.
"""

from asyncio import Transport
from collections.abc import Iterable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from access.authenticator import Authenticator
from access.tenants import ANYONE, Caller
from access.tls import names_in
from router.front.access import check_monitor, let_in
from router.front.api import ApiError
from router.http.answers import RESUME_TOKEN_HEADER, error_response
from router.http.formats import shape_of
from router.http.page import PAGE_PATH

OPEN_PATHS = frozenset({"/health", "/ready", PAGE_PATH})
MONITORED_PATHS = frozenset({"/metrics", "/sd"})
_NAMES = "certificate_names"
_CALLER = "caller"


class HttpGate:
    """An ASGI application around another, which finds the caller with `caller_of`."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            state = scope.setdefault("state", {})
            try:
                shown = _authorization(scope["headers"], scope["path"])
                caller = let_in(self._authenticator, shown, state.get(_NAMES))
                if scope["path"] in MONITORED_PATHS:
                    check_monitor(caller)
            except ApiError as error:
                await _refuse(error, scope, receive, send)
                return
            state[_CALLER] = caller
        await self._app(scope, receive, send)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let pages of `origins` ("*": of all) ask `app` and read its answers, with keys but without cookies. Without
    origins, `app` is returned as it is."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("x-request-id", RESUME_TOKEN_HEADER, "retry-after"),
    )


class CertificateProtocol(H11Protocol):
    """Tells the application the names in a client's certificate, which uvicorn keeps to itself."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        certificate = self.transport.get_extra_info("peercert")
        self.app_state = {**self.app_state, _NAMES: names_in(certificate)}


def caller_of(request: Request) -> Caller:
    """Return whom the gate has let in."""
    found: Caller = request.scope.get("state", {}).get(_CALLER, ANYONE)
    return found


def _authorization(headers: Iterable[tuple[bytes, bytes]], path: str) -> str:
    """Return the header's value; a second one makes it no credential, since servers differ in which they believe.
    Anthropic's clients show a key in a header of their own."""
    shown = list(headers)
    found = [value for name, value in shown if name == b"authorization"]
    if shape_of(path) == "messages":
        found += [b"Bearer " + value for name, value in shown if name == b"x-api-key"]
    if not found:
        return ""
    return found[0].decode("latin-1") if len(found) == 1 else "ambiguous"


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(error, api=shape_of(scope["path"]))
    if error.code == "UNAUTHENTICATED":
        response.headers["www-authenticate"] = "Bearer"
    # The body is not read, so the connection cannot carry another request.
    response.headers["connection"] = "close"
    await response(scope, receive, send)
