"""The part of the GPU benchmark with two worker processes: what it notices, and that nothing of it is left behind."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from random import Random
from types import SimpleNamespace

import msgspec
import pytest
import torch

from benchmarks.gpu import cluster as part
from benchmarks.gpu import stages, workers
from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.judge import Judge
from benchmarks.gpu.parts import Part
from benchmarks.gpu.random_model import save_checkpoint
from benchmarks.gpu.reference import Reference
from benchmarks.gpu.stages import PartOutcome, run
from benchmarks.gpu.workers import Answer, running
from cluster.processes.process_launcher import ProcessChild, ProcessLauncher
from engine.config import EngineConfig, TierConfig
from engine.model.prepared.cache import prepare
from worker.config import DecodeConfig, PrefillConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a card runs the part itself")

PROMPT = [Random(1).randrange(320) for _ in range(40)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    save_checkpoint(folder / "random", part.TINY, seed=6)
    return prepare(str(folder / "random"), folder)


def configs(model_dir: Path) -> tuple[PrefillConfig, DecodeConfig, Path]:
    engine = EngineConfig(model_dir=str(model_dir), pool_bytes=1 << 22)
    tiers = TierConfig(host_bytes=0)
    log = model_dir.with_suffix(".log")
    return PrefillConfig(engine=engine, tiers=tiers), DecodeConfig(engine=engine, tiers=tiers), log


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ProcessChild]]:
    """Every worker process that was started, none of which may outlive the test."""
    found: list[ProcessChild] = []
    launch = ProcessLauncher.launch

    def seen(self: ProcessLauncher, spec: object) -> ProcessChild:
        found.append(launch(self, spec))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(ProcessLauncher, "launch", seen)
    yield found
    left = [child.spec.name for child in found if Path(f"/proc/{child.pid}").exists()]
    for child in found:
        child.kill()
    assert not left


def test_a_checkpoint_is_its_seed(tmp_path: Path) -> None:
    """Guards figures of different days that are of different models."""
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        save_checkpoint(folder, part.TINY, seed)
    a, b, c = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert a == b != c


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_that_dies_is_told_at_once(
    model_dir: Path, started: list[ProcessChild], victim: str
) -> None:
    """Guards against a part that waits for its whole budget, and reports that it was not over."""
    with (
        pytest.raises(RuntimeError, match=f"process of {victim} has died: killed by SIGKILL"),
        running(*configs(model_dir)) as pair,
    ):
        assert len(pair.ask([PROMPT], 2)[0].tokens) == 2
        (child,) = [child for child in started if child.spec.name == victim]
        os.kill(child.pid, signal.SIGKILL)
        pair.ask([PROMPT[:20]], 200)
    assert len(started) == 2


def test_a_worker_that_cannot_start_says_why(model_dir: Path, started: list[ProcessChild]) -> None:
    with pytest.raises(RuntimeError, match="nowhere"), running(*configs(model_dir / "nowhere")):
        pytest.fail("it has started")
    assert len(started) == 2


def test_a_block_that_is_held_is_told(
    model_dir: Path, started: list[ProcessChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the sentence that pools are back, which nothing else would contradict."""
    monkeypatch.setattr(workers, "QUIET_S", 1.0)
    with running(*configs(model_dir)) as pair:
        pair.ask([PROMPT], 2)
        assert pair.wait_quiet().keys() == {"prefill", "decode"}
        pair.infos["decode"] = msgspec.structs.replace(pair.infos["decode"], blocks=1)
        with pytest.raises(RuntimeError, match="blocks are still held after 1 s"):
            pair.wait_quiet()


@pytest.fixture
def judged(model_dir: Path) -> Iterator[tuple[Judge, Answer]]:
    """A judge, and an answer that the model itself gives."""
    model, answer = Reference(model_dir, 64), Answer(PROMPT, 0.0)
    for _ in range(4):
        answer.tokens.append(int(model.logits(PROMPT, [*answer.tokens, 0])[-1].argmax()))
    model.close()
    judge = Judge(model_dir, model_dir, 64)
    yield judge, answer
    judge.close()


def test_the_models_own_tokens_are_right(judged: tuple[Judge, Answer]) -> None:
    judge, answer = judged
    verdict = judge.verdict([answer])
    assert verdict["right"] == 1 and verdict["same"] == verdict["tokens"] == 4
    assert float(verdict["lost_block_gap"]) > float(verdict["allowed_gap"]) > 0


def test_one_wrong_token_is_seen_and_spoils_no_other(judged: tuple[Judge, Answer]) -> None:
    """Guards the verdict, which decides whether a GPU computes what a CPU does."""
    judge, answer = judged
    answer.tokens[3] = (answer.tokens[3] + 1) % 320
    verdict = judge.verdict([answer])
    assert verdict["right"] == 0 and verdict["same"] == 3


def test_a_check_without_teeth_is_not_passed(
    judged: tuple[Judge, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a tolerance so wide that a lost block would pass it."""
    judge, answer = judged
    monkeypatch.setattr("benchmarks.gpu.judge.SLACK", 1e6)
    assert judge.verdict([answer])["right"] == 0


@pytest.mark.slow
def test_nccl_that_does_not_work_is_a_line_and_cuda_ipc_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards the report on which of NCCL's two ways works: one that does not may not end the part, and says why. Here
    none does, for want of a GPU."""
    ways = {way: transfer for way, transfer in part.WAYS.items() if "two_hosts" not in way}
    monkeypatch.setattr(part, "DRY_WAYS", dict(reversed(ways.items())))
    lines: list[Line] = []
    with pytest.raises(RuntimeError, match="move blocks that are on a GPU"):
        for line in part.cluster(dry_card()):
            lines.append(line)
    assert [(found["way"], found["works"]) for found in lines] == [("nccl, multi_rank", 0)]
    assert "move blocks that are on a GPU" in str(lines[0]["why"])
    assert "cuda_ipc:" in capfd.readouterr().err


def loses_a_worker(card: Card) -> Iterator[Line]:
    """A part of the benchmark."""
    folder = Path(tempfile.mkdtemp())
    save_checkpoint(folder / "random", part.TINY, seed=6)
    with running(
        *configs(prepare(str(folder / "random"), folder))[:2], Path("/dev/stderr")
    ) as pair:
        yield {"pids": " ".join(str(info.pid) for info in pair.infos.values())}
        os.kill(pair.infos["decode"].pid, signal.SIGKILL)
        pair.ask([PROMPT], 200)


def hangs_with_workers(card: Card) -> Iterator[Line]:
    folder = Path(tempfile.mkdtemp())
    save_checkpoint(folder / "random", part.TINY, seed=6)
    with running(
        *configs(prepare(str(folder / "random"), folder))[:2], Path("/dev/stderr")
    ) as pair:
        yield {"pids": " ".join(str(info.pid) for info in pair.infos.values())}
        signal.pause()


@pytest.mark.slow
def test_of_a_part_that_loses_a_worker_or_hangs_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the card's memory, which workers that outlive their part hold, and the report, which quotes them. The part
    that hangs has all its time, which is over as soon as it has told of its workers."""
    here = "tests.benchmarks.test_gpu_cluster"
    outcomes: dict[str, PartOutcome] = {}
    parts = {name: Part(f"{here}:{name}", 60) for name in ("loses_a_worker", "hangs_with_workers")}
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(stages, "time", clock)

    def heard(name: str, line: Line) -> None:
        if name == "hangs_with_workers":
            clock.monotonic = lambda: time.monotonic() + 120.0

    try:
        run(parts, dry_card, heard, outcomes.__setitem__)
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
    lost, hung = outcomes.values()
    assert "decode-0 has died: killed by SIGKILL" in lost.failure
    assert any("[prefill-0]" in line for line in lost.log), lost.log
    assert "not over after" in hung.failure
    pids = [int(pid) for outcome in (lost, hung) for pid in str(outcome.lines[0]["pids"]).split()]
    assert len(pids) == 4
    deadline_s = time.monotonic() + 10
    while left := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline_s, f"worker processes live on: {left}"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_demos_model_answers_as_the_cpu_does() -> None:
    lines = list(part.demo(dry_card()))
    assert [(line["works"], line["right"]) for line in lines] == [(1, 1)]
