"""The benchmarks of the insides at tiny sizes, real processes and all: that they measure what they say they do."""

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import deterministic, migration, recovery
from benchmarks.bed import TimedAnswer
from benchmarks.counting import CopyCounts
from benchmarks.figures import middle, write_json
from engine.config import EngineConfig
from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.api import Finished

ENGINE = EngineConfig(pool_bytes=4 << 20)


@pytest.mark.slow
def test_migration_counts_blocks_bytes_and_digests(tiny_model: Path) -> None:
    """Guards figures of the wrong request: digests that were never made, made elsewhere, or made where they are off."""
    lines, copy = migration.measure(tiny_model, [1, 70], ["shm"], 2, ENGINE)
    assert copy.median > 1e8
    found = {(line.transport, line.digests, line.prompt_tokens): line for line in lines}
    assert len(found) == len(lines) == 4
    for (_, digests, tokens), line in found.items():
        assert line.blocks == -(-tokens // 16)
        assert line.nbytes > 0 and line.migration_s.median > 0 and line.ttft_s.median > 0
        # Two repeats, sent and received.
        assert line.digests_made == (2 * 2 * line.blocks if digests else 0)
        assert line.digests_off_thread == 0
        assert (line.digest_share.median > 0) == digests


@pytest.mark.slow
def test_recovery_kills_and_stays_exact(tiny_model: Path) -> None:
    """Guards a kill that hits the idle worker, and a comparison that compares nothing."""
    lines = recovery.measure(tiny_model, [40], [3], kills=2, output_tokens=200, engine=ENGINE)
    (line,) = lines
    assert (line.role, line.at_token, line.kills, line.exact) == ("decode", 3, 2, 2)
    # The prompt was still in a prefill worker's cache; what had been written was not.
    assert 3 <= line.recomputed_tokens.median < 200
    assert line.recovery_s.median > 0


class _UnmovedBed:
    """A bed whose one worker is a process that has nothing to do with the answer."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def pids(self, role: str) -> dict[str, int]:
        return {f"{role}-0": self._pid}

    def counts(self, role: str) -> dict[str, CopyCounts]:
        return {f"{role}-0": CopyCounts()}

    def replaced(self, name: str, old_pid: int) -> None:
        pass

    def ask(self, prompt: list[int], output_tokens: int, tenant: str, watch: object = None) -> TimedAnswer:
        finished = Finished(
            reason=FinishReason.LENGTH,
            prompt_tokens=len(prompt),
            output_tokens=2,
            cached_tokens=0,
            stats=RequestStats(prefill_worker="prefill-0", decode_worker="decode-0"),
            ttft_s=0.01,
            itl_mean_s=0.01,
            itl_p99_s=0.01,
            e2e_s=0.02,
        )
        return TimedAnswer([1, 2], [0.01, 0.02], finished)


def test_a_kill_without_effect_is_no_figure() -> None:
    """Guards a benchmark of nothing: the request went on with the worker that was killed."""
    with subprocess.Popen(["sleep", "60"]) as idle:
        bed: Any = _UnmovedBed(idle.pid)
        trial = recovery._Trial(bed, [1], [bed.ask([1], 2, "")], 1000.0)
        with pytest.raises(recovery.NoEffectError, match="prefill-0"):
            trial.kill_prefill()


def test_deterministic_measures_every_side(tiny_model: Path, tmp_path: Path) -> None:
    sides = deterministic.sides_of(tiny_model)
    lines = deterministic.measure(sides, 40, [1, 3], 2, 2)
    assert [line.work for line in lines] == ["prefill, chunks of 128", "decode, 1 at once", "decode, 3 at once"]
    for line in lines:
        assert all(speed.median > 0 for speed in line.tokens_per_s.values())
        assert list(line.relative) == list(sides)[1:]
    file = tmp_path / "told.json"
    write_json(file, "deterministic", {"rounds": "2"}, lines)
    told = json.loads(file.read_bytes())
    assert told["environment"]["torch"] and told["date"] and len(told["rows"]) == 3


def test_the_middle_of_repeats() -> None:
    found = middle([5.0, 1.0, 3.0, 2.0, 4.0])
    assert msgspec.structs.astuple(found) == (3.0, 2.0, 4.0, 5.0, 5)
    assert found.cell(10, 0) == "30 (20–40)"
    with pytest.raises(ValueError, match="nothing"):
        middle([])
