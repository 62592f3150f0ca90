"""What `/v1/messages` answers, in Anthropic's shape: a message, its events, its errors. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.types import FinishReason
from router.front.api import ApiError, Delta, Finished, HttpForm, Started
from router.front.parsers.choose import Parsing
from router.front.parsers.pieces import PieceKind, parts_of
from router.front.tokenizing import Steps
from router.http.adapters.blocks import AnswerBlock, AnswerBlocks, BlockStep
from router.http.openai_reply import error_reply
from router.http.parsed_answer import PartsReader

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def blocks_of(started: Started, form: HttpForm) -> AnswerBlocks:
    return AnswerBlocks(PartsReader(form.parsing or Parsing(), started.request_id))


def whole_message(
    started: Started, form: HttpForm, answers: Sequence[Sequence[Delta]], ends: Sequence[Finished]
) -> Steps[bytes]:
    blocks = blocks_of(started, form)
    for at, part in enumerate(parts_of("".join([delta.text for delta in answers[0]]))):
        if at:
            yield
        blocks.push(part)
    blocks.end()
    content = [_shown(block) for block in blocks.blocks]
    made = _message(started, content, _usage(ends[0])) | _stopped(ends[0], blocks)
    return msgspec.json.encode(made)


def anthropic_error(error: ApiError, label: str = "") -> dict[str, Any]:
    """Return the envelope of an error, with the path of the field at fault at the beginning of its message."""
    reply = error_reply(error)
    return anthropic_envelope(reply.status, str(reply.envelope["error"]["message"]), label)


def anthropic_envelope(status: int, message: str, label: str = "") -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": label or None}


class MessageWriter:
    """Writes the events of one streamed message. Mutable state: the blocks, and whether it has begun."""

    def __init__(self, started: Started, form: HttpForm) -> None:
        self._started = started
        self._blocks = blocks_of(started, form)
        self._has_begun = False

    def delta(self, item: Delta) -> bytes:
        steps = self._blocks.push(item.text)
        return self._begin() + self._written(steps) if steps else b""

    def last(self, end: Finished) -> list[bytes]:
        events = [self._begin(), self._written(self._blocks.end())]
        delta = _stopped(end, self._blocks)
        events.append(_event({"type": "message_delta", "delta": delta, "usage": _usage(end)}))
        events.append(_event({"type": "message_stop"}))
        return events

    def failure(self, error: ApiError) -> bytes:
        return _event(anthropic_error(error, self._started.request_id))

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = {"input_tokens": self._started.prompt_tokens, "output_tokens": 0}
        return _event({"type": "message_start", "message": _message(self._started, [], usage)})

    def _written(self, steps: Sequence[tuple[BlockStep, AnswerBlock, str]]) -> bytes:
        return b"".join([_event(_step(*step)) for step in steps])


def _message(started: Started, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{started.request_id}",
        "type": "message",
        "role": "assistant",
        "model": started.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(end: Finished) -> dict[str, Any]:
    """Anthropic's input tokens are those that were not read from the cache."""
    return {
        "input_tokens": end.prompt_tokens - end.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": end.cached_tokens,
        "output_tokens": end.output_tokens,
    }


def _stopped(end: Finished, blocks: AnswerBlocks) -> dict[str, Any]:
    reason = "end_turn"
    if end.reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif end.stop_matched:
        reason = "stop_sequence"
    elif any(block.kind is PieceKind.CALL for block in blocks.blocks):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": end.stop_matched or None}


def _shown(block: AnswerBlock) -> dict[str, Any]:
    if block.kind is PieceKind.CALL:
        return _begun(block) | {"input": _input(block.text)}
    return _begun(block) | {"thinking" if block.kind is PieceKind.REASONING else "text": block.text}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; broken ones, as the model wrote them, under a name of their own."""
    try:
        read = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"_unparsed": arguments}


def _begun(block: AnswerBlock) -> dict[str, Any]:
    match block.kind:
        case PieceKind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        case PieceKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case _:
            return {"type": "text", "text": ""}


def _step(step: BlockStep, block: AnswerBlock, text: str) -> dict[str, Any]:
    match step:
        case BlockStep.BEGIN:
            return {"type": "content_block_start", "index": block.index, "content_block": _begun(block)}
        case BlockStep.END:
            return {"type": "content_block_stop", "index": block.index}
    match block.kind:
        case PieceKind.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        case PieceKind.REASONING:
            delta = {"type": "thinking_delta", "thinking": text}
        case _:
            delta = {"type": "text_delta", "text": text}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _event(body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), msgspec.json.encode(body))
