"""Reads the bodies of requests under limits, before anything parses them: each one's size, and that of all together.

A body is refused as soon as its length is declared, or is too long without having been declared. What is being received
of large ones counts against the budget of all as it comes, so that many clients who send slowly hold no more than that.
Beyond it, the address that has sent most loses its largest: who comes to a full house is seldom who has filled it.
Small ones are bounded by the number of connections.
"""

import asyncio
from collections import Counter

from starlette.requests import Request
from starlette.responses import Response

from router.front.large_bodies import LARGE_BYTES, LargeBodies
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
    """`large` parses those that are complete; as many bytes as may be received may wait for it."""

    # Mutable state: the address and the bytes of every large body that is being received, and their sum.

    def __init__(self, budget_bytes: int) -> None:
        self.large = LargeBodies(budget_bytes)
        self._budget_bytes = budget_bytes
        self._held: dict[asyncio.Timeout, tuple[str, int]] = {}
        self._held_bytes = 0

    def __repr__(self) -> str:
        return f"Bodies({self._held_bytes} of {self._budget_bytes} bytes)"

    async def read(self, request: Request) -> bytes:
        """Return the whole body. Raises BodyRefusal as soon as it is over a limit, and ClientDisconnect."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > BODY_LIMIT_BYTES:
            raise _too_large()
        address = request.client.host if request.client is not None else ""
        chunks = bytearray()
        mine = asyncio.timeout(None)
        try:
            async with mine:
                async for chunk in request.stream():
                    chunks += chunk
                    if len(chunks) > BODY_LIMIT_BYTES:
                        raise _too_large()
                    if len(chunks) > LARGE_BYTES:
                        self._hold(mine, address, len(chunks))
            return bytes(chunks)
        except TimeoutError as error:
            message = "too many bodies are being received"
            raise BodyRefusal(503, message, "server_error", "unavailable") from error
        finally:
            self._let_go(mine)

    def _hold(self, mine: asyncio.Timeout, address: str, size_bytes: int) -> None:
        """Count a body, and end the time of whatever has to go for it."""
        self._let_go(mine)
        self._held[mine] = (address, size_bytes)
        self._held_bytes += size_bytes
        while self._held_bytes > self._budget_bytes:
            sent = Counter[str]()
            for address, size_bytes in self._held.values():
                sent[address] += size_bytes
            ((most, _),) = sent.most_common(1)
            of_it = [one for one, (address, _) in self._held.items() if address == most]
            victim = max(of_it, key=lambda one: self._held[one][1])
            self._let_go(victim)
            if victim is mine:
                raise TimeoutError
            victim.reschedule(asyncio.get_running_loop().time())

    def _let_go(self, body: asyncio.Timeout) -> None:
        self._held_bytes -= self._held.pop(body, ("", 0))[1]


def _too_large() -> BodyRefusal:
    message = f"the body is larger than {BODY_LIMIT_BYTES} bytes"
    return BodyRefusal(413, message, "invalid_request_error", "request_too_large")
