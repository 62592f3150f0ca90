"""How the soak judges an answer: what it counts, and what it calls a problem."""

from typing import Any

import pytest

from router.client.errors import ApiError
from router.core.recovery import poisoned
from tests.chaos import soak
from tests.chaos.soak import POISONOUS, Question, Soak

QUESTION = Question(0, "greedy", 4)


class Asked:
    """What the judge looks at of `tests.chaos.ground.Ask`."""

    finished = None

    def __init__(self, error: ApiError) -> None:
        self.tokens, self.error = [1, 2], error


@pytest.mark.parametrize(
    ("code", "message", "counted", "is_problem"),
    [
        ("UNAVAILABLE", "no live decode worker", "UNAVAILABLE", False),
        ("UNAVAILABLE", "nobody answers at 127.0.0.1:4: Connection refused", soak.NO_ROUTER, False),
        ("UNAVAILABLE", f"{POISONOUS}: decode-0 (killed by SIGKILL) and decode-1", POISONOUS, True),
        ("INTERNAL", "what nobody expects", "INTERNAL", True),
    ],
)
def test_an_innocent_that_is_accused_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, code: str, message: str, counted: str, is_problem: bool
) -> None:
    """Guards bystanders: the refusal of one that only happened to be on two workers that were killed was among the
    errors that are allowed."""
    monkeypatch.setattr(soak.time, "sleep", lambda _: None)
    ground: Any = None
    judge, asked = Soak(ground, 1), Asked(ApiError(code, message))
    judge._answers[QUESTION] = [1, 2, 3, 4]
    judge._judge(QUESTION, asked, False)  # type: ignore[arg-type]
    assert dict(judge.report.requests) == {counted: 1}
    assert len(judge.report.problems) == is_problem


def test_the_word_is_the_routers() -> None:
    """Guards the count against a refusal that is worded anew."""
    assert any(isinstance(one, str) and one.startswith(POISONOUS) for one in poisoned.__code__.co_consts)
