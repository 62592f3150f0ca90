"""Bounds formats whose own grammar lets a string go on for ever: a small model that has begun a fraction of a second
writes digits until its answer is cut off.

A bound is one more pattern beside the format, so what comes out is always of the format too, and whatever else the
schema says of the string holds as well. What the bounds leave out is of no use or not valid: RFC 5321 (4.5.3.1) gives a
local part 64 octets and a domain 255, RFC 1035 a host's name 253 characters. Pure.
"""

import json
from typing import Any

FRACTION = r"^[^.]*(\.[0-9]{1,9}([^.0-9].*)?)?$"
"""Nanoseconds."""
BOUNDS = {
    "time": FRACTION,
    "date-time": FRACTION,
    "duration": r"^([^0-9]+[0-9]{1,9})*[^0-9]*$",
    "email": r"^[^@]{1,64}@.{1,255}$",
    "hostname": r"^.{1,253}$",
}
"""A pattern for each format that needs one."""
# Schemas stand below these words, of those that can be kept; what is narrower below `not` would be wider for the whole.
_OF_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_OF_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_OF_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def with_bounds(text: str) -> str:
    """Return a checked schema's text with its formats bounded; as it was where it has none of them."""
    if not any(f'"{name}"' in text for name in BOUNDS):
        return text
    schema = json.loads(text)
    bound_formats(schema)
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError:
        # A number beyond what a float holds cannot be written again; whoever sends one does without.
        return text


def bound_formats(schema: object) -> None:
    """Add the bounds to a schema as JSON has been read, and to all schemas within it that must hold."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            if key in _OF_LISTS and isinstance(value, list):
                todo += value
            elif key in _OF_MAPS and isinstance(value, dict):
                todo += value.values()
            elif key in _OF_ONE:
                todo.append(value)
        _bound(part)


def _bound(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    pattern = BOUNDS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(every := schema.get("allOf", []), list):
        schema["allOf"] = [*every, {"pattern": pattern}]
