"""What a lost decode worker costs real processes, counted by the workers themselves: only what is missing."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.counting import FACTORIES, FOLDER, read_counts
from tests.chaos import faults
from tests.chaos.ground import MODES, Ground
from tests.chaos.rows import ANSWER_TOKENS, PROMPT_TOKENS, Ending
from tests.chaos.strike import END_S, PROMPTS, SETTLE_S, Reference, sending

pytestmark = pytest.mark.chaos

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("counts")
    os.environ[FOLDER] = str(found)
    yield found
    del os.environ[FOLDER]


@pytest.fixture(scope="module")
def ground(model_dir: Path, reference: Reference, folder: Path) -> Iterator[Ground]:
    with closing(Ground(model_dir, factories=FACTORIES)) as found:
        reference.make(found)
        yield found


def computed(folder: Path, names: list[str]) -> int:
    """Tokens that the processes of these names have computed. One that was replaced counts from zero."""
    return sum(read_counts(folder, name).computed_tokens for name in names)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("token", [1, 7])
def test_lost_at_a_token(
    ground: Ground, reference: Reference, folder: Path, mode: str, token: int
) -> None:
    """Guards the prompt's blocks, which the prefill worker still has: after the loss the prefill workers compute the
    tokens that had been said, the next decode worker those that had not, and nobody anything else."""
    ground.settle(SETTLE_S)
    prefill, before = ground.of("prefill"), computed(folder, ground.of("prefill"))
    ask = ground.ask(PROMPTS["victim"], mode, ANSWER_TOKENS, f"cost-{token}-{mode}")
    victim = ground.busy("decode")
    (other,) = (name for name in ground.of("decode") if name != victim)
    idle = computed(folder, [other])
    pid = ground.pid(victim)
    ask.wait_tokens(token)
    prompt = computed(folder, prefill) - before
    faults.kill(pid)
    assert not ask.over, "the request was over before the fault"
    ask.join(END_S)
    assert reference.judge(ask, "victim", mode) is Ending.EXACT
    assert prompt == PROMPT_TOKENS, "the fault-free part was not as it should be"
    again = computed(folder, prefill) - before - prompt
    on = computed(folder, [other]) - idle
    assert token <= again and again + on == ANSWER_TOKENS - 1, (again, on)
    ground.replaced(victim, pid)


@pytest.mark.parametrize("mode", list(MODES))
def test_lost_in_the_handoff(
    ground: Ground, reference: Reference, folder: Path, mode: str
) -> None:
    """Guards the chunks that a prefill worker had computed for a reader that died: they are cache, computed once."""
    ground.settle(SETTLE_S)
    prefill = ground.of("prefill")
    before = computed(folder, prefill)
    ask = ground.ask(PROMPTS["victim"], mode, ANSWER_TOKENS, f"cost-{mode}")
    sender = ground.busy("prefill")
    sending(ground, sender)
    # Frozen for a moment, or it has computed the rest before its reader is found and killed.
    with faults.frozen(ground.pid(sender)):
        victim = ground.busy("decode")
        pid = ground.pid(victim)
        faults.kill(pid)
        by_then = computed(folder, prefill) - before
    assert 0 < by_then < PROMPT_TOKENS and not ask.tokens, "it was not being sent"
    ask.join(END_S)
    assert reference.judge(ask, "victim", mode) is Ending.EXACT
    in_all = computed(folder, prefill) - before
    assert PROMPT_TOKENS <= in_all < PROMPT_TOKENS + BLOCK_TOKENS, (by_then, in_all)
    ground.replaced(victim, pid)
