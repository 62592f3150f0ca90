"""Reads the bodies of requests under limits, before anything parses them: each one's size, and that of all together.

A body is refused as soon as its length is declared, or is too long without having been declared. What is being received
counts against the budget of all bodies as it comes, so that many clients who send slowly hold no more than that.
"""

from starlette.requests import Request
from starlette.responses import Response

from router.http.answers import json_response
from router.http.formats import early_envelope

BODY_LIMIT_BYTES = 4 * 1024 * 1024
RETRY_AFTER_S = 1


class BodyRefusal(Exception):
    """A body that is not read to its end, so that its connection cannot carry another request."""

    def __init__(self, status: int, message: str, kind: str, code: str) -> None:
        super().__init__(message)
        self._status = status
        self._said = (status, message, kind, code)

    def response(self, path: str, label: str = "") -> Response:
        """Return the answer of the route at `path`; `label` is the caller's own name for the request."""
        headers = {"connection": "close"} | ({"x-request-id": label} if label else {})
        if self._status == 503:
            headers["retry-after"] = str(RETRY_AFTER_S)
        return json_response(early_envelope(path, *self._said, label), self._status, headers)


class Bodies:
    # Mutable state: bytes of bodies that have been received in part.

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._held_bytes = 0

    def __repr__(self) -> str:
        return f"Bodies({self._held_bytes} of {self._budget_bytes} bytes)"

    async def read(self, request: Request) -> bytes:
        """Return the whole body. Raises BodyRefusal as soon as it is over a limit, and ClientDisconnect."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > BODY_LIMIT_BYTES:
            raise _too_large()
        chunks = bytearray()
        try:
            async for chunk in request.stream():
                chunks += chunk
                self._held_bytes += len(chunk)
                if len(chunks) > BODY_LIMIT_BYTES:
                    raise _too_large()
                if self._held_bytes > self._budget_bytes:
                    message = "too many bodies are being received"
                    raise BodyRefusal(503, message, "server_error", "unavailable")
            return bytes(chunks)
        finally:
            self._held_bytes -= len(chunks)


def _too_large() -> BodyRefusal:
    message = f"the body is larger than {BODY_LIMIT_BYTES} bytes"
    return BodyRefusal(413, message, "invalid_request_error", "request_too_large")
