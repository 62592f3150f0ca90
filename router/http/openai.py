"""The request bodies of OpenAI's two text routes, read into a `GenerateCall`. Pure: bytes in, call or `ApiError` out.

Only syntax and shape are judged here; the ranges of values are judged behind the frontend, where both fronts meet.
Three rules for fields (docs/http.md repeats them for users):

- null means absent, and absent means the server's default;
- a field that would change the answer and is not supported (`tools`, `suffix`, …) is refused unless it holds a value
  that asks for nothing, because an answer that silently ignored it would be wrong; and so is any unknown field, which
  may be one that is supported, misspelt;
- fields that never change an answer (`user`, `metadata`, …: `router/http/fields.py`) are let pass.

A duplicate key counts once, with its last value, as in every common JSON reader.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec

from engine.plan import MAX_LOGPROBS
from engine.types import EarlyStopping
from router.front.api import ChatMessage, GenerateCall, HttpForm, SamplingOverrides, invalid, refuse_more
from router.front.validate import MAX_ALLOWED_IDS, MAX_BIASES, MAX_COUNT, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from router.http.chat_fields import ChoiceField, Message, ToolField, chat_choice, chat_messages, chat_tools, raw_text
from router.http.constraint_fields import ConstraintFields, requested_constraint
from router.http.fields import FieldsReader

R = TypeVar("R", bound=msgspec.Struct)
# Integers wider than this cannot travel in a record; JSON itself has no limit.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_STOPPING = {
    None: EarlyStopping.HEURISTIC,
    False: EarlyStopping.HEURISTIC,
    True: EarlyStopping.FULL,
    "never": EarlyStopping.NEVER,
}
_SAME = (
    "n", "model", "min_tokens", "seed", "ignore_eos", "resumable", "priority", "tenant", "beam_width", "length_penalty",
    "parse_control_tokens", "truncate_prompt_tokens", "cache_salt", "prompt_logprobs",
)
"""Fields that a call has under the same name, and with the same values."""
MAX_CHOICES = 128
"""Answers to several prompts, with their samples."""
_MOST = {
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_BIASES,
    "allowed_token_ids": MAX_ALLOWED_IDS,
}
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "store": (False,),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    **dict.fromkeys(("chat_template", "reasoning_effort", "thinking_token_budget"), ()),
    # What other servers call constraints on the answer: dropped, the answer would break what its reader relies on.
    **dict.fromkeys(("guided_whitespace_pattern", "guided_decoding_backend", "structural_tag", "json_schema"), ()),
    **dict.fromkeys(("grammar", "regex", "ebnf"), ()),
}
"""Fields, with the values beside null with which they ask for nothing."""

class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: object = None
    """Let pass: it pads chunks against those who watch the line."""
    continuous_usage_stats: bool | None = None


class OpenAIRequest(ConstraintFields, kw_only=True):
    """The fields that both routes share."""

    model: str | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    timeout: float | None = None
    resumable: bool | None = None
    priority: Int | None = None
    tenant: str | None = None
    beam_width: Int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    parse_control_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    cache_salt: str | None = None
    logprobs: bool | Int | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    prompt_logprobs: Int | None = None


class ChatRequest(OpenAIRequest, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw(b"")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[ToolField] | None = None
    tool_choice: ChoiceField = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] | None = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    prompt: str | list[str | Int | list[Int]]
    echo: bool | None = None
    best_of: Int | None = None


class Parsed(msgspec.Struct, frozen=True):
    """A request ready to run, and how its answer is to be written; `call.form` is `form`. `prompts` are all of its
    prompts, the first of which is the call's."""

    call: GenerateCall
    form: HttpForm
    stream: bool
    prompts: tuple[str | list[int], ...] = ()

    @property
    def can_resume(self) -> bool:
        """True where a client could come back to the answer."""
        return self.stream and not self.form.echo and len(self.prompts) < 2

    @property
    def calls(self) -> list[GenerateCall]:
        """A call for each prompt."""
        return [msgspec.structs.replace(self.call, prompt=prompt) for prompt in self.prompts] or [self.call]


def _reader(kind: type[R]) -> FieldsReader[R]:
    own = {field.name for field in msgspec.structs.fields(kind)}
    return FieldsReader(kind, {name: values for name, values in UNSUPPORTED.items() if name not in own})


CHAT = _reader(ChatRequest)
COMPLETION = _reader(CompletionRequest)


def parse_chat(body: bytes, *, label: str = "", timeout_s: float | None = None, created: int = 0) -> Parsed:
    """Read a `/v1/chat/completions` body that came at `created`, in seconds since the epoch. `label` and `timeout_s`
    come from headers; the shorter timeout counts.

    Raises `ApiError` INVALID_ARGUMENT with the path of the field at fault.
    """
    request = CHAT.read(body)
    if not request.messages:
        raise invalid("messages", "at least one message is needed")
    limit, other = request.max_tokens, request.max_completion_tokens
    if limit is not None and other is not None and limit != other:
        raise invalid("max_tokens", "disagrees with max_completion_tokens; send one of them")
    messages = chat_messages(request.messages)
    return _parsed(request, messages, other if limit is None else limit, label, timeout_s, created)


def parse_completion(body: bytes, *, label: str = "", timeout_s: float | None = None, created: int = 0) -> Parsed:
    """Read a `/v1/completions` body: a text or a list of them, token ids or a list of lists of them."""
    request = COMPLETION.read(body)
    prompts = _prompts(request.prompt)
    limit, best_of = request.max_tokens, request.best_of
    is_prompt_only = limit == 0
    if is_prompt_only and not (request.echo or request.prompt_logprobs is not None):
        raise invalid("max_tokens", "must be at least 1 without echo")
    parsed = _parsed(request, prompts[0], 1 if is_prompt_only else limit, label, timeout_s, created)
    call, form, drawn = parsed.call, parsed.form, parsed.call.n
    if drawn < 1:
        raise invalid("n", "must be at least 1")
    if best_of is not None and best_of < drawn:
        raise invalid("best_of", "must not be below n")
    if best_of is not None and best_of > 1:
        if parsed.stream:
            raise invalid("best_of", "is allowed only without stream: the best are known at the end")
        if call.beam_width is not None:
            raise invalid("best_of", "is not allowed with beam_width")
        drawn, form = best_of, msgspec.structs.replace(form, best=drawn)
        call = msgspec.structs.replace(call, logprobs=call.logprobs or 0)
    if len(prompts) * drawn > MAX_CHOICES and len(prompts) > 1:
        raise invalid("prompt", f"asks for {len(prompts) * drawn} answers with its samples; at most {MAX_CHOICES}")
    if request.echo:
        if parsed.stream and (is_prompt_only or form.logprobs is not None):
            raise invalid("echo", "is not streamed with logprobs, or alone")
        # Beside log probabilities the text is that of the tokens, which `text_offset` counts; and it is what was read.
        is_given = form.logprobs is None and request.truncate_prompt_tokens is None
        texts = tuple([prompt if is_given and isinstance(prompt, str) else "" for prompt in prompts])
        form = msgspec.structs.replace(form, echo=texts)
        if form.logprobs is not None:
            told = max(form.logprobs, request.prompt_logprobs or 0)
            call = msgspec.structs.replace(call, prompt_logprobs=told)
    elif is_prompt_only and parsed.stream:
        raise invalid("max_tokens", "must be at least 1 where it is streamed")
    if call.resumable and (request.echo or len(prompts) > 1):
        raise invalid("resumable", "is not allowed with echo, or several prompts")
    form = msgspec.structs.replace(form, prompts=len(prompts), is_prompt_only=is_prompt_only)
    return Parsed(msgspec.structs.replace(call, n=drawn, form=form), form, parsed.stream, tuple(prompts))


def timeout_from(value: str, field: str) -> float:
    """Read seconds written as text, as in a header. Raises `ApiError` unless they are finite and above zero."""
    try:
        seconds = float(value)
    except ValueError:
        raise invalid(field, "must be a number of seconds") from None
    return _timeout(seconds, field)


def _parsed(
    request: OpenAIRequest,
    prompt: str | list[ChatMessage] | list[int],
    max_tokens: int | None,
    label: str,
    header_timeout_s: float | None,
    created: int,
) -> Parsed:
    stream = bool(request.stream)
    if request.stream_options is not None:
        if not stream:
            raise invalid("stream_options", "is allowed only with stream: true")
        if request.stream_options.continuous_usage_stats and not request.stream_options.include_usage:
            raise invalid("stream_options.continuous_usage_stats", "is allowed only with include_usage")
    if request.prompt_logprobs is not None and stream:
        raise invalid("prompt_logprobs", "is allowed only without stream")
    if request.resumable and not stream:
        raise invalid("resumable", "is allowed only with stream: true")
    if request.seed is not None and request.seed.bit_length() > 64:
        raise invalid("seed", "must fit in 64 bits")
    if request.allowed_token_ids == []:
        raise invalid("allowed_token_ids", "must name at least one token")
    stop, options = request.stop, request.stream_options or StreamOptions()
    if isinstance(stop, list):
        refuse_more("stop", stop, MAX_STOP_STRINGS)
    for name, most in _MOST.items():
        refuse_more(name, getattr(request, name), most)
    timeouts_s = [_timeout(one_s, "timeout") for one_s in (header_timeout_s, request.timeout) if one_s is not None]
    form = HttpForm(
        chat=isinstance(request, ChatRequest),
        include_usage=bool(options.include_usage),
        is_counting=bool(options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        created=created,
        label=label,
        logprobs=_logprobs(request),
        says_prompt=request.prompt_logprobs is not None,
    )
    field, constraint = requested_constraint(request)
    call = GenerateCall(
        prompt=prompt,
        **(_chat_options(request) if isinstance(request, ChatRequest) else {}),
        max_tokens=max_tokens,
        sampling=_sampling(request),
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        request_id=label,
        logprobs=form.logprobs,
        logit_bias=_biases(request.logit_bias or {}),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        timeout_s=min(timeouts_s, default=None),
        early_stopping=_STOPPING[request.early_stopping],
        form=form,
        constraint=constraint,
        constraint_field=field,
        **_given(request, _SAME),
    )
    return Parsed(call, form, stream)


def _sampling(request: OpenAIRequest) -> SamplingOverrides:
    """Return the sampling that a body gives. Many who draw from all tokens write `top_k` as -1."""
    given = SamplingOverrides(**_given(request, SamplingOverrides.__struct_fields__))
    return msgspec.structs.replace(given, top_k=0) if given.top_k == -1 else given


def _logprobs(request: OpenAIRequest) -> int | None:
    """Return how many alternatives are asked for beside the log probability of each token; None: neither. A chat says
    whether, and how many by another field; a completion says how many."""
    wanted, top = request.logprobs, request.top_logprobs
    if isinstance(request, ChatRequest):
        if wanted is not None and not isinstance(wanted, bool):
            raise invalid("logprobs", "must be true or false; top_logprobs says how many alternatives")
        if top and not wanted:
            raise invalid("top_logprobs", "is allowed only with logprobs: true")
        return top or 0 if wanted else None
    if top:
        raise invalid("top_logprobs", "is a chat's; logprobs says how many alternatives")
    if wanted is True:
        raise invalid("logprobs", "must be the number of alternatives")
    return None if wanted is False else wanted


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Return biases by token id. Raises ApiError."""
    for name, amount in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise invalid("logit_bias", "must have token ids as names")
        if not math.isfinite(amount):
            raise invalid("logit_bias", "must have finite numbers as values")
    return tuple(sorted({int(name): amount for name, amount in given.items()}.items()))


def _chat_options(request: ChatRequest) -> dict[str, Any]:
    """Return what decides how a chat is rendered, beside its messages."""
    if request.continue_final_message and request.add_generation_prompt:
        raise invalid("continue_final_message", "is not allowed with add_generation_prompt")
    options = _given(request, ("add_generation_prompt", "continue_final_message", "parallel_tool_calls"))
    options["tools"] = chat_tools(request.tools)
    options["tool_choice"] = chat_choice(request.tool_choice)
    if request.thinking_token_budget is not None:
        options["reasoning_budget"] = request.thinking_token_budget
    kwargs = raw_text(request.chat_template_kwargs, "chat_template_kwargs")
    if request.reasoning_effort is not None:
        kwargs = _with_effort(kwargs, request.reasoning_effort)
    if kwargs:
        options["chat_template_kwargs"] = kwargs
    return options


def _with_effort(kwargs: str, effort: str) -> str:
    """Return a template's variables with the one for the effort: a template that does not have it refuses it."""
    name, said = "reasoning_effort", msgspec.json.encode(effort)
    try:
        variables = msgspec.json.decode(kwargs or "{}", type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise invalid("chat_template_kwargs", "must be a JSON object") from error
    if bytes(variables.get(name, said)) not in (said, b"null"):
        raise invalid(name, f"disagrees with chat_template_kwargs.{name}; send one of them")
    return msgspec.json.encode(variables | {name: msgspec.Raw(said)}).decode()


def _given(request: OpenAIRequest, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that the client sent; what it left out keeps its default."""
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return all prompts: one text, some, one list of token ids, or some."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        return [[]]
    is_one = isinstance(prompt[0], int)
    if not is_one and len(prompt) > MAX_CHOICES:
        raise invalid("prompt", f"asks for {len(prompt)} answers; at most {MAX_CHOICES}")
    if len(set(map(type, prompt))) > 1:  # sooner than asking each of a hundred thousand ids what it is
        raise invalid("prompt", "must be a text or a list of token ids, or a list of either")
    return [cast(list[int], prompt)] if is_one else cast(list[str | list[int]], prompt)


def _timeout(seconds: float, field: str) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise invalid(field, "must be a finite number of seconds above zero")
    return seconds
