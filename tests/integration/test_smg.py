"""A third-party gateway in front: smg finds one engine of vLLM's protocol where this cluster is (docs/grpc.md)."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from cluster.processes.leftovers import descendants, running
from cluster.rundir import start_of
from tests.docs.test_commands import Place, everything

HERE = "tests/integration/test_smg.py"
HAS_ALL = all(find_spec(name) is not None for name in ("smg", "smg_grpc_proto"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_ALL, reason="needs smg and smg-grpc-proto (in the extra `dev`)"),
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Gateway:
    """smg, and the cluster behind it."""

    url: str
    cluster: str
    model: str

    def chat(self, **more: object) -> dict[str, object]:
        return {"model": self.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0, **more}

    def count(self, outcome: str) -> float:
        """Requests that have ended so, by the router's own metrics."""
        page = httpx.get(f"{self.cluster}/metrics").text
        return sum(map(float, re.findall(rf'^headrace_requests_total{{.*outcome="{outcome}".*}} (\S+)$', page, re.M)))


@pytest.fixture(scope="module")
def gateway(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    (block,) = [b for b in everything() if b.page == "docs/grpc.md" and b.mark == f"run by: {HERE}"]
    up, front = block.text.strip().split("\n")
    folder = tmp_path_factory.mktemp("smg")
    place = Place(demo_cache, folder)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, metrics = one.getsockname()[1], two.getsockname()[1]
    supervisor, smg = 0, None
    try:
        place(up)
        told = place("headrace status --json | python -c 'import json, sys; print(json.load(sys.stdin)[\"pid\"])'")
        supervisor = int(told)
        typed = front.replace("30000", str(port)).replace("50051", place.grpc_port)
        command = [sys.executable, *typed.split()[1:], "--prometheus-port", str(metrics)]
        with (folder / "smg.log").open("wb") as log:
            smg = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        url = f"http://127.0.0.1:{port}"
        model = _served(url, folder / "smg.log")
        yield Gateway(url, f"http://127.0.0.1:{place.http_port}", model)
    finally:
        if smg is not None:
            smg.terminate()
            try:
                smg.wait(10)
            except subprocess.TimeoutExpired:
                smg.kill()
                smg.wait()
        if supervisor and start_of(supervisor) is not None:
            below = descendants(supervisor)
            os.kill(supervisor, signal.SIGKILL)
            for pid in running(below):
                os.kill(pid, signal.SIGKILL)


def _served(url: str, log: Path) -> str:
    """Wait until the gateway has the cluster and its tokenizer; return the model's name."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        try:
            listed = httpx.get(f"{url}/v1/models").json()["data"]
            asked = {"messages": QUESTION, "max_tokens": 1, "model": listed[0]["id"]}
            if httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=30).status_code == 200:
                return str(listed[0]["id"])
        except (httpx.HTTPError, ValueError, LookupError):
            pass
        time.sleep(0.3)
    pytest.fail(f"smg never served: {log.read_text()[-3000:]}")


def test_whole_answers_with_cached_tokens(gateway: Gateway) -> None:
    """Guards the tokenizer that the gateway took from here: it counts what this router counts, template included; and
    the account of a question that was asked before."""
    asked = [httpx.post(f"{gateway.url}/v1/chat/completions", json=gateway.chat(), timeout=60).json() for _ in range(2)]
    texts = [one["choices"][0]["message"]["content"] for one in asked]
    assert texts[0] == texts[1] and "Paris" in texts[0]
    own = httpx.post(f"{gateway.cluster}/v1/chat/completions", json=gateway.chat(), timeout=60).json()
    assert own["choices"][0]["message"]["content"] == texts[0]
    counted = httpx.post(f"{gateway.cluster}/tokenize", json={"messages": QUESTION}).json()["count"]
    usage = asked[1]["usage"]
    assert usage["prompt_tokens"] == counted == own["usage"]["prompt_tokens"]
    assert counted - 2 <= usage["prompt_tokens_details"]["cached_tokens"] < counted


def test_streams_with_usage(gateway: Gateway) -> None:
    body = gateway.chat(stream=True, stream_options={"include_usage": True})
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [httpx.Response(200, text=event).json() for event in events[:-1]]
    text = "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"])
    assert "Paris" in text and len(chunks) > 5, "it came in one piece"
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_a_client_who_leaves_ends_the_request(gateway: Gateway) -> None:
    """Guards decode slots: the gateway's client is gone, and `Abort` or the end of the stream reaches the worker."""
    before = gateway.count("cancelled")
    body = gateway.chat(stream=True, max_tokens=400, ignore_eos=True)
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        next(reply.iter_lines())
    until_s = time.monotonic() + 10
    while gateway.count("cancelled") == before:
        assert time.monotonic() < until_s, "the request ran on"
        time.sleep(0.1)


def test_an_error_is_told_as_one(gateway: Gateway) -> None:
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=gateway.chat(max_tokens=100_000), timeout=60)
    assert reply.status_code >= 400 and "max_tokens" in reply.text
