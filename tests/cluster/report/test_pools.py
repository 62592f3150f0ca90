"""Pools in simulated time: times that can be worked out by hand, and what must hold whatever comes."""

from random import Random

import msgspec
import pytest

from cluster.report.pools import PoolSizes, PoolSpeeds, simulate
from router.status.traffic import RequestShape

SPEEDS = PoolSpeeds(
    token_s=0.001,
    alone_s=0.01,
    row_s=0.002,
    migrate_s=0.005,
    overhead_s=0.02,
    mixed_step_s=0.05,
    chunk_tokens=64,
    least_tokens=16,
)


def shape(arrived_s: float = 0.0, prompt: int = 128, output: int = 5, **more: object) -> RequestShape:
    fields: dict[str, object] = {
        "prefill_cached_tokens": 0,
        "decode_cached_tokens": 0,
        "ttft_s": 0.0,
        "itl_s": 0.0,
        "queue_s": 0.0,
        "prefill_s": 0.0,
        "migrate_s": 0.0,
        "is_local": False,
    }
    return RequestShape(arrived_s=arrived_s, prompt_tokens=prompt, output_tokens=output, **fields | more)  # type: ignore[arg-type]


def test_one_request_alone() -> None:
    """Guards each term: the prompt, the wait for its blocks, what a first token takes besides, and steps of one row."""
    (split,) = simulate([shape(7.0)], PoolSizes(1, 1), SPEEDS)
    assert (split.ttft_s, split.itl_s) == pytest.approx((0.128 + 0.005 + 0.02, 0.012))
    (whole,) = simulate([shape(7.0)], PoolSizes(0, 2), SPEEDS)
    assert (whole.ttft_s, whole.itl_s) == pytest.approx((0.128 + 0.02, 0.012)), "nothing moves"


def test_prompts_wait_for_each_other_on_one_worker_and_not_on_two() -> None:
    both = [shape(), shape()]
    assert simulate(both, PoolSizes(1, 1), SPEEDS)[1].ttft_s == pytest.approx(0.256 + 0.025)
    assert simulate(both, PoolSizes(0, 2), SPEEDS)[1].ttft_s == pytest.approx(0.128 + 0.02)
    assert simulate(both, PoolSizes(2, 1), SPEEDS)[1].ttft_s == pytest.approx(0.128 + 0.025)


def test_a_prompt_beside_rows_holds_them_up_within_the_bound() -> None:
    """Guards what splitting is for. A step of one row has 12 ms of 50 for itself, hence 38 tokens of the prompt."""
    requests = [shape(output=60), shape(0.2, prompt=380)]
    split, whole = simulate(requests, PoolSizes(1, 1), SPEEDS), simulate(requests, PoolSizes(0, 1), SPEEDS)
    assert split[0].itl_s == pytest.approx(0.012, rel=0.05)
    assert whole[0].itl_s == pytest.approx((49 * 0.012 + 10 * 0.050) / 59, rel=0.05)
    assert whole[1].ttft_s == pytest.approx(0.02 + 10 * 0.05, abs=0.012), "and the rows hold up the prompt"
    assert split[1].ttft_s == pytest.approx(0.38 + 0.025)
    unbounded = msgspec.structs.replace(SPEEDS, mixed_step_s=10.0, chunk_tokens=1000)
    assert simulate(requests, PoolSizes(0, 1), unbounded)[0].itl_s == pytest.approx((58 * 0.012 + 0.392) / 59, rel=0.05)


def test_what_is_cached_is_not_read_again() -> None:
    """Guards a chat's next turn: the decode worker has the answer too."""
    turn = shape(prefill_cached_tokens=64, decode_cached_tokens=112)
    assert simulate([turn], PoolSizes(1, 1), SPEEDS)[0].ttft_s == pytest.approx(0.064 + 0.025)
    assert simulate([turn], PoolSizes(0, 2), SPEEDS)[0].ttft_s == pytest.approx(0.016 + 0.02)
    assert simulate([turn], PoolSizes(1, 1, is_auto=True), SPEEDS)[0].ttft_s == pytest.approx(0.016 + 0.02)
    fresh = shape(prefill_cached_tokens=112)
    assert simulate([fresh], PoolSizes(1, 1, is_auto=True), SPEEDS)[0].ttft_s == pytest.approx(0.016 + 0.025)


@pytest.mark.parametrize("sizes", [PoolSizes(1, 1), PoolSizes(0, 3), PoolSizes(2, 2), PoolSizes(2, 1, is_auto=True)])
def test_everybody_is_served_and_nobody_sooner_than_alone(sizes: PoolSizes) -> None:
    random = Random(5)
    for _ in range(20):
        shapes = [
            shape(random.random() * 3, random.randrange(1, 400), random.randrange(1, 40))
            for _ in range(random.randrange(1, 60))
        ]
        found = simulate(shapes, sizes, SPEEDS)
        assert found == simulate(shapes, sizes, SPEEDS)
        for one, times in zip(shapes, found, strict=True):
            assert times.ttft_s >= one.prompt_tokens * SPEEDS.token_s + SPEEDS.overhead_s - 1e-9
            assert times.itl_s >= 0.012 - 1e-9 or one.output_tokens == 1


def test_somebody_must_decode() -> None:
    with pytest.raises(ValueError, match="nobody decodes"):
        simulate([shape()], PoolSizes(2, 0), SPEEDS)
