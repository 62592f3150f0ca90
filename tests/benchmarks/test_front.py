"""The benchmark of the router's data path: what it counts is of real routers, of which several may share a port."""

import pytest

from benchmarks.front import cpu_s, measure

STREAMS, RATE = 48, 100


@pytest.mark.slow
@pytest.mark.parametrize("front", ["sse", "grpc"])
def test_routers_behind_one_port_share_the_streams(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards workers that would answer one router alone, and a port that only the first of the routers has."""
    spent: dict[int, list[float]] = {}

    def each(pid: int) -> float:
        spent.setdefault(pid, []).append(cpu_s([pid]))
        return spent[pid][-1]

    monkeypatch.setattr("benchmarks.front.cpu_s", lambda pids: sum(map(each, pids)))
    line = measure(front, 2, STREAMS, RATE, 2.0, 1, True, routers=2)
    assert line["routers"] == 2 and 0.3 * STREAMS * RATE < line["tokens/s"] < 1.2 * STREAMS * RATE
    shares = [of[-1] - of[-2] for of in spent.values()]
    # One that only hears its workers' reports takes a tenth of that.
    assert len(shares) == 2 and min(shares) > 0.15 * sum(shares), shares
