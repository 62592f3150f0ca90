"""Decode workers that read prompts themselves, as real processes with the demo model: one pool without prefill workers,
and beside a prefill worker where that is the cheaper. The answers are those of a split cluster."""

import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import ChatMessage, Delta, Finished, GenerateCall
from router.grpc.client import Client
from router.status.overview import Overview
from tests.telemetry.test_metrics import samples

GREEDY = SamplingParams(temperature=0.0)


class Served:
    """A cluster that is repaired when a worker dies, and a client."""

    def __init__(self, model_dir: Path, prefill: int, decode: int, local_prefill: str = "never") -> None:
        router = RouterConfig(grpc_port=0, http_port=-1, local_prefill=local_prefill)  # type: ignore[arg-type]
        config = ClusterConfig(launcher="process", prefill_workers=prefill, decode_workers=decode, router=router)
        self.serve(config, model_dir)

    def serve(self, config: ClusterConfig, model_dir: Path) -> None:
        self.cluster = Cluster(config, make_launcher("process"), model_dir=str(model_dir))
        self.client = Client(self.cluster.start().grpc)
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self.cluster.watch, args=(self._stop,), daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._stop.set()
        self._watcher.join(30)
        self.client.close()
        self.cluster.stop()

    def ask(self, prompt: list[int] | list[ChatMessage], max_tokens: int = 8) -> tuple[list[int], Finished]:
        call = GenerateCall(prompt=prompt, sampling=GREEDY, max_tokens=max_tokens, ignore_eos=True)
        events = list(self.client.generate(call))
        tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
        (finished,) = [event for event in events if isinstance(event, Finished)]
        return tokens, finished

    def counted(self, worker: str, family: str, **labels: str) -> float:
        """Return what a worker's metrics say, series with these labels together."""
        overview = msgspec.json.decode(self.cluster.ask("router", "overview"), type=Overview)
        (address,) = [view.metrics_address for view in overview.workers if view.name == worker]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            seen = samples(answer.read())
        return sum(
            value
            for (name, own), value in seen.items()
            if name == f"headrace_{family}" and labels.items() <= dict(own).items()
        )


@pytest.fixture(scope="module")
def split(demo_model: Path) -> Iterator[Served]:
    served = Served(demo_model, prefill=1, decode=1, local_prefill="auto")
    yield served
    served.close()


@pytest.fixture(scope="module")
def pool(demo_model: Path) -> Iterator[Served]:
    served = Served(demo_model, prefill=0, decode=2)
    yield served
    served.close()


def _tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def test_one_pool_gives_the_answers_of_two(split: Served, pool: Served) -> None:
    prompts = [_tokens(count, count) for count in (3, 16, 33, 150)]
    for prompt in prompts:
        wanted, _ = split.ask(prompt)
        got, finished = pool.ask(prompt)
        assert got == wanted
        stats = finished.stats
        assert stats.prefill_worker == stats.decode_worker != "" and stats.migrated_blocks == 0
    with ThreadPoolExecutor(4) as asked:
        assert [tokens for tokens, _ in asked.map(pool.ask, prompts)] == [split.ask(prompt)[0] for prompt in prompts]


def test_a_burst_behind_one_cold_prefix_computes_it_once_a_worker(pool: Served) -> None:
    """Guards one pool against computing the same system prompt for every request that comes before it is cached."""
    prefix = _tokens(320, 7)
    with ThreadPoolExecutor(8) as asked:
        ends = [end for _, end in asked.map(pool.ask, [prefix + _tokens(5, seed) for seed in range(8)])]
    computed = sum(325 - end.stats.prefill_cached_tokens for end in ends)
    assert 320 + 8 * 5 <= computed <= 2 * 320 + 8 * 5, computed
    assert {end.stats.decode_worker for end in ends} <= {"decode-0", "decode-1"}


def test_the_next_turn_goes_where_the_first_one_was(pool: Served) -> None:
    chat = [ChatMessage("user", "Name three rivers in Europe, with commas.")]
    _, first = pool.ask(chat, max_tokens=20)
    chat += [ChatMessage("assistant", "Rhine, Danube, Elbe."), ChatMessage("user", "And one more?")]
    _, second = pool.ask(chat, max_tokens=4)
    assert second.stats.decode_worker == first.stats.decode_worker
    assert second.stats.decode_cached_tokens >= 32, "what both turns begin with"


def test_an_answer_survives_its_worker(split: Served, pool: Served) -> None:
    """Guards recovery where nobody else has ever read the prompt: the next worker reads prompt and answer."""
    prompt = _tokens(80, 21)
    wanted, _ = split.ask(prompt, max_tokens=48)
    call = GenerateCall(prompt=prompt, sampling=GREEDY, max_tokens=48, ignore_eos=True)
    got: list[int] = []
    victims: list[int] = []
    for event in pool.client.generate(call):
        if isinstance(event, Delta):
            got += event.token_ids
            if len(got) >= 8 and not victims:
                victims = [_busiest(pool)]
                os.kill(victims[0], signal.SIGKILL)
        elif isinstance(event, Finished):
            finished = event
    assert victims and got == wanted and finished.stats.migrated_blocks == 0


def _busiest(pool: Served) -> int:
    """The process of the worker that computes, hence the one that answers."""
    pids = [up.pid for up in pool.cluster.workers.values()]
    before = {pid: _cpu_ticks(pid) for pid in pids}
    threading.Event().wait(0.4)
    spent = {pid: _cpu_ticks(pid) - before[pid] for pid in pids}
    idle, busy = sorted(pids, key=spent.__getitem__)
    assert spent[busy] > spent[idle] + 2, "which one answers?"
    return busy


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_prefill_pool_can_come_and_go(pool: Served) -> None:
    """Guards `headrace scale`: one pool becomes two and one again, and no request notices."""
    pool.cluster.scale("prefill", 1, 60.0)
    deadline_s, seed = time.monotonic() + 20.0, 100
    while True:  # until the router has met it
        seed += 1
        _, finished = pool.ask(_tokens(100, seed))
        if finished.stats.prefill_worker == "prefill-0":
            break
        assert time.monotonic() < deadline_s, "nobody asks the prefill worker"
    assert finished.stats.migrated_blocks > 0
    pool.cluster.scale("prefill", 0, 60.0)
    _, finished = pool.ask(_tokens(100, 32))
    assert finished.stats.prefill_worker == finished.stats.decode_worker


def test_beside_a_prefill_worker_a_follow_up_is_read_where_its_answer_is(split: Served) -> None:
    """Guards `local_prefill`: the prefill worker has never had the answer, and would compute it again."""
    prompt = _tokens(64, 41)
    tokens, _ = split.ask(prompt, max_tokens=160)
    _, finished = split.ask([*prompt, *tokens, *_tokens(8, 42)])
    stats = finished.stats
    assert stats.prefill_worker == stats.decode_worker == "decode-0" and stats.migrated_blocks == 0
    assert stats.decode_cached_tokens >= 208
