"""Prompts come out the same for the same seed, with the shape that was asked for."""

import msgspec
import pytest

from cluster.bench.workloads import PRESETS, Kind, Workload, prompts


def test_equal_seeds_give_equal_prompts_and_others_do_not() -> None:
    load = PRESETS["A"].workload
    assert prompts(load, 5, "0/8") == prompts(load, 5, "0/8")
    assert prompts(load, 5, "0/8")[0][:16] != prompts(load, 5, "0/16")[0][:16]


@pytest.mark.parametrize(("name", "length"), [("A", 256), ("B", 1088), ("C", 32)])
def test_presets_have_the_documented_lengths(name: str, length: int) -> None:
    load = PRESETS[name].workload
    made = prompts(load, PRESETS[name].requests, "x")
    assert {len(prompt) for prompt in made} == {length}
    assert all(load.token_low <= t < load.token_high for prompt in made for t in prompt)


def test_groups_share_their_prefix_and_nothing_else() -> None:
    """Guards against groups that share by accident, or new tokens that are not new."""
    load = Workload(
        kind=Kind.SHARED_PREFIX, input_tokens=8, output_tokens=1, prefix_tokens=16, groups=3
    )
    made = prompts(load, 9, "s")
    prefixes = [tuple(prompt[:16]) for prompt in made]
    assert prefixes[:3] * 3 == prefixes
    assert len(set(prefixes)) == 3
    assert len({tuple(prompt[16:]) for prompt in made}) == 9


def test_random_prompts_share_nothing() -> None:
    made = prompts(PRESETS["A"].workload, 32, "s")
    assert len({tuple(prompt[:4]) for prompt in made}) == 32


@pytest.mark.parametrize(
    "change",
    [
        {"input_tokens": 0},
        {"output_tokens": 0},
        {"groups": 0},
        {"prefix_tokens": 0},
        {"token_low": 5, "token_high": 5},
        {"token_low": -1},
    ],
)
def test_impossible_workloads_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        msgspec.structs.replace(PRESETS["B"].workload, **change).check()
