"""Bounds what one address may have open on the gRPC port: its calls, of every service of the port.

gRPC's library accepts connections by itself, and knows a limit for all of them only. But it ends a connection that has
no call for `idle_s`, so that one address keeps no more connections open for longer than it may have calls: a `Watch` of
health is a call too.
"""

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from router.front.api import ApiError
from router.grpc.statuses import trailing_metadata

AGAIN_S = 1.0
_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""What a handler calls its behavior, by whether it takes, and gives, a stream."""


def address_of(peer: str) -> str:
    """Return the host of what gRPC calls a peer (`ipv4:127.0.0.1:4711`, `ipv6:[::1]:4711`, `unix:`)."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class CallLimit(grpc.aio.ServerInterceptor):  # type: ignore[misc, no-any-unimported, unused-ignore]
    # Mutable state: the calls that are open, by address. Owner: the event loop.

    def __init__(self, per_address: int) -> None:
        self._per_address = per_address
        self._open: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"CallLimit({self._open.total()} calls of {len(self._open)} addresses)"

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name, make = _KINDS[handler.request_streaming, handler.response_streaming]
        behavior = getattr(handler, name)
        wrapped = self._stream(behavior) if inspect.isasyncgenfunction(behavior) else self._single(behavior)
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _stream(self, behavior: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            if not self._admits(context):
                return
            with self._counted(context):
                async with aclosing(behavior(request, context)) as messages:
                    async for message in messages:
                        yield message

        return answer

    def _single(self, behavior: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def answer(request: Any, context: Any) -> Any:
            if not self._admits(context):
                return None  # not sent: the status is not OK
            with self._counted(context):
                return await behavior(request, context)

        return answer

    def _admits(self, context: Any) -> bool:
        """Return whether a call may begin; one that is one too many is given its status."""
        if self._open[address_of(context.peer())] < self._per_address:
            return True
        told = f"{self._per_address} calls of your address are open; try later"
        context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
        context.set_details(told)
        error = ApiError("RESOURCE_EXHAUSTED", told, retry_after_s=AGAIN_S)
        context.set_trailing_metadata(trailing_metadata(error))
        return False

    @contextmanager
    def _counted(self, context: Any) -> Iterator[None]:
        address = address_of(context.peer())
        self._open[address] += 1
        try:
            yield
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
