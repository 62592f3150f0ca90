"""The formats in which an answer to one HTTP request is written, by its form. Pure."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.front.api import ApiError, Delta, Finished, HttpForm, Started
from router.front.tokenizing import Steps
from router.http.adapters.messages_reply import MessageWriter, anthropic_envelope, anthropic_error, whole_message
from router.http.adapters.responses_reply import ResponseWriter, whole_response
from router.http.logprobs import TokenBytes
from router.http.openai_reply import envelope, error_reply, whole
from router.http.openai_stream import EventPosition, StreamWriter, event

MESSAGES_PATH = "/v1/messages"
_NAMES = {
    "": {"reasoning_budget": "thinking_token_budget"},
    "messages": {
        "stop": "stop_sequences",
        "reasoning_budget": "thinking.budget_tokens",
        "continue_final_message": "messages",
    },
    "responses": {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"},
}
"""What fields of a call are called in a shape's requests."""
_VARIABLES = {
    "": {"chat_template_kwargs.reasoning_effort": "reasoning_effort"},
    "messages": {"chat_template_kwargs.enable_thinking": "thinking.type"},
    "responses": {"chat_template_kwargs.reasoning_effort": "reasoning.effort"},
}
_TOOLS: dict[str, dict[str, str]] = {
    "": {},
    "messages": {".function.parameters": ".input_schema", ".function": ""},
    "responses": {".function": ""},
}
"""What stands in a shape's tool for what a field of a call says of it."""


class EventWriter(Protocol):
    """Writes the events of one streamed answer."""

    def delta(self, item: Delta) -> bytes: ...

    def last(self, end: Finished) -> list[bytes]: ...


def writer_of(
    started: Started, form: HttpForm, token_bytes: TokenBytes, at: Sequence[EventPosition] = ()
) -> EventWriter:
    match form.api:
        case "messages":
            return MessageWriter(started, form)
        case "responses":
            return ResponseWriter(started, form)
        case _:
            return StreamWriter(started, form, token_bytes, at)


def body_of(
    started: Started,
    form: HttpForm,
    answers: Sequence[Sequence[Delta]],
    ends: Sequence[Finished],
    token_bytes: TokenBytes,
) -> Steps[bytes]:
    """Write a whole answer. Yields where others may have the event loop."""
    match form.api:
        case "messages":
            return (yield from whole_message(started, form, answers, ends))
        case "responses":
            return (yield from whole_response(started, form, answers, ends))
        case _:
            return (yield from whole(started, form, answers, ends, token_bytes))


def shape_of(path: str) -> str:
    """Return the shape of a route's errors, as `HttpForm.api` names it."""
    return "messages" if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/") else ""


def in_words_of(api: str, error: ApiError, *, is_best: bool = False) -> ApiError:
    """Return an error of the frontend with the field as the caller of this shape knows it. The turns that the adapters'
    readers have made are counted otherwise than the caller's, so they are named without their numbers. `is_best`: the
    samples are as many as `best_of` says."""
    names, field = _NAMES[api] | ({"n": "best_of"} if is_best else {}), error.field
    if not field:
        return error
    name = field.partition("[")[0]
    rest = "" if api and name == "messages" else field[len(name) :]
    if name == "tools":
        for said, known in _TOOLS[api].items():
            rest = rest.replace(said, known)
    shown = _VARIABLES[api].get(field) or names.get(name, name) + rest
    if shown == field:
        return error
    message = error.message.removeprefix(f"{field}: ")
    return ApiError(error.code, f"{shown}: {message}", shown, retry_after_s=error.retry_after_s)


def failure_of(error: ApiError, writer: EventWriter | None) -> bytes:
    """An error as the last event of a stream."""
    if isinstance(writer, MessageWriter | ResponseWriter):
        return writer.failure(error)
    return event(msgspec.json.encode(error_reply(error).envelope))


def envelope_of(error: ApiError, api: str, label: str) -> object:
    """The body of an error that is the whole answer."""
    return anthropic_error(error, label) if api == "messages" else error_reply(error).envelope


def early_envelope(path: str, status: int, message: str, kind: str, code: str, label: str = "") -> object:
    """The body of a refusal that needs no call: for this status, and in the shape of the route at `path`."""
    if shape_of(path) == "messages":
        return anthropic_envelope(status, message, label)
    return envelope(message, kind, None, code)
