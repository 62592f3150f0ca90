"""Two routers behind one port, before the same real workers and the demo model."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

from access.config import AccessConfig
from access.keys import make_key
from access.tenants import CredentialTable, Tenant
from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.supervisor import RestartConfig
from router.config import RouterConfig
from router.http.answers import RESUME_TOKEN_HEADER

CHAT = {"messages": [{"role": "user", "content": "Count from one to twenty in words."}], "temperature": 0.0}
STREAMED = {**CHAT, "max_tokens": 48, "ignore_eos": True, "stream": True, "resumable": True}
DOWN_S = 15.0
"""How long a killed router stays away: longer than its streams go on, on a slow machine too."""
CONNECTIONS = 24
"""New connections until both routers have had one: that all go to one of two has a chance of 2 ** -23."""


@dataclass
class Serving:
    cluster: Cluster
    grpc: str
    http: str

    def at(self, router: str) -> str:
        """Where one router serves alone."""
        return f"http://{self.cluster.routers[router].own}"

    def metric(self, router: str, name: str) -> float:
        lines = httpx.get(f"{self.at(router)}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"headrace_{name}"))


@pytest.fixture(scope="module")
def serving(demo_model: Path) -> Iterator[Serving]:
    config = ClusterConfig(
        launcher="process",
        routers=2,
        decode_workers=2,
        stop_grace_s=1.0,
        restart=RestartConfig(first_pause_s=DOWN_S),
        router=RouterConfig(grpc_port=0, http_port=0),
    )
    stop = threading.Event()
    with Cluster(config, make_launcher("process"), model_dir=str(demo_model)) as cluster:
        addresses = cluster.start()
        watcher = threading.Thread(target=cluster.watch, args=(stop,), daemon=True)
        watcher.start()
        try:
            yield Serving(cluster, addresses.grpc, addresses.http)
        finally:
            stop.set()
            watcher.join()


def begin(url: str, body: dict[str, object], events: int = 6) -> tuple[str, bytes]:
    """A stream that is cut after so many events: its token and the whole events that came."""
    got = b""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        token = reply.headers[RESUME_TOKEN_HEADER]
        with closing(reply.iter_raw(64)) as chunks:
            for chunk in chunks:
                got += chunk
                if got.count(b"\n\n") >= events:
                    break
    return token, got[: got.rfind(b"\n\n") + 2]


def last_id(got: bytes) -> str:
    return [line[4:] for line in got.decode().split("\n") if line.startswith("id: ")][-1]


def go_on(url: str, token: str, got: bytes) -> bytes:
    reply = httpx.get(f"{url}/v1/streams/{token}", headers={"Last-Event-ID": last_id(got)}, timeout=60)
    assert reply.status_code == 200, reply.text
    return got + reply.content


def text_of(data: bytes, sample: int = 0) -> str:
    lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == sample)


def whole_text(url: str, body: dict[str, object]) -> list[str]:
    body = {**body, "stream": False, "resumable": False}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    return [choice["message"]["content"] for choice in reply["choices"]]


def test_both_serve_through_one_port_and_each_lists_all(serving: Serving) -> None:
    """Guards the shared ports: a router that binds one and takes no connection, or whose siblings nobody scrapes."""
    before = {name: serving.metric(name, "requests_total{") for name in serving.cluster.routers}
    for _ in range(CONNECTIONS):
        body = {"prompt": "one two", "max_tokens": 1}
        assert httpx.post(f"http://{serving.http}/v1/completions", json=body, timeout=60).status_code == 200
    served = {name: serving.metric(name, "requests_total{") - before[name] for name in before}
    assert sorted(served) == ["router-0", "router-1"] and all(served.values())
    assert sum(served.values()) == CONNECTIONS
    for name in served:
        listed = {one["labels"]["instance"]: one for one in httpx.get(f"{serving.at(name)}/sd").json()}
        assert set(listed) == {"router-0", "router-1", "supervisor", "prefill-0", "decode-0", "decode-1"}
        own = {router: serving.cluster.routers[router].own for router in served}
        assert {router: listed[router]["targets"][0] for router in served} == own


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1.0, "seed": 7}, {"stop": ["sentence is"]}])
def test_a_stream_is_resumed_at_another_router_and_back(serving: Serving, more: dict[str, object]) -> None:
    """Guards the tokens at a resumption elsewhere, none missing and none twice: all samples, and the stop string."""
    zero, one = serving.at("router-0"), serving.at("router-1")
    body = {**STREAMED, **more}
    wanted = whole_text(zero, body)
    token, got = begin(zero, body)
    with httpx.stream(
        "GET", f"{one}/v1/streams/{token}", headers={"Last-Event-ID": last_id(got)}, timeout=60
    ) as reply:
        assert reply.status_code == 200
        for chunk in reply.iter_raw(64):
            got += chunk
            if got.count(b"\n\n") >= 12:
                break
    got = got[: got.rfind(b"\n\n") + 2]
    got = go_on(zero, token, got) if b"[DONE]" not in got else got
    assert [text_of(got, sample) for sample in range(len(wanted))] == wanted
    # Complete, and read at the one, it is still there for the other.
    again = httpx.get(f"{one}/v1/streams/{token}", timeout=60)
    assert [text_of(again.content, sample) for sample in range(len(wanted))] == wanted


def test_who_reads_where_it_was_is_sent_away(serving: Serving) -> None:
    """Guards against two readers of one stream at two routers, each of which would get a part of it."""
    zero, one = serving.at("router-0"), serving.at("router-1")
    wanted = whole_text(zero, {**STREAMED, "max_tokens": 200})
    with httpx.stream(
        "POST", f"{zero}/v1/chat/completions", json={**STREAMED, "max_tokens": 200}, timeout=60
    ) as reply:
        token = reply.headers[RESUME_TOKEN_HEADER]
        chunks = reply.iter_raw(64)
        first = next(chunks)
        other = httpx.get(f"{one}/v1/streams/{token}", timeout=60)
        assert [text_of(other.content)] == wanted
        rest = first + b"".join(chunks)
    assert b"another connection has resumed this stream" in rest and b"[DONE]" not in rest


def test_a_stream_is_ended_at_another_router(serving: Serving) -> None:
    """Guards Cancel at a router that does not have the request: it would run on until its window is over."""
    zero, one = serving.at("router-0"), serving.at("router-1")
    token, _ = begin(zero, {**STREAMED, "max_tokens": 2000})
    assert httpx.delete(f"{one}/v1/streams/{token}", timeout=60).status_code == 204
    deadline = time.monotonic() + 5
    while any(serving.metric(name, "running_requests{") for name in ("router-0", "router-1")):
        assert time.monotonic() < deadline, "it runs on"
        time.sleep(0.05)
    for url in (zero, one):
        assert httpx.get(f"{url}/v1/streams/{token}", timeout=60).status_code == 404


def test_streams_of_a_killed_router_go_on_at_the_other(serving: Serving) -> None:
    """Guards the promise: kill -9 of a router, its streams are resumed at the other with the exact tokens, those of the
    other are not disturbed, and the killed one is back."""
    zero, one = serving.at("router-0"), serving.at("router-1")
    body = {**STREAMED, "max_tokens": 160}
    wanted = whole_text(one, body)
    undisturbed: list[bytes] = []

    def read_through() -> None:
        with httpx.stream("POST", f"{one}/v1/chat/completions", json=body, timeout=60) as reply:
            undisturbed.append(reply.read())

    reader = threading.Thread(target=read_through)
    reader.start()
    begun = [begin(zero, body) for _ in range(3)]
    before = serving.cluster.routers["router-0"].pid
    os.kill(before, signal.SIGKILL)
    # Through the shared port: whoever is there.
    with ThreadPoolExecutor(len(begun)) as pool:
        for rest in pool.map(lambda stream: go_on(f"http://{serving.http}", *stream), begun):
            assert [text_of(rest)] == wanted
    assert serving.cluster.routers["router-0"].pid == before, "it was back already: nothing was shown"
    reader.join()
    assert [text_of(undisturbed[0])] == wanted
    deadline = time.monotonic() + DOWN_S + 20
    while True:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        if serving.cluster.routers["router-0"].pid != before:
            break
    assert serving.at("router-0") == zero, "at another port"
    while True:
        try:
            if httpx.get(f"{zero}/ready").status_code == 200:
                break
        except httpx.HTTPError:
            assert time.monotonic() < deadline
        time.sleep(0.1)
    assert whole_text(zero, body) == wanted


RATE, BURST, SECONDS = 40.0, 40, 4.0
LAG_S = 0.1
"""Within which each router knows what the other has used."""


def test_a_tenants_rate_holds_over_both(demo_model: Path, tmp_path: Path) -> None:
    """Guards the rate of a tenant whose connections reach both routers, which must not give it twice; and that of one
    with a single connection, which must get all of it."""
    config = ClusterConfig(
        launcher="process",
        routers=2,
        stop_grace_s=1.0,
        router=RouterConfig(grpc_port=0, http_port=0),
        access=AccessConfig(keys_file=str(tmp_path / "keys.json")),
    )
    key, kept = make_key("acme", "tenant", "2026-01-01")
    table = CredentialTable(tenants={"acme": Tenant(tokens_per_s=RATE, burst_tokens=BURST)}, keys=[kept])
    keys_file = tmp_path / "keys.json"
    keys_file.write_bytes(msgspec.json.encode(table))
    keys_file.chmod(0o600)
    with Cluster(config, make_launcher("process"), model_dir=str(demo_model)) as cluster:
        cluster.start()
        urls = [f"http://{one.own}/v1/completions" for one in cluster.routers.values()]

        def used(urls: list[str]) -> dict[str, int]:
            """Tokens that the tenant gets at each router where it asks for as many as it can."""
            found, until = dict.fromkeys(urls, 0), time.monotonic() + SECONDS
            headers = {"authorization": f"Bearer {key}"}

            def ask(url: str) -> None:
                with httpx.Client(headers=headers, timeout=60) as client:
                    while time.monotonic() < until:
                        reply = client.post(url, json={"prompt": "a b c d e f", "max_tokens": 4, "ignore_eos": True})
                        if reply.status_code == 200:
                            found[url] += reply.json()["usage"]["total_tokens"]
                        else:
                            assert reply.status_code == 429
                            time.sleep(0.02)

            threads = [threading.Thread(target=ask, args=(url,)) for url in urls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return found

        both = used(urls)
        fair = RATE * SECONDS + BURST
        print(f"over two routers {both.values()} tokens, {fair:.0f} is what one would give")
        assert all(both.values()), "one router gave nothing"
        assert 0.8 * fair <= sum(both.values()) <= fair + 2 * LAG_S * RATE + 30
        one = sum(used(urls[:1]).values())
        print(f"over one of the two {one} tokens")
        assert 0.8 * RATE * SECONDS <= one <= fair + 30


def test_a_tenants_streams_count_where_they_are_resumed(demo_model: Path, tmp_path: Path) -> None:
    """Guards a tenant's limit of running samples, which it passed by resuming each stream at another router: what was
    taken over counted nowhere."""
    config = ClusterConfig(
        launcher="process",
        routers=2,
        stop_grace_s=1.0,
        router=RouterConfig(grpc_port=0, http_port=0),
        access=AccessConfig(keys_file=str(tmp_path / "keys.json")),
    )
    key, kept = make_key("acme", "tenant", "2026-01-01")
    table = CredentialTable(tenants={"acme": Tenant(concurrency=1)}, keys=[kept])
    keys_file = tmp_path / "keys.json"
    keys_file.write_bytes(msgspec.json.encode(table))
    keys_file.chmod(0o600)
    headers = {"authorization": f"Bearer {key}"}
    with Cluster(config, make_launcher("process"), model_dir=str(demo_model)) as cluster:
        cluster.start()
        zero, one = (f"http://{router.own}" for router in cluster.routers.values())
        short = {"prompt": "a b", "max_tokens": 1, "ignore_eos": True}
        body = {**STREAMED, "max_tokens": 1000, "ignore_eos": True}

        def asked() -> list[int]:
            """What a further request is told at each router, once both know what runs."""
            told = []
            for url in (zero, one):
                time.sleep(5 * LAG_S)
                told.append(httpx.post(f"{url}/v1/completions", json=short, headers=headers).status_code)
            return told

        with httpx.Client(headers=headers, timeout=60) as client:
            with client.stream("POST", f"{zero}/v1/chat/completions", json=body) as reply:
                assert reply.status_code == 200
                token = reply.headers[RESUME_TOKEN_HEADER]
                next(reply.iter_raw(64))
            with client.stream("GET", f"{one}/v1/streams/{token}") as reply:
                assert reply.status_code == 200
                next(reply.iter_raw(64))
                assert asked() == [429, 429]
            assert client.delete(f"{one}/v1/streams/{token}").status_code == 204
            assert asked() == [200, 200]
