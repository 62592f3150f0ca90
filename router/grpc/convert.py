"""Converts between the public protobuf messages and the types of `router.front.api`. Nothing else knows both."""

from collections.abc import Sequence

from engine.messages import RequestStats
from engine.types import EarlyStopping, FieldError, FinishReason, SamplingParams
from protos import headrace_pb2 as pb
from router.front.api import (
    ChatMessage,
    Delta,
    Finished,
    GenerateCall,
    GenerateEvent,
    Position,
    Started,
)

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_SCALARS = (
    "model",
    "max_tokens",
    "min_tokens",
    "seed",
    "ignore_eos",
    "request_id",
    "tenant",
    "timeout_s",
    "resumable",
    "n",
    "priority",
    "beam_width",
    "length_penalty",
)
_STOPPING = {
    EarlyStopping.FULL: pb.EARLY_STOPPING_FULL,
    EarlyStopping.HEURISTIC: pb.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.NEVER: pb.EARLY_STOPPING_NEVER,
}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def call_from_proto(request: pb.GenerateRequest) -> GenerateCall:
    """What the caller asks; unset fields keep their defaults. Raises FieldError without an input."""
    kind = request.WhichOneof("input")
    prompt: str | list[ChatMessage] | list[int]
    if kind == "prompt":
        prompt = request.prompt
    elif kind == "chat":
        prompt = [ChatMessage(m.role, m.content) for m in request.chat.messages]
    elif kind == "token_ids":
        prompt = list(request.token_ids.ids)
    else:
        raise FieldError("prompt", "one of prompt, chat and token_ids must be set")
    given = {name: getattr(request, name) for name in _SCALARS if request.HasField(name)}
    drawn = {n: getattr(request.sampling, n) for n in _SAMPLING if request.sampling.HasField(n)}
    stopping = {number: name for name, number in _STOPPING.items()}
    return GenerateCall(
        prompt=prompt,
        early_stopping=stopping.get(request.early_stopping, EarlyStopping.HEURISTIC),
        sampling=SamplingParams(**drawn),
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        **given,
    )


def call_to_proto(call: GenerateCall) -> pb.GenerateRequest:
    """The inverse. Raises ValueError or TypeError for what the wire cannot carry."""
    request = pb.GenerateRequest(stop=call.stop, stop_token_ids=call.stop_token_ids)
    if isinstance(call.prompt, str):
        request.prompt = call.prompt
    elif call.prompt and isinstance(call.prompt[0], ChatMessage):
        messages = [m for m in call.prompt if isinstance(m, ChatMessage)]
        request.chat.messages.extend(pb.ChatMessage(role=m.role, content=m.content) for m in messages)
    else:
        request.token_ids.ids.extend(i for i in call.prompt if isinstance(i, int))
        request.token_ids.SetInParent()
    for name in _SCALARS:
        value = getattr(call, name)
        if value is not None:
            setattr(request, name, value)
    request.early_stopping = _STOPPING[call.early_stopping]
    for name in _SAMPLING:
        setattr(request.sampling, name, getattr(call.sampling, name))
    return request


def event_to_proto(event: GenerateEvent) -> pb.GenerateResponse:
    if isinstance(event, Delta):
        delta = pb.Delta(text=event.text, token_ids=event.token_ids, sample=event.sample)
        return pb.GenerateResponse(delta=delta)
    if isinstance(event, Started):
        started = pb.Started(
            request_id=event.request_id,
            model=event.model,
            prompt_tokens=event.prompt_tokens,
            resume_token=event.resume_token,
            samples=event.samples,
        )
        return pb.GenerateResponse(started=started)
    stats = event.stats
    return pb.GenerateResponse(
        finished=pb.Finished(
            reason=_REASONS[event.reason],
            usage=pb.Usage(
                prompt_tokens=event.prompt_tokens,
                output_tokens=event.output_tokens,
                cached_tokens=event.cached_tokens,
            ),
            timings=pb.Timings(
                ttft_s=event.ttft_s,
                itl_mean_s=event.itl_mean_s,
                itl_p99_s=event.itl_p99_s,
                e2e_s=event.e2e_s,
                stages_s=stats.stages,
            ),
            migration=pb.Migration(
                blocks=stats.migrated_blocks,
                bytes=stats.migrated_bytes,
                seconds=stats.migration_s,
                transport=stats.transport,
            ),
            prefill_worker=stats.prefill_worker,
            decode_worker=stats.decode_worker,
            prefill_cached_tokens=stats.prefill_cached_tokens,
            decode_cached_tokens=stats.decode_cached_tokens,
            stop_matched=event.stop_matched,
            sample=event.sample,
            beam_score=event.beam_score,
        )
    )


def event_from_proto(response: pb.GenerateResponse) -> GenerateEvent:
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        return Delta(delta.text, tuple(delta.token_ids), delta.sample)
    if kind == "started":
        started = response.started
        return Started(
            started.request_id,
            started.model,
            started.prompt_tokens,
            started.resume_token,
            samples=max(1, started.samples),
        )
    end = response.finished
    reasons = {number: reason for reason, number in _REASONS.items()}
    return Finished(
        reason=reasons.get(end.reason, FinishReason.ERROR),
        prompt_tokens=end.usage.prompt_tokens,
        output_tokens=end.usage.output_tokens,
        cached_tokens=end.usage.cached_tokens,
        stats=RequestStats(
            stages=dict(end.timings.stages_s),
            prompt_tokens=end.usage.prompt_tokens,
            output_tokens=end.usage.output_tokens,
            prefill_cached_tokens=end.prefill_cached_tokens,
            decode_cached_tokens=end.decode_cached_tokens,
            migrated_blocks=end.migration.blocks,
            migrated_bytes=end.migration.bytes,
            migration_s=end.migration.seconds,
            transport=end.migration.transport,
            prefill_worker=end.prefill_worker,
            decode_worker=end.decode_worker,
        ),
        ttft_s=end.timings.ttft_s,
        itl_mean_s=end.timings.itl_mean_s,
        itl_p99_s=end.timings.itl_p99_s,
        e2e_s=end.timings.e2e_s,
        stop_matched=end.stop_matched,
        sample=end.sample,
        beam_score=end.beam_score if end.HasField("beam_score") else None,
    )


def resume_to_proto(token: str, positions: Sequence[Position]) -> pb.ResumeRequest:
    first, *others = positions
    return pb.ResumeRequest(
        resume_token=token,
        next_index=first.next_index,
        text_bytes=first.text_bytes,
        others=[pb.Position(next_index=at.next_index, text_bytes=at.text_bytes) for at in others],
    )


def positions_from_proto(request: pb.ResumeRequest) -> list[Position]:
    """What the client has of each sample, in order."""
    return [Position(at.next_index, at.text_bytes) for at in (request, *request.others)]
