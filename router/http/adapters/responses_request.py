"""The bodies of `/v1/responses`, without state, read into the call that every front makes. Pure."""

from typing import Any, Literal

import msgspec

from engine.constraints.text import JSON_OBJECT
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
from router.front.validate import MAX_TOOLS
from router.http.chat_fields import raw_text
from router.http.fields import FieldsReader, refuse_unsupported
from router.http.openai import Int, Parsed

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields, with the values beside null with which they ask for nothing. Nothing is kept here, so nothing can be gone on
with by its id; `store` absent means false."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MAX_ITEMS = 8192
_OF_ITEMS = {"encrypted_content": ()}


class ItemPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: object = None
    annotations: object = None
    logprobs: object = None


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the input, of whatever type; each type uses some of the fields."""

    type: str = "message"
    id: object = None
    status: object = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: object = None
    phase: object = None


class ResponsesTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"")
    strict: object = None


class ResponsesChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: object = None
    """Let pass: the reasoning itself is given, no summary of it."""
    generate_summary: object = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = msgspec.Raw(b"")
    strict: bool | None = None
    """A schema is kept to the letter whether strict or not."""


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptionsField(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: object = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptionsField | None = None
    seed: int | None = None
    priority: Int | None = None
    tenant: str | None = None


RESPONSES = FieldsReader(ResponsesRequest, UNSUPPORTED)


def parse_response(body: bytes, *, label: str = "", timeout_s: float | None = None, created: int = 0) -> Parsed:
    """Read a `/v1/responses` body. Raises `ApiError` INVALID_ARGUMENT with the path of the field at fault."""
    request = RESPONSES.read(body)
    if request.seed is not None and not 0 <= request.seed < 2**64:
        raise invalid("seed", "must fit in 64 bits")
    refuse_more("tools", request.tools, MAX_TOOLS)
    messages = [ChatMessage("system", request.instructions)] if request.instructions else []
    messages += _turns(request.input)
    if not messages or not request.input:
        raise invalid("input", "must not be empty")
    tools = tuple(
        Tool(one.name, one.description or "", raw_text(one.parameters, f"tools[{at}].parameters"))
        for at, one in enumerate(request.tools or ())
    )
    form = HttpForm(
        chat=True,
        include_usage=True,
        return_token_ids=False,
        created=created,
        label=label,
        api="responses",
        repeated=_repeated(request),
    )
    sampling = {name: value for name in ("temperature", "top_p") if (value := getattr(request, name)) is not None}
    names = ("seed", "priority", "tenant", "model", "parallel_tool_calls")
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    effort = request.reasoning.effort if request.reasoning is not None else None
    kwargs = "" if effort is None else msgspec.json.encode({"reasoning_effort": effort}).decode()
    call = GenerateCall(
        prompt=messages,
        max_tokens=request.max_output_tokens,
        sampling=SamplingOverrides(**sampling),
        tools=tools,
        tool_choice=_choice(request.tool_choice),
        chat_template_kwargs=kwargs,
        request_id=label,
        timeout_s=timeout_s,
        form=form,
        **given,
        **_constrained(request.text),
    )
    return Parsed(call, form, bool(request.stream))


def _repeated(request: ResponsesRequest) -> str:
    """Return what every answer repeats of its request, as JSON, in which a schema stands as it came."""
    try:
        return msgspec.json.encode(_echo(request)).decode()
    except UnicodeDecodeError as error:
        raise invalid("", f"the body is not valid UTF-8: {error.reason}") from error


def _constrained(text: TextOptions | None) -> dict[str, Any]:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"constraint": JSON_OBJECT, "constraint_field": "text.format"}
    schema = raw_text(wanted.schema, "text.format.schema")
    if not schema:
        raise invalid("text.format.schema", "is required")
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, schema)
    return {"constraint": constraint, "constraint_field": "text.format.schema"}


def _choice(choice: str | ResponsesChoice | None) -> ToolChoice:
    if isinstance(choice, ResponsesChoice):
        return ToolChoice("required", choice.name)
    match choice:
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case _:
            return ToolChoice()


def _turns(given: str | list[InputItem]) -> list[ChatMessage]:
    """Return the input as turns of a chat."""
    if isinstance(given, str):
        return [ChatMessage("user", given)] if given else []
    if len(given) > MAX_ITEMS:
        raise invalid("input", f"at most {MAX_ITEMS} items are allowed, not {len(given)}")
    lists = [part for item in given for part in (item.content, item.output, item.summary) if isinstance(part, list)]
    refuse_more_parts("input", sum(map(len, lists)))
    turns: list[ChatMessage | AssistantTurn] = []
    for at, item in enumerate(given):
        path = f"input[{at}]"
        refuse_unsupported(item, _OF_ITEMS, path)
        match item.type:
            case "message":
                role = _ROLES.get(item.role or "")
                if role is None:
                    raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
                content = _text(item.content, f"{path}.content")
                if role == "assistant":
                    _assistant(turns).contents.append(content)
                else:
                    turns.append(ChatMessage(role, content))
            case "reasoning":
                thought = _text(item.content or item.summary or "", f"{path}.content")
                _assistant(turns, thinks=bool(thought)).thoughts.append(thought)
            case "function_call":
                if not item.name:
                    raise invalid(f"{path}.name", "is required")
                _assistant(turns).calls.append(ToolCall(item.name, item.arguments or "", item.call_id or ""))
            case "function_call_output":
                result = _text(item.output, f"{path}.output")
                turns.append(ChatMessage("tool", result, tool_call_id=item.call_id or ""))
            case _:
                known = "message, reasoning, function_call and function_call_output"
                raise invalid(f"{path}.type", f"only {known} are supported")
    return [turn.message() if isinstance(turn, AssistantTurn) else turn for turn in turns]


class AssistantTurn(msgspec.Struct):
    """The items of one turn, which are joined once, at its end. Calls, and what was thought before them, belong to the
    turn that they follow each other in."""

    contents: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []

    def message(self) -> ChatMessage:
        content = "\n".join(self.contents) if self.contents or not self.calls else None
        return ChatMessage("assistant", content, tool_calls=tuple(self.calls), reasoning="".join(self.thoughts))


def _assistant(turns: list[ChatMessage | AssistantTurn], *, thinks: bool = False) -> AssistantTurn:
    """Return the assistant's turn under way, or begin one: as it also does where it thinks again after an answer."""
    last = turns[-1] if turns else None
    if not isinstance(last, AssistantTurn) or (thinks and (last.contents or last.calls)):
        last = AssistantTurn()
        turns.append(last)
    return last


def _text(content: str | list[ItemPart] | None, path: str) -> str:
    if content is None:
        raise invalid(path, "is required")
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
            raise invalid(f"{path}[{at}].type", "only parts of text are supported")
        if part.text is None:
            raise invalid(f"{path}[{at}].text", "is required")
        texts.append(part.text)
    return "\n".join(texts)


def _format(text: TextOptions | None) -> dict[str, Any]:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type != "json_schema":
        return {"type": "text" if wanted is None else wanted.type}
    shown = {"name": wanted.name or "", "description": wanted.description, "strict": wanted.strict}
    return {"type": "json_schema", "schema": wanted.schema} | shown


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """Return what an answer repeats of its request."""
    choice = request.tool_choice
    tools = [
        {
            "type": "function",
            "name": one.name,
            "description": one.description,
            "parameters": one.parameters if bytes(one.parameters) else None,
            "strict": one.strict if isinstance(one.strict, bool) else None,
        }
        for one in request.tools or ()
    ]
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "store": False,
        "temperature": request.temperature,
        "text": {"format": _format(request.text)},
        "tool_choice": msgspec.to_builtins(choice) if choice is not None else "auto",
        "tools": tools,
        "top_p": request.top_p,
        "truncation": "disabled",
        "metadata": {},
    }
