"""The Python client of the gRPC API, synchronous and asynchronous. It needs grpcio and protobuf, and nothing else.

Every call has a deadline. Until then, and while no worker has taken the request, a busy or absent server is asked
again, when it says. Once one has, a broken connection is no failure: the rest is read over another. What the server
refuses for good, and what takes longer, raises `ApiError`.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from random import Random
from typing import Any

import grpc

from protos import headrace_pb2 as pb
from router.client.channel import ClientSecrets, Options, api_error, open_channel
from router.client.progress import Retries
from router.client.reading import Reading, client_closed, is_cancelled
from router.client.requests import (
    GatheredAnswer,
    GeneratedText,
    Prompt,
    call_metadata,
    check_timeout,
    detokenize_request,
    generate_request,
    resume_request,
    tokenize_request,
)

ADDRESS = "127.0.0.1:50051"
TIMEOUT_S = 60.0
_SERVICE = "/headrace.v1.Headrace/"
_REPLIES: dict[str, Any] = {
    "ListModels": pb.ListModelsResponse,
    "GetModel": pb.GetModelResponse,
    "Tokenize": pb.TokenizeResponse,
    "Detokenize": pb.DetokenizeResponse,
}


class _Connected:
    """What both kinds of client have in common: how a call is made, over a channel that opens with the first."""

    _library: Any = grpc

    def __init__(
        self,
        address: str = ADDRESS,
        *,
        secrets: ClientSecrets | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: bool = True,
        options: Options = (),
        seed: int | None = None,
    ) -> None:
        """`timeout_s` is the deadline of a call that names none, `options` are of gRPC's channel, and `seed` that of
        the little by which pauses between retries differ."""
        self._address = address
        self._secrets = secrets or ClientSecrets()
        self._timeout_s = timeout_s
        self._retries = retries
        self._options = options
        self._random = Random(seed)
        self._opening = threading.Lock()
        self._opened: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address!r})"

    def _channel(self) -> Any:
        with self._opening:
            if self._opened is None:
                self._opened = open_channel(self._library, self._address, self._secrets, self._options)
            return self._opened

    def _reading(self, prompt: Prompt, options: Mapping[str, Any]) -> Reading:
        named = {name: value for name, value in options.items() if value is not None}
        can_resume = not any(name in named for name in _NEVER_RESUMED)
        given = {"timeout_s": self._timeout_s, "resumable": can_resume, **named}
        own = call_metadata(given, _METADATA)
        retries = Retries(self._random) if self._retries else None
        request = generate_request(prompt, {name: value for name, value in given.items() if name not in _METADATA})
        return Reading(self._channel(), request, self._secrets.metadata, own=own, retries=retries)

    def _resumed(self, token: str, timeout_s: float | None) -> Reading:
        limit_s = self._limit_s(timeout_s)
        request = pb.GenerateRequest(timeout_s=limit_s, resumable=True)
        token = resume_request(token).resume_token
        return Reading(self._channel(), request, self._secrets.metadata, token=token)

    def _call(self, method: str, request: Any, left_s: float) -> Any:
        try:
            call = self._channel().unary_unary(_SERVICE + method)
            return call(request.SerializeToString(), timeout=left_s, metadata=self._secrets.metadata)
        except (ValueError, grpc.aio.UsageError) as error:
            raise client_closed() from error

    def _patience(self, timeout_s: float | None) -> "_Patience":
        retries = Retries(self._random) if self._retries else None
        return _Patience(retries, self._limit_s(timeout_s))

    def _limit_s(self, timeout_s: float | None) -> float:
        """Return the deadline of a call. Raises ApiError for one that no server takes."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        check_timeout(limit_s)
        return limit_s


_NEVER_RESUMED = ("beam_width", "prompt_logprobs")
"""Options that the server refuses together with resumption."""
_METADATA = {"traceparent": "traceparent", "session": "x-headrace-session", "label": "x-request-id"}
"""Options of a call that travel as metadata, and as which."""


class _Patience:
    """The time of one call, over all its tries."""

    def __init__(self, retries: Retries | None, timeout_s: float) -> None:
        self._retries = retries
        self._ends_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(self._ends_s - time.monotonic(), 1e-3)

    def pause_s(self, error: grpc.RpcError) -> float:
        """Return how long to wait before the next try. Raises ApiError if there is none."""
        told, _ = api_error(error)
        pause_s = self._retries.pause_s(told, self.left_s) if self._retries is not None else None
        if pause_s is None:
            raise told from error
        return pause_s


class SyncClient(_Connected):
    """For programs without an event loop. May be shared between threads; close it at the end, or use it in `with`."""

    def stream(self, prompt: Prompt, **options: Any) -> Generator[pb.GenerateResponse, None, None]:
        """Yield the events of an answer as they come: `started`, `delta` and `finished`. Closing the generator cancels
        the request. `options`: fields of `GenerateRequest` and `Sampling`, and `session`, `label` and `traceparent`."""
        return self._reading(prompt, options).events()

    def resume(self, token: str, timeout_s: float | None = None) -> Generator[pb.GenerateResponse, None, None]:
        """Yield the events of an answer that another client has begun, from its first on: `started.resume_token`."""
        return self._resumed(token, timeout_s).events()

    def samples(self, prompt: Prompt, **options: Any) -> list[GeneratedText]:
        """Return all samples of an answer (`n`), whole and in order."""
        answer = GatheredAnswer()
        with closing(self.stream(prompt, **options)) as events:
            for event in events:
                answer.take(event)
        return answer.samples()

    def generate(self, prompt: Prompt, **options: Any) -> GeneratedText:
        """Return the answer, whole; of several samples, the first."""
        return self.samples(prompt, **options)[0]

    def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a text or a chat. `options`: fields of `TokenizeRequest`, and `timeout_s`."""
        timeout_s = options.pop("timeout_s", None)
        request = tokenize_request(prompt, options)
        return list(self._ask("Tokenize", request, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], timeout_s: float | None = None) -> str:
        """Return the text of token ids, control tokens by their names."""
        return str(self._ask("Detokenize", detokenize_request(token_ids), timeout_s).text)

    def models(self, timeout_s: float | None = None) -> list[pb.Model]:
        """Return the models that are served."""
        return list(self._ask("ListModels", pb.ListModelsRequest(), timeout_s).models)

    def close(self) -> None:
        """Close the channel; requests under way end, but for resumable ones."""
        with self._opening:
            channel, self._opened = self._opened, None
        if channel is not None:
            channel.close()

    def __enter__(self) -> "SyncClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, request: Any, timeout_s: float | None) -> Any:
        patience = self._patience(timeout_s)
        while True:
            try:
                return _REPLIES[method].FromString(self._call(method, request, patience.left_s))
            except grpc.RpcError as error:
                time.sleep(patience.pause_s(error))


class AsyncClient(_Connected):
    """The same for programs with an event loop, to which it belongs from its first call on."""

    _library = grpc.aio

    def stream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yield events as `SyncClient.stream` does; close it with `aclosing` to cancel."""
        return self._reading(prompt, options).aevents()

    def resume(self, token: str, timeout_s: float | None = None) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yield the events of an answer that another client has begun, from its first on."""
        return self._resumed(token, timeout_s).aevents()

    async def samples(self, prompt: Prompt, **options: Any) -> list[GeneratedText]:
        """Return all samples of an answer (`n`), whole and in order."""
        answer = GatheredAnswer()
        async with aclosing(self.stream(prompt, **options)) as events:
            async for event in events:
                answer.take(event)
        return answer.samples()

    async def generate(self, prompt: Prompt, **options: Any) -> GeneratedText:
        """Return the answer, whole; of several samples, the first."""
        return (await self.samples(prompt, **options))[0]

    async def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a text or a chat. `options`: fields of `TokenizeRequest`, and `timeout_s`."""
        timeout_s = options.pop("timeout_s", None)
        request = tokenize_request(prompt, options)
        return list((await self._ask("Tokenize", request, timeout_s)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], timeout_s: float | None = None) -> str:
        """Return the text of token ids, control tokens by their names."""
        return str((await self._ask("Detokenize", detokenize_request(token_ids), timeout_s)).text)

    async def models(self, timeout_s: float | None = None) -> list[pb.Model]:
        """Return the models that are served."""
        return list((await self._ask("ListModels", pb.ListModelsRequest(), timeout_s)).models)

    async def close(self) -> None:
        """Close the channel; requests under way end, but for resumable ones."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, method: str, request: Any, timeout_s: float | None) -> Any:
        patience = self._patience(timeout_s)
        while True:
            try:
                return _REPLIES[method].FromString(await self._call(method, request, patience.left_s))
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                raise client_closed() from error
            except grpc.RpcError as error:
                await asyncio.sleep(patience.pause_s(error))
