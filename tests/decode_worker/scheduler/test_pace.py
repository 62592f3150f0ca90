"""How large a step's part of prompts is, and what is predicted of it."""

import pytest

from decode_worker.scheduler.pace import Pace
from tests.decode_worker.scheduler.bench import Fetching


def paced(bound_s: float = 0.05) -> Pace:
    """A step of running rows takes 10 ms, a prompt token 1 ms."""
    pace = Pace(64, 16, bound_s)
    for _ in range(40):
        pace.measured(8, 0, 0.010)
        pace.measured(8, 20, 0.030)
    return pace


def test_a_step_with_running_rows_keeps_the_bound() -> None:
    """Guards inter-token latency against prompts that are computed beside it."""
    pace = paced()
    assert pace.tokens(8) == pytest.approx(40, abs=1)
    assert paced(0.030).tokens(8) == pytest.approx(20, abs=1)
    assert pace.tokens(0) == 64, "nobody waits for it"


def test_prompts_go_on_where_the_rows_alone_take_as_long() -> None:
    """Guards a prompt against waiting until every stream has ended."""
    pace = paced(0.005)
    assert pace.tokens(8) == 16
    short = Pace(8, 16, 0.005)
    assert short.tokens(8) == 8, "a step's memory was counted for so many"
    short.measured(8, 8, 1.0)
    assert short.tokens(8) == 8


def test_nothing_is_bounded_by_what_was_not_measured() -> None:
    pace = Pace(64, 16, 0.05)
    assert (pace.tokens(8), pace.s_per_token(8), pace.s_per_token(0)) == (64, 0.0, 0.0)
    pace.measured(8, 0, 0.010)
    assert (pace.tokens(8), pace.s_per_token(8)) == (64, 0.0)


def test_the_prediction_is_the_whole_time_of_a_token() -> None:
    """Guards the router's comparison with a prefill worker: beside running rows a prompt takes their time too."""
    pace = paced()
    assert pace.s_per_token(0) == pytest.approx(0.001, rel=0.02)
    assert pace.s_per_token(8) == pytest.approx(0.050 / 40, rel=0.05)


def test_prompt_tokens_are_not_charged_with_the_rows_beside_them() -> None:
    pace = Pace(64, 16, 0.05)
    pace.measured(0, 50, 0.050)
    assert pace.s_per_token(0) == pytest.approx(0.001)
    pace.measured(4, 0, 0.010)
    for _ in range(60):
        pace.measured(4, 10, 0.008)  # noise: less than the rows alone
    assert 0.0 <= pace.s_per_token(0) < 1e-4


def test_a_step_of_prompts_alone_is_all_theirs() -> None:
    """Guards the prediction of a token against the time of rows that were not there."""
    pace = Pace(64, 16, 0.05)
    pace.measured(4, 0, 0.010)
    pace.measured(0, 50, 0.050)
    assert pace.s_per_token(0) == pytest.approx(0.001)


def test_a_step_of_a_few_tokens_says_little_of_many() -> None:
    """Guards the prediction against steps whose time is that of reading the weights, whatever is computed."""
    pace = Pace(64, 16, 0.05)
    for _ in range(20):
        pace.measured(0, 64, 0.064)
    pace.measured(0, 1, 0.010)
    assert pace.s_per_token(0) == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize("stale_s", [0.06, 0.3])
def test_one_slow_step_is_outlived(stale_s: float) -> None:
    """Guards a worker that is never without prompts: its rows would be taken to be slow for good, prompts would go on
    by one block a step, and what a token takes would fade to nothing, by which the engine divides."""
    pace = Pace(4096, 64, 0.05)
    pace.measured(0, 4096, 0.08)
    pace.measured(1, 0, stale_s)
    for _ in range(5000):
        tokens = pace.tokens(1)
        pace.measured(1, tokens, 0.008 + 2e-5 * tokens)
    assert pace.tokens(1) == pytest.approx((0.05 - 0.008) / 2e-5, rel=0.2)
    for _ in range(5000):
        pace.measured(1, 64, 0.001)  # a clock that stands still is no reason to end either
        assert 64 <= pace.tokens(1) <= 4096 and pace.s_per_token(1) >= 0.0


def test_the_batch_keeps_the_pace() -> None:
    """Guards the joint: what the shell has measured bounds the next step."""
    bench = Fetching(local_chunk_tokens=32, mixed_step_s=0.02, blocks=64)
    bench.place("a", [1] * 4, max_tokens=40)
    bench.step()
    batch = bench.scheduler.batch
    for _ in range(30):
        bench.step()
        batch.lasted(0.010)
    bench.place("b", list(range(40)))
    assert batch.backlog_tokens == 40
    bench.step()
    batch.lasted(0.042)  # 32 tokens in 32 ms more
    assert batch.s_per_prompt_token == pytest.approx(0.001 + 0.010 / 10, rel=0.05)
    plan = bench.step()
    assert plan is not None and [row.end - row.start for row in plan.rows] == [1, 8]
    bench.place("c", list(range(100, 150)))
    plan = bench.step()
    assert plan is not None and [row.end - row.start for row in plan.rows] == [1, 1, 10], "and no more than the bound"
    assert batch.backlog_tokens == 40
