"""What `/v1/messages` and `/v1/responses` answer, as types: what `docs/openapi.json` says of them.

The writers beside this file make the same as plain JSON; tests hold what they write to these types
(`tests/router/http/test_openapi.py`), and the clients suite what a real server answers.
"""

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(msgspec.Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageFault(msgspec.Struct):
    type: str
    message: str


class MessageErrorReply(msgspec.Struct):
    type: Literal["error"]
    error: MessageFault
    request_id: str | None


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningTextPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


ItemStatus = Literal["completed", "incomplete"]


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputTextPart]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningTextPart]


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class RepeatedReasoning(msgspec.Struct):
    effort: str | None
    summary: None


class RepeatedText(msgspec.Struct):
    format: dict[str, Any]


class ResponseReply(msgspec.Struct):
    """The answer, and what it repeats of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ItemStatus
    background: bool
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    usage: ResponseUsage
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: RepeatedReasoning
    store: bool
    temperature: float | None
    text: RepeatedText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: str
    metadata: dict[str, Any]
