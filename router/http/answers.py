"""An answer over HTTP: all at once, or as a stream of server-sent events, from its beginning or resumed.

The status line is held back until there is output, so that a refusal keeps its own status; that of a resumable stream
leaves as soon as a worker has the request, since it carries the token. Silence longer than `KEEP_ALIVE_S` sends the 200
and a comment. An error after that travels as an event in the stream, which then ends without `[DONE]`, so that no
client takes a part for the whole.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.front.api import ApiError, Delta, Finished, GenerateEvent, HttpForm, Started
from router.front.resume import unknown_token
from router.http.openai_reply import error_reply, whole
from router.http.openai_stream import (
    KEEP_ALIVE,
    KEEP_ALIVE_BETWEEN_IDS,
    EventPosition,
    StreamWriter,
    event,
)

KEEP_ALIVE_S = 10.0
RESUME_TOKEN_HEADER = "x-headrace-resume-token"

log = logging.getLogger("headrace.router.http")


class WholeAnswer:
    """An ASGI application: all of an answer at once."""

    def __init__(self, events: AsyncGenerator[GenerateEvent, None], form: HttpForm) -> None:
        self._events = events
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = self._form.label
        try:
            async with aclosing(_checked(self._events)) as events:
                started = await _first(events)
                label = label or started.request_id
                answers: list[list[Delta]] = [[] for _ in range(started.samples)]
                ends: list[Finished] = []
                async for item in events:
                    if isinstance(item, Delta):
                        answers[item.sample].append(item)
                    elif isinstance(item, Finished):
                        ends.append(item)
                ends.sort(key=lambda end: end.sample)
                body = whole(started, self._form, answers, ends)
                headers = {"content-type": "application/json", "x-request-id": label}
                response = Response(body, headers=headers)
        except ApiError as error:
            response = error_response(error, label)
        await response(scope, receive, send)


class StreamedAnswer:
    """An ASGI application: `events` of the frontend as events of the stream, those after `at`. `form` is None where the
    stream itself knows how it began."""

    def __init__(
        self,
        events: AsyncGenerator[GenerateEvent, None],
        form: HttpForm | None,
        at: Sequence[EventPosition] = (),
    ) -> None:
        self._events = events
        self._form = form
        self._at = at
        self._had_the_end = bool(at) and all(one.closing for one in at)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _EventStream(send, self._form.label if self._form is not None else "")
        pulse = asyncio.ensure_future(out.keep_alive())
        try:
            async with aclosing(_checked(self._events)) as events:
                writer = await self._open(await _first(events), out)
                async for item in events:
                    if isinstance(item, Delta):
                        await out.write(writer.delta(item))
                    elif isinstance(item, Finished):
                        await out.write(b"".join(writer.last(item)))
            if self._had_the_end and await out.withdraw():
                # Nothing was left to say. This status also tells a browser to stop coming back.
                await Response(status_code=204)(scope, receive, send)
            else:
                await out.end()
        except ApiError as error:
            if await out.withdraw():
                await error_response(error, out.label)(scope, receive, send)
            else:
                await out.write(event(msgspec.json.encode(error_reply(error).envelope)))
                await out.end()
        finally:
            pulse.cancel()
            await asyncio.gather(pulse, return_exceptions=True)

    async def _open(self, started: Started, out: "_EventStream") -> StreamWriter:
        form = self._form or started.form
        if form is None:
            raise unknown_token("was not begun over HTTP")
        out.label = form.label or started.request_id
        out.resume_token = started.resume_token
        if started.resume_token and not self._had_the_end:
            await out.begin()
        return StreamWriter(started, form, self._at)


class _EventStream:
    """The response side of one stream. Two tasks write, answer and keep-alive, so every send is under a lock."""

    def __init__(self, send: Send, label: str) -> None:
        self.label = label
        self.resume_token = ""
        self._send = send
        self._lock = asyncio.Lock()
        self._started = False
        self._closed = False
        self._quiet = True

    async def begin(self) -> None:
        async with self._lock:
            await self._start()

    async def write(self, data: bytes) -> None:
        if data:
            async with self._lock:
                await self._put(data)

    async def end(self) -> None:
        async with self._lock:
            await self._start()
            self._closed = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def withdraw(self) -> bool:
        """Keep a stream that has not begun from ever beginning; False if it has begun."""
        async with self._lock:
            self._closed = not self._started
            return self._closed

    async def keep_alive(self) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(KEEP_ALIVE_S)
            async with self._lock:
                if self._closed:
                    return
                if self._quiet:
                    await self._put(KEEP_ALIVE_BETWEEN_IDS if self.resume_token else KEEP_ALIVE)

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # nginx would otherwise collect the tokens and send them at the end.
            (b"x-accel-buffering", b"no"),
        ]
        if self.label:
            headers.append((b"x-request-id", self.label.encode("latin-1")))
        if self.resume_token:
            headers.append((RESUME_TOKEN_HEADER.encode(), self.resume_token.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _put(self, data: bytes) -> None:
        await self._start()
        self._quiet = False
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


async def _first(events: AsyncGenerator[GenerateEvent, None]) -> Started:
    """Return the first event, which must be Started. Raises `ApiError`."""
    item = await anext(events)
    if not isinstance(item, Started):
        raise _internal("the frontend's first event was not Started")
    return item


async def _checked(events: AsyncGenerator[GenerateEvent, None]) -> AsyncGenerator[GenerateEvent, None]:
    """The frontend's events up to the last sample's `Finished`, which is always the last.

    Any failure leaves as `ApiError`, and leaving early closes the frontend's iterator.
    """
    left = 1
    try:
        async with aclosing(events):
            async for item in events:
                yield item
                if isinstance(item, Started):
                    left = item.samples
                left -= isinstance(item, Finished)
                if not left:
                    return
        raise _internal("the frontend's events ended without Finished")
    except ApiError:
        raise
    except Exception as error:
        raise _internal("the frontend failed on a request") from error


def _internal(what: str) -> ApiError:
    """Log our own fault, with the exception being handled if there is one; the caller learns no details."""
    log.error(what, exc_info=True)
    return ApiError("INTERNAL", "the server failed on this request")


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError, label: str = "") -> Response:
    reply = error_reply(error)
    headers = reply.headers | ({"x-request-id": label} if label else {})
    return json_response(reply.envelope, reply.status, headers)
