"""A client of the gRPC API: calls and events are the types of `router.api`."""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType

import grpc

from protos import headrace_pb2 as pb
from router.api import ApiError, Finished, GenerateCall, GenerateEvent
from router.convert import call_to_proto, event_from_proto

_GENERATE = "/headrace.v1.Headrace/Generate"
_MODELS = "/headrace.v1.Headrace/ListModels"
_OPTIONS = [
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class Client:
    """Synchronous and asynchronous; each kind opens its channel when it is first used.

    Leaving an iterator early, or closing it, cancels the request. Every failure is an `ApiError`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.Channel | None = None
        self._aio_channel: grpc.aio.Channel | None = None

    def generate(self, call: GenerateCall) -> Iterator[GenerateEvent]:
        """Events of one request, ending with Finished. Raises ApiError."""
        stream = self._sync().unary_stream(_GENERATE)(_encoded(call), timeout=call.timeout_s)
        try:
            for data in stream:
                event = event_from_proto(pb.GenerateResponse.FromString(data))
                yield event
                if isinstance(event, Finished):
                    return
        except grpc.RpcError as error:
            raise _api_error(error) from error
        finally:
            stream.cancel()

    async def agenerate(self, call: GenerateCall) -> AsyncIterator[GenerateEvent]:
        """Like `generate`, on the running event loop; close it with `aclosing` to cancel."""
        stream = self._aio().unary_stream(_GENERATE)(_encoded(call), timeout=call.timeout_s)
        try:
            async for data in stream:
                event = event_from_proto(pb.GenerateResponse.FromString(data))
                yield event
                if isinstance(event, Finished):
                    return
        except grpc.RpcError as error:
            raise _api_error(error) from error
        finally:
            stream.cancel()

    def models(self, timeout_s: float = 10.0) -> dict[str, int]:
        """Context length in tokens by model name. Raises ApiError."""
        try:
            data = self._sync().unary_unary(_MODELS)(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            raise _api_error(error) from error
        return {m.name: m.context_tokens for m in pb.ListModelsResponse.FromString(data).models}

    def close(self) -> None:
        """Close the synchronous channel; requests under way end."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def aclose(self) -> None:
        """Close both channels."""
        self.close()
        if self._aio_channel is not None:
            await self._aio_channel.close()
            self._aio_channel = None

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _sync(self) -> grpc.Channel:
        if self._channel is None:
            self._channel = grpc.insecure_channel(self._address, _OPTIONS)
        return self._channel

    def _aio(self) -> grpc.aio.Channel:
        if self._aio_channel is None:
            self._aio_channel = grpc.aio.insecure_channel(self._address, _OPTIONS)
        return self._aio_channel


def _encoded(call: GenerateCall) -> bytes:
    try:
        return call_to_proto(call).SerializeToString()
    except (TypeError, ValueError) as error:
        raise ApiError("INVALID_ARGUMENT", f"the call cannot be encoded: {error}") from error


def _api_error(error: grpc.RpcError) -> ApiError:
    metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
    retry_ms = metadata.get("retry-after-ms")
    return ApiError(
        error.code().name,
        error.details() or "",
        metadata.get("headrace-field", ""),
        int(retry_ms) / 1e3 if retry_ms else None,
    )
