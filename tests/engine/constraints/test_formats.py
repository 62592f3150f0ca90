"""Formats that would go on for ever: what is valid stays so, and the endless is cut."""

import json

import pytest

from engine.constraints.formats import BOUNDS, with_bounds
from engine.constraints.grammar import compile_constraint
from engine.text.messages import Tool
from engine.types import Constraint, ConstraintKind
from fakes.vocabulary import byte_vocabulary
from router.front.parsers.choose import Parsing
from router.front.parsers.forced import forced_calls

VOCABULARY = byte_vocabulary()
VALID = {
    "time": ["12:00:00Z", "23:59:60Z", "12:00:00.5+01:00", "12:00:00.123456789Z", "00:00:00.000000001-23:59"],
    "date-time": ["2024-02-29T12:00:00Z", "2024-01-01t12:00:00.123456789-05:30", "1999-12-31T23:59:60.1Z"],
    "duration": ["P1D", "P1Y2M3DT4H5M6S", "P4W", "PT999999999S"],
    "email": ["a@b.c", "a.b+c@d-e.example", "a@[127.0.0.1]", f"{'a' * 64}@b.c", f"a@{'b.' * 127}c"],
    "hostname": ["localhost", "a-b.example.com", "a." * 126 + "b"],
}
ENDLESS = {
    "time": "12:00:00.1234567890",
    "date-time": "2024-01-01T12:00:00.1234567890",
    "duration": "PT1234567890",
    "email": "a" * 65,
    "hostname": "a." * 127,
}


def _held(schema: object, text: str, is_whole: bool = True) -> bool:
    """Return whether a string may be the answer, or, not whole, its beginning."""
    matcher = compile_constraint(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), VOCABULARY)
    written = list(json.dumps(text).encode()[: None if is_whole else -1])
    return matcher.try_consume_tokens(written) == len(written) and (not is_whole or matcher.is_accepting())


@pytest.mark.parametrize("name", BOUNDS)
def test_a_format_has_an_end_and_loses_nothing_valid(name: str) -> None:
    """Guards answers that a small model fills with one digit until they are cut off."""
    for schema in ({"type": "string", "format": name}, {"format": name}):
        assert all(_held(schema, text) for text in VALID[name])
        assert not _held(schema, ENDLESS[name], is_whole=False)
        assert _held(schema, ENDLESS[name][:-1], is_whole=False), "the bound is where the page says"
        assert not _held(schema, "no such!")
    assert _held({"type": "string", "format": name, "description": "x"}, VALID[name][0])


def test_a_domain_has_an_end_too() -> None:
    local = "a@"
    assert not _held({"format": "email"}, local + "b." * 128 + "c")
    assert not _held({"format": "email"}, local + "b" * 256, is_whole=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"format": {"format": "email"}}},
        {"type": "array", "items": {"format": "email"}},
        {"type": "array", "prefixItems": [{"format": "email"}]},
        {"type": "object", "additionalProperties": {"format": "email"}},
        {"anyOf": [{"type": "null"}, {"format": "email", "type": "string"}]},
        {"$ref": "#/$defs/e", "$defs": {"e": {"format": "email"}}},
        {"format": "email", "pattern": "^[ab]"},
        {"format": "email", "pattern": "^[ab]", "allOf": [{"maxLength": 200}]},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_bounds_hold_wherever_a_schema_does(schema: dict[str, object]) -> None:
    """Guards a format below another word, and one beside a pattern of the caller's, which holds as well."""
    kind = str(schema.get("type"))
    shape = {"object": '{"format":"%s"}', "array": '["%s"]'}.get(kind, '"%s"')
    for local, is_held in (("a" * 64, True), ("b", True), ("a" * 65, False), ("c", "pattern" not in schema)):
        matcher = compile_constraint(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), VOCABULARY)
        written = list((shape % f"{local}@b.c").encode())
        assert (matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()) is is_held, local


def test_what_is_no_format_stays_as_it_was() -> None:
    """Guards values and names that only look like one, numbers that Python would write otherwise, and order."""
    for text in (
        '{"enum": [{"format": "email"}]}',
        '{"const": {"format": "time"}}',
        '{"properties": {"email": {"type": "string"}, "b": {}, "a": {}}}',
        '{"not": {"format": "email"}}',
    ):
        assert json.loads(with_bounds(text)) == json.loads(text)
        assert list(json.loads(with_bounds(text)).get("properties", ())) in ([], ["email", "b", "a"])
    for text in ('{"maximum": 1e999, "format": "time"}', '{"format": "uuid",  "minimum": 1.10}'):
        assert with_bounds(text) == text


def test_arguments_of_demanded_calls_are_bounded() -> None:
    tool = Tool("f", "", json.dumps({"properties": {"at": {"format": "time"}}, "required": ["at"]}))
    constraint = forced_calls(Parsing(tools="llama3"), [tool], {})
    for digits, is_held in ((9, True), (10, False)):
        matcher = compile_constraint(constraint, VOCABULARY)
        call = '{"name": "f", "parameters": {"at": "12:00:00.%sZ"}}' % ("1" * digits)
        written = list(call.encode())
        assert (matcher.try_consume_tokens(written) == len(written)) is is_held
