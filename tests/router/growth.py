"""How much memory a router takes as it serves: `python -m tests.router.growth --requests 10000`.

The router is the process that a launcher starts, with the demo model's text side and its metrics. Its workers are
stand-ins in a second process, so that thousands of requests take a minute. Clients ask what makes a router remember:
plain prompts, chats (each a conversation of its own), resumable streams, several samples, some that leave early, some
that are refused, over gRPC or HTTP (`--front`). Every so many requests the router's anonymous memory is read, after a
moment's rest.
"""

import argparse
import asyncio
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from cluster.processes.process_launcher import ProcessChild
from cluster.processes.spec import FACTORIES, ChildSpec, Sealed
from engine.messages import PeerAddress
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import ApiError, ChatMessage, GenerateCall, Started
from router.grpc.client import Client
from router.http.answers import RESUME_TOKEN_HEADER
from tests.router.fake_cluster import FakeWorkers
from tests.secrets_of_tests import SECRETS

KINDS = {"plain": 30, "chat": 40, "resumed": 10, "samples": 8, "leaves": 8, "refused": 4}
"""What clients ask for, and how often."""
CLIENTS = 24
ANSWER_TOKENS = 24
WORDS = ("mill", "race", "wheel", "water", "stone", "grain", "flour", "sluice", "gate", "river", "bank", "sack", "weir")
REST_S = 3.0
ALLOWED_BYTES = 5 << 20
"""What a router may grow by between its 2,000th request and its 10,000th."""


class Measured(NamedTuple):
    """The router's anonymous memory after so many requests."""

    requests: int
    anonymous_bytes: int


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that no file stands behind."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class QuietWorkers(FakeWorkers):
    """Stand-ins that remember nothing of what they did."""

    def _take(self, record: object) -> None:
        self.got.clear()
        self._ends.clear()
        self.orphans.clear()
        super()._take(record)  # type: ignore[arg-type]


def _serve_workers(fingerprint: str, told: Connection) -> None:
    """Serve a prefill and a decode worker until the other end of the pipe is closed."""

    async def serve() -> None:
        workers = QuietWorkers()
        workers.fingerprint, workers.blocks = fingerprint, 546
        workers.answer = [1000 + at for at in range(ANSWER_TOKENS)]
        await workers.start()
        told.send(workers.peers)
        await asyncio.to_thread(told.poll, None)
        await workers.stop()

    asyncio.run(serve())


def measure(
    requests: int,
    every: int,
    model_dir: Path,
    kinds: dict[str, int] = KINDS,
    factory: str = FACTORIES["router"],
    hear: Callable[[Measured, ProcessChild], None] = lambda measured, router: None,
    front: str = "grpc",
) -> list[Measured]:
    """Ask a router for `requests` answers over one of `FRONTS`, and measure it after every `every` of them; `hear` is
    told each figure."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    fingerprint = ModelConfig.load(model_dir).fingerprint
    workers = context.Process(target=_serve_workers, args=(fingerprint, theirs), daemon=True)
    workers.start()
    # A resumable stream waits for its client, for less than a rest: how many do then shall not depend on how fast this
    # machine happens to be at the moment.
    settings = msgspec.to_builtins(RouterConfig(grpc_port=0, http_port=0, resume_window_s=REST_S / 2))
    router = ProcessChild(
        ChildSpec(kind="router", name="router", factory=factory, config=settings, model_dir=str(model_dir),
                  secrets=Sealed.of(SECRETS.valid()))
    )
    try:
        prefill, decode = ours.recv()
        up = router.started_within(60.0)
        assert up is not None, "the router did not start"
        router.set_workers([PeerAddress(*p) for p in _pairs(prefill)], [PeerAddress(*p) for p in _pairs(decode)])
        found = []
        for done in range(every, requests + 1, every):
            address = up.http if front == "http" else up.address
            asyncio.run(_ask(FRONTS[front], address, range(done - every, done), kinds))
            found.append(Measured(done, anonymous_bytes(up.pid)))
            hear(found[-1], router)
        return found
    finally:
        router.stop(1.0)
        ours.close()
        workers.join(5.0)
        if workers.is_alive():
            workers.kill()
            workers.join()


def _pairs(peers: Sequence[PeerAddress]) -> list[tuple[str, str]]:
    return [(peer.name, peer.address) for peer in peers]


Front = Callable[[str, Iterator[int], dict[str, int]], Coroutine[None, None, None]]
"""Asks these questions at an address, one after the other."""


async def _ask(front: Front, address: str, requests: range, kinds: dict[str, int]) -> None:
    """Ask these questions, `CLIENTS` at a time."""
    numbers = iter(requests)
    await asyncio.gather(*(front(address, numbers, kinds) for _ in range(CLIENTS)))
    await asyncio.sleep(REST_S)


async def _over_grpc(address: str, numbers: Iterator[int], kinds: dict[str, int]) -> None:
    async with Client(address) as client:
        for number in numbers:
            await _ask_grpc(client, random.Random(number), kinds)


async def _over_http(address: str, numbers: Iterator[int], kinds: dict[str, int]) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60.0, trust_env=False) as client:
        for number in numbers:
            await _ask_http(client, random.Random(number), kinds)


FRONTS: dict[str, Front] = {"grpc": _over_grpc, "http": _over_http}


def _drawn(rng: random.Random, kinds: dict[str, int]) -> tuple[str, str, str]:
    """Draw a text of some 40 words, what is asked, and whose it is."""
    text = " ".join(rng.choices(WORDS, k=40)) + f" {rng.getrandbits(40)}"
    return text, rng.choices([*kinds], [*kinds.values()])[0], f"tenant {rng.randrange(50)}"


async def _ask_http(client: httpx.AsyncClient, rng: random.Random, kinds: dict[str, int]) -> None:
    """A plain answer comes whole, all others as a stream; a resumable one is left at its beginning and read again."""
    text, kind, tenant = _drawn(rng, kinds)
    asked: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
    asked |= {
        "n": 2 if kind == "samples" else 1,
        "max_tokens": -1 if kind == "refused" else ANSWER_TOKENS,
        "tenant": tenant,
        "stream": kind != "plain",
        "resumable": kind == "resumed",
    }
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    async with client.stream("POST", path, json=asked) as reply:
        assert reply.status_code == (400 if kind == "refused" else 200), await reply.aread()
        if kind in ("leaves", "resumed"):
            async with aclosing(reply.aiter_raw(64)) as pieces:
                await anext(pieces)
        else:
            answer = await reply.aread()
            assert asked["stream"] is False or kind == "refused" or answer.endswith(b"[DONE]\n\n"), answer
    if kind == "resumed":
        again = await client.get(f"/v1/streams/{reply.headers[RESUME_TOKEN_HEADER]}")
        # On a busy machine a client may come back after the window.
        assert again.status_code == 404 or again.content.endswith(b"[DONE]\n\n"), again.content


async def _ask_grpc(client: Client, rng: random.Random, kinds: dict[str, int]) -> None:
    text, kind, tenant = _drawn(rng, kinds)
    prompt: str | list[ChatMessage] = [ChatMessage("user", text)] if kind == "chat" else text
    call = GenerateCall(
        prompt=prompt,
        n=2 if kind == "samples" else 1,
        max_tokens=-1 if kind == "refused" else ANSWER_TOKENS,
        sampling=SamplingParams(),
        resumable=kind == "resumed",
        tenant=tenant,
    )
    try:
        async with aclosing(client.agenerate(call, resume=kind == "resumed")) as events:
            async for event in events:
                if kind == "leaves" and not isinstance(event, Started):
                    return
    except ApiError as error:
        if kind != "refused" or error.code != "INVALID_ARGUMENT":
            raise


def grown_bytes(found: Sequence[Measured], after: int) -> int:
    """Return by how much the memory has grown since the request `after`."""
    return found[-1].anonymous_bytes - next(one.anonymous_bytes for one in found if one.requests >= after)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the memory of a router as it serves.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1_000)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--front", choices=FRONTS, default="grpc")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="headrace-growth-") as folder:
        found = measure(
            chosen.requests,
            chosen.every,
            prepare(None, Path(folder)),
            {chosen.only: 1} if chosen.only else KINDS,
            hear=lambda now, _: print(f"{now.requests:6} requests {now.anonymous_bytes / 2**20:6.1f} MiB", flush=True),
            front=chosen.front,
        )
    after = min(2000, chosen.requests // 2)
    grown = grown_bytes(found, after)
    print(f"from request {after} on: {grown / 2**20:+.1f} MiB, of {ALLOWED_BYTES / 2**20:.1f} MiB allowed")
    return int(grown > ALLOWED_BYTES)


if __name__ == "__main__":
    sys.exit(main())
