"""A client of the gRPC API: calls and events are the types of `router.front.api`."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import grpc
import msgspec

from access.client import ClientCredentials
from access.config import AccessError
from protos import headrace_pb2 as pb
from router.front.api import NOBODY, SESSION_HEADER, ApiError, GenerateCall, GenerateEvent
from router.grpc.convert import call_to_proto, event_from_proto, resume_to_proto
from router.grpc.progress import Progress

_GENERATE = "/headrace.v1.Headrace/Generate"
_RESUME = "/headrace.v1.Headrace/Resume"
_CANCEL = "/headrace.v1.Headrace/Cancel"
_MODELS = "/headrace.v1.Headrace/ListModels"
_CANCEL_TIMEOUT_S = 2.0
_UNANSWERED = re.compile(r"failed to connect to all addresses.* ipv[46]:(\S+): (.+)")
_OPTIONS = [
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Without all three a server that is silent, and not gone, is waited for without end.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


Metadata = tuple[tuple[str, str], ...]


class Client:
    """Synchronous and asynchronous; each kind opens its channel when it is first used.

    Leaving an iterator early, or closing it, cancels the request. Every failure is an `ApiError`. With `resume` a
    broken connection is no failure: the client comes back, and goes on where it was, for up to half a minute.
    """

    def __init__(self, address: str, credentials: ClientCredentials | None = None) -> None:
        self._address = address
        self._credentials = credentials or ClientCredentials()
        shown = self._credentials.authorization
        self._metadata: Metadata = (("authorization", shown),) if shown else ()
        self._channel: grpc.Channel | None = None
        self._aio_channel: grpc.aio.Channel | None = None

    def generate(self, call: GenerateCall, resume: bool = False) -> Generator[GenerateEvent, None, None]:
        """Events of one request, ending with Finished of its last sample. Raises ApiError."""
        reading = _Reading(self._sync(), call, resume, self._metadata)
        try:
            while True:
                try:
                    for data in reading.stream:
                        if (event := reading.taken(data)) is not None:
                            yield event
                        if reading.progress.is_over:
                            return
                    raise _ended_early()
                except (grpc.RpcError, ApiError) as error:
                    time.sleep(reading.pause_s(error))
                    reading.go_on()
        finally:
            reading.stream.cancel()
            if reading.is_left_running():
                with suppress(grpc.RpcError, ValueError):
                    reading.cancel()

    async def agenerate(self, call: GenerateCall, resume: bool = False) -> AsyncIterator[GenerateEvent]:
        """Like `generate`, on the running event loop; close it with `aclosing` to cancel."""
        reading = _Reading(self._aio(), call, resume, self._metadata)
        try:
            while True:
                try:
                    async for data in reading.stream:
                        if (event := reading.taken(data)) is not None:
                            yield event
                        if reading.progress.is_over:
                            return
                    raise _ended_early()
                except (grpc.RpcError, ApiError) as error:
                    await asyncio.sleep(reading.pause_s(error))
                    reading.go_on()
        finally:
            reading.stream.cancel()
            if reading.is_left_running():
                with suppress(grpc.RpcError, grpc.aio.UsageError):
                    await reading.cancel()

    def models(self, timeout_s: float = 10.0) -> dict[str, int]:
        """Context length in tokens by model name. Raises ApiError."""
        try:
            data = self._sync().unary_unary(_MODELS)(b"", timeout=timeout_s, metadata=self._metadata)
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

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _sync(self) -> grpc.Channel:
        if self._channel is None:
            secure, options = self._secure()
            self._channel = (
                grpc.insecure_channel(self._address, options)
                if secure is None
                else grpc.secure_channel(self._address, secure, options)
            )
        return self._channel

    def _aio(self) -> grpc.aio.Channel:
        if self._aio_channel is None:
            secure, options = self._secure()
            self._aio_channel = (
                grpc.aio.insecure_channel(self._address, options)
                if secure is None
                else grpc.aio.secure_channel(self._address, secure, options)
            )
        return self._aio_channel

    def _secure(self) -> tuple[grpc.ChannelCredentials | None, list[tuple[str, Any]]]:
        """Return what TLS needs, None without it, and the channel's options. Raises ApiError for files that cannot be
        read."""
        ours, options = self._credentials, list[tuple[str, Any]](_OPTIONS)
        if not ours.has_tls:
            return None, options
        try:
            roots, key, chain = ours.pem()
        except AccessError as error:
            raise ApiError("UNAUTHENTICATED", str(error)) from error
        if ours.server_name:
            options.append(("grpc.ssl_target_name_override", ours.server_name))
        return grpc.ssl_channel_credentials(roots, key, chain), options


class _Reading:
    """One answer, over as many streams of a channel, of either kind, as it takes."""

    # Mutable state: the present stream, and what has come so far.

    def __init__(self, channel: Any, call: GenerateCall, resume: bool, metadata: Metadata) -> None:
        """Raises ApiError for a call that cannot be encoded."""
        self._metadata = metadata
        self.progress = Progress()
        self._channel = channel
        self._is_resumable = call.resumable or resume
        self._ends_s = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        call = msgspec.structs.replace(call, resumable=self._is_resumable)
        try:
            request = call_to_proto(call).SerializeToString()
        except (TypeError, ValueError) as error:
            raise ApiError("INVALID_ARGUMENT", f"the call cannot be encoded: {error}") from error
        if call.traceparent:
            metadata = (*metadata, ("traceparent", call.traceparent))
        if call.session:
            if not (call.session.isascii() and call.session.isprintable()):
                raise ApiError("INVALID_ARGUMENT", f"{SESSION_HEADER}: only printable ASCII can travel", SESSION_HEADER)
            metadata = (*metadata, (SESSION_HEADER, call.session))
        self.stream = channel.unary_stream(_GENERATE)(request, timeout=call.timeout_s, metadata=metadata)

    def taken(self, data: bytes) -> GenerateEvent | None:
        """The event, unless the caller has seen it already."""
        event = event_from_proto(pb.GenerateResponse.FromString(data))
        return event if self.progress.take(event) else None

    def pause_s(self, error: grpc.RpcError | ApiError) -> float:
        """Return how long to wait before coming back. Raises the ApiError to tell the caller if there is none."""
        failure, from_server = error, False
        if isinstance(error, grpc.RpcError):
            failure, from_server = _api_error(error), "headrace-ended" in dict(error.trailing_metadata() or ())
        try:
            return self.progress.pause_s(failure, from_server, time.monotonic())
        except ApiError as told:
            raise told from error

    def go_on(self) -> None:
        """Read on, from where the last stream broke. Raises ApiError if the client was closed meanwhile."""
        request = resume_to_proto(self.progress.token, self.progress.positions).SerializeToString()
        left_s = None if self._ends_s is None else max(self._ends_s - time.monotonic(), 1e-3)
        try:
            self.stream = self._channel.unary_stream(_RESUME)(request, timeout=left_s, metadata=self._metadata)
        except (ValueError, grpc.aio.UsageError) as error:
            raise ApiError("CANCELLED", "the client was closed") from error

    def is_left_running(self) -> bool:
        """True while the server goes on with the request although nobody reads it."""
        return self._is_resumable and not self.progress.is_over and bool(self.progress.token)

    def cancel(self) -> Any:
        request = pb.CancelRequest(resume_token=self.progress.token).SerializeToString()
        return self._channel.unary_unary(_CANCEL)(request, timeout=_CANCEL_TIMEOUT_S, metadata=self._metadata)


def _ended_early() -> ApiError:
    return ApiError("UNAVAILABLE", "the stream ended without an end of its answer")


def _api_error(error: grpc.RpcError) -> ApiError:
    metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
    retry_ms = metadata.get("retry-after-ms")
    return ApiError(
        error.code().name,
        _plain(error.details() or ""),
        metadata.get("headrace-field", ""),
        int(retry_ms) / 1e3 if retry_ms else None,
    )


def _plain(details: str) -> str:
    """Say who does not answer and why, where a connection failed, without what the library writes around it."""
    found = _UNANSWERED.search(details)
    if found is None:
        return details
    return f"{NOBODY} at {unquote(found[1])}: {found[2].rpartition(': ')[2]}"
