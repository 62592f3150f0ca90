"""Percentiles, gaps and rates against figures worked out by hand or by numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.stats import Sample, gaps, percentile, spread, summarise


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.sampled_from([0, 1, 50, 90, 99, 100]),
)
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    """Guards against an off-by-one rank, which only shows on small samples."""
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, abs=1e-6)


def test_nothing_has_no_percentile() -> None:
    assert spread([]) is None
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_spread_sorts_for_itself() -> None:
    result = spread([3.0, 1.0, 2.0])
    assert result is not None
    assert (result.mean, result.p50) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ([], []),
        ([(1.0, 1)], []),
        ([(1.0, 1), (1.5, 1), (2.5, 1)], [0.5, 1.0]),
        ([(1.0, 1), (2.0, 3)], [1.0, 0.0, 0.0]),
        ([(1.0, 2), (1.5, 0), (2.0, 1)], [0.0, 1.0]),
    ],
)
def test_gaps(arrivals: list[tuple[float, int]], expected: list[float]) -> None:
    """Guards the count: n tokens have n - 1 gaps however they were packed into messages."""
    assert gaps(arrivals) == expected


def test_summary() -> None:
    good = Sample(
        ttft_s=0.5,
        itl_s=[0.1, 0.3],
        e2e_s=1.0,
        prompt_tokens=30,
        output_tokens=10,
        cached_tokens=15,
        migrated_blocks=2,
        migrated_bytes=100,
        migration_s=0.2,
        stages={"route": 0.2},
    )
    warm = Sample(ttft_s=0.1, e2e_s=0.5, prompt_tokens=30, output_tokens=10, stages={"route": 0.4})
    lost = Sample(error="UNAVAILABLE", message="gone", ttft_s=99.0, output_tokens=99)
    summary = summarise([good, warm, lost], wall_s=2.0)
    assert (summary.requests, summary.failed, summary.errors) == (3, 1, {"UNAVAILABLE": 1})
    assert (summary.output_tokens_per_s, summary.total_tokens_per_s) == (10.0, 40.0)
    assert (summary.requests_per_s, summary.hit_rate) == (1.0, 0.25)
    assert summary.stages == {"route": pytest.approx(0.3)}
    assert summary.ttft_s is not None and summary.ttft_s.p99 < 1
    assert summary.migration_s is not None and summary.migration_s.mean == 0.2


def test_a_run_in_which_all_failed_has_no_figures() -> None:
    summary = summarise([Sample(error="INTERNAL")], wall_s=1.0)
    assert (summary.failed, summary.ttft_s, summary.hit_rate, summary.stages) == (1, None, 0.0, {})
