"""The Python client against a real router with stand-ins for its workers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.messages import Cancel, Place
from protos import headrace_pb2 as pb
from router.app import RouterApp
from router.client.channel import ClientSecrets, _plain
from router.client.client import AsyncClient, SyncClient
from router.client.errors import NOBODY, ApiError
from router.client.progress import Retries
from router.client.requests import GatheredAnswer, generate_request
from router.config import RouterConfig
from router.status.observer import NullObserver
from telemetry.labels import STAGES
from tests.router.cut_proxy import CutProxy
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.secrets_of_tests import SECRETS

ANSWER = "hello world"
IDS = (*ANSWER.encode(), 256)
Body = Callable[[str, FakeWorkers], Awaitable[None]]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.fixture
def cluster(runner: asyncio.Runner) -> Callable[..., None]:
    def run(body: Body, **config: object) -> None:
        runner.run(_with_cluster(body, **config))

    return run


async def _with_cluster(body: Body, **config: object) -> None:
    app = RouterApp(RouterConfig(grpc_port=0, http_port=-1, **config), ByteText(), NullObserver(), SECRETS)  # type: ignore[arg-type]
    workers = FakeWorkers()
    try:
        addresses = await app.start()
        await workers.start()
        await app.set_workers(*workers.peers)
        await until(app.hub.ready)
        async with asyncio.timeout(20):
            await body(addresses.grpc, workers)
        await until(lambda: not app.hub.core.open)
        app.hub.core.check()
    finally:
        await app.stop(0.0)
        await workers.stop()


def test_whole_answers_of_both_kinds(cluster: Callable[..., None]) -> None:
    """Guards what most programs use: a text, a chat or ids in; one value with the account out."""

    async def body(address: str, workers: FakeWorkers) -> None:
        def asked() -> None:
            with SyncClient(address) as client:
                for prompt in ("hi", [104, 105], [{"role": "user", "content": "hi"}]):
                    answer = client.generate(prompt)  # type: ignore[arg-type]
                    assert (answer.text, answer.token_ids, answer.finish_reason) == (ANSWER, IDS, "stop")
                    assert (answer.decode_worker, answer.prefill_worker) == ("d0", "p0")
                    assert tuple(answer.stages_s) == STAGES, "a map comes in any order"
                assert [one.text for one in client.samples("hi", n=3)] == [ANSWER] * 3
                assert client.generate("hi", max_tokens=2).finish_reason == "length"
                assert client.detokenize(client.tokenize("hi<end>")) == "hi<end>"
                assert [model.name for model in client.models()] == ["bytes"]

        await asyncio.to_thread(asked)
        async with AsyncClient(address) as client:
            answers = await asyncio.gather(*(client.generate(f"q{at}") for at in range(8)))
            assert [answer.text for answer in answers] == [ANSWER] * 8
            assert await client.detokenize(await client.tokenize("hi")) == "hi"
            assert (await client.models())[0].context_tokens == 512

    cluster(body)


def test_options_reach_the_worker(cluster: Callable[..., None]) -> None:
    async def body(address: str, workers: FakeWorkers) -> None:
        async with AsyncClient(address) as client:
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            await client.generate("x", temperature=0.5, max_tokens=3, seed=7, stop="zzz", n=None, traceparent=trace)
        (place,) = [r for r in workers.got if isinstance(r, Place)]
        record = place.record
        assert (record.sampling.temperature, record.max_tokens, record.seed) == (0.5, 3, 7)
        assert record.traceparent.split("-")[1] == trace.split("-")[1]
        assert record.remaining_s is not None and 50 < record.remaining_s <= 60, "the client's own deadline"

    cluster(body)


def test_log_probabilities_of_the_prompt_are_the_callers_too() -> None:
    """Guards programs that score texts: the server told them, and the client dropped them."""
    told = [pb.TokenLogprobs(token=at, logprob=-at, top=[pb.Alternative(token=9, logprob=-0.5)]) for at in (1, 2, 3)]
    gathered = GatheredAnswer()
    for event in (
        pb.GenerateResponse(started=pb.Started(request_id="r")),
        pb.GenerateResponse(delta=pb.Delta(text="a", token_ids=[3], logprobs=told[2:], prompt_logprobs=told[:2])),
        pb.GenerateResponse(delta=pb.Delta(text="b", token_ids=[3], sample=1)),
        pb.GenerateResponse(finished=pb.Finished(sample=1)),
        pb.GenerateResponse(finished=pb.Finished()),
    ):
        gathered.take(event)
    first, second = gathered.samples()
    assert [one.logprob for one in first.prompt_logprobs] == [-1, -2] and first.prompt_logprobs[0].top[0].token == 9
    assert first.logprobs == (-3,) and first.token_logprobs == (told[2],)
    assert second.prompt_logprobs == first.prompt_logprobs, "the samples share the prompt"


@pytest.mark.parametrize("options", [{"temprature": 1}, {"max_tokens": "many"}, {"seed": -1}, {"stop": 3}])
def test_what_no_field_has_is_refused_here(options: dict[str, object]) -> None:
    """Guards against a misspelt option that changes nothing."""
    with pytest.raises(ApiError) as raised:
        generate_request("x", options)
    assert raised.value.code == "INVALID_ARGUMENT"


CALLS: dict[str, tuple[Callable[[SyncClient], object], str, str]] = {
    "an id below zero": (lambda c: c.generate([-1]), "prompt", "Value out of range: -1"),
    "half a surrogate pair": (lambda c: c.generate("hi\udcff"), "prompt", "is not valid Unicode at character 2"),
    "texts for ids": (lambda c: c.generate(["Hi"]), "prompt", "'str' object cannot"),  # type: ignore[list-item]
    "no prompt": (lambda c: c.generate(None), "prompt", "must be a text, token ids or a chat"),  # type: ignore[arg-type]
    "bytes": (lambda c: c.generate(b"abc"), "prompt", "must be a text, token ids or a chat"),
    "half a chat": (lambda c: c.generate([{"role": "user"}, 5]), "messages", "'int' object"),  # type: ignore[list-item]
    "a number for options": (lambda c: c.generate("x", sampling=5, top_k=3), "request", "is not a mapping"),
    "half a pair to split": (lambda c: c.tokenize("\udcff"), "prompt", "is not valid Unicode at character 0"),
    "a number to split": (lambda c: c.tokenize(5), "messages", "is not iterable"),  # type: ignore[arg-type]
    "an id of no text": (lambda c: c.detokenize([-1]), "token_ids", "Value out of range: -1"),
    "half a pair for a token": (lambda c: c.resume("\udcff"), "resume_token", "is not valid Unicode"),
    "an empty token": (lambda c: c.resume(""), "resume_token", "must not be empty"),
    "no token": (lambda c: c.resume(None), "resume_token", "must not be empty"),  # type: ignore[arg-type]
    "a day that does not end": (lambda c: c.generate("x", timeout_s=1e18), "timeout_s", "at most 86400 seconds"),
    "a day to split": (lambda c: c.tokenize("x", timeout_s=1e18), "timeout_s", "at most 86400 seconds"),
    "no time": (lambda c: c.resume("x", timeout_s=0), "timeout_s", "must be above 0"),
    "time in words": (lambda c: c.models(timeout_s="5"), "timeout_s", "must be above 0"),  # type: ignore[arg-type]
    "a label that cannot travel": (lambda c: c.generate("x", label="é"), "label", "only printable ASCII can travel"),
    "a session of two lines": (lambda c: c.generate("x", session="a\nb"), "session", "only printable ASCII"),
    "a number for a label": (lambda c: c.generate("x", label=5), "label", "only printable ASCII"),
}


@pytest.mark.parametrize("named", CALLS)
def test_what_cannot_be_sent_is_an_api_error(named: str) -> None:
    """Guards the promise that every failure is one, though nothing has been sent: nobody listens there."""
    call, field, told = CALLS[named]
    with SyncClient("127.0.0.1:9", timeout_s=1.0, retries=False) as client, pytest.raises(ApiError) as raised:
        call(client)
    assert (raised.value.code, raised.value.field) == ("INVALID_ARGUMENT", field)
    assert raised.value.message.startswith(f"{field}: ") and told in raised.value.message


@pytest.mark.parametrize("kind", [SyncClient, AsyncClient])
def test_a_key_that_cannot_travel_is_an_api_error(kind: type) -> None:
    async def asked() -> None:
        client = kind("127.0.0.1:9", secrets=ClientSecrets(api_key="é"), timeout_s=1.0)
        found = client.models()
        if kind is AsyncClient:
            await found

    with pytest.raises(ApiError, match="API key: only printable ASCII can travel"):
        asyncio.run(asked())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", [SyncClient, AsyncClient])
def test_a_closed_client_s_stream_is_an_api_error(kind: type, begun: bool, cluster: Callable[..., None]) -> None:
    """Guards readers against gRPC's own errors, and against a cancellation that nobody has asked their task for."""

    async def body(address: str, workers: FakeWorkers) -> None:
        workers.slow_s = 0.2

        def read() -> None:
            client = SyncClient(address)
            events = client.stream("x")
            if begun:
                next(events)
            client.close()
            list(events)

        async def aread() -> None:
            client = AsyncClient(address)
            events = client.stream("x", resumable=False)
            if begun:
                await anext(events)
            await client.close()
            async for _ in events:
                pass

        with pytest.raises(ApiError) as raised:
            await (asyncio.to_thread(read) if kind is SyncClient else aread())
        assert (raised.value.code, raised.value.message) == ("CANCELLED", "the client was closed")
        workers.slow_s = 0.0

    cluster(body)


def test_a_cancelled_task_stays_cancelled(cluster: Callable[..., None]) -> None:
    """Guards `asyncio.timeout` and groups of tasks: they know their own cancellation."""

    async def body(address: str, workers: FakeWorkers) -> None:
        workers.slow_s = 5.0
        async with AsyncClient(address) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.generate("x")

    cluster(body)


def test_what_cannot_be_resumed_is_not_asked_to_be(cluster: Callable[..., None]) -> None:
    """Guards against a refusal of an option that the caller never wrote."""

    async def body(address: str, workers: FakeWorkers) -> None:
        async with AsyncClient(address, retries=False) as client:
            await client.generate("hi", prompt_logprobs=1)
            await client.generate("hi", beam_width=None)
        asked = [item.record for item in workers.got if isinstance(item, Place)]
        assert [record.prompt_logprobs for record in asked] == [1, None]
        assert [bool(record.context) for record in asked] == [False, True]

    cluster(body)


def test_a_broken_connection_is_no_failure(cluster: Callable[..., None]) -> None:
    """Guards resumption: the rest comes over another connection, every token once."""

    async def body(address: str, workers: FakeWorkers) -> None:
        workers.slow_s = 0.05
        proxy = CutProxy(address)
        async with AsyncClient(await proxy.start()) as client:
            events = []
            async for event in client.stream("x"):
                events.append(event)
                if sum(len(one.delta.token_ids) for one in events) == 4 and not proxy.cut_connections:
                    proxy.cut()
            assert proxy.cut_connections
            assert tuple(token for one in events for token in one.delta.token_ids) == IDS
            assert [one.WhichOneof("event") for one in events].count("started") == 1
        await proxy.stop()

    cluster(body)


def test_another_client_reads_on(cluster: Callable[..., None]) -> None:
    """Guards `resume`: the token alone is enough, in a program that has nothing else of the request."""

    async def body(address: str, workers: FakeWorkers) -> None:
        workers.slow_s = 0.02
        first = AsyncClient(address)
        events = first.stream("x")
        token = (await anext(events)).started.resume_token
        await first.close()
        async with AsyncClient(address) as second:
            ids = [token async for event in second.resume(token) for token in event.delta.token_ids]
        assert tuple(ids) == IDS
        await events.aclose()

    cluster(body)


def test_a_busy_server_is_asked_again(cluster: Callable[..., None]) -> None:
    """Guards retries within the deadline: refused for want of room, a request comes back when told and is answered."""

    async def body(address: str, workers: FakeWorkers) -> None:
        workers.slow_s = 0.01
        async with AsyncClient(address, seed=1) as client, AsyncClient(address, retries=False) as hasty:
            asked = [asyncio.create_task(client.generate("x", max_tokens=500)) for _ in range(6)]
            answers = await asyncio.gather(*asked)
            assert [answer.text for answer in answers] == [ANSWER] * 6
            refused = [asyncio.create_task(hasty.generate("x", max_tokens=500)) for _ in range(6)]
            done = await asyncio.gather(*refused, return_exceptions=True)
            codes = {one.code for one in done if isinstance(one, ApiError)}
            assert codes == {"RESOURCE_EXHAUSTED"}, "it was not busy"

    cluster(body, max_waiting=1, retry_after_s=0.1)


@pytest.mark.parametrize("call", ["generate", "tokenize"])
def test_an_absent_server_is_waited_for_until_the_deadline(call: str) -> None:
    """Guards against a client that waits without end, and one that gives up at once."""
    client = SyncClient("127.0.0.1:9", timeout_s=0.6, seed=1)
    with client, pytest.raises(ApiError, match=NOBODY) as raised:
        getattr(client, call)("x")
    assert raised.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("call", ["generate", "samples", "stream", "tokenize"])
def test_no_deadline_of_a_call_is_the_clients(call: str) -> None:
    """Guards against a call that is tried without end."""
    client = SyncClient("127.0.0.1:9", timeout_s=0.2)
    limits: list[float | None] = []

    def pause_s(self: Retries, error: ApiError, left_s: float | None) -> None:
        limits.append(left_s)

    with pytest.MonkeyPatch.context() as patched, client, pytest.raises(ApiError):
        patched.setattr(Retries, "pause_s", pause_s)
        list(getattr(client, call)("x", timeout_s=None))
    assert len(limits) == 1 and limits[0] is not None and limits[0] <= 0.2


def test_threads_share_one_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a channel that nobody closes: two threads made the first call, and each opened one."""
    opened: list[object] = []

    class Channel:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    def slowly(*_: object) -> Channel:
        time.sleep(0.05)
        opened.append(one := Channel())
        return one

    monkeypatch.setattr("router.client.client.open_channel", slowly)
    client = SyncClient()
    with ThreadPoolExecutor(2) as threads:
        found = [one.result() for one in [threads.submit(client._channel) for _ in range(2)]]
    assert found == opened * 2
    client.close()
    assert found[0].is_closed


def test_leaving_cancels(cluster: Callable[..., None]) -> None:
    """Guards a worker against answers that nobody reads, though the request is resumable by default."""

    async def body(address: str, workers: FakeWorkers) -> None:
        workers.slow_s = 5.0

        def leave() -> None:
            with SyncClient(address) as client:
                events = client.stream("x")
                assert next(events).WhichOneof("event") == "started"
                events.close()

        await asyncio.to_thread(leave)
        await until(lambda: any(isinstance(r, Cancel) for r in workers.got))

    cluster(body)


@pytest.mark.parametrize("kind", [SyncClient, AsyncClient])
def test_what_nobody_has_begun_to_read_is_not_asked_for(kind: type, cluster: Callable[..., None]) -> None:
    """Guards a worker against answers of streams that were left before their first event: nothing cancels those."""

    async def body(address: str, workers: FakeWorkers) -> None:
        def leave() -> None:
            with SyncClient(address) as client:
                client.stream("x").close()
                assert client.generate("y").text

        if kind is SyncClient:
            await asyncio.to_thread(leave)
        else:
            async with AsyncClient(address) as client:
                await client.stream("x").aclose()
                assert (await client.generate("y")).text
        assert sum(isinstance(r, Place) for r in workers.got) == 1

    cluster(body)


def test_a_secret_is_not_shown() -> None:
    assert "sesame" not in repr(ClientSecrets(api_key="sesame"))
    assert ClientSecrets(api_key="sesame").metadata == (("authorization", "Bearer sesame"),)


def test_constraints_are_options() -> None:
    request = generate_request("x", {"choices": ["a", "b"], "logit_bias": {5: -1.0}})
    assert list(request.choices.choices) == ["a", "b"] and dict(request.logit_bias) == {5: -1.0}
    assert generate_request("x", {"json_schema": "{}"}).json_schema == "{}"
    with pytest.raises(ApiError):
        generate_request("x", {"json_schema": "{}", "regex": "a"})


def test_a_request_is_what_was_said() -> None:
    request = generate_request([{"role": "user", "content": "é"}], {"stop": ["a"], "top_k": 3, "tenant": None})
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="é")])
    assert request == pb.GenerateRequest(chat=chat, stop=["a"], sampling=pb.Sampling(top_k=3))


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("Tls handshake failed (X): CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "certificate has expired"),
        ("Tls handshake failed (X): WRONG_VERSION_NUMBER: Invalid context: OK", "it speaks without TLS"),
        ("Custom verification check failed with error: A: Hostname Verification Check failed.", "Hostname"),
        ("Failed to create security handshaker.", "the client's authority"),
    ],
)
def test_tls_that_fails_is_no_absent_server(why: str, told: str) -> None:
    found = _plain(f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:4: {why}")
    assert found.startswith(f"TLS with 127.0.0.1:4 failed: {told}")
