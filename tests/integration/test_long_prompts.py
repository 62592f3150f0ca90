"""A flood of prompts of a megabyte of digits, each a token: the router stays quick for others, and does not grow."""

import http.client
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from router.config import RouterConfig

PROMPTS = 40
DIGITS = 1024 * 1024
PAGE_S = 1.0
SHORT_S = 2.0
GROWTH_BYTES = 300_000_000
LASTS_S = 8.0


@pytest.fixture(scope="module")
def cluster(demo_model: Path) -> Iterator[Cluster]:
    config = ClusterConfig(launcher="process", router=RouterConfig(grpc_port=0, http_port=0))
    with Cluster(config, make_launcher("process"), model_dir=str(demo_model)) as running:
        running.start()
        yield running


class LongPrompts:
    """So many clients, each of whom sends its prompt, waits for the answer, and sends it again."""

    def __init__(self, address: str, field: str) -> None:
        self.answers: Counter[int] = Counter()
        prompt: object = "7" * DIGITS
        if field == "messages":
            prompt = [{"role": "user", "content": prompt}]
        self._address = address
        self._path = "/v1/chat/completions" if field == "messages" else "/v1/completions"
        self._body = json.dumps({field: prompt, "max_tokens": 1})
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(PROMPTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a long prompt was never answered"

    def _run(self) -> None:
        while not self._over.is_set():
            status, _ = ask(self._address, "POST", self._path, self._body, 120)
            self.answers[status] += 1
            if status == 503:
                self._over.wait(1)


def resident_bytes(pid: int) -> int:
    """Return the process's memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ask(address: str, method: str, path: str, body: str | None = None, limit_s: float = 60) -> tuple[int, float]:
    """Return the status of an answer and the seconds until it was there."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection(address, timeout=limit_s)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        reply.read()
        return reply.status, time.monotonic() - began_s
    finally:
        connection.close()


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_flood_of_long_prompts_holds_up_nobody(cluster: Cluster, field: str) -> None:
    """Guards a router that tokenized what no context could hold, in the threads that its metrics page needed: its page
    took two minutes, a short prompt half of one, and its memory grew by more than a gigabyte."""
    address, pid = cluster.router.http, cluster.router.pid
    short = json.dumps({"prompt": "One, two, three,", "max_tokens": 1, "temperature": 0})
    assert ask(address, "POST", "/v1/completions", short)[0] == 200
    before_bytes = most_bytes = resident_bytes(pid)
    pages, shorts = [], []
    flood = LongPrompts(address, field)
    try:
        until_s = time.monotonic() + LASTS_S
        while time.monotonic() < until_s:
            status, seconds = ask(address, "GET", "/metrics")
            assert status == 200
            pages.append(seconds)
            status, seconds = ask(address, "POST", "/v1/completions", short)
            assert status == 200
            shorts.append(seconds)
            most_bytes = max(most_bytes, resident_bytes(pid))
    finally:
        flood.end()
    most_bytes = max(most_bytes, resident_bytes(pid))
    grown_bytes = most_bytes - before_bytes
    print(
        f"\n{sum(flood.answers.values())} prompts of 1 MiB as {field}: {dict(flood.answers)}; "
        f"/metrics at most {max(pages):.2f} s of {len(pages)}, a short prompt {max(shorts):.2f} s of {len(shorts)}, "
        f"the router {grown_bytes / 1e6:+.0f} MB over {before_bytes / 1e6:.0f}"
    )
    assert set(flood.answers) <= {400, 503} and flood.answers[400] >= PROMPTS
    assert max(pages) < PAGE_S and max(shorts) < SHORT_S
    assert grown_bytes <= GROWTH_BYTES
