"""What may come next in an answer, over a vocabulary of bytes."""

import json
import math
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor
from msgspec.structs import replace

from engine.constraints.matchers import AWAITED_S, MAX_AWAITED, MAX_GRAMMARS, SPARE_MATCHERS, Matchers
from engine.model.config import ModelError
from engine.plan import row_of
from engine.step import DeadEnd, Row, TokenView, draws_of
from engine.types import Constraint, ConstraintKind, RequestId, RequestRecord
from fakes.vocabulary import AtOnce, byte_matchers, byte_vocabulary
from tests.engine.watched import WatchedList

END = 256
PROMPT = list(b"Say: ")
PET = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps({
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["kind", "age"],
        "additionalProperties": False,
    }),
)  # fmt: skip
DATE = Constraint(ConstraintKind.REGEX, "[0-9]{4}-[01][0-9]")
CHOICE = Constraint(ConstraintKind.LARK, 'start: "yes" | "yellow" | "no"')


def row(constraint: Constraint, output: bytes | list[int], name: str = "r") -> Row:
    record = RequestRecord(
        request=RequestId(name), tokens=PROMPT, prompt_tokens=len(PROMPT), max_tokens=999, seed=1, constraint=constraint
    )
    tokens = [*PROMPT, *output]
    return row_of(record, tokens, len(tokens) - 1, len(tokens), [], frozenset({END}))


def allowed(mask: object) -> set[int]:
    assert isinstance(mask, bytes), mask
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def chars(text: str) -> set[int]:
    return set(text.encode())


def test_what_may_come_next() -> None:
    matchers = byte_matchers()
    for output, then in [
        (b"", chars("yn")),
        (b"y", chars("e")),
        (b"ye", chars("sl")),
        (b"yel", chars("l")),
        (b"no", {END}),
        (b"yes", {END}),
    ]:
        assert allowed(matchers.masks([row(CHOICE, output)])[0]) == then


def test_an_answer_may_end_only_where_it_is_complete() -> None:
    matchers = byte_matchers()
    assert END not in allowed(matchers.masks([row(DATE, b"2026-1")])[0])
    assert allowed(matchers.masks([row(DATE, b"2026-11")])[0]) == {END}


@pytest.mark.parametrize("threads", [0, 2])
def test_many_rows_have_their_own(threads: int) -> None:
    """Computed one after the other, or side by side, as on a host with cores to spare."""
    matchers = byte_matchers()
    matchers._executor = LLExecutor(threads) if threads else None
    rows = [row(CHOICE, b"y", "a"), row(DATE, b"20", "b"), row(CHOICE, b"", "c")]
    assert [allowed(mask) for mask in matchers.masks(rows)] == [chars("e"), chars("0123456789"), chars("yn")]


def _written(matchers: Matchers, constraint: Constraint, seed: int) -> list[int]:
    """Draw an answer among what is allowed, token by token."""
    chosen, output = random.Random(seed), list[int]()
    while len(output) < 200 and END not in output:
        output.append(chosen.choice(sorted(allowed(matchers.masks([row(constraint, output)])[0]))))
    return output


@pytest.mark.parametrize("constraint", [PET, DATE, CHOICE], ids=lambda c: c.kind)
def test_the_place_in_a_grammar_is_a_function_of_record_and_tokens(constraint: Constraint) -> None:
    """Guards requests that go on elsewhere: whoever replays a beginning allows what those allow who were there all
    along, also where a token was drawn behind which no mask was ever computed."""
    for seed in range(4):
        old = byte_matchers()
        output = _written(old, constraint, seed)
        for at in range(len(output)):
            mask = byte_matchers().masks([row(constraint, output[:at])])
            assert mask == old.masks([row(constraint, output[:at], f"new {at}")])
            assert output[at] in allowed(mask[0])


def test_a_request_that_comes_back_with_other_tokens_is_replayed() -> None:
    """Guards the name of a request that is used again, with another answer or another constraint."""
    matchers = byte_matchers()
    matchers.masks([row(CHOICE, b"yel")])
    assert allowed(matchers.masks([row(CHOICE, b"y")])[0]) == chars("e")
    assert allowed(matchers.masks([row(CHOICE, b"n")])[0]) == chars("o")
    assert allowed(matchers.masks([row(DATE, b"2")])[0]) == chars("0123456789")


def test_tokens_that_do_not_keep_it_are_a_dead_end() -> None:
    matchers = byte_matchers()
    (mask,) = matchers.masks([row(CHOICE, b"maybe")])
    assert isinstance(mask, DeadEnd) and "does not keep it" in mask.message
    assert allowed(matchers.masks([row(CHOICE, b"n")])[0]) == chars("o"), "and it does not stay one"


@pytest.mark.parametrize("text", ["start: nothing", "start: /[/", 'start: "a'])
def test_what_cannot_be_compiled_is_a_dead_end(text: str) -> None:
    matchers, constraint = byte_matchers(), Constraint(ConstraintKind.LARK, text)
    assert matchers.is_compiled(constraint)
    (mask,) = matchers.masks([row(constraint, b"")])
    assert isinstance(mask, DeadEnd) and mask.message.startswith("constraint: ")


def test_a_grammar_that_grows_too_costly_ends_its_request_and_no_other() -> None:
    matchers = byte_matchers()
    costly = Constraint(ConstraintKind.REGEX, "((a{1000}){1000}){1000}")
    ends = None
    for length in range(40):
        mask, other = matchers.masks([row(costly, b"a" * length, "costly"), row(CHOICE, b"y", "other")])
        assert allowed(other) == chars("e")
        if isinstance(mask, DeadEnd):
            ends = mask
            break
    assert ends is not None and ends.message.startswith("constraint: "), "within a few tokens, and not by a crash"


def test_matchers_of_requests_that_are_gone_are_let_go() -> None:
    matchers = byte_matchers()
    for number in range(3 * SPARE_MATCHERS):
        matchers.masks([row(CHOICE, b"y", f"r{number}")])
    assert repr(matchers) == f"Matchers(1 grammars, {SPARE_MATCHERS + 1} matchers)"
    assert allowed(matchers.masks([row(CHOICE, b"ye", "r0")])[0]) == chars("sl"), "and made anew where they come back"


def digits(count: int) -> Constraint:
    return Constraint(ConstraintKind.REGEX, f"a{{{count + 1}}}")


def long(number: int) -> Constraint:
    return Constraint(ConstraintKind.REGEX, "b" * 60_000 + str(number))


def test_compiled_constraints_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    matchers, now_s = byte_matchers(), 0.0
    monkeypatch.setattr("engine.constraints.matchers.time.monotonic", lambda: now_s)
    for number in range(100):
        now_s += 2 * AWAITED_S  # whoever asked before does not wait any more
        matchers.is_compiled(digits(number))
    assert repr(matchers) == "Matchers(32 grammars, 0 matchers)"
    for number in range(40):
        now_s += 2 * AWAITED_S
        matchers.is_compiled(long(number))
    assert repr(matchers) == "Matchers(17 grammars, 0 matchers)", "1 MiB of text"
    for number in range(100):
        matchers.masks([row(digits(number), b"", "r")])
    assert repr(matchers) == "Matchers(32 grammars, 1 matchers)", "an answer that has begun has its own"


def test_those_that_wait_do_not_drive_out_each_other_s_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker whose waiting answers have more constraints than are kept: each newcomer had all of them compiled
    again, one after the other, and hardly any answer began."""
    monkeypatch.setattr("engine.constraints.matchers.AWAITED_S", math.inf)  # a slow machine compiles for longer
    compiled = []

    class Counting(AtOnce):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            compiled.append(args[0])
            return super().submit(fn, *args, **kwargs)

    matchers = Matchers(byte_vocabulary, END + 1, Counting(), AtOnce())
    for waiting in (60, 60, 61, 61):
        assert all([matchers.is_compiled(digits(number)) for number in range(waiting)])
    assert len(compiled) == len(set(compiled)) == 61
    for number in range(1000):
        matchers.is_compiled(digits(number))
    assert repr(matchers) == f"Matchers({MAX_AWAITED * MAX_GRAMMARS} grammars, 0 matchers)", "there is a bound for all"
    for number in range(150):
        matchers.is_compiled(long(number))
    assert repr(matchers) == "Matchers(139 grammars, 0 matchers)", "8 MiB of text"


def test_whoever_waits_for_a_constraint_is_woken() -> None:
    matchers = Matchers(byte_vocabulary, END + 1, masking=AtOnce())
    import threading

    woken = threading.Event()
    matchers.wake = woken.set
    compiled = matchers.is_compiled(PET)
    assert woken.wait(10.0)
    assert matchers.is_compiled(PET)
    assert isinstance(compiled, bool)
    matchers.close()


def test_a_vocabulary_that_cannot_be_loaded_is_a_dead_end() -> None:
    def fails() -> None:
        raise ModelError("here", "no tokenizer")

    matchers = Matchers(fails, END + 1, AtOnce(), AtOnce())  # type: ignore[arg-type]
    (mask,) = matchers.masks([row(CHOICE, b"")])
    assert isinstance(mask, DeadEnd) and mask.code == "INTERNAL"


def row_behind(tokens: list[int] | TokenView, constraint: Constraint, drafts: int = 0) -> Row:
    known = row(constraint, b"")
    return replace(known, tokens=tokens, end=len(tokens), drafts=drafts)


def test_an_answer_that_goes_on_is_not_read_again() -> None:
    """Guards the time of a step: the whole prompt and answer were copied and compared several times in each."""
    endless, matchers = Constraint(ConstraintKind.REGEX, "[0-9]*"), byte_matchers()
    own = WatchedList([*PROMPT, *b"12345" * 400])
    matchers.masks([row_behind(own, endless)])
    for step in range(20):
        own.read = 0
        rows = draws_of(row_behind(TokenView.of(own, *b"78"), endless, 2))
        masks = matchers.masks(rows)
        assert [allowed(mask) for mask in masks] == [chars("0123456789") | {END}] * 3
        token = ord(str(step % 10))
        matchers.continued([replace(rows[0], allowed=masks[0])], [token])  # type: ignore[arg-type]
        own.append(token)
        assert own.read < 300, "two dozen for each look"


@pytest.mark.parametrize("seed", range(4))
def test_a_matcher_stands_where_a_new_one_would_whatever_became_of_the_guesses(seed: int) -> None:
    """Guards tokens that were followed or guessed and came to be others, an answer that is another when its request
    comes back, and one that was cut: a matcher behind what it saw before allows what the grammar does not."""
    chosen, matchers = random.Random(seed), byte_matchers()
    words = Constraint(ConstraintKind.REGEX, "(abc|adef|ag*h|bcd)*")
    own = [*PROMPT]

    def written(length: int) -> list[int]:
        """Write what the grammar allows."""
        output, others = own[len(PROMPT) :], byte_matchers()
        for _ in range(length):
            (mask,) = others.masks([row(words, output)])
            output.append(chosen.choice(sorted(allowed(mask) - {END})))
        return output[len(own) - len(PROMPT) :]

    for _ in range(25):
        guesses = written(chosen.randrange(3))
        rows = draws_of(row_behind(TokenView.of(own, *guesses), words, len(guesses)))
        masks = matchers.masks(rows)
        assert masks == byte_matchers().masks([replace(one, tokens=[*one.tokens]) for one in rows])
        if chosen.random() < 0.5:
            token = chosen.choice(sorted(allowed(masks[-1])))
            matchers.continued([replace(rows[-1], allowed=masks[-1])], [token])  # type: ignore[arg-type]
        match chosen.randrange(6):
            case 0:
                del own[len(PROMPT) + chosen.randrange(3) :]
                own += written(len(guesses) + 2)
            case 1:
                own = [*PROMPT]
                own = [*PROMPT, *written(6)]
            case _:
                own += written(2)
