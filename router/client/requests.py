"""What a caller writes in Python becomes a request, and what comes back becomes one value per sample."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from protos import headrace_pb2 as pb
from router.client.channel import can_travel
from router.client.errors import ApiError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a chat: messages with `role` and `content`."""
STAGES = (
    "admit", "route", "reserve", "prefill_queue", "prefill_run", "migrate", "decode_queue", "decode_run", "stream_out",
    "unattributed",
)  # fmt: skip
"""What a request's time goes to, in order: a map of the schema comes in any."""
MAX_TIMEOUT_S = 24 * 3600.0
"""The longest deadline that servers take."""
_SAMPLING = frozenset(pb.Sampling.DESCRIPTOR.fields_by_name)
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True)
class GeneratedText:
    """One sample of an answer, whole. `cached_tokens` of the prompt's tokens had not to be computed."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    request_id: str
    prefill_worker: str
    decode_worker: str
    ttft_s: float
    e2e_s: float
    stages_s: Mapping[str, float] = field(repr=False)
    """In the order in which a request passes them; what a newer server has beside them comes last."""
    logprobs: tuple[float, ...] = field(repr=False)
    """Those of its tokens, where `logprobs` was asked for."""
    finished: pb.Finished = field(repr=False)
    """All that the server says at the end."""
    token_logprobs: tuple[pb.TokenLogprobs, ...] = field(default=(), repr=False)
    """The same with the alternatives: each has `token`, `logprob` and `top`."""
    prompt_logprobs: tuple[pb.TokenLogprobs, ...] = field(default=(), repr=False)
    """Those of the prompt's tokens from the second on, where `prompt_logprobs` was asked for."""


def chat_messages(prompt: Sequence[Mapping[str, Any]]) -> pb.ChatMessages:
    """Return a chat's messages. Raises ApiError for what is no chat."""
    with _refusing("messages"):
        found: pb.ChatMessages = ParseDict({"messages": [dict(message) for message in prompt]}, pb.ChatMessages())
    return found


def generate_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return what asks for an answer to `prompt`. `options` are fields of `GenerateRequest` and `Sampling`, by name;
    None leaves one out. Raises ApiError for a name or a value that no field has, and for what is no prompt."""
    given = {name: value for name, value in options.items() if value is not None}
    sampling = {name: given.pop(name) for name in list(given) if name in _SAMPLING}
    if isinstance(given.get("choices"), list | tuple):
        given["choices"] = {"choices": list(given["choices"])}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    with _refusing("request"):
        if sampling:
            given["sampling"] = {**given.get("sampling", {}), **sampling}
        request: pb.GenerateRequest = ParseDict(given, pb.GenerateRequest())
    if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise ApiError("INVALID_ARGUMENT", "prompt: must be a text, token ids or a chat", "prompt")
    with _refusing("prompt"):
        if isinstance(prompt, str):
            request.prompt = prompt
        elif prompt and isinstance(prompt[0], Mapping):
            request.chat.CopyFrom(chat_messages(prompt))  # type: ignore[arg-type]
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    return request


def tokenize_request(prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> pb.TokenizeRequest:
    """Return what asks for the ids of a text or a chat. Raises ApiError for an option that there is not, and for what
    is neither."""
    with _refusing("request"):
        request = pb.TokenizeRequest(**options)
    with _refusing("prompt"):
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.chat.CopyFrom(chat_messages(prompt))
    return request


def detokenize_request(token_ids: Sequence[int]) -> pb.DetokenizeRequest:
    """Return what asks for the text of token ids. Raises ApiError for what is none."""
    with _refusing("token_ids"):
        return pb.DetokenizeRequest(token_ids=token_ids)


def resume_request(token: str) -> pb.ResumeRequest:
    """Return what asks for an answer from its beginning. Raises ApiError for what is no token."""
    with _refusing("resume_token"):
        request = pb.ResumeRequest(resume_token=token)
    if not token:
        raise ApiError("INVALID_ARGUMENT", "resume_token: must not be empty", "resume_token")
    return request


def call_metadata(options: Mapping[str, Any], keys: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the options that travel as metadata, under their `keys`; None and "" leave one out. Raises ApiError for a
    value that cannot."""
    given = {name: options[name] for name in keys if options.get(name) not in (None, "")}
    for name, value in given.items():
        if not (isinstance(value, str) and can_travel(value)):
            raise ApiError("INVALID_ARGUMENT", f"{name}: only printable ASCII can travel", name)
    return tuple((keys[name], value) for name, value in given.items())


def check_timeout(timeout_s: float) -> None:
    """Raise ApiError for a deadline that no server takes."""
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        message = f"timeout_s: must be above 0 and at most {MAX_TIMEOUT_S:g} seconds"
        raise ApiError("INVALID_ARGUMENT", message, "timeout_s")


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Raise ApiError, about the field of this name, for a value that a message cannot hold."""
    try:
        yield
    except UnicodeEncodeError as error:
        message = f"{name}: is not valid Unicode at character {error.start}"
        raise ApiError("INVALID_ARGUMENT", message, name) from error
    except (ParseError, TypeError, ValueError) as error:
        raise ApiError("INVALID_ARGUMENT", f"{name}: {error}", name) from error


class GatheredAnswer:
    """Collects an answer's events; its samples stand in order when all have ended."""

    # Mutable state: the name of the request, and what has come of each sample.

    def __init__(self) -> None:
        self._request_id = ""
        self._texts: dict[int, list[str]] = {}
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[pb.TokenLogprobs]] = {}
        self._prompt: list[pb.TokenLogprobs] = []
        self._ends: dict[int, pb.Finished] = {}

    def take(self, event: pb.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "started":
            self._request_id = event.started.request_id
        elif kind == "delta":
            self._texts.setdefault(event.delta.sample, []).append(event.delta.text)
            self._ids.setdefault(event.delta.sample, []).extend(event.delta.token_ids)
            self._logprobs.setdefault(event.delta.sample, []).extend(event.delta.logprobs)
            self._prompt.extend(event.delta.prompt_logprobs)
        elif kind == "finished":
            self._ends[event.finished.sample] = event.finished

    def samples(self) -> list[GeneratedText]:
        return [self._sample(index, self._ends[index]) for index in sorted(self._ends)]

    def _sample(self, index: int, end: pb.Finished) -> GeneratedText:
        told = tuple(self._logprobs.get(index, ()))
        return GeneratedText(
            text="".join(self._texts.get(index, ())),
            token_ids=tuple(self._ids.get(index, ())),
            finish_reason=_REASONS.get(end.reason, "unknown"),
            prompt_tokens=end.usage.prompt_tokens,
            output_tokens=end.usage.output_tokens,
            cached_tokens=end.usage.cached_tokens,
            request_id=self._request_id,
            prefill_worker=end.prefill_worker,
            decode_worker=end.decode_worker,
            ttft_s=end.timings.ttft_s,
            e2e_s=end.timings.e2e_s,
            stages_s=_in_order(end.timings.stages_s),
            logprobs=tuple([one.logprob for one in told]),
            finished=end,
            token_logprobs=told,
            prompt_logprobs=tuple(self._prompt),
        )


def _in_order(stages_s: Mapping[str, float]) -> dict[str, float]:
    return {name: stages_s[name] for name in (*STAGES, *sorted(set(stages_s) - set(STAGES))) if name in stages_s}
