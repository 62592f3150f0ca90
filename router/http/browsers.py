"""Stands between browsers and the front: what a page of somebody else can have a browser send here has no effect.

A front that asks for no credential trusts whoever reaches it, and a browser on the same machine does, whatever page it
shows. Two ways are open to such a page, and both are closed here. Browsers send bodies of some kinds to any origin
without asking it (`with_cors`), so a body that comes from a page must be JSON, about which they ask. And a page's own
name may come to stand for this machine, after which its browser takes us for the page's own server: a front that
listens for this machine alone is not asked by public names at its own port. Proxies have ports of their own.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.answers import json_response
from router.http.formats import early_envelope

JSON_KIND = "application/json"
HTTP_PORT = 80


class BrowserGuard:
    """An ASGI application around another, of a front that was told to listen on `host`."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._is_for_this_machine = host == "localhost" or _is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        status, code, message = 0, "", ""
        if self._is_for_this_machine and _is_rebound(scope, headers.get("host", "")):
            status, code = 421, "misdirected_request"
            message = "this server listens for its own machine alone: ask it by address, or as localhost"
        elif scope["method"] == "POST" and "origin" in headers and _kind(headers) != JSON_KIND:
            status, code = 415, "unsupported_media_type"
            message = f"a page must send its body as content-type {JSON_KIND}"
        if not status:
            await self._app(scope, receive, send)
            return
        # The body is not read, so the connection cannot carry another request.
        body = early_envelope(scope["path"], status, message, "invalid_request_error", code)
        await json_response(body, status, {"connection": "close"})(scope, receive, send)


def _kind(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_rebound(scope: Scope, host: str) -> bool:
    """True where the client calls us by a public name and our own port. TLS knows names by itself."""
    try:
        asked = urlsplit(f"//{host}")
        name, port = (asked.hostname or "").rstrip("."), asked.port
    except ValueError:
        return False  # no browser writes such a name
    server = scope.get("server")
    if scope["scheme"] != "http" or server is None or (port or HTTP_PORT) != server[1]:
        return False
    return "." in name and not name.endswith(".localhost") and not _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return name.rpartition(".")[2].isdecimal()  # as 127.1, which only an address can be
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
