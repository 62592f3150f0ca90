"""A router that may hold 256 descriptors, and 400 connections that say nothing, on each of its ports."""

import http.client
import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.types import SamplingParams
from router.config import FrontLimits, RouterConfig
from router.front.api import ApiError, Delta, GenerateCall
from router.grpc.client import Client

DESCRIPTORS = 256
IDLE = 400
HANDSHAKE_S = 3.0
CALL = GenerateCall(prompt="One, two, three,", max_tokens=2, sampling=SamplingParams(temperature=0.0))


@pytest.fixture(scope="module")
def cluster(demo_model: Path) -> Iterator[Cluster]:
    """A cluster whose processes may hold few descriptors; this one, which holds the idle connections, may hold more."""
    limits = FrontLimits(header_s=HANDSHAKE_S)
    config = ClusterConfig(launcher="process", router=RouterConfig(grpc_port=0, http_port=0, limits=limits))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Cluster(config, make_launcher("process"), model_dir=str(demo_model)) as running:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
        try:
            running.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8 * IDLE)), hard))
        yield running
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def idle_connections(address: str) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        yield


def ask_http(address: str, method: str = "POST", path: str = "/v1/completions") -> int:
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        body = json.dumps({"prompt": CALL.prompt, "max_tokens": 2}) if method == "POST" else None
        connection.request(method, path, body)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def ask_grpc(address: str) -> str:
    """Return how a call ended: with tokens, or with an error's code."""
    with Client(address) as client:
        try:
            return "answered" if any(isinstance(event, Delta) for event in client.generate(CALL)) else "empty"
        except ApiError as error:
            return error.code


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_idle_connections_keep_nobody_out(cluster: Cluster) -> None:
    """Guards a router that accepted until it had no descriptor left, and then answered nobody and reached no worker."""
    router = cluster.router
    assert ask_http(router.http) == 200 and ask_grpc(router.address) == "answered"
    for name, address in (("HTTP", router.http), ("gRPC", router.address)):
        with idle_connections(address):
            began_s = time.monotonic()
            assert ask_http(router.http) == 200 and ask_http(router.http, "GET", "/metrics") == 200
            http_s = time.monotonic() - began_s
            open_now = descriptors(router.pid)
            ended = ask_grpc(router.address)
            print(f"\n{IDLE} idle on {name}: {open_now} descriptors, HTTP answered in {http_s:.2f} s, gRPC: {ended}")
            assert open_now < DESCRIPTORS
            # gRPC gives no connection up for another; it refuses, until those that shook no hands have had their time.
            assert ended == "answered" or (name == "gRPC" and ended == "UNAVAILABLE")
            time.sleep(HANDSHAKE_S if name == "gRPC" else 0)
            assert ask_grpc(router.address) == "answered"


def test_idle_connections_on_a_port_of_metrics_keep_no_scrape_out(cluster: Cluster) -> None:
    address = cluster.workers["decode-0"]
    targets = _targets(cluster.router.http)
    with idle_connections(targets["decode-0"]):
        assert ask_http(targets["decode-0"], "GET", "/metrics") == 200
        assert descriptors(address.pid) < DESCRIPTORS
        assert ask_http(cluster.router.http) == 200


def _targets(address: str) -> dict[str, str]:
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("GET", "/sd")
    told = json.loads(connection.getresponse().read())
    connection.close()
    return {one["labels"]["worker"]: one["targets"][0] for one in told if "worker" in one["labels"]}
