"""Constraints on trial, in the test's process: what is refused, and that the rest is cheap."""

import json
import subprocess
import sys
import time

import pytest

from engine.constraints.trial import try_out
from engine.constraints.trial_messages import CPU_S, MEMORY_BYTES, ConstraintTrial
from engine.types import Constraint, ConstraintKind
from fakes.vocabulary import byte_vocabulary

VOCABULARY = byte_vocabulary()


def _tried(kind: str, text: object) -> tuple[str, float]:
    written = text if isinstance(text, str) else json.dumps(text)
    began_s = time.process_time()
    verdict = try_out(ConstraintTrial(Constraint(ConstraintKind(kind), written)), VOCABULARY)
    assert (verdict.constraint is None) == bool(verdict.error)
    return verdict.error, time.process_time() - began_s


REFUSED: dict[str, tuple[str, object]] = {
    "no schema": ("json_schema", {"type": "thing"}),
    "refers to itself alone": ("json_schema", {"$ref": "#"}),
    "refer to each other": ("json_schema", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                                            "$ref": "#/$defs/a"}),
    "refers to nothing": ("json_schema", {"$ref": "#/$defs/none"}),
    "alternatives multiply": ("json_schema", {"allOf": [{"oneOf": [
        {"type": "object", "properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(8)]} for i in range(12)]}),
    "expressions multiply": ("json_schema", {"allOf": [{"type": "string", "pattern": f".*{c}.{{30}}x"}
                                                       for c in "abcdefgh"]}),
    "bad expression": ("regex", "a("),
    "repeats itself": ("regex", "((a{1000}){1000}){1000}"),
    "an empty answer alone": ("regex", "(){3}"),
    "a class of no character": ("regex", "[a&&b]"),
    "no rule": ("lark", "nothing: here"),
    "no terminal": ("lark", "start: THING"),
    "neither Lark nor EBNF": ("lark", "hello there"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    error, seconds = _tried(*REFUSED[name])
    assert error and len(error) <= 600
    assert "<state>" not in error, "the parser's inner state is nobody's business"
    assert "NoExtension" not in error, "nor are the library's own names"
    assert seconds < CPU_S


TAKEN: dict[str, tuple[str, object]] = {
    "any JSON": ("json_schema", {}),
    "a tree": ("json_schema", {"$defs": {"t": {"type": "object", "properties": {
        "left": {"$ref": "#/$defs/t"}, "value": {"type": "integer"}}, "required": ["value"]}}, "$ref": "#/$defs/t"}),
    "2,000 words": ("json_schema", {"enum": [f"word {number}" for number in range(2000)]}),
    "300 properties": ("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "string"}
                                                                       for i in range(300)}}),
    "nested stars": ("regex", "(a*)*{100}"),
    "a long count": ("regex", "a{5000}b"),
    "a wide window": ("regex", ".*a.{20}"),
    "EBNF": ("lark", 'root ::= "x" [0-9]+ ("," root)?'),
    "Lark": ("lark", 'start: "x" NUM\nNUM: /[0-9]+/'),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    error, seconds = _tried(*TAKEN[name])
    assert not error
    assert seconds < CPU_S


def test_ebnf_becomes_lark() -> None:
    """Guards workers that would each convert it again, by code that is not meant for them."""
    verdict = try_out(ConstraintTrial(Constraint(ConstraintKind.LARK, 'root ::= "x"')), VOCABULARY)
    assert verdict.constraint is not None and 'start: "x"' in verdict.constraint.text


TAKES = """
import sys
from engine.constraints.trial import _limit_memory

_limit_memory()
held = bytearray(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("taken_bytes", "is_refused"), [(240_000_000, False), (260_000_000, True)])
def test_a_trial_has_256_mb(taken_bytes: int, is_refused: bool) -> None:
    """Guards the other half of the promise, which no schema comes near within its second: what is promised is 256 MB
    beyond what the process began with, and neither half nor twice as much."""
    assert MEMORY_BYTES == 256_000_000
    command = [sys.executable, "-c", TAKES, str(taken_bytes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ("MemoryError" in ended.stderr, ended.returncode != 0) == (is_refused, is_refused), ended.stderr
