"""vLLM's engine protocol over the frontend, against stand-ins for workers. Behind a real gateway it is tried in
tests/integration/test_smg.py."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto", reason="needs smg-grpc-proto (in the extra `vllm`)")

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from access.config import AccessConfig
from engine.constraints.text import JSON_OBJECT, choices_constraint
from engine.messages import Cancel, Place
from engine.types import Constraint, ConstraintKind, TokenLogprobs
from router.front.api import ApiError, Delta, Started
from router.grpc.client import Client
from router.grpc.vllm import service
from router.grpc.vllm.messages import SampleSoFar, call_from_vllm, output_logprobs
from tests.router.fake_cluster import FakeWorkers, until
from tests.router.grpc.test_service import with_cluster
from tests.router.test_credentials import Keys

IDS = [*b"hello world", 256]
PROMPT = vllm.TokenizedInput(input_ids=[104, 105])
Speak = Callable[[Any, FakeWorkers], Any]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.fixture
def engine(runner: asyncio.Runner) -> Callable[[Speak], None]:
    def run(speak: Speak) -> None:
        async def body(client: Client, workers: FakeWorkers) -> None:
            async with grpc.aio.insecure_channel(client._address) as channel:
                await speak(VllmEngineStub(channel), workers)

        runner.run(with_cluster(body, vllm_protocol=True))

    return run


async def read(call: Any) -> tuple[list[Any], list[Any]]:
    """The chunks and the last messages of an answer."""
    messages = [message async for message in call]
    chunks = [m.chunk for m in messages if m.WhichOneof("response") == "chunk"]
    return chunks, [m.complete for m in messages if m.WhichOneof("response") == "complete"]


def test_an_answer_streams_and_comes_whole(engine: Callable[[Speak], None]) -> None:
    """Guards the account: every token once in the chunks, all of them in the last message, and nothing before it where
    no stream was asked for."""

    async def speak(stub: Any, workers: FakeWorkers) -> None:
        asked = vllm.GenerateRequest(request_id="a", tokenized=PROMPT, stream=True)
        chunks, (end,) = await read(stub.Generate(asked))
        assert [token for chunk in chunks for token in chunk.token_ids] == IDS == list(end.output_ids)
        assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("stop", 2, 12)
        whole = vllm.GenerateRequest(request_id="b", text="hi", sampling_params=vllm.SamplingParams(max_tokens=3, n=2))
        chunks, ends = await read(stub.Generate(whole))
        assert chunks == [] and sorted(end.index for end in ends) == [0, 1]
        assert all(list(end.output_ids) == IDS[:3] and end.finish_reason == "length" for end in ends)
        stopped = vllm.SamplingParams(stop=["wor"])
        _, (end,) = await read(stub.Generate(vllm.GenerateRequest(text="hi", sampling_params=stopped)))
        assert (end.finish_reason, end.matched_stop_str) == ("stop", "wor")

    engine(speak)


def test_what_is_asked_reaches_the_worker(engine: Callable[[Speak], None]) -> None:
    """Guards plain scalars: 0 is absent there, and a top_p of 0 would leave one token."""

    async def speak(stub: Any, workers: FakeWorkers) -> None:
        await read(stub.Generate(vllm.GenerateRequest(tokenized=PROMPT)))
        given = vllm.SamplingParams(temperature=0.0, top_p=0.5, top_k=2**32 - 1, seed=-1, min_tokens=2, ignore_eos=True)
        await read(stub.Generate(vllm.GenerateRequest(tokenized=PROMPT, sampling_params=given)))
        plain, other = (r.record for r in workers.got if isinstance(r, Place))
        assert (plain.tokens, plain.sampling.top_p, plain.sampling.repetition_penalty) == ([104, 105], 1.0, 1.0)
        assert (plain.sampling.temperature, plain.sampling.top_k) == (1.0, 0)
        assert (other.sampling.temperature, other.sampling.top_p, other.sampling.top_k) == (0.0, 0.5, 2**31 - 1)
        assert (other.seed, other.min_tokens, other.ignore_eos) == (2**64 - 1, 2, True)

    engine(speak)


def test_abort_ends_a_request_and_tells_its_reader(engine: Callable[[Speak], None]) -> None:
    """Guards decode slots: gateways abort by name, and may never cancel the stream."""

    async def speak(stub: Any, workers: FakeWorkers) -> None:
        workers.slow_s = 0.05
        call = aiter(stub.Generate(vllm.GenerateRequest(request_id="a", tokenized=PROMPT, stream=True)))
        other = asyncio.create_task(read(stub.Generate(vllm.GenerateRequest(request_id="b", tokenized=PROMPT))))
        first = await anext(call)
        await stub.Abort(vllm.AbortRequest(request_ids=["a", "nobody's"]))
        chunks, (end,) = await read(call)
        had = [*first.chunk.token_ids, *(token for chunk in chunks for token in chunk.token_ids)]
        assert end.finish_reason == "abort" and list(end.output_ids) == had and len(had) < len(IDS)
        await until(lambda: any(isinstance(r, Cancel) for r in workers.got))
        assert (await other)[1][0].finish_reason == "stop"
        assert (await stub.GetServerInfo(vllm.GetServerInfoRequest())).active_requests == 0

    engine(speak)


def test_how_many_samples_is_checked_before_any_is_made(
    engine: Callable[[Speak], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the router's memory: the protocol lets a request ask for four thousand million samples."""
    made = []
    real = service.SampleSoFar
    monkeypatch.setattr(service, "SampleSoFar", lambda index: made.append(index) or real(index))

    async def speak(stub: Any, workers: FakeWorkers) -> None:
        asked = vllm.GenerateRequest(tokenized=PROMPT, sampling_params=vllm.SamplingParams(n=100_000))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(stub.Generate(asked))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(made) <= 1

    engine(speak)


def test_a_stream_that_is_left_ends_too(engine: Callable[[Speak], None]) -> None:
    async def speak(stub: Any, workers: FakeWorkers) -> None:
        workers.slow_s = 5.0
        call = stub.Generate(vllm.GenerateRequest(request_id="a", tokenized=PROMPT, stream=True))
        await until(lambda: any(isinstance(r, Place) for r in workers.got))
        assert (await stub.GetLoads(vllm.GetLoadsRequest())).loads[0].num_running_reqs == 1
        call.cancel()
        await until(lambda: any(isinstance(r, Cancel) for r in workers.got))

    engine(speak)


def test_what_a_gateway_wants_to_know(engine: Callable[[Speak], None]) -> None:
    async def speak(stub: Any, workers: FakeWorkers) -> None:
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
        info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.served_model_name, info.max_context_length, list(info.eos_token_ids)) == ("bytes", 512, [256])
        assert info.is_generation and not info.supports_vision
        chunks = [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]
        data = b"".join(chunk.data for chunk in chunks)
        assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        assert zipfile.ZipFile(io.BytesIO(data)).namelist() == ["tokenizer.json"]
        for refused in (stub.Embed(vllm.EmbedRequest()), stub.FlushCache(common.FlushCacheRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await refused
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED

    engine(speak)


def test_a_tenant_is_told_of_its_own_requests_and_a_monitor_of_all(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Guards how much others ask, which only who may read metrics is told; and a monitor that would end what it counts,
    which was told of a fault of ours."""
    keys = Keys(tmp_path)

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.slow_s = 5.0

        def by(key: str) -> dict[str, Any]:
            return {"metadata": (("authorization", f"Bearer {key}"),)}

        async with grpc.aio.insecure_channel(client._address) as channel:
            stub = VllmEngineStub(channel)
            call = stub.Generate(vllm.GenerateRequest(request_id="a", tokenized=PROMPT, stream=True), **by(keys.acme))
            await until(lambda: any(isinstance(r, Place) for r in workers.got))
            for key, count, is_told in ((keys.acme, 1, False), (keys.globex, 0, False), (keys.monitor, 1, True)):
                load = (await stub.GetLoads(vllm.GetLoadsRequest(), **by(key))).loads[0]
                info = await stub.GetServerInfo(vllm.GetServerInfoRequest(), **by(key))
                assert (load.num_running_reqs, load.num_total_reqs, info.active_requests) == (count,) * 3
                assert bool(info.last_receive_timestamp) is is_told
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Abort(vllm.AbortRequest(request_ids=["a"]), **by(keys.monitor))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            await stub.Abort(vllm.AbortRequest(request_ids=["a"]), **by(keys.globex))
            assert not any(isinstance(r, Cancel) for r in workers.got)
            await stub.Abort(vllm.AbortRequest(request_ids=["a"]), **by(keys.acme))
            await until(lambda: any(isinstance(r, Cancel) for r in workers.got))
            call.cancel()

    access = AccessConfig(keys_file=str(keys.path))
    runner.run(with_cluster(body, vllm_protocol=True, access=access))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (vllm.GenerateRequest(), "input"),
        (vllm.GenerateRequest(text="x", mm_inputs=vllm.MultimodalInputs()), "mm_inputs"),
        (vllm.GenerateRequest(text="x", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (vllm.GenerateRequest(text="x", extra_mm_inputs=[vllm.MultimodalInputs()]), "extra_mm_inputs"),
    ],
)
def test_what_is_not_served_is_refused(asked: Any, field: str) -> None:
    """Guards against an answer that silently left something out."""
    with pytest.raises(ApiError) as raised:
        call_from_vllm(asked)
    assert (raised.value.code, raised.value.field) == ("INVALID_ARGUMENT", field)


def test_lists_are_counted_before_they_are_read() -> None:
    """Guards the event loop, as the test of the other protocol does (tests/router/test_large_bodies.py)."""
    biases = dict.fromkeys(range(1025), 1.0)
    for field, many in (("stop", ["a"] * 17), ("stop_token_ids", [1] * 65), ("logit_bias", biases)):
        with pytest.raises(ApiError, match="at most") as refused:
            call_from_vllm(vllm.GenerateRequest(text="x", sampling_params=vllm.SamplingParams(**{field: many})))
        assert refused.value.field == field


def test_constraints_are_ours() -> None:
    for given, constraint in (
        (vllm.SamplingParams(json_schema="{}"), Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        (vllm.SamplingParams(regex="a+"), Constraint(ConstraintKind.REGEX, "a+")),
        (vllm.SamplingParams(grammar='start: "a"'), Constraint(ConstraintKind.LARK, 'start: "a"')),
        (vllm.SamplingParams(json_object=True), JSON_OBJECT),
        (
            vllm.SamplingParams(choice=vllm.ChoiceConstraint(choices=["a", "b"])),
            choices_constraint(["a", "b"], "choice"),
        ),
    ):
        call = call_from_vllm(vllm.GenerateRequest(text="x", sampling_params=given))
        assert call.constraint == constraint and call.constraint_field == given.WhichOneof("constraint")
    for given in (vllm.SamplingParams(structural_tag="{}"), vllm.SamplingParams(choice=vllm.ChoiceConstraint())):
        with pytest.raises(ApiError):
            call_from_vllm(vllm.GenerateRequest(text="x", sampling_params=given))


def test_log_probabilities_stand_in_columns() -> None:
    told = output_logprobs([TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.0))), TokenLogprobs(7, -2.0)])
    assert list(told.token_ids) == [5, 7] and list(told.token_logprobs) == [-0.5, -2.0]
    assert [list(top.token_ids) for top in told.top_logprobs] == [[5, 6], []]


def test_log_probabilities_of_the_prompt_are_told() -> None:
    """Guards callers who asked for them, and paid with what the cache holds: they were computed and left out."""
    given = (TokenLogprobs(8, -0.5, ((8, -0.5), (9, -1.0))), TokenLogprobs(7, -2.0))
    sample = SampleSoFar(0)
    first = sample.chunk(Delta("a", (5,), prompt_logprobs=given), Started("r", "m", 3, prompt_ids=((6, 8, 7),)))
    later = sample.chunk(Delta("b", (6,)), Started("r", "m", 3))
    assert not later.chunk.HasField("input_logprobs")
    told = sample.complete("length", 3)
    for columns in first.chunk.input_logprobs, told.complete.input_logprobs:
        assert list(columns.token_ids) == [6, 8, 7]
        values = [one.value if one.HasField("value") else None for one in columns.token_logprobs]
        assert values == [None, -0.5, -2.0]
        assert [list(top.token_ids) for top in columns.top_logprobs] == [[], [8, 9], []]
