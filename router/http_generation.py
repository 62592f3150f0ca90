"""One generation over HTTP: the answer and a watch for the client's disconnect run side by side.

Whichever ends first ends the other, and leaving the answer always closes the frontend's iterator, which is what cancels
the request on the workers.

A streamed answer holds its status line back until there is output, so that a refusal keeps its own status. Silence
longer than `KEEP_ALIVE_S` sends the 200 and a comment; an error after that travels as an event in the stream, which
then ends without `[DONE]`, so that no client takes a part for the whole.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api import ApiError, Delta, Finished, GenerateCall, GenerateEvent, Started
from router.openai import Parsed
from router.openai_reply import KEEP_ALIVE, ErrorReply, Writer, error_reply, event

KEEP_ALIVE_S = 10.0

_log = logging.getLogger("headrace.router.http")


class Generates(Protocol):
    """The frontend's only method that this front needs; it may raise `ApiError` at any step."""

    def generate(self, call: GenerateCall) -> AsyncIterator[GenerateEvent]: ...


class Generation:
    """An ASGI application for one parsed request whose body has been read. `label` is the caller's name for it."""

    def __init__(self, frontend: Generates, parsed: Parsed, label: str) -> None:
        self._frontend = frontend
        self._parsed = parsed
        self._label = label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream if self._parsed.stream else self._whole
        work = asyncio.ensure_future(answer(scope, receive, send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also reached when the server cancels us; `work` must have closed its iterator before we go.
            watch.cancel()
            work.cancel()
            results = await asyncio.gather(work, watch, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = self._label
        texts: list[str] = []
        ids: list[int] = []
        try:
            async with aclosing(_events(self._frontend, self._parsed.call)) as events:
                writer = self._writer(await _first(events))
                label = label or writer.request_id
                async for item in events:
                    if isinstance(item, Delta):
                        texts.append(item.text)
                        ids.extend(item.token_ids)
                    elif isinstance(item, Finished):
                        body = writer.whole("".join(texts), tuple(ids), item)
                        headers = {"content-type": "application/json", "x-request-id": label}
                        response = Response(body, headers=headers)
        except ApiError as error:
            response = error_response(error_reply(error), label)
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _EventStream(send, self._label)
        pulse = asyncio.ensure_future(out.keep_alive())
        try:
            async with aclosing(_events(self._frontend, self._parsed.call)) as events:
                started = await _first(events)
                writer = self._writer(started)
                out.label = self._label or writer.request_id
                out.resume_token = started.resume_token
                async for item in events:
                    if isinstance(item, Delta):
                        await out.write(writer.delta(item.text, item.token_ids))
                    elif isinstance(item, Finished):
                        await out.write(writer.last(item))
            await out.end()
        except ApiError as error:
            reply = error_reply(error)
            if await out.withdraw():
                await error_response(reply, out.label)(scope, receive, send)
            else:
                await out.write(event(reply.envelope))
                await out.end()
        finally:
            pulse.cancel()
            await asyncio.gather(pulse, return_exceptions=True)

    def _writer(self, started: Started) -> Writer:
        return Writer(
            request_id=started.request_id,
            model=started.model,
            created=int(time.time()),
            chat=self._parsed.chat,
            include_usage=self._parsed.include_usage,
            return_token_ids=self._parsed.return_token_ids,
        )


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

    async def write(self, data: bytes) -> None:
        if data:
            async with self._lock:
                await self._put(data)

    async def end(self) -> None:
        async with self._lock:
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
                    await self._put(KEEP_ALIVE)

    async def _put(self, data: bytes) -> None:
        if not self._started:
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
                headers.append((b"x-headrace-resume-token", self.resume_token.encode("latin-1")))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._quiet = False
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


async def _first(events: AsyncGenerator[GenerateEvent, None]) -> Started:
    item = await anext(events)
    if not isinstance(item, Started):
        raise _internal("the frontend's first event was not Started")
    return item


async def _events(frontend: Generates, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
    """The frontend's events up to `Finished`, which is always the last.

    Any failure leaves as `ApiError`, and leaving early closes the frontend's iterator.
    """
    events = frontend.generate(call)
    try:
        async for item in events:
            yield item
            if isinstance(item, Finished):
                return
        raise _internal("the frontend's events ended without Finished")
    except ApiError:
        raise
    except Exception as error:
        raise _internal("the frontend failed on a request") from error
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _internal(what: str) -> ApiError:
    """Log our own fault, with the exception being handled if there is one; the caller learns no details."""
    _log.error(what, exc_info=True)
    return ApiError("INTERNAL", "the server failed on this request")


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(reply: ErrorReply, label: str = "") -> Response:
    headers = reply.headers | ({"x-request-id": label} if label else {})
    return json_response(reply.envelope, reply.status, headers)
