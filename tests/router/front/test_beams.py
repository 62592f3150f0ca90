"""Beam search and priority from the caller to the worker's record and back, over gRPC and HTTP."""

import json

import httpx
import pytest

from engine.types import BeamParams, EarlyStopping, SamplingParams
from router.app import RouterApp
from router.front.api import ApiError, Finished, GenerateCall, Started
from router.grpc.client import Client
from tests.router.cut_proxy import CutProxy
from tests.router.fake_cluster import FakeWorkers
from tests.router.front.test_samples import ANSWER, by_sample, places, with_router


def test_the_answers_of_a_search_are_its_samples_over_grpc() -> None:
    """Guards the fan-out: one request on the worker, a stream for each answer, each with its own account."""

    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        async with Client(await proxy.start()) as client:
            call = GenerateCall(
                prompt="x",
                n=2,
                beam_width=4,
                length_penalty=0.5,
                early_stopping=EarlyStopping.NEVER,
                priority=-3,
            )
            events = [event async for event in client.agenerate(call)]
        (place,) = places(workers)
        assert place.record.priority == -3 and place.fork_of is None
        assert place.record.beams == BeamParams(
            width=4, answers=2, length_penalty=0.5, early_stopping=EarlyStopping.NEVER
        )
        assert isinstance(events[0], Started) and events[0].samples == 2
        found = by_sample(events)
        for at, (text, ids, end) in found.items():
            assert text == ANSWER[at:] and len(ids) == end.output_tokens
            assert isinstance(end, Finished) and end.beam_score == -0.5 * at
        assert len(found[0][1]) == len(found[1][1]) + 1

    with_router(body)


@pytest.mark.parametrize("stream", [False, True])
def test_the_answers_of_a_search_are_choices_over_http(stream: bool) -> None:
    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        asked = {"prompt": "x", "n": 2, "beam_width": 2, "early_stopping": True, "stream": stream}
        async with httpx.AsyncClient() as client:
            got = await client.post(f"http://{http}/v1/completions", json=asked)
        assert got.status_code == 200, got.text
        (place,) = places(workers)
        assert place.record.beams == BeamParams(
            width=2, answers=2, early_stopping=EarlyStopping.FULL
        )
        if stream:
            lines = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
            choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        else:
            choices = got.json()["choices"]
        for at in range(2):
            mine = [choice for choice in choices if choice["index"] == at]
            assert "".join(choice["text"] for choice in mine) == ANSWER[at:]
            assert mine[-1]["finish_reason"] == "stop" and mine[-1]["beam_score"] == -0.5 * at

    with_router(body)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (GenerateCall(prompt="x", beam_width=0), "beam_width"),
        (GenerateCall(prompt="x", beam_width=17), "beam_width"),
        (GenerateCall(prompt="x", beam_width=2, n=3), "n"),
        (GenerateCall(prompt="x", beam_width=2, length_penalty=float("nan")), "length_penalty"),
        (GenerateCall(prompt="x", beam_width=2, stop=("a",)), "stop"),
        (GenerateCall(prompt="x", beam_width=2, resumable=True), "resumable"),
        (
            GenerateCall(prompt="x", beam_width=2, sampling=SamplingParams(presence_penalty=0.1)),
            "presence_penalty",
        ),
        (GenerateCall(prompt="x", priority=101), "priority"),
    ],
)
def test_what_a_search_cannot_be_is_refused(call: GenerateCall, field: str) -> None:
    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        with pytest.raises(ApiError) as raised:
            await anext(app._frontend.generate(call))
        assert (raised.value.code, raised.value.field) == ("INVALID_ARGUMENT", field)
        assert not places(workers)

    with_router(body)
