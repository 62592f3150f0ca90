"""Chat templates: jinja2 from the model's files, in a sandbox whose objects cannot be changed.

Every text that a user may have written reaches the template through `hide`, strings inside of JSON included, so that
none of them holds the name of a control token while it is rendered (`engine/text/control.py`).
"""

import datetime
import json
import re
import secrets
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.messages import ChatMessage, ChatPrompt, Tool, ToolCall
from engine.types import FieldError

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of a template that have a field of their own."""
_NONE_AWARE = re.compile(r"content['\"\]]*\s+is\s+(not\s+)?none", re.IGNORECASE)
_END = "\ue002" + "".join(chr(0xE100 + digit) for digit in secrets.token_bytes(16)) + "\ue003"
"""Marks the end of the message that the answer goes on with. Nobody else can write it."""

_THINKS = re.compile(r"</?think>|<\|channel\|>")
"""What shows in the template of a model that thinks before it answers."""
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates let a model think, or keep it from it."""

_FAILURES = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError
)
"""What a template's code raises where a chat, or its own variables, are not what it was written for."""
_NOT_ASCII = re.compile(r"[^\x00-\x7f\ue000-\ue1ff]")
"""Characters that JSON of ASCII alone escapes, but for those that hide a name (`engine/text/control.py`)."""

Hide = Callable[[str], str]


class _Refused(Exception):
    """The template itself said no (`raise_exception`)."""


class _NamedTurn(dict[str, Any]):
    """A message with a name, which notes whether the template has looked at it."""

    is_name_read = False

    def __getitem__(self, key: str) -> Any:
        self.is_name_read = self.is_name_read or key == "name"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.is_name_read = self.is_name_read or key == "name"
        return super().get(key, default)

    def items(self) -> Any:
        self.is_name_read = True
        return super().items()


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; when answering it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare them

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template. A template that cannot be parsed is reported when it is used, not when it is loaded: plain
    prompts need none. `words` are the names, attributes and strings in its code: what it knows of; `variables` are the
    names that it takes from outside."""

    def __init__(self, source: str, named_tokens: dict[str, str]) -> None:
        self.source = source
        self.words: frozenset[str] = frozenset()
        self.variables: frozenset[str] = frozenset()
        self._named_tokens = named_tokens
        self._problem = "" if source else "this model has no chat template"
        self._thinks = _THINKS.search(source) is not None
        # Some templates ask whether the content of a turn that only called tools is none, most would print it.
        self._without_content = None if _NONE_AWARE.search(source) else ""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self._reserved = RESERVED | named_tokens.keys() | environment.globals.keys()
        try:
            tree = environment.parse(source)
            self.words = _words(tree)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            self._problem = f"this model's chat template cannot be parsed: {error}"

    def render(self, chat: ChatPrompt, hide: Hide = str) -> str:
        """Return the text of a chat. `hide` is what is done to every string of a user's first.

        Raises FieldError("messages", ...) in the template's own words, and one that names the field for what this
        template has no words for, since it would be left out in silence."""
        if self._problem:
            raise FieldError("messages", self._problem)
        self._check(chat)
        variables = _hidden(json.loads(chat.template_kwargs or "{}"), hide)
        names = {call.id: call.name for message in chat.messages for call in message.tool_calls if call.id}
        messages = [self._message(message, hide, names) for message in chat.messages]
        if chat.continue_final:
            messages[-1]["content"] += _END
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=chat.add_generation_prompt,
                tools=[_tool(tool, hide) for tool in chat.tools] or None,
                documents=None,
                **self._named_tokens,
                **variables,
            )
        except _Refused as error:
            raise FieldError("messages", str(error)) from error
        except _FAILURES as error:
            raise FieldError("messages", f"the chat template failed: {error}") from error
        for at, turn in enumerate(messages):
            if isinstance(turn, _NamedTurn) and not turn.is_name_read:
                raise FieldError(f"messages[{at}].name", "this model's chat template does not show names; leave it out")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise FieldError("messages", "is not valid Unicode") from error
        return _open_end(text) if chat.continue_final else text

    def _check(self, chat: ChatPrompt) -> None:
        if chat.tools and "tools" not in self.words:
            raise FieldError("tools", "this model's chat template does not know tools")
        for at, message in enumerate(chat.messages):
            if message.tool_calls and "tool_calls" not in self.words:
                what = "this model's chat template does not know calls of tools"
                raise FieldError(f"messages[{at}].tool_calls", what)
            # Where a model thinks, its template may drop earlier thoughts: so it was trained.
            if message.reasoning and not (self._thinks or self.words & {"reasoning_content", "thinking"}):
                what = "this model's chat template does not show reasoning; leave it out"
                raise FieldError(f"messages[{at}].reasoning_content", what)
        for name, value in json.loads(chat.template_kwargs or "{}").items():
            # A field's name travels as metadata, which is printable ASCII.
            shown = f".{name[:64]}" if name.isascii() and name.isprintable() else ""
            if name in self._reserved or not name.isidentifier() or name.startswith("_"):
                raise FieldError(f"chat_template_kwargs{shown}", "cannot be set by this field")
            if name not in self.variables and not self._asks_for_nothing(name, value):
                what = f"this model's chat template has no variable {name[:64]}" if shown else "is no variable"
                raise FieldError(f"chat_template_kwargs{shown}", what)

    def _asks_for_nothing(self, name: str, value: Any) -> bool:
        """Return whether a variable that the template does not have changes nothing by its absence."""
        if value is None:
            return True
        return value is self._thinks if name in _SWITCHES else value is False

    def _message(self, message: ChatMessage, hide: Hide, names: dict[str, str]) -> dict[str, Any]:
        """One message in the form that templates were written for; a key stands in it only if it has a value."""
        content = self._without_content if message.content is None else hide(message.content)
        # A tool's turn is known by its call; that its name is not shown, too, loses nothing.
        is_named = bool(message.name) and message.role != "tool"
        made: dict[str, Any] = (_NamedTurn if is_named else dict)(role=message.role, content=content)
        if message.reasoning:
            made["reasoning_content"] = hide(message.reasoning)
            # gpt-oss's name for it; of a turn that calls, its template takes this or the content.
            if "thinking" in self.words and not (message.tool_calls and message.content):
                made["thinking"] = made["reasoning_content"]
        if message.tool_calls:
            made["tool_calls"] = [_call(call, hide) for call in message.tool_calls]
        if message.tool_call_id:
            made["tool_call_id"] = hide(message.tool_call_id)
        name = message.name or (names.get(message.tool_call_id, "") if message.role == "tool" else "")
        if name:
            made["name"] = hide(name)
        return made


def _call(call: ToolCall, hide: Hide) -> dict[str, Any]:
    """Return a call. Its arguments are an object where they are one: what a model wrote may be broken, and comes back
    to it as it was."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = call.arguments
    function = {"name": hide(call.name), "arguments": _hidden(arguments, hide)}
    return ({"id": hide(call.id)} if call.id else {}) | {"type": "function", "function": function}


def _tool(tool: Tool, hide: Hide) -> dict[str, Any]:
    function: dict[str, Any] = {"name": hide(tool.name)}
    if tool.description:
        function["description"] = hide(tool.description)
    if tool.parameters:
        function["parameters"] = _hidden(json.loads(tool.parameters), hide)
    return {"type": "function", "function": function}


def _hidden(value: Any, hide: Hide) -> Any:
    """Return JSON whose strings, keys included, are hidden."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, list):
        return [_hidden(item, hide) for item in value]
    if isinstance(value, dict):
        return {hide(key): _hidden(item, hide) for key, item in value.items()}
    return value


def _open_end(text: str) -> str:
    """Cut off what the template wrote behind the last message."""
    before, *behind = text.split(_END)
    if len(behind) != 1:
        raise FieldError("continue_final_message", "this model's chat template does not write the last message once")
    return before


def _words(tree: nodes.Template) -> frozenset[str]:
    names = {node.name for node in tree.find_all(nodes.Name)}
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    strings = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(names | attributes | strings)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes for HTML, which is not what models were trained on.
    text = json.dumps(value, ensure_ascii=False, indent=indent, **options)
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text
