"""The servers a load run can drive: Headrace over gRPC, or any OpenAI-like server over HTTP.

Both give the events of `router.front.api`, so that the load generator measures them alike.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

import httpx
import msgspec

from access.client import ClientCredentials
from access.config import AccessError
from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.api import ApiError, Delta, Finished, GenerateCall, GenerateEvent
from router.grpc.client import Client

UNKNOWN_TOKEN = -1
"""Stands for the one token that a text chunk is taken for when a server does not send token ids."""


class LoadTarget(Protocol):
    """A server and the connections to it."""

    def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        """Stream one answer's events. Raises `ApiError` for a request that ends badly, be it by the server or the
        network."""
        ...

    async def close(self) -> None: ...


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Migration(msgspec.Struct, frozen=True):
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    transport: str = ""


class _Timing(msgspec.Struct, frozen=True):
    stages: dict[str, float] = {}


class _Headrace(msgspec.Struct):
    migration: _Migration = _Migration()
    timing: _Timing = _Timing()


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    headrace: _Headrace | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class HttpTarget:
    """`/v1/completions` of the server at `address` (host:port or a URL), streamed."""

    def __init__(self, address: str, credentials: ClientCredentials) -> None:
        """Raises ApiError for certificates that cannot be read."""
        url = address if "://" in address else f"{'https' if credentials.has_tls else 'http'}://{address}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            verify = credentials.ssl_context() if credentials.has_tls else True
        except AccessError as error:
            raise ApiError("UNAUTHENTICATED", str(error)) from error
        shown = credentials.authorization
        self._named = {"sni_hostname": credentials.server_name} if credentials.server_name else {}
        self._client = httpx.AsyncClient(
            base_url=url,
            limits=limits,
            timeout=None,
            verify=verify,
            headers={"authorization": shown} if shown else {},
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        """Stream Deltas and Finished, whose times and reason stay empty: the load generator has its own clock."""
        try:
            asked = self._client.stream("POST", "/v1/completions", json=_body(call), extensions=self._named)
            async with asked as reply:
                if reply.status_code != 200:
                    raise _refusal(reply.status_code, await reply.aread())
                last = _Chunk()
                async for line in reply.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        yield _finished(last)
                        return
                    chunk = _decode(data)
                    if chunk.error is not None:
                        raise ApiError(_code(chunk.error, "INTERNAL"), chunk.error.message)
                    last.usage = chunk.usage or last.usage
                    last.headrace = chunk.headrace or last.headrace
                    for choice in chunk.choices:
                        if (delta := _delta(choice)) is not None:
                            yield delta
                raise ApiError("INTERNAL", "the stream ended without [DONE]")
        except httpx.HTTPError as error:
            raise ApiError("UNAVAILABLE", f"{type(error).__name__}: {error}") from error
        except msgspec.DecodeError as error:
            raise ApiError(
                "INTERNAL", f"the server sent an event that cannot be read: {error}"
            ) from error


class GrpcTarget:
    """The gRPC API of the server at `address` (host:port)."""

    def __init__(self, address: str, credentials: ClientCredentials) -> None:
        self._client = Client(address, credentials)

    async def close(self) -> None:
        await self._client.aclose()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        events = self._client.agenerate(call)
        try:
            async for event in events:
                yield event
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()


def open_target(kind: str, address: str, credentials: ClientCredentials | None = None) -> LoadTarget:
    """Connect to a server; `kind` is `grpc` or `http`. Must be called on the event loop that will use the target."""
    shown = credentials or ClientCredentials()
    if kind == "http":
        return HttpTarget(address, shown)
    return GrpcTarget(address, shown)


def _body(call: GenerateCall) -> dict[str, object]:
    body: dict[str, object] = {
        "prompt": call.prompt,
        "max_tokens": call.max_tokens,
        "temperature": call.sampling.temperature,
        "seed": call.seed,
        "ignore_eos": call.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if call.sampling.temperature:
        # Servers have other defaults.
        body |= {"top_p": call.sampling.top_p, "top_k": call.sampling.top_k, "min_p": call.sampling.min_p}
    if call.model is not None:
        body["model"] = call.model
    if call.timeout_s is not None:
        body["timeout"] = call.timeout_s
    return body


def _delta(choice: _Choice) -> Delta | None:
    if choice.token_ids is not None:
        return Delta(choice.text, tuple(choice.token_ids))
    return Delta(choice.text, (UNKNOWN_TOKEN,)) if choice.text else None


def _finished(last: _Chunk) -> Finished:
    usage = last.usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    headrace = last.headrace or _Headrace()
    return Finished(
        reason=FinishReason.LENGTH,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cached_tokens=details.cached_tokens or 0,
        stats=RequestStats(
            stages=headrace.timing.stages,
            migrated_blocks=headrace.migration.blocks,
            migrated_bytes=headrace.migration.bytes,
            migration_s=headrace.migration.seconds,
            transport=headrace.migration.transport,
        ),
        ttft_s=0.0,
        itl_mean_s=0.0,
        itl_p99_s=0.0,
        e2e_s=0.0,
    )


def _refusal(status: int, body: bytes) -> ApiError:
    try:
        error = _decode(body).error or _Error()
    except msgspec.DecodeError:
        error = _Error(body[:200].decode("utf-8", "replace"))
    return ApiError(_code(error, f"HTTP_{status}"), error.message or f"status {status}")


def _code(error: _Error, otherwise: str) -> str:
    return error.code.upper() if isinstance(error.code, str) and error.code else otherwise
