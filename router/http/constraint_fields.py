"""What OpenAI's and vLLM's clients send to say what an answer must be like, read into one constraint. Pure."""

from typing import Literal

import msgspec

from engine.constraints.text import JSON_OBJECT, choices_constraint
from engine.types import Constraint, ConstraintKind, FieldError
from router.front.api import invalid
from router.http.chat_fields import raw_text
from router.http.fields import refuse_unsupported

ABSENT = msgspec.Raw()


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema is kept to the letter whether `strict` or not."""

    schema: msgspec.Raw = ABSENT
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's name for what the `guided_` fields ask, one of them at a time."""

    json: msgspec.Raw = ABSENT
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_fallback: object = None
    """Let pass: there is one backend."""
    disable_any_whitespace: object = None
    disable_additional_properties: object = None
    whitespace_pattern: object = None
    structural_tag: object = None


_OF_STRUCTURED_OUTPUTS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (False,)),
    **dict.fromkeys(("whitespace_pattern", "structural_tag"), ()),
}


class ConstraintFields(msgspec.Struct, kw_only=True):
    """The fields of a request, of which one may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = ABSENT
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def requested_constraint(request: ConstraintFields) -> tuple[str, Constraint | None]:
    """Return what the answer must be like, if anything, with the name of the field that says so. Raises `ApiError`
    where several do."""
    found: list[tuple[str, Constraint]] = []

    def add(field: str, kind: ConstraintKind, text: str | None) -> None:
        if text is not None:
            found.append((field, Constraint(kind, text)))

    def choose(field: str, choices: list[str] | None) -> None:
        if choices is not None:
            try:
                found.append((field, choices_constraint(choices, field)))
            except FieldError as error:
                raise invalid(field, error.message) from error

    wanted, of_schema = request.response_format, "response_format.json_schema.schema"
    if wanted is not None and wanted.type == "json_object":
        found.append(("response_format", JSON_OBJECT))
    if wanted is not None and wanted.type == "json_schema":
        schema = None if wanted.json_schema is None else _schema(wanted.json_schema.schema, of_schema)
        if schema is None:
            raise invalid(of_schema, "is required")
        add(of_schema, ConstraintKind.JSON_SCHEMA, schema)
    add("guided_json", ConstraintKind.JSON_SCHEMA, _schema(request.guided_json, "guided_json"))
    add("guided_regex", ConstraintKind.REGEX, request.guided_regex)
    choose("guided_choice", request.guided_choice)
    add("guided_grammar", ConstraintKind.LARK, request.guided_grammar)
    if (asked := request.structured_outputs) is not None:
        refuse_unsupported(asked, _OF_STRUCTURED_OUTPUTS, "structured_outputs")
        add("structured_outputs.json", ConstraintKind.JSON_SCHEMA, _schema(asked.json, "structured_outputs.json"))
        add("structured_outputs.regex", ConstraintKind.REGEX, asked.regex)
        choose("structured_outputs.choice", asked.choice)
        add("structured_outputs.grammar", ConstraintKind.LARK, asked.grammar)
        if asked.json_object:
            found.append(("structured_outputs.json_object", JSON_OBJECT))
    if len(found) > 1:
        raise invalid(found[1][0], f"is not allowed with {found[0][0]}: an answer has one constraint")
    return found[0] if found else ("constraint", None)


def _schema(raw: msgspec.Raw, field: str) -> str | None:
    """Return a schema's text as it came: the order of its properties is that of the answer. It may come as JSON, or as
    a string that holds JSON; null is nothing."""
    text = raw_text(raw, field)
    if text.startswith('"'):
        held: str = msgspec.json.decode(text)
        return held
    return text or None
