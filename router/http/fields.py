"""Reads JSON bodies into structs, so that no field of a request is passed over in silence. Pure.

A field is one of four: one that the struct has; one that would change the answer and is not supported, which passes
only with null or a value that asks for nothing; one that never changes an answer and is let pass with any value
(`HARMLESS`); or an unknown one, which is refused, with the name of one that is known and alike.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

import msgspec

from router.front.api import ApiError, invalid

NAME_CHARS = 64
"""A longer name is nobody's slip: an error shows its beginning."""
HARMLESS: dict[str, str] = {
    **dict.fromkeys(("user", "safety_identifier", "metadata", "request_id", "session_id"), "names something for a log"),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "cache_prompt"), "the prefix cache is always on"),
    **dict.fromkeys(("service_tier", "prediction", "keep_alive"), "bears on cost or time alone, and not here"),
}
"""Fields that never change an answer, and why."""

R = TypeVar("R")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


class UnknownFieldError(ApiError):
    """A field that nothing here has; unlike that of other errors, its name is the client's own."""


class FieldsReader(Generic[R]):
    """Reads bodies into structs of one kind, which also hold every unsupported and every harmless field. `whole` is
    that kind with all of them, `unsupported` the values with which some pass: `router/http/openapi.py` describes both.
    """

    def __init__(self, kind: type[R], unsupported: Mapping[str, tuple[object, ...]]) -> None:
        self.kind = kind
        self.unsupported = unsupported
        others = [(name, object, None) for name in (*unsupported, *HARMLESS)]
        whole: Any = msgspec.defstruct(kind.__name__, others, bases=(kind,), kw_only=True, forbid_unknown_fields=True)
        self.whole = whole
        self._decoder: msgspec.json.Decoder[R] = msgspec.json.Decoder(whole)

    def read(self, body: bytes) -> R:
        """Raises `ApiError` INVALID_ARGUMENT with the path of the field at fault."""
        try:
            request = decoded(self._decoder, body)
        except msgspec.ValidationError as error:
            raise self._located(str(error)) from error
        refuse_unsupported(request, self.unsupported)
        return request

    def _located(self, text: str) -> ApiError:
        """msgspec's message with its `$.path` turned into a field name."""
        if (match := _UNKNOWN.match(text)) is not None:
            return self._unknown(match["name"], match["path"] or "")
        path = ""
        if (match := _PATH.match(text)) is not None:
            text, path = match["what"], match["path"]
        if (match := _MISSING.search(text)) is not None:
            return invalid(f"{path}.{match['name']}" if path else match["name"], "is required")
        return invalid(path, text[:1].lower() + text[1:]) if path else invalid("", f"the body: {text}")

    def _unknown(self, name: str, path: str) -> ApiError:
        is_slip = not path and len(name) <= NAME_CHARS
        alike = get_close_matches(name, self.whole.__struct_fields__, 1, 0.8) if is_slip else []
        shown = name if len(name) <= NAME_CHARS else f"{name[:NAME_CHARS]}…"
        field = f"{path}.{shown}" if path else shown
        what = f"is not a field here; is {alike[0]} meant?" if alike else "is not supported"
        return UnknownFieldError("INVALID_ARGUMENT", f"{field}: {what}", field)


def decoded(decoder: "msgspec.json.Decoder[R]", body: bytes) -> R:
    """Decode a body. Raises `ApiError` INVALID_ARGUMENT for what is no JSON, and msgspec's ValidationError."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise invalid("", f"the body is not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        what = f"{error.reason} at byte {error.start} of a string"
        raise invalid("", f"the body is not valid UTF-8: {what}") from error
    except RecursionError as error:
        raise invalid("", "the body is nested too deeply") from error


def refuse_unsupported(given: object, unsupported: Mapping[str, tuple[object, ...]], path: str = "") -> None:
    """Raise `ApiError` INVALID_ARGUMENT if a field of `given`, which is found at `path`, asks for what is not
    supported."""
    for name, neutral in unsupported.items():
        value: object = getattr(given, name)
        # `==` alone would let 1 pass for true and 0 for false.
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in neutral):
            raise invalid(f"{path}.{name}" if path else name, _refusal(neutral))


def _refusal(neutral: tuple[object, ...]) -> str:
    values = " or ".join(msgspec.json.encode(ok).decode() for ok in neutral)
    return f"only {values} is supported" if values else "is not supported"
