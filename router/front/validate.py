"""Checks every field of a call, before its prompt is tokenized.

Raises `FieldError` with the field's name, `TooLongError` for a prompt that the context cannot hold,
`UnknownModelError` for a model that is not served.
"""

import math
from collections.abc import Sequence

from engine.constraints.text import check_constraint
from engine.messages import Orphan
from engine.plan import MAX_PRIORITY, SAMPLING_RANGES, check_beams
from engine.types import BeamParams, FieldError, TooLongError
from router.config import RouterConfig
from router.front.api import SESSION_HEADER, ChatMessage, GenerateCall
from router.front.output import ServedModel
from router.front.resume import Context

MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LABEL_CHARS = 128
MAX_TIMEOUT_S = 24 * 3600.0
MAX_COUNT = 2**31 - 1
ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})


class UnknownModelError(FieldError):
    """The caller named a model that this router does not serve."""


def check_call(call: GenerateCall, model: ServedModel, config: RouterConfig) -> None:
    """Everything that can be said of a call before its prompt is tokenized."""
    if call.model is not None and call.model != model.name:
        raise UnknownModelError("model", f"{_shown(call.model)} is not served here, {model.name!r} is")
    _check_prompt(call.prompt, model, config)
    _count("n", call.n, 1, config.max_samples)
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(call.sampling, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise FieldError(name, f"is {value}, must be at least {low:g} and at most {high:g}")
    _count("top_k", call.sampling.top_k, 0, MAX_COUNT)
    _count("max_tokens", call.max_tokens, 1, MAX_COUNT)
    _count("min_tokens", call.min_tokens, 0, MAX_COUNT)
    if call.max_tokens is not None and call.min_tokens > call.max_tokens:
        raise FieldError("min_tokens", f"must not exceed max_tokens, which is {call.max_tokens}")
    _count("seed", call.seed, 0, 2**64 - 1)
    _check_stop(call.stop)
    if len(call.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise FieldError("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} are allowed")
    _check_ids("stop_token_ids", call.stop_token_ids, model.vocab_size)
    for field, label in (("request_id", call.request_id), ("tenant", call.tenant), (SESSION_HEADER, call.session)):
        if len(label) > MAX_LABEL_CHARS:
            raise FieldError(field, f"must have at most {MAX_LABEL_CHARS} characters")
        _check_text(field, label)
    _count("priority", call.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_search(call)
    if call.constraint is not None:
        check_constraint(call.constraint, call.constraint_field)
        if call.ignore_eos:
            raise FieldError("ignore_eos", f"is not allowed with {call.constraint_field}, which ends the answer")
    if call.timeout_s is not None and not 0 < call.timeout_s <= MAX_TIMEOUT_S:
        raise FieldError("timeout_s", f"must be above 0 and at most {MAX_TIMEOUT_S:g} seconds")


def check_adopted(orphan: Orphan, context: Context, model: ServedModel, config: RouterConfig) -> None:
    """Hold what a worker reports of an earlier router's request to the limits of the calls that this one takes. Raises
    FieldError."""
    record = orphan.record
    if not 0 < record.prompt_tokens <= len(record.tokens):
        raise FieldError("prompt_tokens", f"is {record.prompt_tokens} of {len(record.tokens)} tokens")
    chat = [ChatMessage(role, content) for role, content in context.chat]
    beams = record.beams
    call = GenerateCall(
        prompt=record.tokens[: record.prompt_tokens],
        n=context.samples if beams is None else beams.answers,
        max_tokens=record.max_tokens,
        min_tokens=record.min_tokens,
        sampling=record.sampling,
        seed=record.seed,
        stop=context.stop,
        stop_token_ids=record.stop_token_ids,
        priority=record.priority,
        ignore_eos=record.ignore_eos,
        constraint=record.constraint,
        beam_width=None if beams is None else beams.width,
    )
    check_call(call, model, config)
    if chat:
        _check_prompt(chat, model, config)
    _count("max_tokens", record.max_tokens, 1, model.context_tokens - record.prompt_tokens)
    emitted = max(len(record.tokens) - record.prompt_tokens, len(orphan.tokens))
    _count("tokens", emitted, 0, record.max_tokens)
    _check_ids("tokens", [*record.tokens[record.prompt_tokens :], *orphan.tokens], model.vocab_size)
    _count("sample_index", record.sample_index, 0, context.samples - 1)


def _check_search(call: GenerateCall) -> None:
    beams = beam_params(call)
    if beams is None:
        return
    check_beams(beams)
    if call.resumable:
        raise FieldError("resumable", "is not allowed with beam_width")
    if call.constraint is not None:
        raise FieldError(call.constraint_field, "is not allowed with beam_width")
    if call.stop:
        raise FieldError("stop", "is not allowed with beam_width; stop_token_ids are")
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(call.sampling, name):
            raise FieldError(name, "is not allowed with beam_width")
    if call.sampling.repetition_penalty != 1.0:
        raise FieldError("repetition_penalty", "is not allowed with beam_width")


def beam_params(call: GenerateCall) -> BeamParams | None:
    """Return what the call asks of a beam search; None where it draws its samples."""
    if call.beam_width is None:
        return None
    return BeamParams(
        width=call.beam_width,
        answers=call.n,
        length_penalty=call.length_penalty,
        early_stopping=call.early_stopping,
    )


def prompt_field(prompt: object) -> str:
    """The name by which callers know this kind of prompt."""
    if isinstance(prompt, str):
        return "prompt"
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return "messages"
    return "token_ids"


def _check_prompt(prompt: object, model: ServedModel, config: RouterConfig) -> None:
    field = prompt_field(prompt)
    if not prompt:
        raise FieldError(field if isinstance(prompt, str) else "prompt", "must not be empty")
    if isinstance(prompt, str):
        texts = [(field, prompt)]
    elif field == "messages":
        assert isinstance(prompt, list)
        if len(prompt) > MAX_MESSAGES:
            raise FieldError("messages", f"at most {MAX_MESSAGES} are allowed, not {len(prompt)}")
        texts = []
        for index, message in enumerate(prompt):
            if message.role not in ROLES:
                known = ", ".join(sorted(ROLES))
                raise FieldError(f"messages[{index}].role", f"must be one of {known}")
            texts.append((f"messages[{index}].content", message.content))
    else:
        assert isinstance(prompt, list)
        if len(prompt) >= model.context_tokens:
            raise TooLongError(field, f"has {len(prompt)} tokens; the context holds {model.context_tokens}")
        _check_ids(field, prompt, model.vocab_size)
        return
    size = sum(_check_text(name, text) for name, text in texts)
    if size > config.max_prompt_bytes:
        raise TooLongError(field, f"has {size} bytes of text, at most {config.max_prompt_bytes} are accepted")


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise FieldError("stop", f"at most {MAX_STOP_STRINGS} strings are allowed, not {len(stop)}")
    for index, text in enumerate(stop):
        if not text:
            raise FieldError(f"stop[{index}]", "must not be empty")
        if _check_text(f"stop[{index}]", text) > MAX_STOP_BYTES:
            raise FieldError(f"stop[{index}]", f"must have at most {MAX_STOP_BYTES} bytes")


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        at = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise FieldError(f"{field}[{at}]", f"is {ids[at]}, must lie in 0 to {vocab_size - 1}")


def _check_text(field: str, text: str) -> int:
    """The size of `text` in bytes of UTF-8; raises FieldError for half a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise FieldError(field, f"is not valid Unicode at character {error.start}") from error


def _count(field: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise FieldError(field, f"is {value}, must lie in {low} to {high}")


def _shown(name: str) -> str:
    return repr(name if len(name) <= MAX_LABEL_CHARS else name[:MAX_LABEL_CHARS] + "…")
