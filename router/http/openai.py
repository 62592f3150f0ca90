"""The request bodies of OpenAI's two text routes, read into a `GenerateCall`. Pure: bytes in, call or `ApiError` out.

Only syntax and shape are judged here; the ranges of values are judged behind the frontend, where both fronts meet.
Three rules for fields (docs/http.md repeats them for users):

- null means absent, and absent means the server's default;
- a field that would change the answer and is not supported (`tools`, `logprobs`, …) is refused unless it holds a value
  that asks for nothing, because an answer that silently ignored it would be wrong;
- any other field is ignored, as clients send many that only matter elsewhere (`user`, `store`, `metadata`).

A duplicate key counts once, with its last value, as in every common JSON reader.
"""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from engine.constraints.text import JSON_OBJECT, choices_constraint
from engine.types import Constraint, ConstraintKind, EarlyStopping, FieldError, SamplingParams
from router.front.api import ApiError, ChatMessage, GenerateCall, HttpForm, invalid

# Integers wider than this cannot travel in a record; JSON itself has no limit.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_STOPPING = {
    None: EarlyStopping.HEURISTIC,
    False: EarlyStopping.HEURISTIC,
    True: EarlyStopping.FULL,
    "never": EarlyStopping.NEVER,
}
_SAME = (
    "n", "model", "min_tokens", "seed", "ignore_eos", "resumable", "priority", "tenant", "beam_width", "length_penalty",
    "parse_control_tokens",
)
"""Fields that a call has under the same name, and with the same values."""
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    # What other servers call constraints on the answer: dropped, the answer would break what its reader relies on.
    **dict.fromkeys(("guided_whitespace_pattern", "guided_decoding_backend", "structural_tag", "json_schema"), ()),
    **dict.fromkeys(("grammar", "regex", "ebnf", "allowed_token_ids", "bad_words", "logits_processors"), ()),
}
"""Fields, with the values beside null with which they ask for nothing."""


ABSENT = msgspec.Raw()


class JsonSchema(msgspec.Struct):
    """A schema is kept to the letter whether `strict` or not."""

    schema: msgspec.Raw = ABSENT
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's name for what the `guided_` fields ask, one of them at a time."""

    json: msgspec.Raw = ABSENT
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None


class OpenAIRequest(msgspec.Struct, kw_only=True):
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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = ABSENT
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatRequest(OpenAIRequest, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Int | None = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    prompt: str | list[str | Int | list[Int]]


class Parsed(msgspec.Struct, frozen=True):
    """A request ready to run, and how its answer is to be written; `call.form` is `form`."""

    call: GenerateCall
    form: HttpForm
    stream: bool


R = TypeVar("R", bound=OpenAIRequest)


def _decoder(kind: type[R]) -> msgspec.json.Decoder[R]:
    """Reads `kind` and every unsupported field, whatever that holds."""
    unsupported = [(name, object, None) for name in UNSUPPORTED]
    whole: Any = msgspec.defstruct(kind.__name__, unsupported, bases=(kind,), kw_only=True)
    return msgspec.json.Decoder(whole)


_chat = _decoder(ChatRequest)
_completion = _decoder(CompletionRequest)
_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


def parse_chat(body: bytes, *, label: str = "", timeout_s: float | None = None, created: int = 0) -> Parsed:
    """Read a `/v1/chat/completions` body that came at `created`, in seconds since the epoch. `label` and `timeout_s`
    come from headers; the shorter timeout counts.

    Raises `ApiError` INVALID_ARGUMENT with the path of the field at fault.
    """
    request = _decode(_chat, body)
    if not request.messages:
        raise invalid("messages", "at least one message is needed")
    limit, other = request.max_tokens, request.max_completion_tokens
    if limit is not None and other is not None and limit != other:
        raise invalid("max_tokens", "disagrees with max_completion_tokens; send one of them")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    return _parsed(request, messages, other if limit is None else limit, label, timeout_s, created)


def parse_completion(body: bytes, *, label: str = "", timeout_s: float | None = None, created: int = 0) -> Parsed:
    """Read a `/v1/completions` body: text, a list of one text, token ids, or a list of one list of token ids."""
    request = _decode(_completion, body)
    return _parsed(request, _prompt(request.prompt), request.max_tokens, label, timeout_s, created)


def timeout_from(value: str, field: str) -> float:
    """Read seconds written as text, as in a header. Raises `ApiError` unless they are finite and above zero."""
    try:
        seconds = float(value)
    except ValueError:
        raise invalid(field, "must be a number of seconds") from None
    return _timeout(seconds, field)


def _decode(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _located(str(error)) from error
    except msgspec.DecodeError as error:
        raise invalid("", f"the body is not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise invalid("", f"the body is not valid UTF-8: {error.reason} at byte {error.start} of a string") from error
    except RecursionError as error:
        raise invalid("", "the body is nested too deeply") from error


def _located(text: str) -> ApiError:
    """msgspec's message with its `$.path` turned into a field name."""
    path = ""
    if (match := _PATH.match(text)) is not None:
        text, path = match["what"], match["path"]
    if (match := _MISSING.search(text)) is not None:
        return invalid(f"{path}.{match['name']}" if path else match["name"], "is required")
    return invalid(path, text[:1].lower() + text[1:]) if path else invalid("", f"the body: {text}")


def _parsed(
    request: OpenAIRequest,
    prompt: str | list[ChatMessage] | list[int],
    max_tokens: int | None,
    label: str,
    header_timeout_s: float | None,
    created: int,
) -> Parsed:
    for name, neutral in UNSUPPORTED.items():
        value: object = getattr(request, name)
        # `==` alone would let 1 pass for true and 0 for false.
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in neutral):
            raise invalid(name, "only 1 is supported" if name == "best_of" else "is not supported")
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise invalid("stream_options", "is allowed only with stream: true")
    if request.resumable and not stream:
        raise invalid("resumable", "is allowed only with stream: true")
    if request.seed is not None and request.seed.bit_length() > 64:
        raise invalid("seed", "must fit in 64 bits")
    stop, options = request.stop, request.stream_options or StreamOptions()
    timeouts_s = [_timeout(one_s, "timeout") for one_s in (header_timeout_s, request.timeout) if one_s is not None]
    form = HttpForm(
        chat=isinstance(request, ChatRequest),
        include_usage=bool(options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        created=created,
        label=label,
    )
    field, constraint = requested_constraint(request)
    call = GenerateCall(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(**_given(request, SamplingParams.__struct_fields__)),
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        request_id=label,
        timeout_s=min(timeouts_s, default=None),
        early_stopping=_STOPPING[request.early_stopping],
        form=form,
        constraint=constraint,
        constraint_field=field,
        **_given(request, _SAME),
    )
    return Parsed(call, form, stream)


def requested_constraint(request: OpenAIRequest) -> tuple[str, Constraint | None]:
    """Return what the answer must be like, if anything, with the name of the field that says so. Raises `ApiError`
    where several do."""
    found: list[tuple[str, Constraint]] = []

    def add(field: str, kind: ConstraintKind, text: str | None) -> None:
        if text is not None:
            found.append((field, Constraint(kind, text)))

    def choose(field: str, choices: list[str] | None) -> None:
        if choices is not None:
            try:
                found.append((field, choices_constraint(choices, field)))
            except FieldError as error:
                raise invalid(field, error.message) from error

    wanted = request.response_format
    if wanted is not None and wanted.type == "json_object":
        found.append(("response_format", JSON_OBJECT))
    if wanted is not None and wanted.type == "json_schema":
        schema = None if wanted.json_schema is None else _schema(wanted.json_schema.schema)
        if schema is None:
            raise invalid("response_format.json_schema.schema", "is required")
        add("response_format.json_schema.schema", ConstraintKind.JSON_SCHEMA, schema)
    add("guided_json", ConstraintKind.JSON_SCHEMA, _schema(request.guided_json))
    add("guided_regex", ConstraintKind.REGEX, request.guided_regex)
    choose("guided_choice", request.guided_choice)
    add("guided_grammar", ConstraintKind.LARK, request.guided_grammar)
    if (asked := request.structured_outputs) is not None:
        add("structured_outputs.json", ConstraintKind.JSON_SCHEMA, _schema(asked.json))
        add("structured_outputs.regex", ConstraintKind.REGEX, asked.regex)
        choose("structured_outputs.choice", asked.choice)
        add("structured_outputs.grammar", ConstraintKind.LARK, asked.grammar)
        if asked.json_object:
            found.append(("structured_outputs.json_object", JSON_OBJECT))
    if len(found) > 1:
        raise invalid(found[1][0], f"is not allowed with {found[0][0]}: an answer has one constraint")
    return found[0] if found else ("constraint", None)


def _schema(raw: msgspec.Raw) -> str | None:
    """Return a schema's text as it came: the order of its properties is that of the answer. It may come as JSON, or as
    a string that holds JSON; null is nothing."""
    text = bytes(raw).strip()
    if text in (b"", b"null"):
        return None
    held: str = msgspec.json.decode(text) if text.startswith(b'"') else text.decode()
    return held


def _given(request: OpenAIRequest, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that the client sent; what it left out keeps its default."""
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def _message(message: Message, path: str) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    content = message.content
    if content is None:
        raise invalid(f"{path}.content", "is required")
    if isinstance(content, str):
        return ChatMessage(role, content)
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise invalid(f"{path}.content[{i}].type", "only parts of type text are supported")
        if part.text is None:
            raise invalid(f"{path}.content[{i}].text", "is required")
        texts.append(part.text)
    return ChatMessage(role, "\n".join(texts))


def _prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt[0]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) != len(prompt):
        raise invalid(
            "prompt",
            "must be one text or one list of token ids; send several prompts as several requests",
        )
    return ids


def _timeout(seconds: float, field: str) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise invalid(field, "must be a finite number of seconds above zero")
    return seconds
