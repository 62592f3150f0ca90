"""The checks of a call before its prompt is tokenized: each bound from both sides, and the name of the field at fault.

Tried elsewhere too: odd values over gRPC in tests/router/grpc/test_service.py and over HTTP in
tests/router/http/test_fuzz.py, what a search cannot be in test_beams.py, the number of samples in test_samples.py.
"""

import math

import pytest

from engine.plan import MAX_PRIORITY
from engine.types import BeamParams, Constraint, ConstraintKind, EarlyStopping, FieldError, SamplingParams, TooLongError
from router.config import RouterConfig
from router.front.api import ChatMessage, GenerateCall, Tool, ToolCall
from router.front.validate import UnknownModelError, beam_params, check_call, prompt_field
from tests.router.fake_cluster import ByteText

CONFIG = RouterConfig(max_samples=4, max_prompt_bytes=100)


def check(**fields: object) -> None:
    call = GenerateCall(**{"prompt": "x", **fields})  # type: ignore[arg-type]
    check_call(call, ByteText(), CONFIG)


def chat(*contents: str, role: str = "user") -> list[ChatMessage]:
    return [ChatMessage(role, content) for content in contents]


def turn(**fields: object) -> ChatMessage:
    return ChatMessage(**{"role": "assistant", "content": "x", **fields})  # type: ignore[arg-type]


CALL = ToolCall("f", "{}")


def calling(arguments: str) -> ChatMessage:
    return turn(tool_calls=(ToolCall("f", arguments),))


CHAT_BOUNDS: list[tuple[str, object, object, str]] = [
    ("tools", (Tool("f" * 64),), (Tool("f" * 65),), "tools[0].function.name"),
    ("tools", (Tool("f.g_h-1"),), (Tool("f"), Tool("f g")), "tools[1].function.name"),
    ("tools", (Tool("f"), Tool("g")), (Tool("f"), Tool("f")), "tools[1].function.name"),
    ("tools", tuple(Tool(str(n)) for n in range(40)), tuple(Tool(str(n)) for n in range(129)), "tools"),
    ("tools", (Tool("f", "", '{"a": [[1]]}'),), (Tool("f", "", "[]"),), "tools[0].function.parameters"),
    ("tools", (Tool("f", "", "{}"),), (Tool("f", "", "{"),), "tools[0].function.parameters"),
    ("tools", (Tool("f", "d" * 80),), (Tool("f", "d" * 100),), "messages"),
    ("tools", (Tool("f", "é"),), (Tool("f", "\ud800"),), "tools[0].function.description"),
    ("chat_template_kwargs", '{"a": 1}', "[1]", "chat_template_kwargs"),
    ("chat_template_kwargs", '{"a": 1}', '{"a":' * 65 + "1" + "}" * 65, "chat_template_kwargs"),
    ("chat_template_kwargs", '{"a": "' + "[" * 90 + '"}', '{"]": ' * 65 + "1" + "}" * 65, "chat_template_kwargs"),
    ("chat_template_kwargs", '{"a": "\\"' + "[" * 85 + '"}', "{" * 65 + '"' + "}" * 10, "chat_template_kwargs"),
    ("continue_final_message", False, True, "continue_final_message"),
]


@pytest.mark.parametrize(("field", "good", "bad", "named"), CHAT_BOUNDS)
def test_every_bound_of_a_chat(field: str, good: object, bad: object, named: str) -> None:
    """Guards a template from what no caller needs, and a caller from a field that silently does nothing."""
    check(**{"prompt": chat("x"), field: good})
    with pytest.raises(FieldError) as caught:
        check(**{"prompt": chat("x"), field: bad})
    assert caught.value.field == named
    if good:
        with pytest.raises(FieldError, match="only in a chat"):
            check(**{field: good})


BOUNDS = [
    ("logprobs", 20, 21, "logprobs"),
    ("logprobs", 0, -1, "logprobs"),
    ("prompt_logprobs", 20, 21, "prompt_logprobs"),
    ("logit_bias", ((299, -100.0), (0, 100.0)), ((300, 1.0),), "logit_bias"),
    ("logit_bias", ((1, 100.0),), ((1, 100.5),), "logit_bias"),
    ("logit_bias", ((1, 1.0),), ((1, float("nan")),), "logit_bias"),
    ("logit_bias", ((1, 1.0),) * 1024, ((1, 1.0),) * 1025, "logit_bias"),
    ("allowed_token_ids", (0, 299), (0, 300), "allowed_token_ids[1]"),
    ("allowed_token_ids", (1,) * 4096, (1,) * 4097, "allowed_token_ids"),
    ("prompt", "é" * 50, "é" * 51, "prompt"),
    ("prompt", chat("x" * 50, "y" * 50), chat("x" * 50, "y" * 51), "messages"),
    ("prompt", chat("") * 4096, chat("") * 4097, "messages"),
    ("prompt", chat("x", role="developer"), chat("x", role="pope"), "messages[0].role"),
    ("prompt", chat("x"), chat("x", "\ud800"), "messages[1].content"),
    ("prompt", [turn(name="n" * 90)], [turn(name="n" * 129)], "messages[0].name"),
    ("prompt", [turn(reasoning="r")], [turn(reasoning="\ud800")], "messages[0].reasoning_content"),
    ("prompt", [turn(tool_calls=(CALL,) * 2)], [turn(tool_calls=(CALL,) * 129)], "messages[0].tool_calls"),
    ("prompt", [turn(tool_calls=(CALL,), content=None)], [turn(content=None)], "messages[0].content"),
    ("prompt", [turn(tool_calls=(CALL,))], [turn(tool_calls=(CALL,), role="user")], "messages[0].tool_calls"),
    ("prompt", [calling("{}")], [calling("[" * 65)], "messages[0].tool_calls[0].function.arguments"),
    ("prompt", [calling("x" * 90)], [calling("x" * 101)], "messages"),
    ("prompt", [1] * 511, [1] * 512, "token_ids"),
    ("prompt", [0, 299], [0, 300], "token_ids[1]"),
    ("prompt", [0], [5, -1], "token_ids[1]"),
    ("prompt", "x", "", "prompt"),
    ("prompt", "x", [], "prompt"),
    ("model", "bytes", "bits", "model"),
    ("n", 4, 5, "n"),
    ("n", 1, 0, "n"),
    ("max_tokens", 1, 0, "max_tokens"),
    ("max_tokens", 2**31 - 1, 2**31, "max_tokens"),
    ("min_tokens", 0, -1, "min_tokens"),
    ("seed", 2**64 - 1, 2**64, "seed"),
    ("seed", 0, -1, "seed"),
    ("stop", ("s",) * 16, ("s",) * 17, "stop"),
    ("stop", ("a", "é" * 128), ("a", "é" * 128 + "x"), "stop[1]"),
    ("stop", ("a",), ("",), "stop[0]"),
    ("stop_token_ids", (1,) * 64, (1,) * 65, "stop_token_ids"),
    ("stop_token_ids", (299,), (299, 300), "stop_token_ids[1]"),
    ("request_id", "x" * 128, "x" * 129, "request_id"),
    ("tenant", "é" * 128, "\udc00", "tenant"),
    ("priority", MAX_PRIORITY, MAX_PRIORITY + 1, "priority"),
    ("priority", -MAX_PRIORITY, -MAX_PRIORITY - 1, "priority"),
    ("timeout_s", 86400.0, 86400.1, "timeout_s"),
    ("timeout_s", 0.001, 0.0, "timeout_s"),
    ("timeout_s", None, math.nan, "timeout_s"),
    ("sampling", SamplingParams(temperature=2.0), SamplingParams(temperature=2.01), "temperature"),
    ("sampling", SamplingParams(top_p=1.0), SamplingParams(top_p=math.nan), "top_p"),
    ("sampling", SamplingParams(top_k=0), SamplingParams(top_k=-1), "top_k"),
]


@pytest.mark.parametrize(("name", "good", "bad", "field"), BOUNDS, ids=[str(at) for at in range(len(BOUNDS))])
def test_each_bound_from_both_sides(name: str, good: object, bad: object, field: str) -> None:
    """Guards against a bound that is off by one, and against characters counted as bytes."""
    check(**{name: good})
    with pytest.raises(FieldError) as caught:
        check(**{name: bad})
    assert caught.value.field == field and str(caught.value).startswith(f"{field}: ")


def test_min_tokens_may_reach_max_tokens_and_no_more() -> None:
    check(min_tokens=5, max_tokens=5)
    with pytest.raises(FieldError, match="min_tokens: must not exceed max_tokens, which is 4"):
        check(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (TooLongError, {"prompt": "x" * 101}),
        (TooLongError, {"prompt": [1] * 512}),
        (UnknownModelError, {"model": "another"}),
        (FieldError, {"n": 0}),
    ],
)
def test_what_is_too_long_or_unknown_can_be_told_from_what_is_wrong(
    kind: type[FieldError], fields: dict[str, object]
) -> None:
    """Guards the statuses of both fronts, which follow from the kind of error."""
    with pytest.raises(FieldError) as caught:
        check(**fields)
    assert type(caught.value) is kind


def test_a_refusal_does_not_repeat_a_megabyte_of_the_callers_text() -> None:
    with pytest.raises(UnknownModelError) as caught:
        check(model="m" * 10**6)
    assert len(str(caught.value)) < 300


def test_a_search_is_what_its_call_says_and_draws_nothing() -> None:
    """Guards against fields that a search would ignore in silence."""
    assert beam_params(GenerateCall(prompt="x", n=2)) is None
    call = GenerateCall(prompt="x", n=2, beam_width=3, length_penalty=0.5, early_stopping=EarlyStopping.NEVER)
    assert beam_params(call) == BeamParams(width=3, answers=2, length_penalty=0.5, early_stopping=EarlyStopping.NEVER)
    check(n=2, beam_width=3)
    for name in "presence_penalty", "frequency_penalty", "repetition_penalty":
        with pytest.raises(FieldError, match=f"{name}: is not allowed with beam_width"):
            check(beam_width=3, sampling=SamplingParams(**{name: 1.5}))


@pytest.mark.parametrize(
    ("prompt", "field"),
    [("x", "prompt"), ("", "prompt"), (chat("x"), "messages"), ([1], "token_ids"), ([], "token_ids")],
)
def test_a_prompt_has_the_name_that_its_caller_gave_it(prompt: object, field: str) -> None:
    assert prompt_field(prompt) == field


def test_allowed_tokens_need_one_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards an answer of tokens that nobody allowed: matrices have rows for ids that the engine never draws."""
    monkeypatch.setattr(ByteText, "drawable_tokens", 298)
    check(allowed_token_ids=(297, 299))
    with pytest.raises(FieldError, match="ids from 298 on") as caught:
        check(allowed_token_ids=(298, 299))
    assert caught.value.field == "allowed_token_ids"
    with pytest.raises(FieldError, match="end the answer at once"):
        check(allowed_token_ids=(256, 299), min_tokens=2)


def test_allowed_tokens_that_only_end_the_answer_do_not_go_with_min_tokens() -> None:
    """Guards a step from a row of which nothing may be drawn."""
    check(allowed_token_ids=(256,))
    check(allowed_token_ids=(256, 97), min_tokens=2)
    check(allowed_token_ids=(256,), min_tokens=2, ignore_eos=True)
    with pytest.raises(FieldError) as caught:
        check(allowed_token_ids=(256, 98), min_tokens=2, stop_token_ids=(98,))
    assert caught.value.field == "allowed_token_ids"


def test_log_probabilities_of_a_prompt_are_told_once_and_to_nobody_who_comes_back() -> None:
    check(logprobs=1, resumable=True)
    with pytest.raises(FieldError) as caught:
        check(prompt_logprobs=1, resumable=True)
    assert caught.value.field == "resumable"


def test_no_field_gives_way_to_a_constraint_in_silence() -> None:
    """Guards a caller who allows few tokens: where the constraint needs others, it was answered with these."""
    constraint = Constraint(ConstraintKind.REGEX, "yes|no")
    check(constraint=constraint)
    for field, value in (("ignore_eos", True), ("allowed_token_ids", (5,))):
        with pytest.raises(FieldError, match="is not allowed with") as caught:
            check(constraint=constraint, **{field: value})
        assert caught.value.field == field
