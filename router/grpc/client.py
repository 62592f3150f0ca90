"""A client of the gRPC API for our own programs: calls and events are the types of `router.front.api`. What it does on
the wire is in `router/client/`."""

from collections.abc import AsyncIterator, Generator
from contextlib import aclosing, closing
from typing import Any

import grpc
import msgspec

from access.client import ClientCredentials
from access.config import AccessError
from protos import headrace_pb2 as pb
from router.client.channel import ClientSecrets, Metadata, api_error, open_channel
from router.client.reading import Reading
from router.front.api import SESSION_HEADER, ApiError, GenerateCall, GenerateEvent
from router.grpc.convert import call_to_proto, event_from_proto

_MODELS = "/headrace.v1.Headrace/ListModels"


class Client:
    """Synchronous and asynchronous; each kind opens its channel when it is first used.

    Leaving an iterator early, or closing it, cancels the request. Every failure is an `ApiError`. With `resume` a
    broken connection is no failure: the client comes back, and goes on where it was, for up to half a minute.
    """

    def __init__(self, address: str, credentials: ClientCredentials | None = None) -> None:
        self._address = address
        self._credentials = credentials or ClientCredentials()
        self._metadata = ClientSecrets(api_key=self._credentials.api_key).metadata
        self._channel: grpc.Channel | None = None
        self._aio_channel: grpc.aio.Channel | None = None

    def generate(self, call: GenerateCall, resume: bool = False) -> Generator[GenerateEvent, None, None]:
        """Events of one request, ending with Finished of its last sample. Raises ApiError."""
        with closing(self._reading(self._sync(), call, resume).events()) as responses:
            for response in responses:
                yield event_from_proto(response)

    async def agenerate(self, call: GenerateCall, resume: bool = False) -> AsyncIterator[GenerateEvent]:
        """Like `generate`, on the running event loop; close it with `aclosing` to cancel."""
        async with aclosing(self._reading(self._aio(), call, resume).aevents()) as responses:
            async for response in responses:
                yield event_from_proto(response)

    def models(self, timeout_s: float = 10.0) -> dict[str, int]:
        """Context length in tokens by model name. Raises ApiError."""
        try:
            data = self._sync().unary_unary(_MODELS)(b"", timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise api_error(error)[0] from error
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

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _sync(self) -> grpc.Channel:
        if self._channel is None:
            self._channel = open_channel(grpc, self._address, self._secrets())
        return self._channel

    def _aio(self) -> grpc.aio.Channel:
        if self._aio_channel is None:
            self._aio_channel = open_channel(grpc.aio, self._address, self._secrets())
        return self._aio_channel

    def _secrets(self) -> ClientSecrets:
        """Return what the credentials' files hold. Raises ApiError for files that cannot be read."""
        ours = self._credentials
        if not ours.has_tls:
            return ClientSecrets(api_key=ours.api_key)
        try:
            roots, key, chain = ours.pem()
        except AccessError as error:
            raise ApiError("UNAUTHENTICATED", str(error)) from error
        return ClientSecrets(
            api_key=ours.api_key, has_tls=True, roots=roots, key=key, chain=chain, server_name=ours.server_name
        )

    def _reading(self, channel: Any, call: GenerateCall, resume: bool) -> Reading:
        """Ask. Raises ApiError for a call that cannot be encoded."""
        own: Metadata = (("traceparent", call.traceparent),) if call.traceparent else ()
        if call.session:
            if not (call.session.isascii() and call.session.isprintable()):
                raise ApiError("INVALID_ARGUMENT", f"{SESSION_HEADER}: only printable ASCII can travel", SESSION_HEADER)
            own = (*own, (SESSION_HEADER, call.session))
        try:
            request = call_to_proto(msgspec.structs.replace(call, resumable=call.resumable or resume))
            return Reading(channel, request, self._metadata, own=own)
        except (TypeError, ValueError) as error:
            raise ApiError("INVALID_ARGUMENT", f"the call cannot be encoded: {error}") from error
