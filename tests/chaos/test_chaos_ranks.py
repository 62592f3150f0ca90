"""Workers of three ranks, whose processes are struck one by one: the end of any rank is the worker's, and requests go
on elsewhere to the bit, as after any worker's end."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos.ground import Ask, Ground
from tests.chaos.rows import ANSWER_TOKENS, RANK_ROWS, Ending
from tests.chaos.strike import END_S, PROMPTS, SETTLE_S, Reference, run_row, sending
from tests.chaos.test_chaos_samples import OUTPUT_TOKENS, SAMPLES, sampled, sampling_call
from tests.chaos.test_chaos_searches import Search

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("renewed")]

RANK_WAIT_S = 8.0
"""Longer than a rank is frozen, so that it comes back; the worker of one that stays stopped ends after it."""


@pytest.fixture(scope="module")
def whole() -> Reference:
    """Answers of three ranks: they round otherwise than those of one."""
    return Reference()


@pytest.fixture(scope="module")
def ground(model_dir: Path, whole: Reference) -> Iterator[Ground]:
    with closing(Ground(model_dir, ranks=3, rank_wait_s=RANK_WAIT_S)) as found:
        whole.make(found)
        yield found


@pytest.mark.parametrize("number", range(len(RANK_ROWS)), ids=[str(row) for row in RANK_ROWS])
def test_row_of_a_rank(ground: Ground, whole: Reference, number: int) -> None:
    """Guards against a worker that goes on without a rank, or with one that comes back with another step's sums."""
    run_row(ground, whole, RANK_ROWS[number], number)


@pytest.mark.parametrize(("mode", "rank"), [("greedy", 1), ("seeded with penalties", 2)])
def test_samples_of_a_worker_that_loses_a_rank_are_exact(
    ground: Ground, whole: Reference, mode: str, rank: int
) -> None:
    """Guards a group of forks over one prompt, whose blocks all ranks have written: each goes on behind its own
    tokens."""
    told = sampled(ground, sampling_call(mode, f"whole {mode}"))
    assert len(told) == SAMPLES and all(len(answer[0]) == OUTPUT_TOKENS for answer in told)
    assert sampled(ground, sampling_call(mode, f"rank {rank} {mode}"), 8, rank) == told


@pytest.mark.parametrize(("moment", "rank"), [(6, 2), ("sending", 1)])
def test_a_search_whose_worker_loses_a_rank_finds_the_same(
    ground: Ground, whole: Reference, moment: int | str, rank: int
) -> None:
    """Guards beams, which say nothing before their end: all is computed again from the prompt. Its decode worker loses
    a rank at a step of it, or its prefill worker while chunks of the prompt are on their way."""
    told = Search(ground, f"whole at {moment}").found()
    search = Search(ground, f"rank {rank} at {moment}")
    if isinstance(moment, int):
        victim = search.at_step(moment)
    else:
        victim = ground.busy("prefill")
        sending(ground, victim)
    pid = ground.pid(victim)
    faults.kill(ground.rank_pid(victim, rank))
    assert search.found() == told
    ground.replaced(victim, pid)


def asked(ground: Ground, tenant: str) -> Ask:
    return ground.ask(PROMPTS["victim"], "seeded", ANSWER_TOKENS, tenant, resume=True)


def told_whole(ground: Ground, whole: Reference, ask: Ask) -> None:
    ask.join(END_S)
    assert whole.judge(ask, "victim", "seeded") is Ending.EXACT
    ground.settle(SETTLE_S)


def test_a_drained_worker_of_three_ranks_hands_its_answer_over(ground: Ground, whole: Reference) -> None:
    """Guards blocks that leave amid an answer, to another worker of three ranks; and ranks that outlive a drain."""
    ask = asked(ground, "drained")
    ask.wait_tokens(2)
    name = ground.busy("decode")
    pids = [ground.rank_pid(name, rank) for rank in range(3)]
    assert not ask.over, "it was over before the fault"
    ground.cluster.drain(name, timeout_s=END_S, again=True)
    ground.replaced(name, pids[0])
    told_whole(ground, whole, ask)
    assert ask.finished is not None and ask.finished.stats.decode_worker != name, "it had ended before"
    assert not [pid for pid in pids if faults.process_state(pid) not in ("", "Z")]


def test_an_answer_of_three_ranks_is_resumed_at_another_router(ground: Ground, whole: Reference) -> None:
    """Guards adoption: the workers go on without a router, and the next one tells the client what it missed."""
    ask = asked(ground, "orphan")
    ask.wait_tokens(2)
    pid = ground.pid("router")
    faults.kill(pid)
    assert not ask.over, "it was over before the fault"
    ground.replaced("router", pid)
    told_whole(ground, whole, ask)
