"""The bodies of `/v1/messages`, Anthropic's shape, read into the call that every front makes. Pure."""

from typing import Annotated, Any, Literal

import msgspec

from engine.types import Constraint, ConstraintKind
from router.front.api import (
    ChatMessage,
    GenerateCall,
    HttpForm,
    SamplingOverrides,
    Tool,
    ToolCall,
    ToolChoice,
    invalid,
    refuse_more,
    refuse_more_parts,
)
from router.front.validate import MAX_MESSAGES, MAX_STOP_STRINGS, MAX_TOOLS
from router.http.chat_fields import raw_text
from router.http.fields import FieldsReader
from router.http.openai import Int, Parsed

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
}
"""Fields, with the values beside null with which they ask for nothing."""
ERROR_PREFIX = "Error: "
"""Stands before the result of a tool that failed: no template has another place for that."""


class MessageBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A block of content, of whatever type; each type uses some of the fields."""

    type: str
    text: str | None = None
    citations: object = None
    cache_control: object = None
    """Let pass: the prefix cache is always on."""
    thinking: str | None = None
    signature: object = None
    """Let pass: this server's are empty."""
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"")
    caller: object = None
    tool_use_id: str | None = None
    content: "str | list[MessageBlock] | None" = None
    is_error: bool | None = None
    source: object = None
    title: object = None
    context: object = None


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[MessageBlock]


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: msgspec.Raw = msgspec.Raw(b"")
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: object = None
    strict: object = None
    eager_input_streaming: object = None


class AnthropicChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingField(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized"] | None = None
    """What is thought is always given; that it is not summed up is told in docs/tools.md."""


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: Literal["high"] | None = None
    """The value that stands for none."""


class CountRequest(msgspec.Struct, kw_only=True):
    """What decides how many tokens the prompt has, and what callers send beside it as they would to be answered."""

    messages: list[AnthropicMessage]
    model: str | None = None
    system: str | list[MessageBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    cache_control: object = None
    """Let pass: the prefix cache is always on."""
    speed: object = None
    """Let pass: it bears on time and cost alone, and not here."""
    user_profile_id: object = None
    """Let pass: it names something for a log."""


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: int | None = None
    priority: Int | None = None
    tenant: str | None = None


MESSAGES = FieldsReader(MessagesRequest, UNSUPPORTED)
COUNTING = FieldsReader(CountRequest, UNSUPPORTED)


def parse_messages(body: bytes, *, label: str = "", timeout_s: float | None = None, created: int = 0) -> Parsed:
    """Read a `/v1/messages` body. Raises `ApiError` INVALID_ARGUMENT with the path of the field at fault."""
    request = MESSAGES.read(body)
    refuse_more("stop_sequences", request.stop_sequences, MAX_STOP_STRINGS)
    if request.seed is not None and not 0 <= request.seed < 2**64:
        raise invalid("seed", "must fit in 64 bits")
    form = _form(label, created)
    sampling = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: getattr(request, name) for name in ("seed", "priority", "tenant")}
    thinking = request.thinking or ThinkingField("adaptive")
    if thinking.budget_tokens is not None and thinking.type != "enabled":
        raise invalid("thinking.budget_tokens", "is allowed only with type enabled")
    call = msgspec.structs.replace(
        _call(request, form),
        max_tokens=request.max_tokens,
        reasoning_budget=thinking.budget_tokens,
        sampling=SamplingOverrides(**{name: value for name, value in sampling.items() if value is not None}),
        stop=tuple(request.stop_sequences or ()),
        request_id=label,
        timeout_s=timeout_s,
        **_constrained(request.output_config),
        **{name: value for name, value in given.items() if value is not None},
    )
    return Parsed(call, form, bool(request.stream))


def _constrained(config: OutputConfig | None) -> dict[str, Any]:
    if config is None or config.format is None:
        return {}
    field = "output_config.format.schema"
    schema = raw_text(config.format.schema, field)
    return {"constraint": Constraint(ConstraintKind.JSON_SCHEMA, schema), "constraint_field": field}


def parse_count(body: bytes) -> GenerateCall:
    """Read a `/v1/messages/count_tokens` body."""
    return _call(COUNTING.read(body), _form())


def _form(label: str = "", created: int = 0) -> HttpForm:
    return HttpForm(
        chat=True, include_usage=True, return_token_ids=False, created=created, label=label, api="messages"
    )


def _call(request: CountRequest, form: HttpForm) -> GenerateCall:
    if not request.messages:
        raise invalid("messages", "at least one message is needed")
    refuse_more("messages", request.messages, MAX_MESSAGES)
    refuse_more_parts("messages", _parts(request.system) + sum([_parts(one.content) for one in request.messages]))
    refuse_more("tools", request.tools, MAX_TOOLS)
    messages = []
    if request.system:
        messages.append(ChatMessage("system", _text(request.system, "system")))
    for at, message in enumerate(request.messages):
        messages += _turns(message, f"messages[{at}]")
    is_open = request.messages[-1].role == "assistant"
    if is_open and messages[-1].tool_calls:
        field = f"messages[{len(request.messages) - 1}].content"
        raise invalid(field, "must be text alone, as the answer goes on with the assistant's last message")
    tools = []
    for at, tool in enumerate(request.tools or ()):
        schema = raw_text(tool.input_schema, f"tools[{at}].input_schema")
        tools.append(Tool(tool.name, tool.description or "", schema))
    choice = request.tool_choice
    kwargs = ""
    if request.thinking is not None and request.thinking.type != "adaptive":
        kwargs = msgspec.json.encode({"enable_thinking": request.thinking.type == "enabled"}).decode()
    return GenerateCall(
        prompt=messages,
        model=request.model,
        tools=tuple(tools),
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        chat_template_kwargs=kwargs,
        continue_final_message=is_open,
        form=form,
    )


def _choice(choice: AnthropicChoice | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    if choice.type == "tool" and not choice.name:
        raise invalid("tool_choice.name", "is required")
    return ToolChoice("required", (choice.name or "") if choice.type == "tool" else "")


def _parts(content: str | list[MessageBlock] | None) -> int:
    """Return the number of blocks, those in blocks included."""
    if not isinstance(content, list):
        return 0
    return len(content) + sum([len(one.content) for one in content if isinstance(one.content, list)])


def _text(content: str | list[MessageBlock], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for at, block in enumerate(content):
        if block.type != "text":
            raise invalid(f"{path}[{at}].type", "only text is supported here")
        if block.text is None:
            raise invalid(f"{path}[{at}].text", "is required")
        texts.append(block.text)
    return "\n".join(texts)


def _turns(message: AnthropicMessage, path: str) -> list[ChatMessage]:
    """Return one message as turns of a chat: results of tools are turns of their own, before the user's text."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    texts: list[MessageBlock] = []
    calls: list[ToolCall] = []
    results: list[ChatMessage] = []
    reasoning = []
    for at, block in enumerate(message.content):
        field = f"{path}.content[{at}]"
        match message.role, block.type:
            case _, "text":
                texts.append(block)
            case "assistant", "thinking":
                reasoning.append(block.thinking or "")
            case "assistant", "tool_use":
                if not block.name:
                    raise invalid(f"{field}.name", "is required")
                calls.append(ToolCall(block.name, raw_text(block.input, f"{field}.input") or "{}", block.id or ""))
            case "user", "tool_result":
                told = (ERROR_PREFIX if block.is_error else "") + _text(block.content or "", f"{field}.content")
                results.append(ChatMessage("tool", told, tool_call_id=block.tool_use_id or ""))
            case _:
                raise invalid(f"{field}.type", f"is not supported in a turn of the {message.role}")
    content: str | None = _text(texts, f"{path}.content") if texts else None
    if message.role == "user":
        return [*results, *([ChatMessage("user", content)] if content is not None or not results else [])]
    if content is None and not calls:
        content = ""
    return [ChatMessage("assistant", content, tool_calls=tuple(calls), reasoning="\n".join(reasoning))]
