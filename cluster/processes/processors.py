"""Counts the cores that this process may keep busy. Linux."""

import os
from collections.abc import Iterator
from pathlib import Path

from cluster.memory import control_groups


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may run on, or fewer where an enclosing control group has a quota of less time
    (`docker run --cpus`, Kubernetes' limits): threads beyond it only bring forward the moment when all of them stand
    still. At least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Return the quotas in whole cores, of version 2 and version 1 of control groups; none where there is no limit."""
    for group in control_groups(root, "cpu"):
        try:
            if (group / "cpu.max").exists():
                quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = (
                    (group / name).read_text(encoding="ascii").strip()
                    for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                )
        except OSError:
            continue
        if quota not in ("max", "-1"):
            yield int(quota) // int(period)
