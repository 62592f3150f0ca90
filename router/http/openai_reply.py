"""Writes what the two OpenAI routes answer: JSON bodies, and errors in OpenAI's envelope. Pure."""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec

from engine.types import FinishReason, TokenLogprobs
from router.front.api import ApiError, Delta, Finished, HttpForm, Started
from router.front.tokenizing import Steps, at_once
from router.http.fields import UnknownFieldError
from router.http.logprobs import TokenBytes, characters, chat_logprobs, completion_logprobs, prompt_logprobs
from router.http.parsed_answer import PartsReader

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
"""This front's names of fields that have another name behind the frontend."""
_INNER_BYTES = bytes(range(0x80, 0xC0))
"""All bytes of UTF-8 that begin no character."""
PIECE_TOKENS = 64
"""With 20 alternatives so many tokens of a chat take about ten milliseconds to write."""
PIECE_IDS = 16 * PIECE_TOKENS
"""So many tokens' text takes about as long."""
_TIMES = ("ttft_s", "itl_mean_s", "itl_p99_s", "e2e_s")


class ReplyText(msgspec.Struct):
    content: str
    role: Literal["assistant"] | msgspec.UnsetType = "assistant"
    refusal: msgspec.UnsetType | None = msgspec.UNSET


class ReplyChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    text: str | msgspec.UnsetType = msgspec.UNSET
    message: ReplyText | dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    delta: ReplyText | dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    beam_score: float | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: Any = msgspec.UNSET


class Reply(msgspec.Struct):
    """A whole answer, or one chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ReplyChoice]
    usage: dict[str, Any] | msgspec.UnsetType | None
    headrace: dict[str, Any] | msgspec.UnsetType
    prompt_logprobs: Any = msgspec.UNSET


def whole(
    started: Started,
    form: HttpForm,
    answers: Sequence[Sequence[Delta]],
    ends: Sequence[Finished],
    token_bytes: TokenBytes,
) -> Steps[bytes]:
    """An answer at once: all output and the account of every sample, in order of prompts and samples. The figures are
    those of sample 0. Yields between its parts, as log probabilities make megabytes of it."""
    each, choices = len(answers) // form.prompts, list[ReplyChoice]()
    about = list[EchoedPrompt]()
    for prompt in range(form.prompts):
        about.append((yield from _echoed_prompt(started, form, prompt, answers[prompt * each], token_bytes)))
    for prompt in range(form.prompts):
        samples = range(prompt * each, (prompt + 1) * each)
        for at in sorted(samples, key=lambda at: -_mean(answers[at]))[: form.best] if form.best else samples:
            if choices:
                yield
            deltas, choice = [] if form.is_prompt_only else answers[at], last_choice(ends[at], form)
            choice.index, text = len(choices), "".join(delta.text for delta in deltas)
            if form.parsing is not None:
                reader = PartsReader(form.parsing, started.request_id, at)
                choice.message = yield from reader.message(text)
                choice.finish_reason = finish_reason(ends[at], reader)
            elif form.chat:
                choice.message = ReplyText(text, refusal=None)
            else:
                choice.text = about[prompt].text + text
            if form.return_token_ids:
                choice.token_ids = tuple(token for delta in deltas for token in delta.token_ids)
            if form.logprobs is not None:
                given = [one for delta in deltas for one in delta.logprobs]
                if form.chat:
                    json = yield from _encoded_logprobs(given, token_bytes)
                else:
                    json = yield from _encoded_lists(form, [*about[prompt].given, *given], token_bytes)
                choice.logprobs = cast(dict[str, Any], json)
            if form.says_prompt and not form.chat:
                choice.prompt_logprobs = about[prompt].logprobs
            choices.append(choice)
    told = about[0].logprobs if form.says_prompt and form.chat else msgspec.UNSET
    return encoded(started, form, "chat.completion", choices, usage(ends, form), ends[0], told)


def _encoded_logprobs(given: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> Steps[msgspec.Raw]:
    """The field `logprobs` of a chat's choice as JSON, of which no more than a piece ever stands as objects."""
    pieces = []
    for at in range(0, len(given), PIECE_TOKENS):
        if at:
            yield
        content = chat_logprobs(given[at : at + PIECE_TOKENS], token_bytes)["content"]
        pieces.append(msgspec.json.encode(content)[1:-1])
    return msgspec.Raw(b'{"content":[' + b",".join(pieces) + b'],"refusal":null}')


def _encoded_lists(
    form: HttpForm, given: Sequence[TokenLogprobs | int], token_bytes: TokenBytes
) -> Steps[msgspec.Raw]:
    """The same of a completion's choice, whose text these tokens begin."""
    lists: dict[str, list[bytes] | None] = {}
    offset = 0
    for at in range(0, max(len(given), 1), PIECE_TOKENS):
        if at:
            yield
        part = given[at : at + PIECE_TOKENS]
        for name, values in written_logprobs(form, part, offset, token_bytes).items():
            pieces = lists.setdefault(name, None if values is None else [])
            if pieces is not None:
                pieces.append(msgspec.json.encode(values)[1:-1])
        offset += sum([characters(one if isinstance(one, int) else one.token, token_bytes) for one in part])
    whole = {
        name: None if pieces is None else msgspec.Raw(b"[" + b",".join(pieces) + b"]")
        for name, pieces in lists.items()
    }
    return msgspec.Raw(msgspec.json.encode(whole))


class EchoedPrompt(msgspec.Struct, frozen=True):
    """What an answer says of a prompt."""

    text: str
    given: list[TokenLogprobs | int]
    """What comes before the output in a completion's lists: the first token, of which nothing is known, and the
    others."""
    logprobs: msgspec.Raw | None
    """The field `prompt_logprobs` as JSON."""


def _echoed_prompt(
    started: Started, form: HttpForm, at: int, first: Sequence[Delta], token_bytes: TokenBytes
) -> Steps[EchoedPrompt]:
    """What is said of prompt number `at`. `first` is the output of its first sample."""
    said = first[0].prompt_logprobs if first else ()
    text = yield from _echoed_text(started, form, at, token_bytes)
    given: list[TokenLogprobs | int] = []
    if form.echo is not None and form.logprobs is not None:
        given = [started.prompt_ids[at][0], *said]
    if not form.says_prompt:
        return EchoedPrompt(text, given, None)
    pieces = [b"null"]
    for begin in range(0, len(said), PIECE_TOKENS):
        told = prompt_logprobs(said[begin : begin + PIECE_TOKENS], token_bytes)
        pieces.append(msgspec.json.encode(told[1:])[1:-1])
        yield
    return EchoedPrompt(text, given, msgspec.Raw(b"[" + b",".join(pieces) + b"]"))


def echoed_text(started: Started, form: HttpForm, at: int, token_bytes: TokenBytes) -> str:
    """What the text begins with: prompt number `at`, if it is to be echoed."""
    return at_once(_echoed_text(started, form, at, token_bytes))


def _echoed_text(started: Started, form: HttpForm, at: int, token_bytes: TokenBytes) -> Steps[str]:
    if form.echo is None:
        return ""
    if form.echo[at]:
        return form.echo[at]
    ids, shown = started.prompt_ids[at], list[bytes]()
    for begin in range(0, len(ids), PIECE_IDS):
        if begin:
            yield
        both = [token_bytes(token) for token in ids[begin : begin + PIECE_IDS]]
        shown += [data for data, is_shown in both if is_shown]
    # The end of a character that a cut has parted belongs to no token here, so it has no room either.
    return b"".join(shown).lstrip(_INNER_BYTES).decode(errors="replace")


def _mean(deltas: Sequence[Delta]) -> float:
    """The mean log probability of an answer's tokens."""
    values = [one.logprob for delta in deltas for one in delta.logprobs]
    return sum(values) / max(1, len(values))


def written_logprobs(
    form: HttpForm, given: Sequence[TokenLogprobs | int], offset: int, token_bytes: TokenBytes
) -> dict[str, Any]:
    """The field `logprobs` of a choice; `offset` characters of its text came before."""
    if form.chat:
        return chat_logprobs([one for one in given if not isinstance(one, int)], token_bytes)
    return completion_logprobs(given, offset, token_bytes, has_top=bool(form.logprobs))


def encoded(
    started: Started,
    form: HttpForm,
    chat_kind: str,
    choices: list[ReplyChoice],
    use: dict[str, Any] | msgspec.UnsetType | None,
    end: Finished | None,
    prompt: object = msgspec.UNSET,
) -> bytes:
    """One JSON body of an answer, with the figures of `end` where it is given."""
    name = f"{'chatcmpl' if form.chat else 'cmpl'}-{started.request_id}"
    kind = chat_kind if form.chat else "text_completion"
    figures = msgspec.UNSET if end is None else _headrace(started, end)
    return msgspec.json.encode(Reply(name, kind, form.created, started.model, choices, use, figures, prompt))


def _headrace(started: Started, end: Finished) -> dict[str, Any]:
    """Return what this server adds to OpenAI's answer: where the request ran, what moved, and where its time went, in
    the stages of docs/architecture.md."""
    stats = end.stats
    return {
        "request_id": started.request_id,
        "prefill": {"worker": stats.prefill_worker, "cached_tokens": stats.prefill_cached_tokens},
        "decode": {"worker": stats.decode_worker, "cached_tokens": stats.decode_cached_tokens},
        "migration": {
            "blocks": stats.migrated_blocks,
            "bytes": stats.migrated_bytes,
            "seconds": stats.migration_s,
            "transport": stats.transport,
        },
        "timing": {name: getattr(end, name) for name in _TIMES} | {"stages": stats.stages},
        "stop_matched": end.stop_matched,
    }


def finish_reason(end: Finished, reader: PartsReader | None) -> str:
    """Return OpenAI's word for how a sample ended."""
    if reader is not None and reader.calls and end.reason is FinishReason.STOP and not end.stop_matched:
        return "tool_calls"
    return end.reason.value


def last_choice(end: Finished, form: HttpForm) -> ReplyChoice:
    """The choice that says how a sample ended, without its text; of a prompt alone, not how the token ended it that
    nobody is shown."""
    reason = FinishReason.LENGTH if form.is_prompt_only else end.reason
    choice = ReplyChoice(index=end.sample, finish_reason=reason.value)
    if end.beam_score is not None:
        choice.beam_score = end.beam_score
    return choice


def usage(ends: Sequence[Finished], form: HttpForm) -> dict[str, Any]:
    """Sums up all samples, in their order: those of one prompt share it."""
    has_reasoning = form.parsing is not None and form.parsing.reasoning
    reasoned = {"completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_tokens for end in ends)}}
    each = len(ends) // form.prompts
    firsts = range(0, len(ends), each)
    prompt = sum(ends[at].prompt_tokens for at in firsts)
    completion = 0 if form.is_prompt_only else sum(end.output_tokens for end in ends)
    cached = sum(min(end.cached_tokens for end in ends[at : at + each]) for at in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    } | (reasoned if has_reasoning else {})


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
    if field and not isinstance(error, UnknownFieldError):
        what = message.removeprefix(f"{field}: ")
        field = _FIELDS.get(name := field.partition("[")[0], name) + field[len(name) :]
        message = f"{field}: {what}"
    headers = {}
    if status == 429 or (status == 503 and error.retry_after_s is not None):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    return ErrorReply(status, envelope(message, kind, field or None, code), headers)


def envelope(message: str, kind: str, param: str | None, code: str) -> dict[str, dict[str, str | None]]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
