"""A whole cluster of processes with a small random Gemma 3, whose windows are shorter than the prompts and slide while
answers are written: with layer groups, without them, and transformers give the same tokens."""

import os
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import msgspec
import pytest
import transformers

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.config import EngineConfig, TierConfig
from engine.kv.groups import group_names, layer_groups, migrated
from engine.model.prepared.cache import prepare
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import Delta, Finished, GenerateCall
from router.grpc.client import Client
from router.status.overview import Overview
from tests.engine.model.checkpoints import VOCAB, build, save_hf
from tests.engine.model.test_every_family import near_ties
from tests.integration.probe import Probe
from tests.telemetry.test_metrics import samples
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig

SIZE, PROMPT, ANSWER = 4, 100, 140
Answer = tuple[list[int], Finished]
Held = tuple[dict[str, float], dict[str, float]]
"""Held blocks by layer group, and all by state."""


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return build("gemma3")


@pytest.fixture(scope="module")
def model_dir(model: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    return prepare(save_hf(model, folder / "model"), folder / "cache")


class GroupedCluster:
    """A prefill worker and two decode workers, with a probe on each."""

    def __init__(self, model_dir: Path, transport: str, groups: str) -> None:
        engine = EngineConfig(block_size=SIZE, pool_bytes=2 << 20, layer_groups=groups)  # type: ignore[arg-type]
        transfer, tiers = TransferConfig(transport=transport), TierConfig(host_bytes=1 << 20)
        config = ClusterConfig(
            launcher="process",
            prefill_workers=1,
            decode_workers=2,
            router=RouterConfig(grpc_port=0, http_port=-1),
            prefill=PrefillConfig(engine=engine, transfer=transfer, tiers=tiers, chunk_tokens=16),
            decode=DecodeConfig(engine=engine, transfer=transfer, tiers=tiers, local_chunk_tokens=16),
        )
        self.cluster = Cluster(config, make_launcher("process"), model_dir=str(model_dir))
        try:
            addresses = self.cluster.start()
        except BaseException:
            self.cluster.stop()
            raise
        self.client = Client(addresses.grpc)
        self.pids = {up.name: up.pid for up in addresses.workers}
        self.probes = {
            up.name: Probe(up.name.partition("-")[0], up.address, self.cluster.keys.valid())
            for up in addresses.workers
        }

    def ask(self, prompt: list[int], kill_after: int | None = None, victim: str = "") -> Answer:
        """Ask; a worker is killed when so many tokens have come."""
        call = GenerateCall(
            prompt=prompt, sampling=SamplingParams(temperature=0.0), max_tokens=ANSWER, ignore_eos=True
        )
        tokens, finished = list[int](), None
        for event in self.client.generate(call):
            if isinstance(event, Delta):
                tokens += event.token_ids
                if kill_after is not None and len(tokens) >= kill_after:
                    self.kill(victim)
                    kill_after = None
            elif isinstance(event, Finished):
                finished = event
        assert finished is not None and kill_after is None
        return tokens, finished

    def held_midway(self) -> list[Held]:
        """Return what the decode workers' pages say, several times while one of them answers."""
        overview = msgspec.json.decode(self.cluster.ask("router", "overview"), type=Overview)
        addresses = [view.metrics_address for view in overview.workers if view.role == "decode"]
        found = list[Held]()
        deadline_s = time.monotonic() + 60.0

        def ask_on() -> None:
            for seed in count(3):
                if len(found) >= 3 or time.monotonic() > deadline_s:
                    return
                self.ask(_prompt(seed))

        with ThreadPoolExecutor(1) as asking:
            answering = asking.submit(ask_on)
            while not answering.done():
                found += [page for page in map(page_of, addresses) if page[1]["active"]]
            answering.result()
        return found

    def kill(self, name: str) -> None:
        os.kill(self.pids.pop(name), signal.SIGKILL)
        self.probes.pop(name).close()

    def wait_whole(self) -> None:
        for probe in self.probes.values():
            probe.wait_quiet(5.0)

    def close(self) -> None:
        for probe in self.probes.values():
            probe.close()
        self.client.close()
        self.cluster.stop()


def page_of(address: str) -> Held:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        seen = samples(answer.read())
    by_name = [
        {dict(labels)[label]: value for (name, labels), value in seen.items() if name == f"headrace_{wanted}"}
        for wanted, label in (("kv_group_blocks", "group"), ("kv_blocks", "state"))
    ]
    return by_name[0], by_name[1]


@pytest.fixture(scope="module", params=["shm", "tcp"])
def grouped(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[GroupedCluster]:
    found = GroupedCluster(model_dir, request.param, "on")
    yield found
    found.close()


def _prompt(seed: int, length: int = PROMPT) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def ungrouped(model_dir: Path) -> dict[int, list[int]]:
    """The answers of a cluster that keeps everything, by the seed of the prompt."""
    cluster = GroupedCluster(model_dir, "shm", "off")
    try:
        return {seed: cluster.ask(_prompt(seed))[0] for seed in (1, 2)}
    finally:
        cluster.close()


def test_the_same_tokens_with_groups_without_and_by_transformers(
    grouped: GroupedCluster, ungrouped: dict[int, list[int]], model: transformers.PreTrainedModel
) -> None:
    """Guards the whole of it: prefill, migration of the tails, sliding while decoding, and a second time from cache."""
    config = model.config
    kinds = [config.sliding_window if kind == "sliding_attention" else 0 for kind in config.layer_types]
    groups = layer_groups(kinds)
    for seed in (1, 2):
        tokens, finished = grouped.ask(_prompt(seed))
        assert tokens == ungrouped[seed]
        assert len(tokens) == ANSWER and near_ties(model, _prompt(seed), tokens) == 0
        stats = finished.stats
        assert stats.prefill_worker == "prefill-0"
        most = len(migrated(groups, range(PROMPT // SIZE), PROMPT, SIZE))
        assert stats.migrated_blocks == most < len(groups) * PROMPT // SIZE
        again, finished = grouped.ask(_prompt(seed))
        assert again == tokens
    pages = grouped.held_midway()
    assert pages and all(list(held) == group_names(groups) for held, _ in pages)
    of_requests = ("active", "reserved", "quarantined")
    sums = [sum(held.values()) - sum(states[state] for state in of_requests) for held, states in pages]
    # A page may be made while a step's figures are being set.
    assert sums.count(0) > len(sums) / 2, sums
    assert any(everything > PROMPT // SIZE and all(0 < window < everything for window in windows)
               for everything, *windows in (held.values() for held, _ in pages))
    grouped.wait_whole()


@pytest.mark.parametrize("kill_after", [1, 40])
def test_a_decode_worker_dies_in_the_middle(
    model_dir: Path, ungrouped: dict[int, list[int]], kill_after: int
) -> None:
    """Guards recovery: another worker goes on behind what was told, and every pool is whole in the end."""
    cluster = GroupedCluster(model_dir, "shm", "on")
    try:
        _, first = cluster.ask(_prompt(1))
        victim = first.stats.decode_worker
        # It has the prompt in its cache, and so is asked again.
        tokens, finished = cluster.ask(_prompt(1), kill_after, victim)
        assert tokens == ungrouped[1]
        assert finished.stats.decode_worker != victim, "it was not killed in the middle"
        cluster.wait_whole()
    finally:
        cluster.close()
