"""The benchmark of the router's data path: what it counts is of real routers, of which several may share a port."""

import pytest

from benchmarks.front import cpu_s, measure


@pytest.mark.slow
@pytest.mark.parametrize("front", ["sse", "grpc"])
def test_routers_behind_one_port_share_the_streams(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards workers that would answer one router alone, and a port that only the first of the routers has."""
    seen: list[list[int]] = []
    monkeypatch.setattr("benchmarks.front.cpu_s", lambda pids: seen.append(list(pids)) or sum(map(each, pids)))
    spent: dict[int, list[float]] = {}

    def each(pid: int) -> float:
        spent.setdefault(pid, []).append(cpu_s([pid]))
        return spent[pid][-1]

    line = measure(front, 2, 24, 40, 2.0, 1, True, routers=2)
    assert line["routers"] == 2 and 0.5 * 24 * 40 < line["tokens/s"] < 1.2 * 24 * 40
    assert len(spent) == 2 and all(of[-1] > of[-2] for of in spent.values()), "a router had no stream"
