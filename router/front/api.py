"""The calls to the router and its answers, whatever front they came through (gRPC or HTTP)."""

from collections.abc import Sized
from typing import Literal

import msgspec

from engine.messages import RequestStats
from engine.text.messages import ChatMessage as ChatMessage
from engine.text.messages import Tool as Tool
from engine.text.messages import ToolCall as ToolCall
from engine.types import Constraint, EarlyStopping, FinishReason, SamplingParams, TokenLogprobs
from router.client.errors import NOBODY as NOBODY
from router.client.errors import ApiError as ApiError
from router.front.parsers.choose import Parsing


class HttpForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form in which the answer to one HTTP request is written: beside `Started` and the output, all that every byte
    of a streamed answer depends on, and a resumed one shares with its beginning. `created` is in seconds since the
    epoch, `label` the caller's own name for the request (`x-request-id`), empty where there is none."""

    chat: bool
    include_usage: bool
    return_token_ids: bool
    created: int
    label: str = ""
    api: Literal["", "messages", "responses"] = ""
    """The shape: that of OpenAI's first two routes, of Anthropic's `/v1/messages`, or of `/v1/responses`."""
    repeated: str = ""
    """JSON text of what the answer repeats of its request."""
    parsing: Parsing | None = None
    """How the text is taken apart into reasoning, content and calls; None where all of it is content. The intake says,
    since it depends on the model and the prompt."""
    logprobs: int | None = None
    """How many alternatives are written beside each token's log probability; None: neither is written."""
    prompts: int = 1
    """The number of prompts that are answered as one: each has as many samples."""
    echo: tuple[str, ...] | None = None
    """The prompts as they were given, which the text begins with; empty where it is what their ids stand for, as they
    were given so, may be cut, or have log probabilities beside them. None: no echo."""
    says_prompt: bool = False
    """Log probabilities of the prompt's tokens are written."""
    is_prompt_only: bool = False
    """No output is written: the one token of it that was drawn was not asked for."""
    is_counting: bool = False
    """Each chunk of a stream says how many tokens its sample has so far."""
    best: int = 0
    """So many samples of each prompt are written, those with the greatest mean log probability; 0: all."""


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model calls tools: as it likes, not at all, or at least one; `name` is the only one it may."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str = ""


class SamplingOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling values that a caller names; None stands for the served model's own."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` with the named values in their place."""
        named = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(defaults, **named)


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request for text. `prompt` is plain text, a chat, or token ids. None means: the server's default."""

    prompt: str | list[ChatMessage] | list[int]
    n: int = 1
    """Samples of the answer, drawn side by side from one seed."""
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    sampling: SamplingOverrides | SamplingParams = SamplingOverrides()
    """The values that its caller names; or all of them, and then nothing is the model's."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    """What the answer must be like."""
    constraint_field: str = "constraint"
    """The name by which the caller knows it."""
    parse_control_tokens: bool | None = None
    """Whether the names of control tokens in the caller's text become these tokens: by default in a plain prompt, which
    its caller may have rendered, and not in the messages of a chat."""
    request_id: str = ""
    tenant: str = ""
    timeout_s: float | None = None
    priority: int = 0
    logprobs: int | None = None
    """So many alternatives beside the log probability of each output token; None: no log probabilities."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """What is added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty: all."""
    beam_width: int | None = None
    """Beam search in place of drawing: the `n` best answers of so many hypotheses."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    resumable: bool = False
    """Leaving the stream does not cancel the request: for a while its client may come back and go on reading."""
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of a longer prompt, its last ones; -1: as many as the context leaves room for."""
    cache_salt: str = ""
    """Only requests of the same tenant with the same salt find each other's prompts in the cache."""
    form: HttpForm | None = None
    """The form of the answer, where the call came over HTTP."""
    tools: tuple[Tool, ...] = ()
    """The functions that the model of a chat may call."""
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    """More than one call may be made in an answer."""
    chat_template_kwargs: str = ""
    """JSON text of an object: variables for the chat's template."""
    add_generation_prompt: bool = True
    """The chat's text ends with what the template writes before an answer."""
    continue_final_message: bool = False
    """The chat's last message is the beginning of the answer."""
    reasoning_budget: int | None = None
    """The most tokens of a think block, which is then closed; None: only `max_tokens` bounds it."""
    traceparent: str = ""
    """The caller's W3C trace context; it travels as a header or as metadata."""
    session: str = ""
    """The caller's name for a conversation, whose requests are to go to the same workers; a header, or metadata."""


class ModelFacts(msgspec.Struct, frozen=True):
    """The model as `/v1/models` describes it, beside the names under which it is served: what its file calls it, its
    context in tokens, and how a request is sampled that says nothing of it."""

    root: str
    max_model_len: int
    default_sampling: SamplingParams


class TokenizedText(msgspec.Struct, frozen=True):
    """A text's token ids, and if they were asked for, the tokens as the vocabulary writes them."""

    ids: list[int]
    strings: list[str]


class Started(msgspec.Struct, frozen=True):
    """A worker has taken the request; where it is resumable, all of its samples. A client whose connection broke comes
    back with `resume_token`, a secret. `form` is the call's: how a stream that began over HTTP goes on there."""

    request_id: str
    model: str
    prompt_tokens: int
    resume_token: str = ""
    form: HttpForm | None = None
    samples: int = 1
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    """The prompt, where more is said of it; several where several requests are answered as one."""
    had_text: tuple[str, ...] = ()
    """The text that the client of a stream that goes on has, by sample, where the form takes texts apart."""
    had_ids: tuple[tuple[int, ...], ...] = ()
    """The output tokens that the client of a stream that goes on has, by sample, where the form's text offsets go on
    behind them."""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New output. `text` may be empty while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    sample: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of each of the tokens, where they are asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first of sample 0: those of the prompt's tokens from the second on, where they are asked for."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a sample that ended well; of the request, with the last of them. `stats.stages` holds all nine stages
    and `unattributed`, in seconds."""

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    stats: RequestStats
    ttft_s: float
    itl_mean_s: float
    itl_p99_s: float
    e2e_s: float
    stop_matched: str = ""
    sample: int = 0
    beam_score: float | None = None
    reasoning_tokens: int = 0
    """Output tokens of the reasoning, where the form of the answer tells them apart."""


class Position(msgspec.Struct, frozen=True):
    """A client's place in one sample: output tokens, and bytes of their text, since text may lag behind tokens."""

    next_index: int = 0
    text_bytes: int = 0


GenerateEvent = Started | Delta | Finished

MAX_PARTS = 16_384
"""Parts of content in all messages of a chat, and calls."""
SESSION_HEADER = "x-headrace-session"
"""The header, or the metadata, with `GenerateCall.session`."""


def invalid(field: str, message: str) -> ApiError:
    """The caller's fault; `field` is empty where no field is to blame."""
    return ApiError("INVALID_ARGUMENT", f"{field}: {message}" if field else message, field)


def refuse_more(field: str, items: Sized | None, most: int) -> None:
    """Raise `ApiError` INVALID_ARGUMENT where there are more than `most` items: before anything is made of each."""
    if items is not None and len(items) > most:
        raise invalid(field, f"at most {most} are allowed, not {len(items)}")


def refuse_more_parts(field: str, parts: int) -> None:
    """The same for the parts of all messages of a chat, and the calls in them."""
    if parts > MAX_PARTS:
        raise invalid(field, f"at most {MAX_PARTS} parts and calls are allowed, not {parts}")
