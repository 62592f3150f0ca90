"""One answer, over as many streams of a channel as it takes: where a connection breaks, the rest comes over another."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import Any

import grpc

from protos import headrace_pb2 as pb
from router.client.channel import Metadata, api_error
from router.client.errors import ApiError
from router.client.progress import Progress, Retries
from router.client.requests import check_timeout

GENERATE = "/headrace.v1.Headrace/Generate"
RESUME = "/headrace.v1.Headrace/Resume"
CANCEL = "/headrace.v1.Headrace/Cancel"
CANCEL_TIMEOUT_S = 2.0


class Reading:
    """Belongs to one caller, and to the kind of its channel: `events` reads over one of `grpc`, `aevents` over one of
    `grpc.aio`. Leaving either early cancels the request."""

    # Mutable state: the present stream, what has come so far, and whether the request is to be asked again.

    def __init__(
        self,
        channel: Any,
        request: pb.GenerateRequest,
        metadata: Metadata = (),
        *,
        own: Metadata = (),
        retries: Retries | None = None,
        token: str = "",
    ) -> None:
        """`metadata` goes with every call, `own` with the request alone. With `retries` it is asked again while no
        worker has taken it. A request that is `resumable` outlives its connections; with the `token` of one that
        another client has begun, its answer is read from the beginning. Raises ApiError for a deadline that no server
        takes."""
        if request.HasField("timeout_s"):
            check_timeout(request.timeout_s)
        self._channel = channel
        self._request = request
        self._metadata = metadata
        self._own = own
        self._retries = retries
        self._ends_s = time.monotonic() + request.timeout_s if request.HasField("timeout_s") else None
        self._asks_again = False
        self.progress = Progress(token)
        self.stream: Any = None
        """Opened when the first event is asked for: what nobody has begun to read need not be cancelled."""

    def events(self) -> Generator[pb.GenerateResponse, None, None]:
        """Yield what the server sends, ending with Finished of the last sample. Raises ApiError."""
        self._begin()
        try:
            while True:
                try:
                    for data in self.stream:
                        response = pb.GenerateResponse.FromString(data)
                        if self.progress.take(response):
                            yield response
                        if self.progress.is_over:
                            return
                    raise _ended_early()
                except (grpc.RpcError, ApiError) as error:
                    time.sleep(self.pause_s(error))
                    self.go_on()
        finally:
            self.stream.cancel()
            if self._is_left_running():
                with suppress(grpc.RpcError, ValueError):
                    self._cancel()

    async def aevents(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Like `events`, on the running event loop; close it with `aclosing` to cancel."""
        self._begin()
        try:
            while True:
                try:
                    async for data in self.stream:
                        response = pb.GenerateResponse.FromString(data)
                        if self.progress.take(response):
                            yield response
                        if self.progress.is_over:
                            return
                    raise _ended_early()
                except asyncio.CancelledError as error:
                    if is_cancelled():
                        raise
                    raise client_closed() from error
                except (grpc.RpcError, ApiError) as error:
                    await asyncio.sleep(self.pause_s(error))
                    self.go_on()
        finally:
            self.stream.cancel()
            if self._is_left_running():
                with suppress(grpc.RpcError, grpc.aio.UsageError):
                    await self._cancel()

    def pause_s(self, error: grpc.RpcError | ApiError) -> float:
        """Return how long to wait before going on. Raises the ApiError to tell the caller if there is no going on."""
        failure, from_server = api_error(error) if isinstance(error, grpc.RpcError) else (error, False)
        try:
            return self.progress.pause_s(failure, from_server, time.monotonic())
        except ApiError as told:
            if self._retries is not None and not self.progress.has_begun:
                pause_s = self._retries.pause_s(told, self._left_s())
                if pause_s is not None:
                    self._asks_again = True
                    return pause_s
            raise told from error

    def go_on(self) -> None:
        """Read on, from where the last stream broke. Raises ApiError if the client was closed meanwhile."""
        if not self._asks_again:
            self.stream = self._opened(self._read_on)
            return
        self._asks_again, self.progress = False, Progress()
        left_s = self._left_s()
        if left_s is not None:
            self._request.timeout_s = left_s
        self.stream = self._opened(self._asked)

    def _begin(self) -> None:
        """Open the first stream. Raises ApiError if the client was closed before."""
        self.stream = self._opened(self._read_on if self.progress.token else self._asked)

    def _opened(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except (ValueError, grpc.aio.UsageError) as error:
            raise client_closed() from error

    def _read_on(self) -> Any:
        request = self.progress.resume_request().SerializeToString()
        return self._channel.unary_stream(RESUME)(request, timeout=self._left_s(), metadata=self._metadata)

    def _asked(self) -> Any:
        call = self._channel.unary_stream(GENERATE)
        metadata = (*self._metadata, *self._own)
        return call(self._request.SerializeToString(), timeout=self._left_s(), metadata=metadata)

    def _left_s(self) -> float | None:
        return None if self._ends_s is None else max(self._ends_s - time.monotonic(), 1e-3)

    def _is_left_running(self) -> bool:
        """True while the server goes on with the request although nobody reads it."""
        return self._request.resumable and not self.progress.is_over and bool(self.progress.token)

    def _cancel(self) -> Any:
        request = pb.CancelRequest(resume_token=self.progress.token).SerializeToString()
        return self._channel.unary_unary(CANCEL)(request, timeout=CANCEL_TIMEOUT_S, metadata=self._metadata)


def client_closed() -> ApiError:
    """Return the error of a call whose client was closed before its end."""
    return ApiError("CANCELLED", "the client was closed")


def is_cancelled() -> bool:
    """Say whether the running task itself was cancelled: `grpc.aio` raises CancelledError for calls of a closed
    channel, too."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _ended_early() -> ApiError:
    return ApiError("UNAVAILABLE", "the stream ended without an end of its answer")
