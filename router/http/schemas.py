"""JSON schemas of the structs that bodies are read into, made from the structs themselves.

msgspec writes schemas too, but not of a struct with JSON kept as it came, and it knows nothing of the values with which
a field that is not supported passes.
"""

from collections.abc import Mapping
from typing import Any, get_args

import msgspec
from msgspec import inspect, structs

from router.http.fields import HARMLESS, FieldsReader

Schema = dict[str, Any]
_PLAIN: dict[type, Schema] = {
    inspect.AnyType: {},
    inspect.RawType: {},
    inspect.CustomType: {},  # `object`
    inspect.NoneType: {"type": "null"},
    inspect.BoolType: {"type": "boolean"},
}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_LENGTHS = {"min_length": "minLength", "max_length": "maxLength"}
_OF_TEXT = frozenset({*_LENGTHS.values(), "enum"})


class SchemaWriter:
    """Collects the schemas of structs, by name, as they are met. `limits` are what later checks say of a field's
    values, by field; `neutral` the values with which unsupported fields of a struct pass, by the struct's name."""

    def __init__(self, limits: Mapping[str, Schema], neutral: Mapping[str, Mapping[str, tuple[object, ...]]]) -> None:
        self.components: dict[str, Schema] = {}
        self._limits = limits
        self._neutral = dict(neutral)

    def body(self, reader: FieldsReader[Any]) -> Schema:
        """Return a reference to the schema of what `reader` takes."""
        self._neutral[reader.whole.__name__] = reader.unsupported
        return self.of(reader.whole)

    def of(self, kind: object) -> Schema:
        return self._schema(inspect.type_info(kind), {})

    def _struct(self, found: inspect.StructType) -> Schema:
        name = found.cls.__name__
        if name in self.components:
            return _reference(name)
        schema: Schema = {"type": "object", "properties": {}}
        self.components[name] = schema  # before its fields: one may hold another of its kind
        if found.tag_field is not None:
            schema["properties"][found.tag_field] = {"const": found.tag}
        neutral = self._neutral.get(name, {})
        is_request = found.forbid_unknown_fields
        for field in found.fields:
            key = field.encode_name
            if key in neutral:
                schema["properties"][key] = _passing(neutral[key])
            elif is_request and key in HARMLESS:
                schema["properties"][key] = {"description": f"Let pass: {HARMLESS[key]}."}
            else:
                schema["properties"][key] = self._schema(field.type, self._limit(name, key) if is_request else {})
        lacking = {field.name for field in structs.fields(found.cls) if msgspec.UnsetType in get_args(field.type)}
        required = [field.encode_name for field in found.fields if field.required and field.name not in lacking]
        if required := [*([found.tag_field] if found.tag_field is not None else []), *required]:
            schema["required"] = required
        if is_request:
            schema["additionalProperties"] = False
        return _reference(name)

    def _limit(self, struct: str, field: str) -> Schema:
        return self._limits.get(f"{struct}.{field}") or self._limits.get(field, {})

    def _schema(self, found: inspect.Type, limits: Schema) -> Schema:
        if isinstance(found, inspect.StructType):
            return self._struct(found)
        if isinstance(found, inspect.Metadata):
            return self._schema(found.type, limits)
        if isinstance(found, inspect.UnionType):
            return {"anyOf": [self._schema(one, limits) for one in found.types]}
        if isinstance(found, inspect.LiteralType):
            return {"enum": list(found.values)}
        if isinstance(found, inspect.ListType | inspect.VarTupleType):
            outer = {key: value for key, value in limits.items() if key.endswith("Items")}
            inner = {key: value for key, value in limits.items() if key not in outer}
            return {"type": "array", "items": self._schema(found.item_type, inner), **outer}
        if isinstance(found, inspect.DictType):
            return {"type": "object", "additionalProperties": self._schema(found.value_type, limits)}
        if isinstance(found, inspect.IntType | inspect.FloatType):
            kind = "integer" if isinstance(found, inspect.IntType) else "number"
            own = {name: value for key, name in _BOUNDS.items() if (value := getattr(found, key)) is not None}
            return {"type": kind, **own, **{key: limits[key] for key in _BOUNDS.values() if key in limits}}
        if isinstance(found, inspect.StrType):
            own = {name: value for key, name in _LENGTHS.items() if (value := getattr(found, key)) is not None}
            return {"type": "string", **own, **{key: limits[key] for key in _OF_TEXT if key in limits}}
        return dict(_PLAIN[type(found)])


def _passing(values: tuple[object, ...]) -> Schema:
    return {"enum": [None, *values], "description": "Not supported."}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody
