"""What is taken as a constraint before native code sees it."""

import time

import pytest

from engine.constraints.grammar import compile_constraint, explained
from engine.constraints.text import (
    MAX_BYTES,
    MAX_CHOICES,
    MAX_DEPTH,
    check_constraint,
    choices_constraint,
    depth_of,
)
from engine.types import Constraint, ConstraintKind, FieldError
from fakes.vocabulary import byte_vocabulary


def _nested(depth: int) -> str:
    return '{"not":' * depth + "true" + "}" * depth


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "", "empty"),
        ("regex", "  ", "empty"),
        ("regex", "a" * (MAX_BYTES + 1), "bytes"),
        ("regex", "\ud800", "Unicode"),
        ("lark", "start: \0", "NUL"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "deep"),
        ("lark", "start: " + "[" * 200 + '"a"' + "]" * 200, "deep"),
        ("json_schema", _nested(1000), "deep"),
        ("json_schema", "[" * 30000, "deep"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", "3", "must be a JSON schema"),
        ("json_schema", "false", "allows nothing"),
        ("json_schema", '{"items": {"$ref": "http://127.0.0.1:9/x.json"}}', "within the schema"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "within the schema"),
        ("json_schema", '{"const": 9007199254740993}', "double"),
        ("json_schema", '{"properties": {"a": {"enum": [{"b": [99999999999999999999]}]}}}', "double"),
        ("json_schema", '{"const": -9223372036854775808}', "double"),
        ("json_schema", '{"const": 0.1000000000000000055}', "double"),
        ("json_schema", '{"const": 1e9999999999999999999}', "double"),
        ("json_schema", f'{{"const": 1{"0" * 400}}}', "double"),
        ("json_schema", '{"type": "integer", "minimum": 99999999999999999999}', "minimum"),
        ("json_schema", '{"type": "integer", "maximum": 1e20}', "maximum"),
        ("json_schema", '{"items": {"exclusiveMinimum": 9007199254740993}}', "exclusiveMinimum"),
        ("json_schema", '{"type": "object", "minProperties": 2}', "minProperties above 1"),
        ("json_schema", '{"required": ["a", "a"], "minProperties": 3}', "minProperties above 2"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_refused(kind: str, text: str, says: str) -> None:
    began_s = time.perf_counter()
    with pytest.raises(FieldError, match=says) as caught:
        check_constraint(Constraint(ConstraintKind(kind), text), "guided")
    assert caught.value.field == "guided"
    assert time.perf_counter() - began_s < 0.5


@pytest.mark.parametrize("text", [
    "true", '{"$ref": "#"}', _nested(MAX_DEPTH - 2), '{"const": "((((("}',
    '{"enum": [0.1, -1.50, 1e23, 9007199254740994]}',
    '{"maximum": 9223372036854775807, "default": 9007199254740993}', '{"properties": {"const": {"default": 1e400}}}',
    '{"const": {"minProperties": 9}}', '{"required": ["a"], "minProperties": 2}', '{"minimum": true}',
])  # fmt: skip
def test_what_is_taken(text: str) -> None:
    check_constraint(Constraint(ConstraintKind.JSON_SCHEMA, text))


def test_true_allows_any_json() -> None:
    """Guards a schema that is a boolean, which the compiler of grammars does not know."""
    matcher = compile_constraint(Constraint(ConstraintKind.JSON_SCHEMA, " true\n"), byte_vocabulary())
    assert matcher.try_consume_tokens(list(b'[1, {"a": null}]')) == 16 and matcher.is_accepting()


def test_depth_counts_what_is_open_at_once() -> None:
    assert depth_of("a") == 0
    assert depth_of("()()()") == 1
    assert depth_of("([{}])") == 3
    assert depth_of(")))(") == 1


def test_choices_are_quoted() -> None:
    """Guards a choice that would close its string and go on as grammar."""
    assert choices_constraint(['a" | /.*/ "', "b\n"], "x").text == r'start: "a\" | /.*/ \"" | "b\n"'


@pytest.mark.parametrize("choices", [[], [""], ["a"] * (MAX_CHOICES + 1)], ids=len)
def test_choices_that_are_none(choices: list[str]) -> None:
    with pytest.raises(FieldError, match=r"^x: "):
        choices_constraint(choices, "x")


@pytest.mark.parametrize("depth", [65, 900, 9000])
def test_brackets_in_strings_do_not_hide_how_deep_a_schema_is(depth: int) -> None:
    """Guards whoever reads it: a key that closes a bracket kept the count low, and reading ran out of stack."""
    text = '{"]":' * depth + "1" + "}" * depth
    with pytest.raises(FieldError, match="nested more than"):
        check_constraint(Constraint(ConstraintKind.JSON_SCHEMA, text))


@pytest.mark.parametrize(
    ("kind", "message", "told"),
    [
        (
            ConstraintKind.REGEX,
            'at 1(8): invalid regex "(a" (in regex): regex parse error:\n    (a\n    ^\nerror: unclosed group\n'
            "   1 | start: /(a/\n              ^",
            "is not an expression that can be kept to: unclosed group",
        ),
        (
            ConstraintKind.LARK,
            'at 3(8): unknown name: "foo"\n   3 | start: foo\n              ^',
            'is not a grammar that can be kept to: line 3, column 8: unknown name: "foo"',
        ),
        (
            ConstraintKind.JSON_SCHEMA,
            "Pointer '/nope' does not exist",
            "is not a schema that can be kept to: a $ref points to /nope, which is not there",
        ),
        (
            ConstraintKind.JSON_SCHEMA,
            "regex parse error:\n    (?=a)b\n    ^^^\nerror: look-around is not supported",
            "is not a schema that can be kept to: in an expression: look-around is not supported",
        ),
    ],
)
def test_errors_speak_of_what_the_caller_wrote(kind: ConstraintKind, message: str, told: str) -> None:
    """Guards callers from a compiler's view of a text that they never wrote."""
    assert explained(kind, message) == told
