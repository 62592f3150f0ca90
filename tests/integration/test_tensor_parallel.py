"""Workers of three processes in a whole cluster, with the demo model: handoffs between equal and unequal degrees, held
against devices of one process that compute in the same slices, and what the end of a rank costs."""

import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cluster.cli.command import run
from cluster.config import ClusterConfig
from engine.backends.workspace import trial_row
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.step import StepPlan
from engine.types import BlockId
from router.config import RouterConfig
from router.status.overview import Overview
from telemetry.rank_metrics import WAITED_FOR
from tests.integration.test_one_pool import GREEDY, Served
from tests.telemetry.test_metrics import samples
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig

ENGINE = EngineConfig(pool_bytes=96 * 1024 * 1024)
PROMPT = [random.Random(5).randrange(1000, 40_000) for _ in range(75)]
ANSWER_TOKENS = 24
RANK_WEIGHTS = "headrace_rank_weights_bytes"
BLOCKS = [BlockId(block) for block in range(7)]


class Degrees(Served):
    """A cluster of one prefill and one decode worker of so many ranks, which are replaced when they end."""

    def __init__(self, model_dir: Path, prefill: int, decode: int, transport: str) -> None:
        self.degrees = prefill, decode
        transfer = TransferConfig(transport=transport)
        config = ClusterConfig(
            launcher="process",
            router=RouterConfig(grpc_port=0, http_port=-1, local_prefill="never"),
            prefill=PrefillConfig(engine=ranked(prefill), transfer=transfer),
            decode=DecodeConfig(engine=ranked(decode), transfer=transfer),
        )
        self.serve(config, model_dir)

    def ranks(self, worker: str) -> list[int]:
        """The processes of a worker's ranks from 1 on."""
        pid = self.cluster.workers[worker].pid
        children = [Path(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
        found = [int(child) for some in children for child in some]
        return [child for child in found if b"worker.rank" in Path(f"/proc/{child}/cmdline").read_bytes()]


def ranked(ranks: int) -> EngineConfig:
    return msgspec.structs.replace(ENGINE, tensor_parallel=ranks)


def in_slices(model_dir: Path, prefill: int, decode: int) -> list[int]:
    """Return the answer of devices of one process each, between which the prompt's blocks are copied."""
    devices: list[EngineDevice] = []
    try:
        for slices in (prefill, decode):
            config = msgspec.structs.replace(ENGINE, model_dir=str(model_dir), sum_slices=slices)
            devices.append(open_device(config))
        reader, writer = devices
        tokens = list(PROMPT)
        tokens.append(drawn(reader, tokens, 0))
        for block in BLOCKS:
            writer.kv.block(block)[:] = reader.kv.block(block)
        while len(tokens) < len(PROMPT) + ANSWER_TOKENS:
            tokens.append(drawn(writer, tokens, len(tokens) - 1))
        return tokens[len(PROMPT) :]
    finally:
        for device in devices:
            device.kv.close()
            if device.matchers is not None:
                device.matchers.close()


def drawn(device: EngineDevice, tokens: list[int], start: int) -> int:
    row = trial_row(tokens, start, BLOCKS)
    record = msgspec.structs.replace(row.record, sampling=GREEDY)
    row = msgspec.structs.replace(row, draw=True, record=record)
    (token,) = device.runner.launch(StepPlan((row,))).wait()
    assert isinstance(token, int)
    return token


@pytest.fixture(params=[(3, 3, "shm"), (3, 1, "tcp"), (1, 3, "shm")], ids=lambda degrees: "-".join(map(str, degrees)))
def served(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[Degrees]:
    served = Degrees(demo_model, *request.param)
    yield served
    served.close()


def test_handoffs_between_degrees_are_exact(
    served: Degrees, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against heads in the wrong place of a block, and a block sent before every rank has written it."""
    for worker, ranks in zip(("prefill-0", "decode-0"), served.degrees, strict=True):
        assert len(served.ranks(worker)) == ranks - 1
    tokens, finished = served.ask(PROMPT, ANSWER_TOKENS)
    assert finished.stats.migrated_blocks > 0
    for worker, ranks in zip(("prefill-0", "decode-0"), served.degrees, strict=True):
        its_ranks_are_told(served, worker, ranks)
    if served.degrees == (3, 3):
        held = [rank.weights_bytes for rank in served.cluster.workers["decode-0"].ranks]
        the_plan_says_what_ranks_hold(held, capsys)
    assert tokens == in_slices(demo_model, *served.degrees)
    if served.degrees == (3, 3):
        a_rank_that_is_killed_ends_its_worker(served, tokens)


def its_ranks_are_told(served: Degrees, worker: str, ranks: int) -> None:
    """Guards what `headrace status` and `top` show, and metrics of ranks that nobody computes in."""
    up = served.cluster.workers[worker]
    overview = msgspec.json.decode(served.cluster.ask("router", "overview"), type=Overview)
    (view,) = [view for view in overview.workers if view.name == worker]
    pids = [up.pid, *sorted(served.ranks(worker))] if ranks > 1 else []
    assert [up.ranks[0].pid, *sorted(rank.pid for rank in up.ranks[1:])] == pids if pids else not up.ranks
    assert view.ranks == up.ranks
    with urllib.request.urlopen(f"http://{view.metrics_address}/metrics", timeout=30) as answer:
        seen = samples(answer.read())
    weights = {dict(labels)["rank"]: value for (name, labels), value in seen.items() if name == RANK_WEIGHTS}
    assert weights == {str(at): rank.weights_bytes for at, rank in enumerate(up.ranks)} or not up.ranks
    assert len(weights) == ranks and min(weights.values()) > 0
    for rank in weights:
        assert seen["headrace_rank_cpu_seconds_total", (("rank", rank),)] > 0
    for what in WAITED_FOR:
        assert (seen["headrace_rank_wait_seconds_total", (("what", what),)] > 0) is (ranks > 1)


def the_plan_says_what_ranks_hold(held: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `headrace plan`, by the setting and by the flag, against a model that is divided otherwise."""
    for flags in (["--set", "engine.tensor_parallel=3"], ["--tp", "3", "--dtype", "float32"]):
        capsys.readouterr()
        assert run(["plan", "--json", *flags]) == 0
        planned = json.loads(capsys.readouterr().out)["weights_bytes"]
        assert held == [pytest.approx(planned, rel=0.05)] * 3


def a_rank_that_is_killed_ends_its_worker(served: Degrees, tokens: list[int]) -> None:
    """Guards against a worker that goes on with a part of its model, and ranks that outlive it."""
    first, second = served.ranks("decode-0")
    os.kill(second, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            found = served.ranks("decode-0")
        except (OSError, KeyError):
            found = []
        if len(found) == 2 and not {first, second} & set(found):
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{first}").exists()
    assert served.ask(PROMPT, ANSWER_TOKENS)[0] == tokens
