"""Constraints tried out in a process of their own: who is refused, and that nobody waits for those."""

import asyncio
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Semaphore

import pytest

from engine.constraints.trial_messages import CPU_S, TrialVerdict
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


class Trials:
    """Trials that end when they are told to; `asked` began, in order. A model is never opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Constraint] = []
        self.go_on = Semaphore(0)
        monkeypatch.setattr(TrialProcess, "ask", self._ask)
        self.trials = GrammarTrials(Path("no model"))

    def _ask(self, constraint: Constraint) -> TrialVerdict:
        self.asked.append(constraint)
        assert self.go_on.acquire(timeout=10)
        return TrialVerdict(constraint)

    def ask(self, number: int, tenant: str) -> "asyncio.Task[Constraint]":
        return asyncio.create_task(self.trials.approved(_word(number), "f", tenant))


def _word(number: int) -> Constraint:
    return Constraint(ConstraintKind.REGEX, f"w{number}")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trials]:
    made = Trials(monkeypatch)
    yield made
    made.go_on.release(100)
    made.trials.close()


def test_a_trial_that_nobody_waits_for_does_not_begin(slow: Trials) -> None:
    """Guards a tenant that leaves each call at once: it had 32 trials before everybody else's, a second each."""

    async def story() -> None:
        for number in range(2 * MAX_WAITING):
            left = slow.ask(number, "a")
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.wait({left})
        slow.go_on.release(2)
        assert await slow.ask(100, "b") == _word(100)
        assert slow.asked == [_word(0), _word(100)]

    asyncio.run(story())


def test_tenants_have_their_trials_in_turns(slow: Trials) -> None:
    async def story() -> None:
        asked = [slow.ask(number, "a") for number in range(4)]
        asked += [slow.ask(10, "b"), slow.ask(20, "c"), slow.ask(21, "c")]
        await asyncio.sleep(0)
        slow.go_on.release(len(asked))
        await asyncio.gather(*asked)
        assert slow.asked == [_word(number) for number in (0, 10, 20, 1, 21, 2, 3)]

    asyncio.run(story())


def test_a_full_line_refuses_the_tenant_that_filled_it(slow: Trials) -> None:
    async def story() -> None:
        flood = [slow.ask(number, "a") for number in range(MAX_WAITING)]
        await asyncio.sleep(0)
        others = [slow.ask(100 + number, "b") for number in range(2)]
        await asyncio.sleep(0)
        too_many = slow.ask(200, "a")
        slow.go_on.release(MAX_WAITING)
        assert await asyncio.gather(*others) == [_word(100), _word(101)]
        told = await asyncio.gather(*flood, too_many, return_exceptions=True)
        assert told[: MAX_WAITING - 2] == [_word(number) for number in range(MAX_WAITING - 2)]
        refused = told[MAX_WAITING - 2 :]
        assert [one.code for one in refused if isinstance(one, ApiError)] == ["UNAVAILABLE"] * 3

    asyncio.run(story())


def test_what_two_tenants_wait_for_is_tried_once_and_is_each_ones_own(slow: Trials) -> None:
    """Guards a trial that its tenant leaves, and that another waits for."""

    async def story() -> None:
        asked = [slow.ask(0, "a"), slow.ask(1, "a"), slow.ask(1, "b"), slow.ask(2, "a"), slow.ask(2, "b")]
        await asyncio.sleep(0)
        asked[1].cancel()
        slow.go_on.release(3)
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(told[1], asyncio.CancelledError)
        assert [told[0], *told[2:]] == [_word(0), _word(1), _word(2), _word(2)]
        assert slow.asked == [_word(0), _word(1), _word(2)]
        assert repr(slow.trials) == "GrammarTrials(3 remembered, 0 under way)"

    asyncio.run(story())
