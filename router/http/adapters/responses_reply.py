"""What `/v1/responses` answers: a response of items, and its events, each with its number. Pure."""

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


def whole_response(
    started: Started, form: HttpForm, answers: Sequence[Sequence[Delta]], ends: Sequence[Finished]
) -> Steps[bytes]:
    blocks = _blocks(started, form)
    for at, part in enumerate(parts_of("".join([delta.text for delta in answers[0]]))):
        if at:
            yield
        blocks.push(part)
    blocks.end()
    items = [_item(started, block, "completed") for block in blocks.blocks]
    return msgspec.json.encode(_response(started, form, items, ends[0]))


class ResponseWriter:
    """Writes the events of one streamed response. Mutable state: the blocks, and the number of the next event."""

    def __init__(self, started: Started, form: HttpForm) -> None:
        self._started = started
        self._form = form
        self._blocks = _blocks(started, form)
        self._number = 0

    def delta(self, item: Delta) -> bytes:
        steps = self._blocks.push(item.text)
        return self._begin() + self._written(steps) if steps else b""

    def last(self, end: Finished) -> list[bytes]:
        steps = self._blocks.end()
        cut = self._blocks.blocks[-1] if self._blocks.blocks and end.reason is FinishReason.LENGTH else None
        events = [self._begin(), self._written(steps, cut)]
        items = [_item(self._started, block, "completed") for block in self._blocks.blocks]
        response = _response(self._started, self._form, items, end)
        events.append(self._event(f"response.{response['status']}", {"response": response}))
        return events

    def failure(self, error: ApiError) -> bytes:
        told = error_reply(error).envelope["error"]
        return self._event("error", {"code": told["code"], "message": told["message"], "param": told["param"]})

    def _begin(self) -> bytes:
        if self._number:
            return b""
        response = _response(self._started, self._form, [], None)
        return b"".join(
            [self._event(f"response.{name}", {"response": response}) for name in ("created", "in_progress")]
        )

    def _written(
        self, steps: Sequence[tuple[BlockStep, AnswerBlock, str]], cut: AnswerBlock | None = None
    ) -> bytes:
        """`cut`: the block in whose middle the answer has ended."""
        events = [event for step in steps for event in self._step(*step, is_cut=step[1] is cut)]
        return b"".join([self._event(*event) for event in events])

    def _step(
        self, step: BlockStep, block: AnswerBlock, text: str, *, is_cut: bool
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of one step of a block. Text stands in a part of its item, arguments in the item itself."""
        item = {"item_id": _item_id(self._started, block), "output_index": block.index}
        part = item | {"content_index": 0}
        kind = {PieceKind.CALL: "function_call_arguments", PieceKind.REASONING: "reasoning_text"}.get(
            block.kind, "output_text"
        )
        at = item if block.kind is PieceKind.CALL else part
        extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        if step is BlockStep.MORE:
            return [(f"response.{kind}.delta", at | {"delta": text} | extra)]
        is_begun = step is BlockStep.BEGIN
        shown = _item(self._started, block, "in_progress" if is_begun else "incomplete" if is_cut else "completed")
        whole = (
            f"response.output_item.{'added' if is_begun else 'done'}",
            {"output_index": block.index, "item": shown | ({"content": []} if is_begun and "content" in shown else {})},
        )
        if block.kind is PieceKind.CALL:
            done = (f"response.{kind}.done", at | {"arguments": block.text, "name": block.name})
            return [whole] if is_begun else [done, whole]
        inner = (f"response.content_part.{'added' if is_begun else 'done'}", part | {"part": _part(block)})
        if is_begun:
            return [whole, inner]
        return [(f"response.{kind}.done", at | {"text": block.text} | extra), inner, whole]

    def _event(self, kind: str, body: dict[str, Any]) -> bytes:
        made = {"type": kind, "sequence_number": self._number} | body
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(made))


def _blocks(started: Started, form: HttpForm) -> AnswerBlocks:
    return AnswerBlocks(PartsReader(form.parsing or Parsing(), started.request_id))


def _response(started: Started, form: HttpForm, items: list[dict[str, Any]], end: Finished | None) -> dict[str, Any]:
    # Not as numbers of ours: a schema may hold some that no double does.
    echo: dict[str, Any] = msgspec.json.decode(form.repeated or "{}", type=dict[str, msgspec.Raw])
    is_cut = end is not None and end.reason is FinishReason.LENGTH
    status = "in_progress" if end is None else "incomplete" if is_cut else "completed"
    if is_cut and items:
        items[-1]["status"] = "incomplete"
    return {
        "id": f"resp_{started.request_id}",
        "object": "response",
        "created_at": form.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": started.model,
        "output": items,
        "usage": None if end is None else _usage(end),
    } | echo


def _usage(end: Finished) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.output_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.output_tokens,
    }


def _item_id(started: Started, block: AnswerBlock) -> str:
    prefix = {PieceKind.CALL: "fc", PieceKind.REASONING: "rs"}.get(block.kind, "msg")
    return f"{prefix}_{started.request_id}_{block.index}"


def _item(started: Started, block: AnswerBlock, status: str) -> dict[str, Any]:
    made: dict[str, Any] = {"id": _item_id(started, block), "status": status}
    match block.kind:
        case PieceKind.CALL:
            made |= {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
        case PieceKind.REASONING:
            made |= {"type": "reasoning", "summary": [], "content": [_part(block)]}
        case _:
            made |= {"type": "message", "role": "assistant", "content": [_part(block)]}
    return made


def _part(block: AnswerBlock) -> dict[str, Any]:
    if block.kind is PieceKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
