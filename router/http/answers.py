"""A streamed answer over HTTP (server-sent events), from its beginning or resumed.

The status line is held back until there is output, so that a refusal keeps its own status; that of a resumable stream
leaves as soon as a worker has the request, since it carries the token. Silence longer than `KEEP_ALIVE_S` sends the 200
and a comment. An error after that travels as an event in the stream, which then ends without `[DONE]`, so that no
client takes a part for the whole.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.front.api import ApiError, Delta, Finished, GenerateEvent, HttpForm, Started
from router.front.resume import unknown_token
from router.http.answer import checked, error_response, first
from router.http.event_ids import At
from router.http.openai_reply import error_reply
from router.http.openai_stream import KEEP_ALIVE, KEEP_ALIVE_BETWEEN_IDS, StreamWriter, event

KEEP_ALIVE_S = 10.0
RESUME_TOKEN_HEADER = "x-headrace-resume-token"


class StreamedAnswer:
    """An ASGI application: `events` of the frontend as events of the stream, those after `at`. `form` is None where the
    stream itself knows how it began."""

    def __init__(
        self,
        events: AsyncIterator[GenerateEvent],
        form: HttpForm | None,
        label: str,
        at: Sequence[At] = (),
    ) -> None:
        self._events = events
        self._form = form
        self._label = label
        self._at = at
        self._had_the_end = bool(at) and all(one.closing for one in at)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _EventStream(send, self._label)
        pulse = asyncio.ensure_future(out.keep_alive())
        try:
            async with aclosing(checked(self._events)) as events:
                writer = await self._open(await first(events), out)
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
            reply = error_reply(error)
            if await out.withdraw():
                await error_response(reply, out.label)(scope, receive, send)
            else:
                await out.write(event(msgspec.json.encode(reply.envelope)))
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
