"""Constraints tried out in a process of their own: who is refused, and that nobody waits for those."""

import asyncio
import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from engine.constraints.trial_messages import CPU_S
from engine.types import Constraint, ConstraintKind, FieldError
from router.front.api import ApiError
from router.front.grammars import MAX_WAITING, TOO_COSTLY, GrammarTrials, TrialProcess

GOOD = Constraint(ConstraintKind.REGEX, "[0-9]+")
BAD = Constraint(ConstraintKind.REGEX, "[")
BOMB = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 99_999_989}))
"""As a set of remainders it needs more memory, and more time, than a trial has; no limit of the library counts them."""


async def _refused(trials: GrammarTrials, constraint: Constraint, says: str) -> None:
    with pytest.raises(FieldError, match=says) as caught:
        await trials.approved(constraint, "guided_json")
    assert caught.value.field == "guided_json"


def _remainders(count: int) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": count}))


def _used_s(pid: int) -> float:
    """Seconds of the processor that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_trial_has_one_second_of_the_processor(demo_model: Path) -> None:
    """Two schemas of one kind, of which one takes about a tenth of a second and the other more than two, and neither
    more memory than there is. Guards a limit in whole seconds since the process began, which was up to two."""
    trial = TrialProcess(demo_model)
    try:
        within, beyond = _remainders(29_989), _remainders(499_979)
        assert trial.ask(within).constraint == within
        assert trial._process is not None
        began_s, others = _used_s(trial._process.pid), resource.getrusage(resource.RUSAGE_CHILDREN)
        assert trial.ask(beyond).error == TOO_COSTLY
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s = ended.ru_utime + ended.ru_stime - others.ru_utime - others.ru_stime - began_s
        assert 0.8 * CPU_S < used_s < 1.2 * CPU_S
        assert trial.ask(within).constraint == within, "what a trial has left unused or used up is not the next one's"
    finally:
        trial.close()


def _pid(trials: GrammarTrials) -> int:
    assert trials._process is not None and trials._process._process is not None
    return trials._process._process.pid


def test_without_a_model_no_constraint_is_taken() -> None:
    asyncio.run(_refused(GrammarTrials(None), GOOD, "not supported"))


def test_trials(demo_model: Path) -> None:
    """One process serves them all. Guards what ends it, which must be refused, then and later, and must not keep the
    next one from its own trial; and the loop, which goes on meanwhile."""

    async def story() -> None:
        trials = GrammarTrials(demo_model)
        try:
            ebnf = Constraint(ConstraintKind.LARK, 'root ::= "x"')
            approved = await trials.approved(ebnf, "f")
            assert approved.kind is ConstraintKind.LARK and approved.text != ebnf.text
            assert await trials.approved(GOOD, "f") == GOOD
            await _refused(trials, BAD, "is not an expression that can be kept to: unclosed character class$")
            first = _pid(trials)
            lags: list[float] = []

            async def tick() -> None:
                while True:
                    began_s = time.perf_counter()
                    await asyncio.sleep(0.005)
                    lags.append(time.perf_counter() - began_s - 0.005)

            ticking = asyncio.create_task(tick())
            began_s = time.perf_counter()
            await _refused(trials, BOMB, TOO_COSTLY)
            took_s = time.perf_counter() - began_s
            ticking.cancel()
            assert took_s < 20.0 and lags and sorted(lags)[len(lags) // 2] < 0.1
            began_s = time.perf_counter()
            await _refused(trials, BOMB, TOO_COSTLY)
            assert time.perf_counter() - began_s < 0.1, "it is remembered, and not tried again"
            other = Constraint(ConstraintKind.REGEX, "[a-z]+")
            assert await trials.approved(other, "f") == other
            assert _pid(trials) != first
            os.kill(_pid(trials), signal.SIGKILL)
            third = Constraint(ConstraintKind.REGEX, "[A-Z]+")
            await _refused(trials, third, "256 MB")
        finally:
            trials.close()

    asyncio.run(story())


def test_a_caller_that_leaves_takes_its_trial_from_nobody(demo_model: Path) -> None:
    """Guards an answer that stays in the pipe and is read as that of the next question."""

    async def story() -> None:
        trials = GrammarTrials(demo_model)
        try:
            await trials.approved(GOOD, "f")
            words = [Constraint(ConstraintKind.REGEX, f"w{number}") for number in range(8)]
            asked = [asyncio.create_task(trials.approved(word, "f")) for word in [*words, *words]]
            await asyncio.sleep(0)
            for task in asked[:5]:
                task.cancel()
            told = await asyncio.gather(*asked, return_exceptions=True)
            assert told[5:] == [*words[5:], *words]
        finally:
            trials.close()

    asyncio.run(story())


def test_the_line_is_bounded(demo_model: Path) -> None:
    async def story() -> None:
        trials = GrammarTrials(demo_model)
        try:
            words = [Constraint(ConstraintKind.REGEX, f"w{number}") for number in range(MAX_WAITING + 1)]
            asked = [asyncio.create_task(trials.approved(word, "f")) for word in words]
            told = await asyncio.gather(*asked, return_exceptions=True)
            assert told[:-1] == words[:-1]
            assert isinstance(told[-1], ApiError) and told[-1].code == "UNAVAILABLE" and told[-1].retry_after_s
        finally:
            trials.close()

    asyncio.run(story())
