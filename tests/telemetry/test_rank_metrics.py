"""What is told of the ranks of a worker: of one process, and of several."""

import os
import subprocess
import sys

from telemetry.metrics import WorkerMetrics
from telemetry.rank_metrics import RankMetrics
from tests.telemetry.test_metrics import samples


class Waited:
    @property
    def waited_s(self) -> dict[str, float]:
        return {"sums": 1.5, "orders": 0.25}


def test_a_worker_of_one_process_is_rank_0() -> None:
    """Guards panels that are empty where there are no ranks."""
    metrics = WorkerMetrics("m", "decode-0", "decode")
    RankMetrics(metrics.families, {os.getpid(): 7}, None)
    seen = samples(metrics.render())
    assert seen["headrace_rank_weights_bytes", (("rank", "0"),)] == 7
    assert seen["headrace_rank_cpu_seconds_total", (("rank", "0"),)] > 0
    assert seen["headrace_rank_wait_seconds_total", (("what", "sums"),)] == 0


def test_each_rank_has_its_own_weights_and_processor_time() -> None:
    """Guards figures of another rank, a page that fails because a rank has ended, and waits that are not told."""
    metrics = WorkerMetrics("m", "decode-0", "decode")
    program = "sum(range(10**7)); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        RankMetrics(metrics.families, {os.getpid(): 7, other.pid: 5}, Waited())
        seen = samples(metrics.render())
        other.kill()
    assert seen["headrace_rank_weights_bytes", (("rank", "1"),)] == 5

    own_s = sum(os.times()[:2])
    assert 0.05 < seen["headrace_rank_cpu_seconds_total", (("rank", "1"),)] < 60
    assert 0 < seen["headrace_rank_cpu_seconds_total", (("rank", "0"),)] <= own_s + 0.02
    assert seen["headrace_rank_wait_seconds_total", (("what", "sums"),)] == 1.5
    assert seen["headrace_rank_wait_seconds_total", (("what", "orders"),)] == 0.25
    assert ("headrace_rank_cpu_seconds_total", (("rank", "1"),)) not in samples(metrics.render())
