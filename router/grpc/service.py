"""The public gRPC service: bytes to a call, events to bytes, errors to statuses. It decides nothing; a call goes on in
`router/front/frontend.py`.

`Generate` takes raw bytes, since gRPC answers what it cannot decode with UNKNOWN: a message that is
no protobuf, or holds invalid UTF-8, is the caller's fault and is told so.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from importlib.util import find_spec
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from access.authenticator import Authenticator
from access.internal import listen
from access.tenants import Caller
from access.tls import ServerCertificates, names_of_peer
from engine.types import FieldError, host_port
from protos import headrace_pb2 as pb
from router.client.requests import MAX_TIMEOUT_S
from router.config import FrontLimits
from router.front.access import OPEN, as_tenant, let_in, tenant_for, tenant_of
from router.front.api import SESSION_HEADER, ApiError, Delta, GenerateCall, GenerateEvent, Started, invalid
from router.front.frontend import Frontend
from router.front.large_bodies import LargeBodies
from router.front.tokenizing import in_turns
from router.front.validate import served
from router.grpc.calls import CallLimit
from router.grpc.convert import (
    call_from_proto,
    delta_to_proto,
    event_to_proto,
    is_long,
    positions_from_proto,
    sampling_to_proto,
    tokenize_call,
)
from router.grpc.statuses import LABEL_KEY, trailing_metadata, usable_label
from telemetry.tracing import HEADER, sound

SERVICE = "headrace.v1.Headrace"

log = logging.getLogger(__name__)


def check_vllm(wanted: bool) -> None:
    """Raises ValueError where vLLM's engine protocol is wanted and its messages are not installed."""
    if wanted and find_spec("smg_grpc_proto") is None:
        raise ValueError("router.vllm_protocol needs the messages of that protocol: pip install 'headrace[vllm]'")


class Service:
    """The gRPC server and its handlers; `ready` is asked for health."""

    def __init__(
        self,
        frontend: Frontend,
        ready: Callable[[], bool],
        authenticator: Authenticator = OPEN,
        certificates: ServerCertificates | None = None,
        *,
        has_vllm: bool = False,
        bodies_bytes: int = FrontLimits().bodies_bytes,
    ) -> None:
        """`has_vllm`: vLLM's engine protocol is spoken, too. Without `certificates` there is no TLS. Health and
        reflection need no credential beyond what TLS asks. `bodies_bytes` of messages may wait to be parsed."""
        self._frontend = frontend
        self._authenticator = authenticator
        self._certificates = certificates
        self._ready = ready
        self._has_vllm = has_vllm
        self._large = LargeBodies(bodies_bytes)
        self._health = health.aio.HealthServicer()
        self._serving: bool | None = None
        self._server: grpc.aio.Server | None = None

    async def start(
        self,
        host: str,
        port: int,
        max_message_bytes: int,
        limits: Sequence[tuple[str, int]] = (),
        *,
        calls_per_address: int = FrontLimits().calls_per_address,
        is_shared: bool = False,
    ) -> int:
        """Serve our own service, health and reflection; returns the port. `limits` are options of gRPC's server.
        `is_shared`: other routers listen there too.

        Raises OSError if the address cannot be bound.
        """
        server = grpc.aio.server(
            interceptors=[CallLimit(calls_per_address)],
            options=[
                *limits,
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.so_reuseport", int(is_shared)),
                # Clients of resumable streams ask every few seconds whether we are there.
                ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ],
        )
        self._register(server)
        try:
            port = listen(server, host_port(host, port), self._certificates)
        except RuntimeError as error:
            why = "it is taken, or no address of this host"
            raise OSError(f"cannot listen on {host}:{port} for gRPC: {why}") from error
        await server.start()
        self._server = server
        return port

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests and give those under way `grace_s` seconds."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _register(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Generate": _streaming(self._generate),
            "Resume": _streaming(self._resume),
            "Cancel": _single(self._cancel),
            "ListModels": _single(self._list_models),
            "GetModel": _single(self._get_model),
            "Tokenize": _single(self._tokenize),
            "Detokenize": _single(self._detokenize),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        if self._has_vllm:
            # Imported here, since its messages are an extra.
            from router.grpc.vllm.service import SERVICE as VLLM
            from router.grpc.vllm.service import VllmEngineService

            other = VllmEngineService(self._frontend, self._ready, self._caller, self._large)
            server.add_generic_rpc_handlers((other.handlers(_single, _streamed),))
            names.append(VLLM)
        reflection.enable_server_reflection(names, server)

    async def update_health(self) -> None:
        """Tell watchers when readiness changed."""
        ready = self._ready()
        if ready == self._serving:
            return
        self._serving = ready
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def _generate(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[GenerateEvent, None]:
        caller = self._caller(context)
        parsed = await self._large.parse(lambda body: _parse(body, context.time_remaining()), data)
        call = as_tenant(parsed, caller)
        metadata = dict(context.invocation_metadata() or ())
        trace, session = sound(str(metadata.get(HEADER, ""))), str(metadata.get(SESSION_HEADER, ""))
        label = call.request_id or _label(context)
        call = msgspec.structs.replace(call, traceparent=trace, session=session, request_id=label)
        return self._frontend.generate(call)

    async def _resume(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[GenerateEvent, None]:
        tenant = tenant_of(self._caller(context))
        request = await self._message(pb.ResumeRequest, data)
        return self._frontend.resume(request.resume_token, positions_from_proto(request), tenant)

    async def _cancel(self, data: bytes, context: grpc.aio.ServicerContext) -> Message:
        tenant = tenant_of(self._caller(context))
        request = await self._message(pb.CancelRequest, data)
        await self._frontend.cancel(request.resume_token, tenant)
        return pb.CancelResponse()

    async def _list_models(self, data: bytes, context: grpc.aio.ServicerContext) -> Message:
        self._caller(context)
        return pb.ListModelsResponse(models=[self._model(name) for name in self._frontend.names])

    async def _get_model(self, data: bytes, context: grpc.aio.ServicerContext) -> Message:
        self._caller(context)
        request, names = await self._message(pb.GetModelRequest, data), self._frontend.names
        name = request.name
        if name not in names:
            raise ApiError("NOT_FOUND", f"name: it is not served here, {served(names)}", "name")
        return pb.GetModelResponse(model=self._model(name))

    async def _tokenize(self, data: bytes, context: grpc.aio.ServicerContext) -> Message:
        caller = self._caller(context)
        request = await self._message(pb.TokenizeRequest, data)
        try:
            call = tokenize_call(request)
        except FieldError as error:
            raise ApiError("INVALID_ARGUMENT", str(error), error.field) from error
        call = _within(as_tenant(call, caller), context.time_remaining())
        add_special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        found = await self._frontend.tokenize(call, add_special=add_special, strings=request.return_token_strs)
        context_tokens = self._frontend.model.context_tokens
        return pb.TokenizeResponse(token_ids=found.ids, token_strs=found.strings, context_tokens=context_tokens)

    async def _detokenize(self, data: bytes, context: grpc.aio.ServicerContext) -> Message:
        caller = self._caller(context)
        request = await self._message(pb.DetokenizeRequest, data)
        model = request.model if request.HasField("model") else None
        tenant = tenant_for(caller, request.tenant)
        return pb.DetokenizeResponse(text=await self._frontend.detokenize(list(request.token_ids), model, tenant))

    async def _message(self, kind: Any, data: bytes) -> Any:
        """Return a message of `kind`. Raises ApiError."""
        return await self._large.parse(partial(_message, kind), data)

    def _model(self, name: str) -> pb.Model:
        model = self._frontend.model
        return pb.Model(
            name=name,
            context_tokens=model.context_tokens,
            vocabulary_tokens=model.vocab_size,
            stop_token_ids=sorted(model.stop_ids),
            default_sampling=sampling_to_proto(self._frontend.sampling),
        )

    def _caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """Return who calls, by the key in the metadata or the certificate of the connection. Raises ApiError."""
        if self._authenticator.is_open:
            return let_in(self._authenticator, "", None)
        shown = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
        names = names_of_peer(context.auth_context())
        return let_in(self._authenticator, shown[0] if len(shown) == 1 else "ambiguous" if shown else "", names)


def _streaming(
    events: Callable[[bytes, grpc.aio.ServicerContext], Awaitable[AsyncGenerator[GenerateEvent, None]]],
) -> Any:
    """A handler that sends what `events` yields as messages, and what it raises as a status."""

    async def answer(data: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(await events(data, context)) as stream:
                async for event in stream:
                    if isinstance(event, Started):
                        named = _label(context) or event.request_id
                        await context.send_initial_metadata(((LABEL_KEY, named),))
                    if isinstance(event, Delta) and is_long(event):
                        message = await in_turns(delta_to_proto(event))
                    else:
                        message = event_to_proto(event)
                    yield message.SerializeToString()
        except ApiError as error:
            _refuse(context, error)
        except Exception:
            log.exception("a request failed")
            _refuse(context, ApiError("INTERNAL", "the router failed on this request"))

    return grpc.unary_stream_rpc_method_handler(answer)


def _streamed(messages: Callable[[bytes, grpc.aio.ServicerContext], AsyncGenerator[Message, None]]) -> Any:
    """A handler that sends the messages as they are, and what is raised as a status."""

    async def answer(data: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(messages(data, context)) as stream:
                async for message in stream:
                    yield message.SerializeToString()
        except ApiError as error:
            _refuse(context, error)
        except Exception:
            log.exception("a call failed")
            _refuse(context, ApiError("INTERNAL", "the router failed on this call"))

    return grpc.unary_stream_rpc_method_handler(answer)


def _single(reply: Callable[[bytes, grpc.aio.ServicerContext], Awaitable[Message]]) -> Any:
    """A handler that sends what `reply` returns, and what it raises as a status."""

    async def answer(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return (await reply(data, context)).SerializeToString()
        except ApiError as error:
            _refuse(context, error)
        except Exception:
            log.exception("a call failed")
            _refuse(context, ApiError("INTERNAL", "the router failed on this call"))
        return b""

    return grpc.unary_unary_rpc_method_handler(answer)


def _message(kind: Any, data: bytes) -> Any:
    """A protobuf message of `kind`. Raises ApiError."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise invalid("request", f"is not a valid {name} (malformed, or invalid UTF-8): {error}") from error


def _parse(data: bytes, remaining_s: float | None) -> GenerateCall:
    """The call, with the earlier of its own and gRPC's deadline. Raises ApiError."""
    try:
        call = call_from_proto(_message(pb.GenerateRequest, data))
    except FieldError as error:
        raise ApiError("INVALID_ARGUMENT", str(error), error.field) from error
    return _within(call, remaining_s)


def _within(call: GenerateCall, remaining_s: float | None) -> GenerateCall:
    if remaining_s is None or (call.timeout_s is not None and not call.timeout_s > remaining_s):
        return call
    return msgspec.structs.replace(call, timeout_s=min(max(remaining_s, 1e-3), MAX_TIMEOUT_S))


def _refuse(context: grpc.aio.ServicerContext, error: ApiError) -> None:
    """Let a call end with an error's status. gRPC's own `abort` raises an exception and keeps it, with every frame and
    so the request, until the collector comes by."""
    context.set_code(grpc.StatusCode[error.code])
    context.set_details(error.message)
    context.set_trailing_metadata(trailing_metadata(error, _label(context)))


def _label(context: grpc.aio.ServicerContext) -> str:
    """Return the caller's own name for a call, from its metadata; the first of several counts."""
    found = (str(value) for key, value in context.invocation_metadata() or () if key == LABEL_KEY)
    return usable_label(next(found, ""))
