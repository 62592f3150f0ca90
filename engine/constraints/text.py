"""The text of a constraint: what is taken, before any native code has seen it, and what else becomes one of its kinds.
Pure.

Grammars are compiled by recursive native code, so size and nesting are bounded here, at the router's border and at the
worker's. What remains costly within these bounds is found out by a trial (`engine/constraints/trial.py`).
"""

import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Literal

import msgspec

from engine.types import Constraint, ConstraintKind, FieldError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 64
"""Brackets within brackets: of a schema's JSON, of an expression, or of a grammar."""
MAX_CHOICES = 1024
FIELD = "constraint"
"""The name by which callers know it where their front has no better one."""

JSON_OBJECT = Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"object"}')


def check_constraint(constraint: Constraint, field: str = FIELD) -> None:
    """Raise FieldError for a text that must not be compiled."""
    text = constraint.text
    if not text.strip():
        raise FieldError(field, "must not be empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise FieldError(field, "is not valid Unicode") from error
    if size > MAX_BYTES:
        raise FieldError(field, f"has {size} bytes, at most {MAX_BYTES} are accepted")
    if "\0" in text:
        raise FieldError(field, "must not contain NUL")
    # For a schema too, whose strings may hold expressions, and before anything recursive reads it.
    if depth_of(text) > MAX_DEPTH:
        raise FieldError(field, f"is nested more than {MAX_DEPTH} deep")
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        check_schema(text, field)


def depth_of(text: str) -> int:
    """Return how deeply brackets are nested at most, whatever they mean: an opening one counts until any is closed."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(text):
        depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


_BRACKETS = re.compile(r"[()\[\]{}]")


Role = Literal["schema", "map", "value", "note"]
_ROLES: dict[str, Role] = {
    **dict.fromkeys(("const", "enum"), "value"),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), "map"),
    **dict.fromkeys(("default", "examples"), "note"),
}
"""What stands below a word of a schema, where it is no schema: values of an answer, schemas by name, or notes."""
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_INT64_END = 2**63


def check_schema(text: str, field: str) -> None:
    """Raise FieldError for a schema that must not be compiled, or that would be kept to otherwise than it says."""
    try:
        schema = json.loads(text, parse_int=_exact_int, parse_float=_exact_float)
    except RecursionError as error:
        raise FieldError(field, f"is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:
        raise FieldError(field, f"is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise FieldError(field, "must be a JSON schema: an object, or a boolean")
    if schema is False:
        raise FieldError(field, "allows nothing")
    # Brackets in its strings can close what `depth_of` counts, so it is counted once more.
    todo: list[tuple[object, int, Role]] = [(schema, 1, "schema")]
    while todo:
        part, depth, role = todo.pop()
        if depth > MAX_DEPTH and isinstance(part, dict | list):
            raise FieldError(field, f"is nested more than {MAX_DEPTH} deep")
        if isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                raise FieldError(field, f"refers to {reference[:80]!r}; only references within the schema are followed")
            if role == "schema":
                _check_words(part, field)
                todo += [(one, depth + 1, _ROLES.get(key, "schema")) for key, one in part.items()]
            else:
                todo += [(one, depth + 1, "schema" if role == "map" else role) for one in part.values()]
        elif isinstance(part, list):
            todo += [(one, depth + 1, role) for one in part]
        elif role == "value" and isinstance(part, float) and math.isnan(part):
            raise FieldError(field, "has a number in const or enum that a double does not hold exactly")


def _check_words(schema: dict[str, object], field: str) -> None:
    """Refuse words that the grammar's compiler takes and does not keep to."""
    for word in _LIMITS:
        limit = schema.get(word)
        if isinstance(limit, int | float) and not abs(limit) < _INT64_END:
            raise FieldError(field, f"has a {word} that is beyond 64 bits, or that a double does not hold exactly")
    fewest, required = schema.get("minProperties"), schema.get("required")
    known = len({one for one in required if isinstance(one, str)}) if isinstance(required, list) else 0
    if isinstance(fewest, int | float) and not fewest <= known + 1:
        # Beside the required ones, a name may come twice.
        raise FieldError(field, f"has a minProperties above {known + 1}: at most one more than are required is kept to")


def _exact_int(literal: str) -> int | float:
    """Return a schema's whole number; NaN for one that the grammar's compiler would make another of."""
    number = int(literal)
    try:
        is_held = number == _INT64_END - 1 or (abs(number) < _INT64_END and int(float(number)) == number)
        return number if is_held else _exact_float(literal)
    except OverflowError:
        return math.nan


def _exact_float(literal: str) -> float:
    number = float(literal)
    try:
        return number if Decimal(literal) == Decimal(repr(number)) else math.nan
    except InvalidOperation:
        return math.nan


def schema_constraint(schema: object, field: str) -> Constraint:
    """Return the constraint of a schema that came as JSON. Raises FieldError for one that JSON cannot hold."""
    try:
        return Constraint(ConstraintKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())
    except (TypeError, ValueError, RecursionError) as error:
        raise FieldError(field, "is no JSON schema") from error


def choices_constraint(choices: Sequence[str], field: str) -> Constraint:
    """Return the constraint of an answer that is one of `choices`, to the letter."""
    if not choices:
        raise FieldError(field, "must name at least one choice")
    if len(choices) > MAX_CHOICES:
        raise FieldError(field, f"names {len(choices)} choices, at most {MAX_CHOICES} are accepted")
    if not all(choices):
        raise FieldError(field, "must not hold an empty choice")
    return Constraint(ConstraintKind.LARK, "start: " + " | ".join(json.dumps(one) for one in choices))
