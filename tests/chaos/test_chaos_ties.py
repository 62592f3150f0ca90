"""Recovery where `deterministic` is off: after a loss a token may differ, where the two best logits nearly tie.

Every answer, disturbed or not, is compared with transformers' own choice behind the answer's own tokens, and the
undisturbed ones are printed beside the others: what a loss may change is what rounding changes anyway.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.model.prepared.cache import find_demo_model
from tests.chaos import faults
from tests.chaos.ground import Ground, tokens
from tests.chaos.strike import END_S, SETTLE_S
from tests.parity.reference import Reference

pytestmark = pytest.mark.chaos

PROMPTS = [tokens(count, seed) for seed, count in enumerate((20, 75, 200))]
OUTPUT_TOKENS = 24


@pytest.fixture(scope="module")
def ground(model_dir: Path) -> Iterator[Ground]:
    # The native kernels have no other mode.
    with closing(Ground(model_dir, deterministic="off", attention="torch")) as found:
        yield found


@pytest.fixture(scope="module")
def exact() -> Reference:
    return Reference(find_demo_model())


def _answer(ground: Ground, prompt: list[int], tenant: str, kill_at: int | None) -> list[int]:
    ask = ground.ask(prompt, "greedy", OUTPUT_TOKENS, tenant)
    had: list[int] = []
    if kill_at is not None:
        ask.wait_tokens(kill_at)
        victim = ground.busy("decode")
        pid = ground.pid(victim)
        faults.kill(pid)
        had = list(ask.tokens)
        assert not ask.over, "it was over before the fault"
        ground.replaced(victim, pid)
    ask.join(END_S)
    assert ask.finished is not None, ask.error
    assert ask.tokens[: len(had)] == had and len(ask.tokens) == OUTPUT_TOKENS
    ground.settle(SETTLE_S)
    return ask.tokens


@pytest.fixture(scope="module")
def control(ground: Ground) -> list[list[int]]:
    return [_answer(ground, prompt, "control", None) for prompt in PROMPTS]


@pytest.mark.parametrize("kill_at", [1, 14])
def test_what_a_loss_changes_is_a_near_tie(
    ground: Ground,
    exact: Reference,
    control: list[list[int]],
    kill_at: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards the promise of the other mode: nothing said is lost or changed, and what follows is a best token."""
    for number, (prompt, calm) in enumerate(zip(PROMPTS, control, strict=True)):
        broken = _answer(ground, prompt, f"broken {kill_at}", kill_at)
        found = {
            what: exact.differences(number, prompt, answer)
            for what, answer in (("undisturbed", calm), ("killed", broken))
        }
        with capsys.disabled():
            print(f"\n{len(prompt)} tokens, killed at {kill_at}: {found}, same: {calm == broken}")
        for differences in found.values():
            assert all(difference.is_near_tie for difference in differences)
