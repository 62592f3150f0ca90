"""Converts between the public protobuf messages and the types of `router.front.api`. Nothing else knows both."""

from collections.abc import Sequence
from typing import Any

from engine.constraints.text import choices_constraint
from engine.messages import RequestStats
from engine.types import (
    Constraint,
    ConstraintKind,
    EarlyStopping,
    FieldError,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
)
from protos import headrace_pb2 as pb
from router.front.api import (
    ChatMessage,
    Delta,
    Finished,
    GenerateCall,
    GenerateEvent,
    Position,
    SamplingOverrides,
    Started,
    Tool,
    ToolCall,
    refuse_more,
    refuse_more_parts,
)
from router.front.tokenizing import Steps, at_once
from router.front.validate import (
    MAX_ALLOWED_IDS,
    MAX_BIASES,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
)
from telemetry.labels import STAGES

_SAMPLING = SamplingOverrides.__struct_fields__
_SCALARS = (
    "model", "max_tokens", "min_tokens", "seed", "ignore_eos", "request_id", "tenant", "timeout_s", "resumable", "n",
    "priority", "beam_width", "length_penalty", "parse_control_tokens", "truncate_prompt_tokens", "cache_salt",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "logprobs", "prompt_logprobs",
)
# What our records and the messages have under the same names.
_STARTED = ("request_id", "model", "prompt_tokens", "resume_token", "samples")
_USAGE = ("prompt_tokens", "output_tokens", "cached_tokens")
_TIMINGS = ("ttft_s", "itl_mean_s", "itl_p99_s", "e2e_s")
_STATS = ("prefill_worker", "decode_worker", "prefill_cached_tokens", "decode_cached_tokens")
_MIGRATED = {"blocks": "migrated_blocks", "bytes": "migrated_bytes", "seconds": "migration_s", "transport": "transport"}
"""Names in the message `Migration`, and in `RequestStats`."""
_STOPPING = {
    EarlyStopping.FULL: pb.EARLY_STOPPING_FULL,
    EarlyStopping.HEURISTIC: pb.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.NEVER: pb.EARLY_STOPPING_NEVER,
}
_MOST = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_BIASES,
    "allowed_token_ids": MAX_ALLOWED_IDS,
}
MAX_POSITIONS = 4096
PIECE_TOKENS = 128
"""With 20 alternatives so many tokens take some milliseconds to convert."""
_KINDS: dict[str, ConstraintKind] = {kind.value: kind for kind in ConstraintKind}
"""By the names of fields."""
_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


def call_from_proto(request: pb.GenerateRequest) -> GenerateCall:
    """Return what the caller asks; unset fields keep their defaults. Raises FieldError without an input, and ApiError
    for lists that are too long."""
    for name, most in _MOST.items():
        refuse_more(name, getattr(request, name), most)
    prompt = _prompt(request)
    if prompt is None:
        raise FieldError("prompt", "one of prompt, chat and token_ids must be set")
    given = {name: getattr(request, name) for name in _SCALARS if request.HasField(name)}
    drawn = {n: getattr(request.sampling, n) for n in _SAMPLING if request.sampling.HasField(n)}
    stopping = {number: name for name, number in _STOPPING.items()}
    field = request.WhichOneof("constraint")
    return GenerateCall(
        constraint=None if field is None else _constraint(request, field),
        constraint_field=field or "constraint",
        prompt=prompt,
        early_stopping=stopping.get(request.early_stopping, EarlyStopping.HEURISTIC),
        sampling=SamplingOverrides(**drawn),
        tools=_tools(request.tools),
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        logit_bias=tuple(sorted(request.logit_bias.items())),
        allowed_token_ids=tuple(request.allowed_token_ids),
        **given,
    )


def _constraint(request: pb.GenerateRequest, field: str) -> Constraint:
    if field == "choices":
        return choices_constraint(request.choices.choices, field)
    return Constraint(_KINDS[field], getattr(request, field))


def tokenize_call(request: pb.TokenizeRequest) -> GenerateCall:
    """Return the call whose prompt is asked for. Raises as `call_from_proto` does."""
    prompt = _prompt(request)
    if prompt is None:
        raise FieldError("prompt", "one of prompt and chat must be set")
    names = (
        *("model", "parse_control_tokens", "tenant"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    )
    given = {name: getattr(request, name) for name in names if request.HasField(name)}
    return GenerateCall(prompt=prompt, tools=_tools(request.tools), **given)


def _tools(tools: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    refuse_more("tools", tools, MAX_TOOLS)
    return tuple(Tool(one.name, one.description, one.parameters_json) for one in tools)


def _prompt(request: Any) -> str | list[ChatMessage] | list[int] | None:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        return str(request.prompt)
    if kind == "chat":
        messages = request.chat.messages
        refuse_more("messages", messages, MAX_MESSAGES)
        refuse_more_parts("messages", sum([len(one.tool_calls) for one in messages]))
        return [_message(one) for one in messages]
    return list(request.token_ids.ids) if kind == "token_ids" else None


def sampling_to_proto(sampling: SamplingParams) -> pb.Sampling:
    """Return all values of a sampling."""
    return pb.Sampling(**_taken(sampling, _SAMPLING))


def call_to_proto(call: GenerateCall) -> pb.GenerateRequest:
    """The inverse. Raises ValueError or TypeError for what the wire cannot carry."""
    usual = GenerateCall(prompt="")
    for name in ("tool_choice", "parallel_tool_calls", "reasoning_budget"):
        if getattr(call, name) != getattr(usual, name):
            raise ValueError(f"{name} is for chats over HTTP")
    request = pb.GenerateRequest(
        stop=call.stop,
        stop_token_ids=call.stop_token_ids,
        logit_bias=dict(call.logit_bias),
        allowed_token_ids=call.allowed_token_ids,
    )
    if isinstance(call.prompt, str):
        request.prompt = call.prompt
    elif call.prompt and isinstance(call.prompt[0], ChatMessage):
        messages = [m for m in call.prompt if isinstance(m, ChatMessage)]
        request.chat.messages.extend(_message_to_proto(one) for one in messages)
    else:
        request.token_ids.ids.extend(i for i in call.prompt if isinstance(i, int))
        request.token_ids.SetInParent()
    for name in _SCALARS:
        value = getattr(call, name)
        if value is not None:
            setattr(request, name, value)
    if call.constraint is not None:
        setattr(request, call.constraint.kind, call.constraint.text)
    for tool in call.tools:
        request.tools.add(name=tool.name, description=tool.description, parameters_json=tool.parameters)
    request.early_stopping = _STOPPING[call.early_stopping]
    for name in _SAMPLING:
        if (value := getattr(call.sampling, name)) is not None:
            setattr(request.sampling, name, value)
    return request


def _message(message: pb.ChatMessage) -> ChatMessage:
    calls = tuple(ToolCall(call.name, call.arguments_json, call.id) for call in message.tool_calls)
    return ChatMessage(
        message.role,
        None if calls and not message.content else message.content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def _message_to_proto(message: ChatMessage) -> pb.ChatMessage:
    made = pb.ChatMessage(
        role=message.role,
        content=message.content or "",
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )
    for call in message.tool_calls:
        made.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments)
    return made


def is_long(event: Delta) -> bool:
    """Return whether output is to be converted in pieces, as it has the log probabilities of many tokens."""
    return max(len(event.logprobs), len(event.prompt_logprobs)) > PIECE_TOKENS


def delta_to_proto(event: Delta) -> Steps[pb.GenerateResponse]:
    """Yields where others may have the event loop."""
    response = pb.GenerateResponse(delta=pb.Delta(text=event.text, token_ids=event.token_ids, sample=event.sample))
    made = response.delta
    for given, told in ((event.logprobs, made.logprobs), (event.prompt_logprobs, made.prompt_logprobs)):
        for at in range(0, len(given), PIECE_TOKENS):
            if at:
                yield
            told.extend(map(_logprobs_to_proto, given[at : at + PIECE_TOKENS]))
    return response


def event_to_proto(event: GenerateEvent) -> pb.GenerateResponse:
    if isinstance(event, Delta):
        return at_once(delta_to_proto(event))
    if isinstance(event, Started):
        (ids,) = event.prompt_ids or ((),)
        return pb.GenerateResponse(started=pb.Started(**_taken(event, _STARTED), prompt_ids=ids))
    stats = event.stats
    finished = pb.Finished(
        reason=_REASONS[event.reason],
        usage=pb.Usage(**_taken(event, _USAGE)),
        timings=pb.Timings(stages_s=stats.stages, **_taken(event, _TIMINGS)),
        migration=pb.Migration(**{name: getattr(stats, own) for name, own in _MIGRATED.items()}),
        stop_matched=event.stop_matched,
        sample=event.sample,
        beam_score=event.beam_score,
        **_taken(stats, _STATS),
    )
    return pb.GenerateResponse(finished=finished)


def _logprobs_to_proto(one: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.Alternative(token=token, logprob=logprob) for token, logprob in one.top]
    return pb.TokenLogprobs(token=one.token, logprob=one.logprob, top=top)


def _logprobs_from_proto(one: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(one.token, one.logprob, tuple([(other.token, other.logprob) for other in one.top]))


def event_from_proto(response: pb.GenerateResponse) -> GenerateEvent:
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        logprobs = tuple([_logprobs_from_proto(one) for one in delta.logprobs])
        prompt_logprobs = tuple([_logprobs_from_proto(one) for one in delta.prompt_logprobs])
        return Delta(delta.text, tuple(delta.token_ids), delta.sample, logprobs, prompt_logprobs)
    if kind == "started":
        started = response.started
        ids = (tuple(started.prompt_ids),) if started.prompt_ids else ()
        return Started(**_taken(started, _STARTED) | {"samples": max(1, started.samples), "prompt_ids": ids})
    end = response.finished
    reasons = {number: reason for reason, number in _REASONS.items()}
    stats = RequestStats(
        stages={stage: end.timings.stages_s[stage] for stage in STAGES if stage in end.timings.stages_s},
        prompt_tokens=end.usage.prompt_tokens,
        output_tokens=end.usage.output_tokens,
        **{own: getattr(end.migration, name) for name, own in _MIGRATED.items()},
        **_taken(end, _STATS),
    )
    return Finished(
        reason=reasons.get(end.reason, FinishReason.ERROR),
        stats=stats,
        stop_matched=end.stop_matched,
        sample=end.sample,
        beam_score=end.beam_score if end.HasField("beam_score") else None,
        **_taken(end.usage, _USAGE),
        **_taken(end.timings, _TIMINGS),
    )


def _taken(record: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def resume_to_proto(token: str, positions: Sequence[Position]) -> pb.ResumeRequest:
    first, *others = positions
    return pb.ResumeRequest(
        resume_token=token,
        next_index=first.next_index,
        text_bytes=first.text_bytes,
        others=[pb.Position(next_index=at.next_index, text_bytes=at.text_bytes) for at in others],
    )


def positions_from_proto(request: pb.ResumeRequest) -> list[Position]:
    """Return the client's place in each sample, in order. Raises ApiError for more than any answer has."""
    refuse_more("positions", request.others, MAX_POSITIONS)
    return [Position(at.next_index, at.text_bytes) for at in (request, *request.others)]
