"""Beam searches whose workers are killed or frozen: found again elsewhere, the same, from real processes."""

import threading
import time

import pytest

from router.front.api import Delta, Finished, GenerateCall, GenerateEvent
from tests.chaos import faults
from tests.chaos.faults import NoEffectError
from tests.chaos.ground import Ground
from tests.chaos.rows import FROZEN_S
from tests.chaos.strike import END_S, PROMPTS, SETTLE_S, sending

pytestmark = pytest.mark.chaos

WIDTH, ANSWERS, OUTPUT_TOKENS = 3, 2, 40
Found = list[tuple[list[int], str, float | None]]
"""Tokens, text and score of each answer."""


class Search:
    """One search in a thread of its own."""

    def __init__(self, ground: Ground, tenant: str) -> None:
        self._ground = ground
        self._events: list[GenerateEvent] = []
        self._error: BaseException | None = None
        call = GenerateCall(
            prompt=PROMPTS["victim"],
            n=ANSWERS,
            beam_width=WIDTH,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            tenant=tenant,
        )
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: GenerateCall) -> None:
        try:
            self._events += self._ground.client.generate(call)
        except BaseException as error:
            self._error = error

    def found(self) -> Found:
        """Return its answers, when it has ended and every pool is at rest."""
        self._thread.join(END_S)
        assert not self._thread.is_alive(), "silence"
        if self._error is not None:
            raise self._error
        answers: Found = [([], "", None) for _ in range(ANSWERS)]
        for event in self._events:
            if isinstance(event, Delta | Finished):
                ids, text, score = answers[event.sample]
                if isinstance(event, Delta):
                    answers[event.sample] = ([*ids, *event.token_ids], text + event.text, score)
                else:
                    answers[event.sample] = (ids, text, event.beam_score)
        self._ground.settle(SETTLE_S)
        return answers

    def at_step(self, step: int) -> str:
        """Return the decode worker that searches, once it has run so many steps of it. Raises NoEffectError if the
        search has ended."""
        name = self._ground.busy("decode")
        first: int | None = None
        while True:
            load = self._ground.load(name)
            if load is not None and load.running_requests:
                first = load.step if first is None else first
                if load.step >= first + step:
                    return name
            elif first is not None or not self._thread.is_alive():
                raise NoEffectError(f"the search was over before step {step}")
            time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(ground: Ground) -> Found:
    answers = Search(ground, "whole").found()
    assert [len(ids) for ids, _, _ in answers] == [OUTPUT_TOKENS] * ANSWERS
    assert answers[0][0] != answers[1][0] and answers[0][2] > answers[1][2]  # type: ignore[operator]
    return answers


@pytest.mark.parametrize("moment", [1, 6, 20, "sending"])
def test_a_search_whose_worker_dies_finds_the_same(
    ground: Ground, whole: Found, moment: int | str
) -> None:
    """Guards the promise of docs/kv-memory.md: nothing was said, so it is made again from its prompt, to the bit. Its
    decode worker dies at a step of it, or its prefill worker while chunks of its prompt are on their way."""
    search = Search(ground, f"killed at {moment}")
    if isinstance(moment, int):
        victim = search.at_step(moment)
    else:
        victim = ground.busy("prefill")
        sending(ground, victim)
    pid = ground.pid(victim)
    faults.kill(pid)
    assert search.found() == whole
    ground.replaced(victim, pid)


def test_a_search_whose_decode_worker_freezes_finds_the_same(ground: Ground, whole: Found) -> None:
    """A zombie that goes on with its search is not believed, and what it held is let go."""
    search = Search(ground, "frozen")
    pid = ground.pid(search.at_step(4))
    with faults.frozen(pid):
        time.sleep(FROZEN_S)
    assert search.found() == whole
