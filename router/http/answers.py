"""An answer over HTTP: all at once, or as a stream of server-sent events, from its beginning or resumed.

The status line is held back until there is output, so that a refusal keeps its own status; that of a resumable stream
leaves as soon as a worker has the request, since it carries the token. Silence longer than `KEEP_ALIVE_S` sends the
200, with the token, and a comment. An error after that travels as an event in the stream, which then ends without
`[DONE]`, so that no client takes a part for the whole.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.front.api import ApiError, Delta, Finished, GenerateEvent, HttpForm, Started
from router.front.outlet import Outlet
from router.front.resume import unknown_token
from router.front.tokenizing import in_turns
from router.http.formats import EventWriter, body_of, envelope_of, failure_of, in_words_of, writer_of
from router.http.logprobs import TokenBytes
from router.http.openai_reply import error_reply
from router.http.openai_stream import (
    KEEP_ALIVE,
    KEEP_ALIVE_BETWEEN_IDS,
    EventPosition,
)

KEEP_ALIVE_S = 10.0
RESUME_TOKEN_HEADER = "x-headrace-resume-token"

CONNECTION = "connection"
"""Where a request's state holds the `ChunkWriter` of its connection, if the server is ours."""

log = logging.getLogger("headrace.router.http")
T = TypeVar("T")


class ChunkWriter(Protocol):
    """Writes to a client past the layers of the application."""

    def is_gone(self) -> bool:
        """Return whether the connection is lost, or is being closed."""

    def is_writable(self) -> bool:
        """Return whether the client is there, not behind, and knows chunks: one older than HTTP/1.1 does not."""

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the answer now, which has begun and not ended."""


class WholeAnswer:
    """An ASGI application: all of an answer at once."""

    def __init__(
        self,
        events: AsyncGenerator[GenerateEvent, None],
        form: HttpForm,
        token_bytes: TokenBytes,
        outlet: Outlet | None = None,
    ) -> None:
        """`outlet`, which `events` ask, takes all output, so that this is woken for the end alone."""
        self._token_bytes = token_bytes
        self._events = events
        self._form = form
        self._outlet = outlet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = self._form.label
        try:
            async with aclosing(_checked(self._events)) as events:
                started = await _first(events)
                label = label or started.request_id
                form = started.form or self._form
                answers: list[list[Delta]] = [[] for _ in range(started.samples)]
                ends: list[Finished] = []

                def take(item: Delta) -> bool:
                    answers[item.sample].append(item)
                    return True

                if self._outlet is not None:
                    self._outlet.take = take
                async for item in events:
                    if isinstance(item, Delta):
                        take(item)
                    elif isinstance(item, Finished):
                        ends.append(item)
                ends.sort(key=lambda end: end.sample)
                body = await in_turns(body_of(started, form, answers, ends, self._token_bytes))
                headers = {"content-type": "application/json", "x-request-id": label}
                response = Response(body, headers=headers)
        except ApiError as error:
            told = in_words_of(self._form.api, error, is_best=self._form.best > 0)
            response = error_response(told, label, self._form.api)
        await response(scope, receive, send)


class StreamedAnswer:
    """An ASGI application: `events` of the frontend as events of the stream, those after `at`. `form` is None where the
    stream itself knows how it began. `outlet`, which `events` ask, is opened where the connection can be written to at
    once."""

    def __init__(
        self,
        events: AsyncGenerator[GenerateEvent, None],
        form: HttpForm | None,
        token_bytes: TokenBytes,
        at: Sequence[EventPosition] = (),
        outlet: Outlet | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._outlet = outlet
        self._events = events
        self._form = form
        self._at = at
        self._had_the_end = bool(at) and all(one.closing for one in at)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("state", {}).get(CONNECTION)
        out = _EventStream(send, self._form.label if self._form is not None else "", connection)
        pulse = asyncio.ensure_future(out.keep_alive(self._outlet))
        writer: EventWriter | None = None
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
            api = "" if self._form is None else self._form.api
            if await out.withdraw():
                await error_response(in_words_of(api, error), out.label, api)(scope, receive, send)
            else:
                await out.write(failure_of(in_words_of(api, error), writer))
                await out.end()
        finally:
            pulse.cancel()
            await asyncio.gather(pulse, return_exceptions=True)

    async def _open(self, started: Started, out: "_EventStream") -> EventWriter:
        form = started.form or self._form
        if form is None:
            raise unknown_token("was not begun over HTTP")
        out.named(started)
        if started.resume_token and not self._had_the_end:
            await out.begin()
        writer = writer_of(started, form, self._token_bytes, self._at)
        if self._outlet is not None and not any(one.closing for one in self._at):
            self._outlet.take = partial(out.take, writer.delta)
        return writer


class _EventStream:
    """The response side of one stream. Two tasks write, answer and keep-alive, so every send is under a lock.

    `label` is the caller's name for the request, if it has one: otherwise it goes by its id."""

    __slots__ = ("_closed", "_connection", "_lock", "_quiet", "_resume_token", "_send", "_started", "label")

    def __init__(self, send: Send, label: str, connection: ChunkWriter | None = None) -> None:
        self._connection = connection
        self.label = label
        self._resume_token = ""
        self._send = send
        self._lock = asyncio.Lock()
        self._started = False
        self._closed = False
        self._quiet = True

    def named(self, started: Started) -> None:
        """Take what its head says of the request."""
        form = started.form
        self.label = self.label or (form.label if form is not None else "") or started.request_id
        self._resume_token = started.resume_token

    async def begin(self) -> None:
        async with self._lock:
            await self._start()

    async def write(self, data: bytes) -> None:
        if data:
            async with self._lock:
                await self._put(data)

    def take(self, written: Callable[[Delta], bytes], item: Delta) -> bool:
        """Write what `written` makes of new output at once, if nobody else writes and the client is not behind; return
        whether it was taken."""
        connection = self._connection
        if connection is None or not self._started or self._closed or self._lock.locked():
            return False
        if not connection.is_writable():
            return False
        if data := written(item):
            self._quiet = False
            connection.write_chunk(data)
        return True

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

    async def keep_alive(self, outlet: Outlet | None) -> None:
        """`outlet` says how a head is named that leaves now. It is not kept: it leads back to this stream."""
        while True:
            self._quiet = True
            await asyncio.sleep(KEEP_ALIVE_S)
            async with self._lock:
                if self._closed:
                    return
                if self._quiet and not self._is_gone():
                    if not self._started and outlet is not None and outlet.begin is not None:
                        self.named(outlet.begin())
                    await self._put(KEEP_ALIVE_BETWEEN_IDS if self._resume_token else KEEP_ALIVE)

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
        if self._resume_token:
            headers.append((RESUME_TOKEN_HEADER.encode(), self._resume_token.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _is_gone(self) -> bool:
        return self._connection is not None and self._connection.is_gone()

    async def _put(self, data: bytes) -> None:
        if self._is_gone():
            # asyncio would write a line into the log for every event that was ready when the client left.
            return
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


async def while_connected(work: Awaitable[T], receive: Receive) -> T | None:
    """Do `work` until the client disconnects: then it is cancelled, and None returned. The request's body must have
    been read, or be of no interest."""
    job = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Also reached when the server cancels us; the work must have ended before we go.
        watch.cancel()
        job.cancel()
        results = await asyncio.gather(job, watch, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return None if job.cancelled() else job.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError, label: str = "", api: str = "") -> Response:
    """Return an error in the envelope of the route's shape."""
    reply = error_reply(error)
    headers = reply.headers | ({"x-request-id": label} if label else {})
    return json_response(envelope_of(error, api, label), reply.status, headers)
