"""HTTP streams of real workers and the demo model, cut again and again: the text of the uninterrupted run."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from router.config import RouterConfig
from router.http.answers import RESUME_TOKEN_HEADER

CHAT = {"messages": [{"role": "user", "content": "Count from one to twenty in words."}]}
FORMS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 77},
    "stop string": {"temperature": 0.0, "stop": ["sentence is"]},
}
PIECE_EVENTS = 4
"""Whole events that are read from a connection before it is cut, inside the next one."""


@pytest.fixture(scope="module")
def client(demo_model: Path) -> Iterator[httpx.Client]:
    config = ClusterConfig(launcher="process", router=RouterConfig(grpc_port=0, http_port=0))
    with Cluster(config, make_launcher("process"), model_dir=str(demo_model)) as cluster:
        addresses = cluster.start()
        with httpx.Client(base_url=f"http://{addresses.http}", timeout=60) as found:
            yield found


def cut(reply: httpx.Response) -> bytes:
    """The first whole events; what came of the next one is thrown away with the connection."""
    got = b""
    with closing(reply.iter_raw(64)) as chunks:
        for chunk in chunks:
            got += chunk
            if got.count(b"\n\n") >= PIECE_EVENTS:
                break
    return got[: got.rfind(b"\n\n") + 2]


def bodies(data: bytes) -> list[dict]:  # type: ignore[type-arg]
    lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("form", list(FORMS))
def test_a_stream_cut_again_and_again_is_the_uninterrupted_one(
    client: httpx.Client, form: str
) -> None:
    """Guards the whole way from the sampler to the socket: the same text, usage and end as an answer in one piece."""
    body = {**CHAT, **FORMS[form], "max_tokens": 24, "ignore_eos": True}
    whole = client.post("/v1/chat/completions", json=body).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}, "resumable": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        token = reply.headers[RESUME_TOKEN_HEADER]
        got = cut(reply)
    cuts = 1
    while not got.endswith(b"[DONE]\n\n"):
        last = [line[4:] for line in got.decode().split("\n") if line.startswith("id: ")][-1]
        with client.stream("GET", f"/v1/streams/{token}", headers={"Last-Event-ID": last}) as reply:
            assert reply.status_code == 200
            got += cut(reply)
        cuts += 1
        time.sleep(0.02)
    again = client.get(f"/v1/streams/{token}")
    assert again.content == got and cuts >= 3
    *chunks, last_chunk = bodies(got)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    choice = whole["choices"][0]
    assert text == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert choice["finish_reason"] == ("stop" if form == "stop string" else "length")
    used = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last_chunk["usage"][k] for k in used] == [whole["usage"][k] for k in used]
