"""Decides how a request ends for its client: by its worker's last word, or by what is known without one. Pure."""

import msgspec

from engine.messages import Ended, Fault, RequestStats
from engine.types import Beam, FinishReason
from router.core.call import Call, State
from router.core.events import Complete, Ending, Fail
from router.core.leaving.moves import together

DEADLINE = Fault("DEADLINE_EXCEEDED", "the deadline passed before the request ended")
LEFT = Fault("CANCELLED", "the client left before the request ended")
RESUMED_ELSEWHERE = Fault("CANCELLED", "another connection has resumed this stream")
ROUTER_FAILED = Fault("INTERNAL", "the router failed on this request")


def ending(call: Call, record: Ended) -> Ending:
    """Return what a worker's `Ended` means to the client, who has not been answered yet."""
    request, reason, stats = record.request, record.reason, record.stats
    ended_well = reason in (FinishReason.STOP, FinishReason.LENGTH)
    # 1. The router itself has found the end: the worker's reason comes too late.
    if call.state is State.FINISHING:
        return complete(call, reason, stats)
    # 2. It ended well, which is believed if it agrees with what has arrived.
    if record.fault is None and ended_well:
        problem = _contradiction(call, record)
        if problem:
            return Fail(request, Fault("INTERNAL", problem), FinishReason.ERROR)
        return complete(call, reason, stats, tuple(record.beams))
    # 3. It failed. A fault contradicts a reason that is a good end.
    if reason is FinishReason.DEADLINE:
        return Fail(request, DEADLINE, reason)
    fault = record.fault or Fault("INTERNAL", f"worker {call.decode} ended it with {reason.value!r}")
    return Fail(request, fault, FinishReason.ERROR if ended_well else reason)


def complete(call: Call, reason: FinishReason, stats: RequestStats, beams: tuple[Beam, ...] = ()) -> Complete:
    """The account of a request that ended well. After a loss its figures are those of the last placement, but what an
    earlier one computed is not called cached."""
    stats = together(call.earlier, stats)
    if call.state is State.FINISHING:
        reason = FinishReason.STOP
        stats = msgspec.structs.replace(stats, output_tokens=len(call.emitted))
    expected, bound = call.believed_prefill_tokens, call.cached_tokens_bound
    if bound is not None:
        expected = min(expected, bound)
        cached = min(stats.prefill_cached_tokens, bound)
        stats = msgspec.structs.replace(stats, prefill_cached_tokens=cached)
    return Complete(call.record.request, reason, stats, expected, beams)


def unreported(call: Call) -> RequestStats:
    """The account of a request whose worker was lost before it could give its own: no stages, no figures."""
    return RequestStats(
        prompt_tokens=call.record.prompt_tokens,
        output_tokens=len(call.emitted),
        prefill_worker=call.prefill,
        decode_worker=call.decode,
    )


def _contradiction(call: Call, record: Ended) -> str:
    """Return why the worker's good end cannot be believed; empty if it can."""
    if call.state is State.OFFERED:
        return f"worker {call.decode} ended a request that it had not accepted"
    wanted = 0 if call.record.beams is None else call.record.beams.answers
    if len(record.beams) != wanted:
        return f"worker {call.decode} found {len(record.beams)} answers of {wanted}"
    if not wanted and record.stats.output_tokens != len(call.emitted):
        counted, arrived = record.stats.output_tokens, len(call.emitted)
        return f"worker {call.decode} counts {counted} output tokens, {arrived} arrived"
    return ""
