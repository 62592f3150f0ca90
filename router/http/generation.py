"""One generation over HTTP: the answer and a watch for the client's disconnect run side by side.

Whichever ends first ends the other, and leaving the answer always closes the frontend's iterator, which is what cancels
the request on the workers, or, where the stream is resumable, leaves it for a while.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.front.api import (
    ApiError,
    Delta,
    Finished,
    GenerateCall,
    GenerateEvent,
    HttpForm,
    Position,
)
from router.front.resume import unknown_token
from router.http.answer import checked, error_response, first
from router.http.answers import StreamedAnswer
from router.http.event_ids import FIELD, positions
from router.http.openai_reply import Writer, error_reply


class Generates(Protocol):
    """What this front needs of the frontend; an iterator may raise `ApiError` at any step."""

    def generate(self, call: GenerateCall) -> AsyncIterator[GenerateEvent]: ...

    def resume(
        self, token: str, positions: Sequence[Position] = ()
    ) -> AsyncIterator[GenerateEvent]: ...

    def cancel(self, token: str) -> bool: ...


class WholeAnswer:
    """An ASGI application: all of an answer at once."""

    def __init__(self, events: AsyncIterator[GenerateEvent], form: HttpForm) -> None:
        self._events = events
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = self._form.label
        try:
            async with aclosing(checked(self._events)) as events:
                started = await first(events)
                label = label or started.request_id
                answers: list[list[Delta]] = [[] for _ in range(started.samples)]
                ends: list[Finished] = []
                async for item in events:
                    if isinstance(item, Delta):
                        answers[item.sample].append(item)
                    elif isinstance(item, Finished):
                        ends.append(item)
                ends.sort(key=lambda end: end.sample)
                body = Writer(started, self._form).whole(answers, ends)
                headers = {"content-type": "application/json", "x-request-id": label}
                response = Response(body, headers=headers)
        except ApiError as error:
            response = error_response(error_reply(error), label)
        await response(scope, receive, send)


class Streams:
    """The endpoint `/v1/streams/TOKEN`: GET goes on with a resumable stream behind the event that `Last-Event-ID`
    names, or the query's `last_event_id`, as a browser's `EventSource` cannot set the header itself; DELETE ends it."""

    def __init__(self, frontend: Generates) -> None:
        self._frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        token: str = request.path_params["token"]
        if scope["method"] == "DELETE":
            known = self._frontend.cancel(token)
            gone = (
                Response(status_code=204) if known else error_response(error_reply(unknown_token()))
            )
            await gone(scope, receive, send)
            return
        if scope["method"] != "GET":  # a HEAD would take the stream over from whoever reads it
            raise HTTPException(405, headers={"Allow": "GET, DELETE"})
        named = request.headers.get(FIELD) or request.query_params.get("last_event_id", "")
        try:
            at = positions(named, token)
        except ApiError as error:
            await error_response(error_reply(error))(scope, receive, send)
            return
        had = [Position(one.next_index, one.text_bytes) for one in at]
        events = self._frontend.resume(token, had)
        await attended(StreamedAnswer(events, None, "", at), scope, receive, send)


async def attended(answer: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Give `answer` until the client disconnects. The request's body must have been read, or be of no interest."""
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
