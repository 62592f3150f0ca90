"""Chat templates: jinja2 from the model's files, in a sandbox whose objects cannot be changed."""

import datetime
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.types import FieldError


class _Refused(Exception):
    """The template itself said no (`raise_exception`)."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; when answering it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare them

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template. A template that cannot be parsed is reported when it is used, not when it is loaded: plain
    prompts need none."""

    def __init__(self, source: str, named_tokens: dict[str, str]) -> None:
        self._named_tokens = named_tokens
        self._problem = "" if source else "this model has no chat template"
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            self._problem = f"this model's chat template cannot be parsed: {error}"

    def render(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of (role, content) pairs. Raises FieldError("messages", ...) in the template's own words."""
        if self._problem:
            raise FieldError("messages", self._problem)
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._named_tokens,
            )
        except _Refused as error:
            raise FieldError("messages", str(error)) from error
        except (TemplateError, TypeError, ValueError, LookupError, OverflowError) as error:
            raise FieldError("messages", f"the chat template failed: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes for HTML, which is not what models were trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
