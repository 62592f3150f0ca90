"""vLLM's engine protocol over the same frontend: gateways made for that engine, such as smg, find one here.

The messages come from the wheel `smg-grpc-proto` (`pip install headrace[vllm]`) and not from a copy. What the gateway
sees is one engine with one queue; pools, placement and migration stay behind it. A request ends by its stream's end or
by `Abort`, whichever comes first.
"""

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from access.tenants import Caller
from engine.types import SamplingParams
from router.client.requests import MAX_TIMEOUT_S
from router.front.access import as_tenant, tenant_of
from router.front.api import Delta, Finished, GenerateCall, Started, invalid
from router.front.frontend import Frontend
from router.front.large_bodies import LargeBodies
from router.grpc.vllm.messages import SampleSoFar, call_from_vllm, unsupported
from telemetry.build import VERSION
from telemetry.tracing import HEADER, sound

SERVICE = "vllm.grpc.engine.VllmEngine"
PIECE_BYTES = 256 * 1024
_SAME_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(eq=False, slots=True)
class _Running:
    """One request under way, and the task that its `Abort` interrupts."""

    tenant: str
    task: "asyncio.Task[Any]"
    is_aborted: bool = False


class VllmEngineService:
    """The handlers of the service. Lives on the router's event loop.

    Mutable state: requests under way by the gateway's name for them, when one came last, and the tokenizer's archive
    once it was asked for."""

    def __init__(
        self,
        frontend: Frontend,
        ready: Callable[[], bool],
        caller: Callable[[grpc.aio.ServicerContext], Caller],
        large: LargeBodies,
    ) -> None:
        """`caller` says who calls, or raises ApiError."""
        self._frontend = frontend
        self._ready = ready
        self._caller = caller
        self._large = large
        self._running: dict[str, set[_Running]] = {}
        self._began_s = time.monotonic()
        self._received_s = 0.0
        self._archive = b""

    def handlers(self, single: Callable[[Any], Any], streaming: Callable[[Any], Any]) -> Any:
        """Return the service's handlers; `single` and `streaming` make one of a function that raises ApiError."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": streaming(self.generate),
                "Abort": single(self._abort),
                "Embed": single(self._refused("Embed")),
                "FlushCache": single(self._refused("FlushCache")),
                "StartProfile": single(self._refused("StartProfile")),
                "StopProfile": single(self._refused("StopProfile")),
                "HealthCheck": single(self._health),
                "GetModelInfo": single(self._model_info),
                "GetServerInfo": single(self._server_info),
                "GetLoads": single(self._loads),
                "GetTokenizer": streaming(self._tokenizer),
            },
        )

    async def generate(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        """Answer one request. Raises ApiError."""
        caller = self._caller(context)
        request = await self._large.parse(partial(_message, vllm.GenerateRequest), data)
        call = as_tenant(call_from_vllm(request), caller)
        metadata = dict(context.invocation_metadata() or ())
        call = msgspec.structs.replace(call, traceparent=sound(str(metadata.get(HEADER, ""))))
        left_s = context.time_remaining()
        if left_s is not None:
            call = msgspec.structs.replace(call, timeout_s=min(max(left_s, 1e-3), MAX_TIMEOUT_S))
        self._received_s = time.time()
        task = asyncio.current_task()
        assert task is not None
        mine = _Running(call.tenant, task)
        self._running.setdefault(request.request_id, set()).add(mine)
        try:
            async with aclosing(self._answer(call, mine, is_streamed=request.stream)) as messages:
                async for message in messages:
                    yield message
        finally:
            others = self._running[request.request_id]
            others.discard(mine)
            if not others:
                del self._running[request.request_id]

    async def _answer(self, call: GenerateCall, mine: _Running, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        samples = [SampleSoFar(0)]  # as many as are asked for, once their number was checked
        ended: set[int] = set()
        started = Started("", "", 0)
        try:
            async with aclosing(self._frontend.generate(call)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        started = event
                        samples = [SampleSoFar(index) for index in range(call.n)]
                    elif isinstance(event, Delta):
                        chunk = samples[event.sample].chunk(event, started)
                        if is_streamed and event.token_ids:
                            yield chunk
                    elif isinstance(event, Finished):
                        ended.add(event.sample)
                        yield samples[event.sample].complete(event.reason.value, started.prompt_tokens, event)
        except asyncio.CancelledError:
            if not mine.is_aborted:
                raise
            # By `Abort`, so the stream ends well: its reader is told, and the request has ended on every worker.
            mine.task.uncancel()
            for index, sample in enumerate(samples):
                if index not in ended:
                    yield sample.complete("abort", started.prompt_tokens)

    async def _abort(self, data: bytes, context: grpc.aio.ServicerContext) -> Any:
        tenant = tenant_of(self._caller(context))
        for name in (await self._large.parse(partial(_message, vllm.AbortRequest), data)).request_ids:
            for running in self._running.get(name, ()):
                if tenant in (None, running.tenant):
                    running.is_aborted = True
                    running.task.cancel()
        return vllm.AbortResponse()

    async def _health(self, data: bytes, context: grpc.aio.ServicerContext) -> Any:
        ready = self._ready()
        return vllm.HealthCheckResponse(healthy=ready, message="" if ready else "no worker can take requests")

    async def _model_info(self, data: bytes, context: grpc.aio.ServicerContext) -> Any:
        self._caller(context)
        model = self._frontend.model
        drawn: SamplingParams = model.sampling
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=self._frontend.names[0],
            tokenizer_path=model.name,
            is_generation=True,
            max_context_length=model.context_tokens,
            max_req_input_len=model.context_tokens - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=sorted(model.stop_ids),
            default_sampling_params_json=msgspec.json.encode(drawn).decode(),
        )

    async def _server_info(self, data: bytes, context: grpc.aio.ServicerContext) -> Any:
        caller = self._caller(context)
        return vllm.GetServerInfoResponse(
            active_requests=self._count(caller),
            last_receive_timestamp=0.0 if caller.role == "tenant" else self._received_s,
            uptime_seconds=time.monotonic() - self._began_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
        )

    async def _loads(self, data: bytes, context: grpc.aio.ServicerContext) -> Any:
        count = self._count(self._caller(context))
        load = vllm.SchedulerLoad(num_running_reqs=count, num_total_reqs=count)
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=VERSION, dp_rank_count=1, loads=[load])

    async def _tokenizer(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        self._caller(context)
        if not self._archive:
            self._archive = await asyncio.to_thread(lambda: archive(self._frontend.model.tokenizer_files()))
        whole = self._archive
        for at in range(0, len(whole), PIECE_BYTES):
            is_last = at + PIECE_BYTES >= len(whole)
            digest = hashlib.sha256(whole).hexdigest() if is_last else ""
            yield common.GetTokenizerChunk(data=whole[at : at + PIECE_BYTES], sha256=digest)

    def _refused(self, what: str) -> Callable[[bytes, grpc.aio.ServicerContext], Any]:
        async def refuse(data: bytes, context: grpc.aio.ServicerContext) -> Any:
            raise unsupported(what)

        return refuse

    def _count(self, caller: Caller) -> int:
        """Return how many requests are under way, to a tenant its own: figures of all together are a monitor's."""
        running = [one for named in self._running.values() for one in named]
        return sum(caller.role != "tenant" or one.tenant == caller.tenant for one in running)


def archive(files: Mapping[str, str]) -> bytes:
    """Return files as a zip, always the same for the same contents."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in sorted(files.items()):
            packed.writestr(zipfile.ZipInfo(name, _SAME_DATE), text.encode(), zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _message(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise invalid("request", f"is not a valid {kind.DESCRIPTOR.name}: {error}") from error
