"""Two hundred schemas, of the kinds that callers send: flat and nested records, lists, choices, trees, formats,
parts that are shared, records that say of which kind they are, text of any length."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

COUNT = 200
NAMES = (
    *("name", "title", "city", "colour", "age", "count", "price", "active", "tags", "items", "owner", "address"),
    *("score", "level", "kind", "date", "id", "notes", "parts", "first_name", "größe", "x-y", "a b", "unit"),
)
WORDS = ("red", "green", "blue", "small", "large", "yes", "no", "north", "south", "äpfel", "a \"quoted\" word", "x/y")


def schemas(count: int = COUNT) -> list[Schema]:
    """Return them; always the same, all different, and each kind as often as the others."""
    kinds: tuple[Callable[[Random], Schema], ...] = (
        _record, _nested, _listed, _choice, _united, _tree, _formats, _numbers, _tuple, _map, _shared, _tagged, _told,
    )  # fmt: skip
    made: dict[str, Schema] = {}
    for number in range(count):
        chosen = Random(number)
        while (written := json.dumps(schema := kinds[number % len(kinds)](chosen))) in made:
            pass
        made[written] = schema
    return list(made.values())


def _string(chosen: Random) -> Schema:
    return chosen.choice([
        {"type": "string", "maxLength": chosen.randrange(4, 24)},
        {"type": "string", "minLength": 1, "maxLength": 12},
        {"type": "string", "enum": chosen.sample(WORDS, 3)},
        {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        {"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"},
        {"const": chosen.choice(WORDS)},
    ])  # fmt: skip


def _number(chosen: Random) -> Schema:
    low = chosen.randrange(-50, 50)
    return chosen.choice([
        {"type": "integer", "minimum": low, "maximum": low + chosen.randrange(1, 2000)},
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 30},
        {"type": "number", "minimum": 0, "maximum": chosen.randrange(1, 100)},
        {"type": "integer", "multipleOf": chosen.choice((2, 5, 10)), "minimum": 0, "maximum": 1000},
        {"type": "integer", "minimum": 0, "maximum": 9},
    ])  # fmt: skip


def _scalar(chosen: Random) -> Schema:
    return chosen.choice([_string, _number, lambda _: {"type": "boolean"}, lambda _: {"type": ["null", "boolean"]}])(
        chosen
    )


def _record(chosen: Random, part: Callable[[Random], Schema] = _scalar) -> Schema:
    names = chosen.sample(NAMES, chosen.randrange(1, 6))
    required = names[: chosen.randrange(1, len(names) + 1)]
    return {
        "type": "object",
        "properties": {name: part(chosen) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _nested(chosen: Random) -> Schema:
    return _record(chosen, lambda c: _record(c) if c.random() < 0.5 else _scalar(c))


def _listed(chosen: Random) -> Schema:
    item = _record(chosen) if chosen.random() < 0.5 else _scalar(chosen)
    return {"type": "array", "items": item, "minItems": chosen.randrange(3), "maxItems": chosen.randrange(3, 5)}


def _choice(chosen: Random) -> Schema:
    return chosen.choice([
        {"enum": [*chosen.sample(WORDS, 4), None, 7, True]},
        {"const": {"kind": chosen.choice(WORDS), "n": [1, 2, {"deep": False}]}},
        {"type": "object", "properties": {"pick": {"enum": chosen.sample(WORDS, 5)}}, "required": ["pick"],
         "additionalProperties": False},
    ])  # fmt: skip


def _united(chosen: Random) -> Schema:
    shapes = [_record(chosen), _scalar(chosen), {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}]
    return {"anyOf": chosen.sample(shapes, 2)}


def _tree(chosen: Random) -> Schema:
    leaf = chosen.choice([_number(chosen), {"enum": chosen.sample(WORDS, 3)}])
    node = {
        "type": "object",
        "properties": {"value": leaf, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "type": "object", "properties": {"root": {"$ref": "#/$defs/node"}},
            "required": ["root"], "additionalProperties": False}  # fmt: skip


def _formats(chosen: Random) -> Schema:
    kinds = ("date", "time", "date-time", "uuid", "ipv4", "email")
    names = chosen.sample(NAMES, 2)
    parts = {name: {"type": "string", "format": chosen.choice(kinds)} for name in names}
    return {"type": "object", "properties": parts, "required": names, "additionalProperties": False}


def _numbers(chosen: Random) -> Schema:
    return {"type": "object", "properties": {name: _number(chosen) for name in chosen.sample(NAMES, 4)},
            "minProperties": 0, "additionalProperties": False}  # fmt: skip


def _tuple(chosen: Random) -> Schema:
    return {"type": "array", "prefixItems": [_scalar(chosen) for _ in range(3)], "items": False, "minItems": 3}


def _map(chosen: Random) -> Schema:
    if chosen.random() < 0.5:
        return {"type": "object", "additionalProperties": _scalar(chosen), "properties": {"id": _number(chosen)},
                "required": ["id"], "maxProperties": 3}  # fmt: skip
    parts = [{"type": "object", "properties": {name: _scalar(chosen)}, "required": [name]} for name in ("id", "name")]
    return {"allOf": parts}


def _shared(chosen: Random) -> Schema:
    """Several properties are of one definition, which does not refer to itself."""
    names = chosen.sample(NAMES, 3)
    parts = {name: {"$ref": "#/$defs/part"} for name in names}
    return {"$defs": {"part": _record(chosen)}, "type": "object", "properties": parts, "required": names[:2],
            "additionalProperties": False}  # fmt: skip


def _tagged(chosen: Random) -> Schema:
    """One of several records, told apart by a constant."""
    shapes = []
    for word in chosen.sample(WORDS, 3):
        parts = {"kind": {"const": word}, chosen.choice(("title", "größe", "id")): _scalar(chosen)}
        shapes.append({"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False})
    return {"oneOf": shapes}


def _told(chosen: Random) -> Schema:
    """Text without a limit of its own, and properties that may be left out."""
    return _record(chosen, lambda c: {"type": "string"} if c.random() < 0.6 else _scalar(c))
