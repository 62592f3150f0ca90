"""A tcp peer behind a network that swallows every packet: no reset, no end of stream, nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.blackhole import CASES, NOT_ALLOWED, STALL_S
from tests.chaos.strike import KEEPALIVE_S
from transfer.liveness import LOOK_S

pytestmark = pytest.mark.chaos

MARGIN_S = 1.0
"""Time for steps, reports and looks on two busy cores."""
TIMEOUT_S = 180.0


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("prefill", "greedy"),
        ("prefill-data", "seeded"),
        ("decode", "seeded"),
        ("decode-token", "greedy"),
    ],
)
def test_a_black_hole_is_noticed_in_time(model_dir: Path, name: str, mode: str) -> None:
    """Guards a request that waits for a peer whose packets are lost until TCP itself gives up, which takes a quarter of
    an hour; and blocks that are never let go. Control streams are given up in two seconds; a data connection beside a
    living control stream in `stall_s`."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, and the commands ip and tc")
    found = subprocess.run(
        [sys.executable, "-m", "tests.chaos.blackhole", str(model_dir), name, mode],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if found.returncode == NOT_ALLOWED:
        pytest.skip(found.stderr.strip())
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout.splitlines()[-1])
    assert not result["was_over"], "the request was over before the fault"
    ends = [packets for wire in result["dropped"] for packets in wire]
    assert sum(ends) > 0 and (CASES[name].data_only or all(ends[:2])), f"nothing was swallowed: {ends}"
    limit_s = STALL_S + LOOK_S if CASES[name].data_only else KEEPALIVE_S
    assert result["noticed_s"] < limit_s + MARGIN_S
    assert result["ending"] == "exact"
    assert result["nobody_died"], "a worker that came back was killed"
