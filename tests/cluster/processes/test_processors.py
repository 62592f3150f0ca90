"""How many cores there are to use, as files under `/proc` and `/sys` say."""

import os
from pathlib import Path

import pytest

from cluster import config
from cluster.processes.processors import usable_cores
from tests.cluster.test_memory import tree


def old_group(at: str, quota: int) -> dict[str, str]:
    return {f"{at}/cpu.cfs_quota_us": f"{quota}\n", f"{at}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("cgroup", "groups", "want"),
    [
        ("0::/a/b\n", {}, 64),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 64),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "450000 100000\n"}, 4),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "300000 50000\n"}, 6),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "9900000 100000\n"}, 64),
        ("4:cpu,cpuacct:/x\n0::/\n", old_group("sys/fs/cgroup/cpu/x", 200000), 2),
        ("4:cpu,cpuacct:/x\n0::/\n", old_group("sys/fs/cgroup/cpu/x", -1), 64),
        ("4:cpuset:/x\n", old_group("sys/fs/cgroup/cpu/x", 200000), 64),
    ],
)
def test_the_tightest_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, groups: dict[str, str], want: int
) -> None:
    """Guards a container with four cores' time on a machine of 64: as many threads would use it up at once, and stand
    still for the rest of each period."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores(tree(tmp_path, {"proc/self/cgroup": cgroup, **groups})) == want


def test_threads_of_a_worker_are_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "usable_cores", lambda: 6)
    assert [config.default_threads(workers) for workers in (1, 2, 4, 8)] == [6, 3, 1, 1]
