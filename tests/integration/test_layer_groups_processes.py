"""A whole cluster of processes with a small random Gemma 3, whose windows are shorter than the prompts and slide while
answers are written: with layer groups, without them, and transformers give the same tokens."""

import os
import random
import signal
import urllib.request
from collections.abc import Iterator
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
from tests.engine.model.test_every_family import greedy_gap
from tests.integration.probe import Probe
from tests.telemetry.test_metrics import samples
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig

SIZE, PROMPT, ANSWER = 4, 100, 140
NEAR_TIE = 1e-4
Answer = tuple[list[int], Finished]


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

    def held_midway(self, prompt: list[int]) -> tuple[dict[str, float], dict[str, float]]:
        """Return what a decode worker's page says, while it answers, of held blocks by group and of all by state."""
        call = GenerateCall(
            prompt=prompt, sampling=SamplingParams(temperature=0.0), max_tokens=ANSWER, ignore_eos=True
        )
        events, tokens = self.client.generate(call), 0
        while tokens < ANSWER // 2:
            event = next(events)
            tokens += len(event.token_ids) if isinstance(event, Delta) else 0
        overview = msgspec.json.decode(self.cluster.ask("router", "overview"), type=Overview)
        pages = [page_of(view.metrics_address) for view in overview.workers if view.role == "decode"]
        list(events)
        (found,) = [page for page in pages if page[1]["active"]]
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


def page_of(address: str) -> tuple[dict[str, float], dict[str, float]]:
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
        assert greedy_gap(model, _prompt(seed), tokens) <= NEAR_TIE
        stats = finished.stats
        assert stats.prefill_worker == "prefill-0"
        most = len(migrated(groups, range(PROMPT // SIZE), PROMPT, SIZE))
        assert stats.migrated_blocks == most < len(groups) * PROMPT // SIZE
        again, finished = grouped.ask(_prompt(seed))
        assert again == tokens
    held, states = grouped.held_midway(_prompt(3))
    assert list(held) == group_names(groups)
    assert sum(held.values()) == states["active"] + states["reserved"] + states["quarantined"]
    everything, *windows = held.values()
    assert everything >= PROMPT // SIZE and all(0 < window < everything for window in windows)
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
