"""Writes what the two OpenAI routes answer: JSON bodies, and errors in OpenAI's envelope. Pure."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from router.front.api import ApiError, Delta, Finished, HttpForm, Started

_STATUS: dict[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "OUT_OF_RANGE": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "DEADLINE_EXCEEDED": (408, "timeout_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled"),
    "INTERNAL": (500, "server_error"),
    "UNAVAILABLE": (503, "server_error"),
}
_CODES = {"OUT_OF_RANGE": "context_length_exceeded", "NOT_FOUND": "model_not_found"}
_FIELDS = {
    "token_ids": "prompt",
    "timeout_s": "timeout",
    "request_id": "x-request-id",
    "next_index": "Last-Event-ID",
    "text_bytes": "Last-Event-ID",
    "positions": "Last-Event-ID",
}
"""What this front calls fields that have another name behind the frontend."""


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class WorkerUse(msgspec.Struct):
    worker: str
    cached_tokens: int


class Migration(msgspec.Struct):
    blocks: int
    bytes: int
    seconds: float
    transport: str


class Timing(msgspec.Struct):
    """Seconds. `stages` are those of docs/architecture.md, with what none of them covers as `unattributed`."""

    ttft_s: float
    itl_mean_s: float
    itl_p99_s: float
    e2e_s: float
    stages: dict[str, float]


class Headrace(msgspec.Struct):
    """What this server adds to OpenAI's answer: where the request ran, what moved, and where its time went."""

    request_id: str
    prefill: WorkerUse
    decode: WorkerUse
    migration: Migration
    timing: Timing
    stop_matched: str


class ReplyText(msgspec.Struct):
    content: str
    role: Literal["assistant"] | msgspec.UnsetType = "assistant"
    refusal: msgspec.UnsetType | None = msgspec.UNSET


class ReplyChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    text: str | msgspec.UnsetType = msgspec.UNSET
    message: ReplyText | msgspec.UnsetType = msgspec.UNSET
    delta: ReplyText | dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    beam_score: float | msgspec.UnsetType = msgspec.UNSET


class Reply(msgspec.Struct, kw_only=True):
    """A whole answer, or one chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ReplyChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    headrace: Headrace | msgspec.UnsetType = msgspec.UNSET


class Writer:
    """Writes the answer to one request. Holds what every part of it repeats."""

    def __init__(self, started: Started, form: HttpForm) -> None:
        self._request_id = started.request_id
        self._id = f"{'chatcmpl' if form.chat else 'cmpl'}-{started.request_id}"
        self._model = started.model
        self._form = form

    def whole(self, answers: Sequence[Sequence[Delta]], ends: Sequence[Finished]) -> bytes:
        """All output and the account of every sample, in order. The figures are those of sample 0."""
        choices = [self._choice(*answer) for answer in zip(answers, ends, strict=True)]
        kind = "chat.completion" if self._form.chat else "text_completion"
        return msgspec.json.encode(self.reply(kind, choices, usage(ends), self.headrace(ends[0])))

    def _choice(self, deltas: Sequence[Delta], end: Finished) -> ReplyChoice:
        choice = last_choice(end)
        text = "".join(delta.text for delta in deltas)
        if self._form.chat:
            choice.message = ReplyText(text, refusal=None)
        else:
            choice.text = text
        if self._form.return_token_ids:
            choice.token_ids = tuple(token for delta in deltas for token in delta.token_ids)
        return choice

    def reply(
        self,
        kind: str,
        choices: list[ReplyChoice],
        use: Usage | msgspec.UnsetType | None,
        headrace: Headrace | None,
    ) -> Reply:
        return Reply(
            id=self._id,
            object=kind,
            created=self._form.created,
            model=self._model,
            choices=choices,
            usage=use,
            headrace=msgspec.UNSET if headrace is None else headrace,
        )

    def headrace(self, end: Finished) -> Headrace:
        stats = end.stats
        return Headrace(
            request_id=self._request_id,
            prefill=WorkerUse(stats.prefill_worker, stats.prefill_cached_tokens),
            decode=WorkerUse(stats.decode_worker, stats.decode_cached_tokens),
            migration=Migration(stats.migrated_blocks, stats.migrated_bytes, stats.migration_s, stats.transport),
            timing=Timing(end.ttft_s, end.itl_mean_s, end.itl_p99_s, end.e2e_s, stats.stages),
            stop_matched=end.stop_matched,
        )


def last_choice(end: Finished) -> ReplyChoice:
    """The choice that says how a sample ended, without its text."""
    choice = ReplyChoice(index=end.sample, finish_reason=end.reason.value)
    if end.beam_score is not None:
        choice.beam_score = end.beam_score
    return choice


def usage(ends: Sequence[Finished]) -> Usage:
    """Sums up all samples: they share one prompt."""
    prompt = ends[0].prompt_tokens
    completion = sum(end.output_tokens for end in ends)
    cached = min(end.cached_tokens for end in ends)
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached))


class ErrorReply(msgspec.Struct, frozen=True):
    status: int
    envelope: dict[str, dict[str, str | None]]
    headers: dict[str, str]


def error_reply(error: ApiError) -> ErrorReply:
    """The HTTP form of an error. A code that is not of docs/http.md's table is our own fault, hence 500."""
    status, kind = _STATUS.get(error.code, _STATUS["INTERNAL"])
    field, message = error.field, error.message
    code = _CODES.get(error.code, error.code.lower())
    if field == "resume_token" and error.code == "NOT_FOUND":
        code = "stream_not_found"
    if field:
        what = message.removeprefix(f"{field}: ")
        field = _FIELDS.get(name := field.partition("[")[0], name) + field[len(name) :]
        message = f"{field}: {what}"
    headers = {}
    if status == 429 or (status == 503 and error.retry_after_s is not None):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    return ErrorReply(status, envelope(message, kind, field or None, code), headers)


def envelope(message: str, kind: str, param: str | None, code: str) -> dict[str, dict[str, str | None]]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
