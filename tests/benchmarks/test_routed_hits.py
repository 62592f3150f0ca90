"""The benchmark of a real cluster's hits."""

import json
from pathlib import Path

import pytest

from benchmarks import routed_hits


def test_prompts_begin_alike_within_a_group_only() -> None:
    made = routed_hits.prompts(3, 4, 20, 2, 1000, 1)
    assert len(made) == 12 and len({tuple(prompt) for prompt in made}) == 12
    assert len({tuple(prompt[:20]) for prompt in made}) == 3
    assert made == routed_hits.prompts(3, 4, 20, 2, 1000, 1) != routed_hits.prompts(3, 4, 20, 2, 1000, 2)


@pytest.mark.slow
def test_policies_differ_in_what_real_workers_find_and_a_killed_router_costs_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards what cache-aware routing is for, in real processes: a worker's cache holds half of the beginnings."""
    out = tmp_path / "out.json"
    arguments = ["--prefill", "2", "--decode", "1", "--groups", "8", "--each", "9", "--pool-blocks", "44", "--kill"]
    arguments += ["--policies", "least-cost,round-robin", "--clients", "2", "--json", str(out)]
    assert routed_hits.main(arguments) == 0
    assert "least-cost" in capsys.readouterr().out
    (rows,) = json.loads(out.read_text())["rows"].values()
    aware, blind = rows
    assert aware["workers used"] == 2 and aware["hits"] > blind["hits"] + 0.1
    assert aware["away s"] > 0 and aware["after"] > aware["before"] - 0.1
