"""Checks every field of a call, before its prompt is tokenized.

Raises `FieldError` with the field's name, `TooLongError` for a prompt that the context cannot hold,
`UnknownModelError` for a model that is not served.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import cast

from engine.constraints.text import check_constraint, check_schema
from engine.messages import Orphan
from engine.plan import LOGIT_BIASES, MAX_LOGPROBS, MAX_PRIORITY, SAMPLING_RANGES, check_beams
from engine.text.messages import ChatMessage, ChatPrompt, Tool
from engine.types import BeamParams, Constraint, FieldError, TooLongError
from router.client.requests import MAX_TIMEOUT_S
from router.config import RouterConfig
from router.core.sessions import SESSION_BYTES
from router.front.api import SESSION_HEADER, GenerateCall
from router.front.output import ServedModel
from router.front.resume import Context

MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 4096
MAX_LABEL_CHARS = 128
MAX_SALT_BYTES = 1024
MAX_COUNT = 2**31 - 1
MAX_TOOLS = 128
"""Tools of a chat, and calls of one turn."""
MAX_DEPTH = 64
"""How deeply a tool's parameters, a call's arguments and a template's variables may be nested."""
MAX_VARIABLES = 64
_STRING = re.compile(r'"(?:[^"\\]++|\\(?:.|\Z))*+(?:"|\Z)', re.DOTALL)
"""A string in JSON, or its beginning where the text ends in it. Brackets inside of one nest nothing."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})


class UnknownModelError(FieldError):
    """The caller named a model that this router does not serve."""


def check_call(call: GenerateCall, model: ServedModel, config: RouterConfig) -> None:
    """Everything that can be said of a call before its prompt is tokenized."""
    _check_model(call.model, model, config)
    _check_prompt(call, model, config)
    _count("n", call.n, 1, config.max_samples)
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(call.sampling, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
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
    _count("logprobs", call.logprobs, 0, MAX_LOGPROBS)
    _count("prompt_logprobs", call.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_logits(call, model)
    if call.resumable and call.prompt_logprobs is not None:
        raise FieldError("resumable", "is not allowed with log probabilities of the prompt")
    for field, label in (("request_id", call.request_id), ("tenant", call.tenant), (SESSION_HEADER, call.session)):
        check_label(field, label)
    if call.truncate_prompt_tokens != -1:
        _count("truncate_prompt_tokens", call.truncate_prompt_tokens, 1, model.context_tokens - 1)
    if _check_text("cache_salt", call.cache_salt) > MAX_SALT_BYTES:
        raise FieldError("cache_salt", f"must have at most {MAX_SALT_BYTES} bytes")
    _count("priority", call.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_search(call)
    if call.constraint is not None:
        check_held(call, call.constraint)
    if call.timeout_s is not None and not 0 < call.timeout_s <= MAX_TIMEOUT_S:
        raise FieldError("timeout_s", f"must be above 0 and at most {MAX_TIMEOUT_S:g} seconds")


def check_held(call: GenerateCall, constraint: Constraint) -> None:
    """What can be said of a call's constraint: where it was given later, the rest need not be checked again."""
    if call.beam_width is not None:
        raise FieldError(call.constraint_field, "is not allowed with beam_width")
    check_constraint(constraint, call.constraint_field)
    if call.ignore_eos:
        raise FieldError("ignore_eos", f"is not allowed with {call.constraint_field}, which ends the answer")
    if call.allowed_token_ids:
        raise FieldError("allowed_token_ids", f"is not allowed with {call.constraint_field}, which may need others")


def check_adopted(orphan: Orphan, context: Context, model: ServedModel, config: RouterConfig) -> None:
    """Hold what a worker reports of an earlier router's request to the limits of the calls that this one takes. Raises
    FieldError."""
    record = orphan.record
    if not 0 < record.prompt_tokens <= len(record.tokens):
        raise FieldError("prompt_tokens", f"is {record.prompt_tokens} of {len(record.tokens)} tokens")
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
        logprobs=record.logprobs,
        logit_bias=record.logit_bias,
        allowed_token_ids=record.allowed_token_ids,
        beam_width=None if beams is None else beams.width,
    )
    check_call(call, model, config)
    if context.chat is not None:
        _check_chat(context.chat, config)
    _count("max_tokens", record.max_tokens, 1, model.context_tokens - record.prompt_tokens)
    emitted = max(len(record.tokens) - record.prompt_tokens, len(orphan.tokens))
    _count("tokens", emitted, 0, record.max_tokens)
    _check_ids("tokens", [*record.tokens[record.prompt_tokens :], *orphan.tokens], model.vocab_size)
    _count("sample_index", record.sample_index, 0, context.samples - 1)
    if context.session is not None:
        _count("session", len(context.session), SESSION_BYTES, SESSION_BYTES)


def _check_logits(call: GenerateCall, model: ServedModel) -> None:
    """Check what changes the logits of single tokens."""
    if len(call.logit_bias) > MAX_BIASES:
        raise FieldError("logit_bias", f"has {len(call.logit_bias)} tokens, at most {MAX_BIASES} are allowed")
    low, high = LOGIT_BIASES
    for token, amount in call.logit_bias:
        if not 0 <= token < model.vocab_size:
            raise FieldError("logit_bias", f"is of token {token}, must be of 0 to {model.vocab_size - 1}")
        if not low <= amount <= high:
            raise FieldError("logit_bias", f"is {amount} of token {token}, must lie in {low:g} to {high:g}")
    if len(call.allowed_token_ids) > MAX_ALLOWED_IDS:
        raise FieldError("allowed_token_ids", f"at most {MAX_ALLOWED_IDS} are allowed")
    _check_ids("allowed_token_ids", call.allowed_token_ids, model.vocab_size)
    drawable = [token for token in call.allowed_token_ids if token < model.drawable_tokens]
    if call.allowed_token_ids and not drawable:
        raise FieldError("allowed_token_ids", f"has no token: ids from {model.drawable_tokens} on stand for none")
    ends = {*call.stop_token_ids, *(() if call.ignore_eos else model.stop_ids)}
    if call.allowed_token_ids and call.min_tokens and ends.issuperset(drawable):
        raise FieldError("allowed_token_ids", "would end the answer at once, which min_tokens forbids")


def _check_search(call: GenerateCall) -> None:
    beams = beam_params(call)
    if beams is None:
        return
    check_beams(beams)
    if call.resumable:
        raise FieldError("resumable", "is not allowed with beam_width")
    if call.stop:
        raise FieldError("stop", "is not allowed with beam_width; stop_token_ids are")
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(call.sampling, name):
            raise FieldError(name, "is not allowed with beam_width")
    if call.sampling.repetition_penalty not in (None, 1.0):
        raise FieldError("repetition_penalty", "is not allowed with beam_width")
    for name in ("logit_bias", "allowed_token_ids"):
        if getattr(call, name):
            raise FieldError(name, "is not allowed with beam_width")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(call, name) is not None:
            raise FieldError(name, "is not allowed with beam_width")


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


def check_ids(
    field: str, ids: Sequence[int], asked: str | None, model: ServedModel, config: RouterConfig
) -> None:
    """Check ids that are to become text. Raises FieldError."""
    _check_model(asked, model, config)
    if len(ids) > model.context_tokens:
        raise TooLongError(field, f"has {len(ids)} tokens; the context holds {model.context_tokens}")
    _check_ids(field, ids, model.vocab_size)


def _check_model(asked: str | None, model: ServedModel, config: RouterConfig) -> None:
    names = config.names(model.name)
    if asked is not None and asked not in names:
        raise UnknownModelError("model", f"{_shown(asked)} is not served here, {served(names)}")


def served(names: Sequence[str]) -> str:
    """Return the half of a sentence that says which names a model has."""
    return f"{' and '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'}"


def _check_prompt(call: GenerateCall, model: ServedModel, config: RouterConfig) -> None:
    prompt, field = call.prompt, prompt_field(call.prompt)
    if not prompt:
        raise FieldError(field if isinstance(prompt, str) else "prompt", "must not be empty")
    chat = chat_of(call)
    choice = call.tool_choice
    if choice.mode == "required":
        if not call.tools:
            raise FieldError("tool_choice", "needs tools")
        if call.constraint is not None and call.constraint_field != "tool_choice":
            raise FieldError("tool_choice", f"is not allowed with {call.constraint_field}: both say what is answered")
        if call.form is None:
            raise FieldError("tool_choice", "is for chats whose calls are taken apart")
    if choice.name and choice.name not in {tool.name for tool in call.tools}:
        raise FieldError("tool_choice", f"names {_shown(choice.name)}, which is none of the tools")
    if chat is None:
        for name, asked in (("tools", call.tools), ("chat_template_kwargs", call.chat_template_kwargs)):
            if asked:
                raise FieldError(name, "is allowed only in a chat")
        if call.continue_final_message:
            raise FieldError("continue_final_message", "is allowed only in a chat")
    if isinstance(prompt, str):
        _check_size(field, [(field, prompt)], config)
    elif chat is not None:
        _check_chat(chat, config)
        if choice.mode == "required":
            _check_demanded(call)
    else:
        ids = cast(list[int], prompt)
        if len(ids) >= model.context_tokens and call.truncate_prompt_tokens is None:
            raise TooLongError(field, f"has {len(ids)} tokens; the context holds {model.context_tokens}")
        _check_ids(field, ids, model.vocab_size)


def chat_of(call: GenerateCall) -> ChatPrompt | None:
    """Return the chat that a call asks to go on with; None where its prompt is none."""
    prompt = call.prompt
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return None
    return ChatPrompt(
        messages=tuple([one for one in prompt if not isinstance(one, int)]),
        tools=() if call.tool_choice.mode == "none" else call.tools,
        template_kwargs=call.chat_template_kwargs,
        add_generation_prompt=call.add_generation_prompt and not call.continue_final_message,
        continue_final=call.continue_final_message,
        is_literal=not call.parse_control_tokens,
    )


def _check_chat(chat: ChatPrompt, config: RouterConfig) -> None:
    if not chat.messages:
        raise FieldError("messages", "must not be empty")
    if len(chat.messages) > MAX_MESSAGES:
        raise FieldError("messages", f"at most {MAX_MESSAGES} are allowed, not {len(chat.messages)}")
    for index, message in enumerate(chat.messages):
        field = f"messages[{index}]"
        if message.role not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise FieldError(f"{field}.role", f"must be one of {known}")
        for name, text in (("name", message.name), ("tool_call_id", message.tool_call_id)):
            if len(text) > MAX_LABEL_CHARS:
                raise FieldError(f"{field}.{name}", f"must have at most {MAX_LABEL_CHARS} characters")
        _check_calls(field, message)
    if chat.continue_final:
        last = chat.messages[-1]
        if last.role != "assistant" or last.content is None or last.tool_calls:
            raise FieldError("continue_final_message", "needs an assistant's last message, of text alone")
    _check_tools(chat.tools)
    if chat.template_kwargs and len(_json_object("chat_template_kwargs", chat.template_kwargs)) > MAX_VARIABLES:
        raise FieldError("chat_template_kwargs", f"may have at most {MAX_VARIABLES} members")
    _check_size("messages", chat.texts(), config)


def _check_calls(field: str, message: ChatMessage) -> None:
    if message.content is None and not message.tool_calls:
        raise FieldError(f"{field}.content", "is required")
    if message.tool_calls and message.role != "assistant":
        raise FieldError(f"{field}.tool_calls", "are an assistant's")
    if len(message.tool_calls) > MAX_TOOLS:
        raise FieldError(f"{field}.tool_calls", f"at most {MAX_TOOLS} are allowed")
    for number, call in enumerate(message.tool_calls):
        if len(call.id) > MAX_LABEL_CHARS:
            raise FieldError(f"{field}.tool_calls[{number}].id", f"must have at most {MAX_LABEL_CHARS} characters")
        if not call.name or len(call.name) > MAX_LABEL_CHARS:
            name = f"{field}.tool_calls[{number}].function.name"
            raise FieldError(name, f"must have 1 to {MAX_LABEL_CHARS} characters")
        _check_depth(f"{field}.tool_calls[{number}].function.arguments", call.arguments)


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise FieldError("tools", f"at most {MAX_TOOLS} are allowed, not {len(tools)}")
    names = set()
    for at, tool in enumerate(tools):
        if TOOL_NAME.fullmatch(tool.name) is None:
            allowed = "must have 1 to 64 of the letters a to z, A to Z, digits, `_`, `-` and `.`"
            raise FieldError(f"tools[{at}].function.name", allowed)
        if tool.name in names:
            raise FieldError(f"tools[{at}].function.name", "stands for two tools")
        names.add(tool.name)
        if tool.parameters:
            _json_object(f"tools[{at}].function.parameters", tool.parameters)


def _check_demanded(call: GenerateCall) -> None:
    """Check the parameters that arguments are held to."""
    for at, tool in enumerate(call.tools):
        if tool.parameters and call.tool_choice.name in ("", tool.name):
            field = f"tools[{at}].function.parameters"
            check_schema(tool.parameters, field)
            kinds = json.loads(tool.parameters).get("type", "object")
            if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
                raise FieldError(field, "must be of type object, which arguments are")


def _check_depth(field: str, text: str) -> None:
    """Refuse JSON that is nested too deeply to be read and rendered; what is no JSON at all is only text."""
    depth = 0
    for character in _STRING.sub("", text):
        if character in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                raise FieldError(field, f"may be nested at most {MAX_DEPTH} deep")
        elif character in "]}":
            depth -= 1


def _json_object(field: str, text: str) -> dict[str, object]:
    _check_depth(field, text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(field, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FieldError(field, "must be an object")
    return value


def _check_size(field: str, texts: Iterable[tuple[str, str]], config: RouterConfig) -> None:
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


def check_label(field: str, label: str) -> None:
    """Raise FieldError for a name that nobody needs so long, or that is no text."""
    if len(label) > MAX_LABEL_CHARS:
        raise FieldError(field, f"must have at most {MAX_LABEL_CHARS} characters")
    _check_text(field, label)


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
