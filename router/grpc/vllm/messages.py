"""Converts between the messages of vLLM's engine protocol and the types of `router.front.api`.

The protocol's plain scalars cannot be absent: 0 stands for what leaves the distribution as it is. What the model's own
defaults are is the gateway's business there, which knows them from `GetModelInfo`.
"""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from engine.constraints.text import JSON_OBJECT, choices_constraint
from engine.types import Constraint, ConstraintKind, FieldError, SamplingParams, TokenLogprobs
from router.front.api import ApiError, Delta, Finished, GenerateCall, Started, invalid, refuse_more
from router.front.validate import MAX_BIASES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

_NEUTRAL_AT_0 = ("top_p", "repetition_penalty")
_PLAIN = ("top_k", "min_p", "frequency_penalty", "presence_penalty")
_KINDS = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.LARK,
}
_MOST = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_TOKEN_IDS, "logit_bias": MAX_BIASES}
_REFUSED = ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")


def call_from_vllm(request: Any) -> GenerateCall:
    """Return what the gateway asks. Raises ApiError for what is not served here."""
    for name in _REFUSED:
        if request.HasField(name):
            raise invalid(name, "is not supported")
    if request.extra_mm_inputs:
        raise invalid("extra_mm_inputs", "is not supported")
    kind = request.WhichOneof("input")
    if kind is None:
        raise invalid("input", "one of tokenized and text must be set")
    asked = request.sampling_params
    for name, most in _MOST.items():
        refuse_more(name, getattr(asked, name), most)
    field = asked.WhichOneof("constraint")
    optional = {
        name: getattr(asked, name)
        for name in ("max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
        if asked.HasField(name)
    }
    return GenerateCall(
        prompt=request.text if kind == "text" else list(request.tokenized.input_ids),
        n=asked.n or 1,
        min_tokens=asked.min_tokens,
        sampling=_sampling(asked),
        # The protocol's seed is signed.
        seed=asked.seed % (1 << 64) if asked.HasField("seed") else None,
        stop=tuple(asked.stop),
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        logit_bias=tuple(sorted(asked.logit_bias.items())),
        request_id=request.request_id,
        constraint=None if field is None else _constraint(asked, field),
        constraint_field=field or "constraint",
        **optional,
    )


def _constraint(asked: Any, field: str) -> Constraint | None:
    if field == "choice":
        try:
            return choices_constraint(asked.choice.choices, field)
        except FieldError as error:
            raise invalid(field, error.message) from error
    if field == "json_object":
        return JSON_OBJECT if asked.json_object else None
    if field not in _KINDS:
        raise invalid(field, "is not supported")
    return Constraint(_KINDS[field], getattr(asked, field))


def _sampling(asked: Any) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(asked, name) for name in _PLAIN}
    given |= {name: value for name in _NEUTRAL_AT_0 if (value := getattr(asked, name))}
    if asked.HasField("temperature"):
        given["temperature"] = asked.temperature
    # A vocabulary's size, or more, is no limit.
    given["top_k"] = min(given["top_k"], 2**31 - 1)
    return SamplingParams(**given)


class SampleSoFar:
    """What has come of one sample: the protocol's last message repeats all of it."""

    # Mutable state: the ids, their log probabilities, and those of the prompt.

    def __init__(self, index: int) -> None:
        self._index = index
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt: Any = None

    def chunk(self, delta: Delta, started: Started) -> Any:
        """Take new output; return it as a message of the stream."""
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs
        chunk = vllm.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=started.prompt_tokens,
            completion_tokens=len(self._ids),
            index=self._index,
        )
        if delta.logprobs:
            chunk.output_logprobs.CopyFrom(output_logprobs(delta.logprobs))
        if delta.prompt_logprobs:
            self._prompt = input_logprobs(started.prompt_ids[0][0], delta.prompt_logprobs)
            chunk.input_logprobs.CopyFrom(self._prompt)
        return vllm.GenerateResponse(chunk=chunk)

    def complete(self, reason: str, prompt_tokens: int, end: Finished | None = None) -> Any:
        """Return the last message; without an `end` the request was aborted."""
        told = vllm.GenerateComplete(
            output_ids=self._ids,
            finish_reason=reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(self._ids),
            cached_tokens=0 if end is None else end.cached_tokens,
            index=self._index,
        )
        if end is not None and end.stop_matched:
            told.matched_stop_str = end.stop_matched
        if self._logprobs:
            told.output_logprobs.CopyFrom(output_logprobs(self._logprobs))
        if self._prompt is not None:
            told.input_logprobs.CopyFrom(self._prompt)
        return vllm.GenerateResponse(complete=told)


def output_logprobs(logprobs: Sequence[TokenLogprobs]) -> Any:
    """Return log probabilities in the protocol's three columns."""
    return vllm.OutputLogProbs(
        token_logprobs=[one.logprob for one in logprobs],
        token_ids=[one.token for one in logprobs],
        top_logprobs=[_top(one) for one in logprobs],
    )


def input_logprobs(first: int, logprobs: Sequence[TokenLogprobs]) -> Any:
    """Return those of a prompt: of its `first` token, which nothing comes before, there are none."""
    return vllm.InputLogProbs(
        token_logprobs=[vllm.InputTokenLogProb(), *(vllm.InputTokenLogProb(value=one.logprob) for one in logprobs)],
        token_ids=[first, *(one.token for one in logprobs)],
        top_logprobs=[vllm.TopLogProbs(), *map(_top, logprobs)],
    )


def _top(one: TokenLogprobs) -> Any:
    return vllm.TopLogProbs(values=[value for _, value in one.top], token_ids=[token for token, _ in one.top])


def unsupported(what: str) -> ApiError:
    return ApiError("UNIMPLEMENTED", f"{what} is not served here")
