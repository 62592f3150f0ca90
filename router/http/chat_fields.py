"""A chat's messages as OpenAI's clients send them, read into the router's own. Pure."""

from typing import Literal

import msgspec

from router.front.api import (
    ChatMessage,
    Tool,
    ToolCall,
    ToolChoice,
    invalid,
    refuse_more,
    refuse_more_parts,
)
from router.front.validate import MAX_MESSAGES, MAX_TOOLS
from router.http.fields import refuse_unsupported

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PART = "text"
OF_MESSAGES: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    **dict.fromkeys(("function_call", "refusal", "audio"), ()),
}
OF_PARTS: dict[str, tuple[object, ...]] = dict.fromkeys(("image_url", "input_audio", "file", "refusal"), ())


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    cache_control: object = None
    """Let pass: the prefix cache is always on."""
    image_url: object = None
    input_audio: object = None
    file: object = None
    refusal: object = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b'""')


class MessageCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in an assistant's message."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: object = None
    """Let pass: clients that put streamed calls together leave it there."""


class FunctionField(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"")
    strict: object = None
    """Let pass: a call that the caller demands always keeps to the parameters, others are the model's own text."""


class ToolField(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionField
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    function: NamedFunction
    type: Literal["function"] = "function"


ChoiceField = Literal["none", "auto", "required"] | NamedChoice | None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    function_call: object = None
    refusal: object = None
    annotations: object = None
    audio: object = None


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    """Return a chat's messages. Raises `ApiError` INVALID_ARGUMENT with the path of what is wrong."""
    refuse_more("messages", messages, MAX_MESSAGES)
    parts = sum([len(one.content) for one in messages if isinstance(one.content, list)])
    refuse_more_parts("messages", parts + sum([len(one.tool_calls or ()) for one in messages]))
    return [_message(one, f"messages[{i}]") for i, one in enumerate(messages)]


def _message(message: Message, path: str) -> ChatMessage:
    role = ROLES.get(message.role)
    if role is None:
        raise invalid(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    refuse_unsupported(message, OF_MESSAGES, path)
    calls = [
        ToolCall(one.function.name, arguments_text(one.function.arguments, f"{path}.tool_calls[{i}]"), one.id or "")
        for i, one in enumerate(message.tool_calls or ())
    ]
    if message.content is None and not calls:
        raise invalid(f"{path}.content", "is required")
    if calls and role != "assistant":
        raise invalid(f"{path}.tool_calls", "are an assistant's")
    if message.tool_call_id and role != "tool":
        raise invalid(f"{path}.tool_call_id", "is a tool's")
    reasoning = message.reasoning_content or message.reasoning or ""
    if reasoning and role != "assistant":
        raise invalid(f"{path}.reasoning_content", "is an assistant's")
    return ChatMessage(
        role,
        _content(message.content, f"{path}.content"),
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning=reasoning,
    )


def chat_tools(fields: list[ToolField] | None) -> tuple[Tool, ...]:
    refuse_more("tools", fields, MAX_TOOLS)
    made = []
    for at, field in enumerate(fields or ()):
        function = field.function
        parameters = raw_text(function.parameters, f"tools[{at}].function.parameters")
        made.append(Tool(function.name, function.description or "", parameters))
    return tuple(made)


def chat_choice(field: ChoiceField) -> ToolChoice:
    if isinstance(field, NamedChoice):
        return ToolChoice("required", field.function.name)
    return ToolChoice(field or "auto")


def arguments_text(raw: msgspec.Raw, path: str) -> str:
    """OpenAI's clients send the text of an object; some others send the object."""
    field = f"{path}.function.arguments"
    text = raw_text(raw, field)
    if not text.startswith('"'):
        return text
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError as error:
        raise invalid(field, f"is not valid JSON: {error}") from error


def raw_text(raw: msgspec.Raw, field: str) -> str:
    """Return JSON as it was sent, empty where it is null or absent. Raises `ApiError` for what is not UTF-8."""
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise invalid(field, "is not valid UTF-8") from error
    return "" if text == "null" else text


def _content(content: str | list[ContentPart] | None, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type != TEXT_PART:
            raise invalid(f"{path}[{i}].type", "only parts of type text are supported")
        refuse_unsupported(part, OF_PARTS, f"{path}[{i}]")
        if part.text is None:
            raise invalid(f"{path}[{i}].text", "is required")
        texts.append(part.text)
    return "\n".join(texts)
