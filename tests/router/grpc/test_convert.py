"""Between the public messages and the router's own types: nothing is lost on the way there and back, and what is left
out keeps its default. Over a real connection it is tried in test_service.py, samples and searches in
tests/router/front/test_samples.py and test_beams.py."""

from typing import Any

import msgspec
import pytest

from engine.messages import RequestStats
from engine.types import (
    Constraint,
    ConstraintKind,
    EarlyStopping,
    FieldError,
    FinishReason,
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
    ToolChoice,
)
from router.front.tokenizing import advance
from router.grpc.convert import (
    PIECE_TOKENS,
    call_from_proto,
    call_to_proto,
    delta_to_proto,
    event_from_proto,
    event_to_proto,
    is_long,
    positions_from_proto,
    resume_to_proto,
)

FULL = GenerateCall(
    prompt="hi",
    n=3,
    model="m",
    max_tokens=9,
    min_tokens=2,
    sampling=SamplingOverrides(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
    ),
    seed=2**64 - 1,
    stop=("a", "b"),
    stop_token_ids=(4, 5),
    ignore_eos=True,
    request_id="mine",
    tenant="t",
    timeout_s=2.5,
    priority=-7,
    beam_width=4,
    length_penalty=0.5,
    early_stopping=EarlyStopping.NEVER,
    resumable=True,
    parse_control_tokens=True,
    truncate_prompt_tokens=-1,
    cache_salt="s",
    logprobs=3,
    prompt_logprobs=2,
    logit_bias=((5, -2.5), (7, 100.0)),
    allowed_token_ids=(5, 7),
    tools=(Tool("f", "does f", '{"type": "object"}'), Tool("g")),
    chat_template_kwargs='{"a": 1}',
    add_generation_prompt=False,
    continue_final_message=True,
    constraint=Constraint(ConstraintKind.REGEX, "a+"),
    constraint_field="regex",
)
NOT_SENT = {"form", "tool_choice", "parallel_tool_calls", "reasoning_budget", "traceparent", "session"}
"""Some belong to HTTP alone, the others travel as metadata."""
FINISHED = Finished(
    reason=FinishReason.LENGTH,
    prompt_tokens=5,
    output_tokens=3,
    cached_tokens=4,
    stats=RequestStats(
        stages={"admit": 0.5},
        prompt_tokens=5,
        output_tokens=3,
        prefill_cached_tokens=4,
        decode_cached_tokens=1,
        migrated_blocks=2,
        migrated_bytes=2**40,
        migration_s=0.25,
        transport="shm",
        prefill_worker="p0",
        decode_worker="d0",
    ),
    ttft_s=0.125,
    itl_mean_s=0.5,
    itl_p99_s=0.75,
    e2e_s=2.0,
    stop_matched="a",
    sample=2,
    beam_score=-1.5,
)


def test_the_full_call_differs_from_every_default() -> None:
    """The test below would let a forgotten field pass whose value is its default."""
    default = GenerateCall(prompt="")
    for record, plain in (FULL, default), (FULL.sampling, default.sampling):
        fields = set(record.__struct_fields__) - NOT_SENT
        assert {name for name in fields if getattr(record, name) == getattr(plain, name)} == set()


CALLED = ChatMessage("assistant", None, tool_calls=(ToolCall("f", "{}", "c1"), ToolCall("g", "")), reasoning="hm")
PROMPTS: list[str | list[ChatMessage] | list[int]] = [
    "hi", "", [ChatMessage("system", "be kind"), ChatMessage("user", "é", name="ann")], [1, 2], [],
    [CALLED, ChatMessage("tool", "4", tool_call_id="c1")],
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_call_comes_back_whole(prompt: str | list[ChatMessage] | list[int]) -> None:
    """Guards against a field that one of the two directions forgets, and a prompt that changes its kind."""
    call = msgspec.structs.replace(FULL, prompt=prompt)
    assert call_from_proto(call_to_proto(call)) == call


@pytest.mark.parametrize("stopping", EarlyStopping)
def test_every_way_to_stop_a_search_has_its_number(stopping: EarlyStopping) -> None:
    call = GenerateCall(prompt="x", early_stopping=stopping)
    assert call_from_proto(call_to_proto(call)) == call


def test_what_is_left_out_keeps_the_servers_default() -> None:
    """Guards against protobuf's zero for a field that nobody set: temperature 0 would be greedy."""
    assert call_from_proto(pb.GenerateRequest(prompt="x")) == GenerateCall(prompt="x")
    zero = pb.GenerateRequest(prompt="x", seed=0, sampling=pb.Sampling(temperature=0.0))
    read = call_from_proto(zero)
    assert (read.seed, read.sampling.temperature) == (0, 0.0)


def test_a_call_without_an_input_names_the_field() -> None:
    with pytest.raises(FieldError) as caught:
        call_from_proto(pb.GenerateRequest())
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "event",
    [
        Started("r", "m", 5, "token", None, 3),
        Started("r", "m", 2, "", None, 1, ((7, 8),)),
        Delta("é", (1,), 0, (), (TokenLogprobs(8, -0.7, ((7, -0.6),)),)),
        Delta("é", (1, 2), 2),
        Delta("é", (1, 2), 2, (TokenLogprobs(1, -0.1, ((3, -0.2), (1, -0.1))), TokenLogprobs(2, -0.3))),
        FINISHED,
        msgspec.structs.replace(FINISHED, beam_score=None, reason=FinishReason.STOP),
    ],
    ids=["started", "prompt", "prompt logprobs", "delta", "logprobs", "finished search", "finished"],
)
def test_an_event_comes_back_whole(event: GenerateEvent) -> None:
    """Guards accounts that lose a figure, and an answer without a score that comes back with the score 0."""
    assert event_from_proto(event_to_proto(event)) == event


def test_many_log_probabilities_are_converted_in_pieces() -> None:
    """Guards the event loop from those of a long prompt, which took it a tenth of a second; the message is the same."""
    given = tuple(TokenLogprobs(at, -0.5, ((at, -0.5), (7, -1.0))) for at in range(3 * PIECE_TOKENS))
    event = Delta("a", (1,), 1, given[:1], given)
    assert is_long(event) and not is_long(Delta("a", (1,), 1, given[:1]))
    steps, pauses = delta_to_proto(event), 0
    while (made := advance(steps)) is None:
        pauses += 1
    assert pauses == 2
    assert event_from_proto(made) == event
    assert made.SerializeToString() == event_to_proto(event).SerializeToString()


def test_events_of_other_servers_are_understood() -> None:
    """Guards against an answer of no samples (a server that knows none), and a reason that we do not know for STOP."""
    started = event_from_proto(pb.GenerateResponse(started=pb.Started(request_id="r")))
    assert isinstance(started, Started) and started.samples == 1
    finished = event_from_proto(pb.GenerateResponse(finished=pb.Finished()))
    assert isinstance(finished, Finished) and finished.reason is FinishReason.ERROR


@pytest.mark.parametrize("count", [1, 3])
def test_positions_keep_their_order(count: int) -> None:
    at = [Position(n + 1, 10 * n) for n in range(count)]
    request = resume_to_proto("token", at)
    assert (request.resume_token, positions_from_proto(request)) == ("token", at)


@pytest.mark.parametrize("kind", ConstraintKind)
def test_constraints_of_every_kind_travel(kind: ConstraintKind) -> None:
    call = GenerateCall(prompt="hi", constraint=Constraint(kind, "x"), constraint_field=kind.value)
    assert call_from_proto(call_to_proto(call)) == call


def test_choices_become_a_grammar() -> None:
    request = pb.GenerateRequest(prompt="hi", choices=pb.Choices(choices=["a", 'b"']))
    call = call_from_proto(request)
    assert call.constraint == Constraint(ConstraintKind.LARK, r'start: "a" | "b\""')
    with pytest.raises(FieldError, match="choices"):
        call_from_proto(pb.GenerateRequest(prompt="hi", choices=pb.Choices()))


@pytest.mark.parametrize("field", [
    {"tool_choice": ToolChoice("required")}, {"parallel_tool_calls": False}, {"reasoning_budget": 5},
])  # fmt: skip
def test_what_the_wire_does_not_have_is_not_dropped(field: dict[str, Any]) -> None:
    """Guards a caller who thinks that the answer must be a call."""
    with pytest.raises(ValueError, match=next(iter(field))):
        call_to_proto(GenerateCall(prompt=[ChatMessage("user", "hi")], **field))
