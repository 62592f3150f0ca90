"""The comparison of one pool with two, in small: the clusters are what their names say, and are asked the same."""

import pytest

from benchmarks.disagg import MODES, measure, workload
from benchmarks.disagg_agreement import agreement
from cluster.bench.slo import parse_slo


@pytest.mark.slow
def test_each_cluster_is_what_its_name_says() -> None:
    """Guards a comparison of a cluster with itself: blocks migrate in a split one, never in one pool, and with `auto`
    no more of them than in a split one. What a router tells of its traffic is what was asked of it, and
    the report finds in it that with such limits nothing is to be gained."""
    verdicts: list[dict[str, str | int | float]] = []
    table = measure(
        [workload(24, 4, turns=2, think_s=0.01)],
        [8.0],
        workers=2,
        requests=8,
        rounds=1,
        slo=parse_slo("ttft=60,itl=60"),
        mixed_step_s=0.05,
        seed=1,
        verdicts=verdicts,
    )
    goodput, latency = verdicts
    assert (goodput["objective"], latency["objective"]) == ("goodput", "latency")
    assert (goodput["report"], goodput["measured"], goodput["agree"]) == ("no difference", "no difference", 1)
    assert float(latency["one pool, TTFT ms measured"]) > 0.0 and float(latency["one pool, TTFT ms predicted"]) > 0.0
    lines = {str(line["mode"]): line for line in table}
    assert list(lines) == list(MODES)
    assert all(line["failed"] == 0 and line["within limits %"] == 100.0 for line in table)
    assert lines["one pool"]["migrated blocks"] == 0
    migrated = lines["split"]["migrated blocks"], lines["auto"]["migrated blocks"]
    assert isinstance(migrated[0], int) and isinstance(migrated[1], int) and migrated[0] >= migrated[1]
    assert migrated[0] > 0


def test_verdicts_agree_where_speeds_stay_and_less_where_they_drift() -> None:
    """Guards both ends: at one speed each measurement repeats the one before, and where speeds drift by far it does
    not, whatever the report says."""
    still = agreement("goodput", 0.0, requests=14, repeats=1, token_s=0.006, seed=1)
    adrift = agreement("goodput", 1.0, requests=14, repeats=1, token_s=0.006, seed=1)
    assert still["measured is measured again"] == 1.0 and still["runs"] == 10
    assert float(still["report is measured"]) >= 0.8
    assert float(adrift["measured is measured again"]) < 0.9
