"""What every route that answers needs: the frontend's events made safe, errors and JSON as responses."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from starlette.responses import Response

from router.front.api import ApiError, Finished, GenerateEvent, Started
from router.http.openai_reply import ErrorReply

_log = logging.getLogger("headrace.router.http")


async def first(events: AsyncGenerator[GenerateEvent, None]) -> Started:
    """Raises `ApiError`."""
    item = await anext(events)
    if not isinstance(item, Started):
        raise _internal("the frontend's first event was not Started")
    return item


async def checked(events: AsyncIterator[GenerateEvent]) -> AsyncGenerator[GenerateEvent, None]:
    """The frontend's events up to the last sample's `Finished`, which is always the last.

    Any failure leaves as `ApiError`, and leaving early closes the frontend's iterator.
    """
    left = 1
    try:
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
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()


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
