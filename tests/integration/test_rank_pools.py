"""Whole clusters whose ranks have a pool and a mover each, at equal and unequal degrees, with a small model: handoffs,
samples, beams and preemptions, held against clusters of single processes that compute in the same slices."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from cluster.config import ClusterConfig
from engine.config import EngineConfig, TierConfig
from engine.device import open_device
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from engine.storage.paged import header_bytes
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import Delta, Finished, GenerateCall
from tests.chaos import faults
from tests.engine.model.checkpoints import build, save_hf
from tests.integration.test_one_pool import GREEDY, Served
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig
from worker.rank import PROGRAM as RANK_PROGRAM

SIZE, BLOCKS, ANSWER_TOKENS, CROWD = 4, 48, 40, 6
STUCK_S = 4.0
NO_TIERS = TierConfig(host_bytes=0)
SEEDED = SamplingParams(temperature=1.0, repetition_penalty=1.2)
PROMPTS = [[8 + (7 * at + 13 * text) % 110 for at in range(21 + text)] for text in range(CROWD)]


class Degrees(NamedTuple):
    prefill: int
    decode: int
    transport: str


TRIED = (
    Degrees(1, 2, "shm"),
    Degrees(2, 1, "tcp"),
    Degrees(2, 2, "tcp"),
    Degrees(3, 1, "shm"),
    Degrees(2, 3, "shm"),
    Degrees(2, 3, "tcp"),
)


class Pools(Served):
    """One prefill and one decode worker: of so many ranks with a pool each, or of one process with so many slices,
    which has room for all."""

    def __init__(
        self, model_dir: Path, degrees: Degrees, in_ranks: bool, preemption: str = "recompute", host_bytes: int = 0
    ) -> None:
        block_bytes = ModelConfig.load(model_dir).kv_layout(SIZE, "float32").block_bytes
        base = EngineConfig(block_size=SIZE, pool_bytes=4 * BLOCKS * block_bytes, speculation="off", rank_wait_s=6.0)
        engines = []
        for degree in degrees[:2]:
            own = {"tensor_parallel": degree, "rank_pools": "own"} if in_ranks else {"sum_slices": degree}
            engines.append(msgspec.structs.replace(base, **own))
        decode = engines[1]
        if in_ranks:
            decode = msgspec.structs.replace(decode, pool_bytes=BLOCKS * block_bytes)
        transfer = TransferConfig(transport=degrees.transport, stuck_s=STUCK_S)
        preemption = preemption if in_ranks else "off"
        config = ClusterConfig(
            launcher="process",
            router=RouterConfig(grpc_port=0, http_port=-1, local_prefill="never", unplaceable_s=90.0),
            prefill=PrefillConfig(engine=engines[0], transfer=transfer, chunk_tokens=8, tiers=NO_TIERS),
            decode=DecodeConfig(
                engine=decode,
                transfer=transfer,
                preemption=preemption,  # type: ignore[arg-type]
                growth_tokens=SIZE,
                tiers=TierConfig(host_bytes=host_bytes),
            ),
        )
        self.begun = 0
        """Answers whose first token has come."""
        self.serve(config, model_dir)

    def told(self, call: GenerateCall) -> tuple[list[list[int]], int]:
        """Return the tokens of each of a call's answers, and how many blocks had migrated."""
        tokens: list[list[int]] = [[] for _ in range(call.n)]
        migrated = 0
        for event in self.client.generate(call):
            if isinstance(event, Delta):
                self.begun += not any(tokens)
                tokens[event.sample] += event.token_ids
            elif isinstance(event, Finished):
                migrated = max(migrated, event.stats.migrated_blocks)
        return tokens, migrated


def calls() -> list[GenerateCall]:
    """Single answers; samples, which share the last block of their prompt until each writes its own; and beams."""
    base = GenerateCall(prompt=PROMPTS[0], sampling=GREEDY, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    single = [msgspec.structs.replace(base, prompt=prompt) for prompt in PROMPTS]
    fresh = [prompt[::-1] for prompt in PROMPTS]
    sampled = msgspec.structs.replace(base, prompt=fresh[0], n=3, sampling=SEEDED, seed=5, max_tokens=12)
    beams = msgspec.structs.replace(base, prompt=fresh[1], n=2, beam_width=3, max_tokens=12)
    return [*single, sampled, beams]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("six")
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6}
    return prepare(save_hf(build("qwen2", **sizes), folder / "model"), folder / "cache")


@pytest.fixture(scope="module")
def wanted(model_dir: Path) -> Iterator[dict[tuple[int, int], list[list[list[int]]]]]:
    """What clusters of single processes answer, by their slices; filled when asked for."""

    class Answers(dict[tuple[int, int], list[list[list[int]]]]):
        def __missing__(self, slices: tuple[int, int]) -> list[list[list[int]]]:
            with closing(Pools(model_dir, Degrees(*slices, "shm"), in_ranks=False)) as alone:
                self[slices] = [alone.told(call)[0] for call in calls()]
            return self[slices]

    yield Answers()


@pytest.mark.slow
@pytest.mark.parametrize("degrees", TRIED, ids=lambda degrees: "{}-{}-{}".format(*degrees))
def test_clusters_of_ranks_with_own_pools_answer_as_slices_do(
    model_dir: Path, wanted: dict[tuple[int, int], list[list[list[int]]]], degrees: Degrees
) -> None:
    """Guards the whole way of blocks whose heads lie in several pools: offered, moved and landed in parts, copied on
    write at every rank, given up and computed again; and what a worker says of its memory."""
    whole = wanted[degrees[:2]]
    with closing(Pools(model_dir, degrees, in_ranks=True)) as ranks:
        for worker, degree in zip(("prefill-0", "decode-0"), degrees[:2], strict=True):
            assert len(ranks.cluster.workers[worker].ranks) == (degree if degree > 1 else 0)
        for call, answers in zip(calls(), whole, strict=True):
            tokens, migrated = ranks.told(call)
            assert tokens == answers, call
            assert migrated > 0 or call.prompt in PROMPTS, "nothing was handed over"
        crowd = [msgspec.structs.replace(call, cache_salt="crowd") for call in calls()[:CROWD]]
        with ThreadPoolExecutor(CROWD) as asked:
            found = list(asked.map(ranks.told, crowd))
        assert [tokens for tokens, _ in found] == whole[:CROWD] and all(migrated for _, migrated in found)
        assert ranks.counted("decode-0", "preemptions_total") > 0, "nobody was preempted"


@pytest.mark.slow
def test_blocks_that_came_in_parts_are_swapped_in_parts(
    model_dir: Path, wanted: dict[tuple[int, int], list[list[list[int]]]]
) -> None:
    """Guards blocks that two ranks have sent and three have, on their way to host memory and back: one that goes before
    every part of it is there, or a rank that gets another's part."""
    degrees = Degrees(2, 3, "tcp")
    with closing(Pools(model_dir, degrees, in_ranks=True, preemption="swap", host_bytes=16 << 20)) as ranks:
        with ThreadPoolExecutor(CROWD) as asked:
            found = list(asked.map(ranks.told, calls()[:CROWD]))
        assert [tokens for tokens, _ in found] == wanted[degrees[:2]][:CROWD]
        assert all(migrated for _, migrated in found), "nothing was handed over"
        for way in ("out", "in"):
            assert ranks.counted("decode-0", "swap_bytes_total", way=way) > 0, "nothing was swapped"


@pytest.mark.slow
def test_the_plan_says_what_ranks_with_own_pools_hold(demo_model: Path) -> None:
    """Guards `headrace plan` against a rank that has another part of the weights, or of the pool, than it says."""
    own = {"tensor_parallel": 3, "rank_pools": "own", "pool_bytes": 96 << 20}
    flags = [flag for name, value in own.items() for flag in ("--set", f"engine.{name}={value}")]
    command = [sys.executable, "-m", "cluster.cli", "plan", "--json", *flags]
    planned = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    config = EngineConfig(model_dir=str(demo_model), deterministic="off", **own)  # type: ignore[arg-type]
    device = open_device(config, rank_program=RANK_PROGRAM)
    assert device.ranks is not None and device.matchers is not None
    try:
        assert device.ranks.weights_bytes == [pytest.approx(planned["weights_bytes"], rel=0.05)] * 3
        sizes = [device.kv.nbytes]
        for pid in device.ranks.pids:
            found = [fd.stat() for fd in Path(f"/proc/{pid}/fd").iterdir() if "headrace-kv" in str(fd.readlink())]
            ((_, size),) = {(stat.st_ino, stat.st_size) for stat in found}  # a mapping has a descriptor of its own
            sizes.append(size - header_bytes(device.blocks))
        assert sizes == [pytest.approx(planned["pools"][1]["kv_bytes"], rel=0.05)] * 3
        assert device.memory.kv_bytes == sum(sizes)
    finally:
        device.ranks.close()
        device.matchers.close()
        device.kv.close()


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize(("worker", "transport"), [("prefill-0", "tcp"), ("decode-0", "shm")])
def test_a_rank_with_its_own_pool_is_lost_amid_handoffs(
    model_dir: Path, wanted: dict[tuple[int, int], list[list[list[int]]]], worker: str, transport: str, how: str
) -> None:
    """Guards blocks that land with a part missing, and requests that wait for parts that nobody sends, or takes."""
    degrees = Degrees(2, 3, transport)
    whole = wanted[degrees[:2]]
    with closing(Pools(model_dir, degrees, in_ranks=True)) as ranks:
        life = ranks.cluster.workers[worker]
        crowd = [msgspec.structs.replace(call, cache_salt=f"{at}") for at in range(6) for call in calls()[:CROWD]]
        with ThreadPoolExecutor(len(crowd)) as asked:
            found = [asked.submit(ranks.told, call) for call in crowd]
            while ranks.begun < 3:
                time.sleep(0.001)
            strike = faults.kill if how == "kill" else faults.freeze
            strike(life.ranks[1].pid)
            assert ranks.begun < len(crowd), "all was handed over before the fault"
            assert [one.result(timeout=120)[0] for one in found] == whole[:CROWD] * 6
        deadline_s = time.monotonic() + 60
        while ranks.cluster.workers[worker].pid == life.pid:
            assert time.monotonic() < deadline_s, "nobody took its place"
            time.sleep(0.05)


@pytest.mark.chaos
def test_a_receiver_whose_rank_is_stopped_while_it_waits_for_blocks_is_ended(
    model_dir: Path, wanted: dict[tuple[int, int], list[list[list[int]]]]
) -> None:
    """Guards a request that waits for ever: its decode worker has nothing to compute, so that nobody waits for the
    rank, whose part of a chunk does not end."""
    degrees = Degrees(2, 3, "tcp")
    (answer,) = wanted[degrees[:2]][0]
    with closing(Pools(model_dir, degrees, in_ranks=True)) as ranks:
        life = ranks.cluster.workers["decode-0"]
        ranks.told(calls()[1])  # the two workers have met
        faults.freeze(life.ranks[2].pid)
        began_s = time.monotonic()
        assert ranks.told(msgspec.structs.replace(calls()[0], timeout_s=90.0))[0] == [answer]
        assert time.monotonic() - began_s > STUCK_S, "it was not noticed by its silence"
        assert ranks.cluster.workers["decode-0"].pid != life.pid
