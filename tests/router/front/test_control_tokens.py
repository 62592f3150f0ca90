"""Control tokens in what users write, from each front to the record that workers get."""

import asyncio
import json
from functools import partial

import msgspec
import pytest

from protos import headrace_pb2 as pb
from router.config import RouterConfig
from router.front.api import GenerateCall
from router.front.intake import Arrival, Intake
from router.front.parsers.turn import turn_of
from router.grpc.convert import call_from_proto, tokenize_call
from router.http.adapters.messages_request import parse_count, parse_messages
from router.http.adapters.responses_request import parse_response
from router.http.openai import parse_chat, parse_completion
from router.http.tokens import parse_tokenize
from tests.engine.text.chats import chat
from tests.engine.text.test_control import ATTACK, controls, files, model, spoken

FILES = files("byte level")
TEXT = model(FILES)


def take(call: GenerateCall, intake: Intake | None = None) -> Arrival:
    intake = intake or Intake(TEXT, RouterConfig())
    return asyncio.run(intake.take(call))


def over_http(content: str, **more: object) -> GenerateCall:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()).call


def over_grpc(content: str, **more: object) -> GenerateCall:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content)])
    return call_from_proto(pb.GenerateRequest(chat=chat, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("over", [over_http, over_grpc])
def test_in_a_chat_they_are_text_on_every_front(over) -> None:  # type: ignore[no-untyped-def]
    calm = spoken(take(over("x")).record.tokens, FILES)
    assert spoken(take(over(ATTACK)).record.tokens, FILES) == calm
    assert len(spoken(take(over(ATTACK, parse_control_tokens=True)).record.tokens, FILES)) == len(calm) + 3


def of_tokenize(body: object) -> GenerateCall:
    return parse_tokenize(json.dumps(body).encode())[0].call


def anthropic(content: str) -> dict[str, object]:
    """A message of Anthropic's shape with what is said in each place that a template may show."""
    result = [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": content}]}]
    use = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}, {"type": "text", "text": content}]
    return {
        "system": content,
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": use},
            {"role": "user", "content": [*result, {"type": "text", "text": content}]},
        ],
    }


def response(content: str) -> dict[str, object]:
    """The same for a response of OpenAI's shape."""
    parts = [{"type": "input_text", "text": content}]
    return {
        "instructions": content,
        "input": [
            {"role": "user", "content": content},
            {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t", "output": content},
            {"role": "user", "content": parts},
        ],
    }


def proto_chat(content: str) -> pb.TokenizeRequest:
    return pb.TokenizeRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content)]))


TOOLS = """{% for m in messages %}{{ '<|' + 'im_start|>' + m.role + '\n' + (m.content or '') | trim }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""A template that also knows what tools are asked and say."""
OF_TOOLS = model(msgspec.structs.replace(FILES, template=TOOLS))
ADAPTERS = {
    "/v1/messages": lambda said: parse_messages(json.dumps({"max_tokens": 4, **anthropic(said)}).encode()).call,
    "/v1/responses": lambda said: parse_response(json.dumps(response(said)).encode()).call,
}
COUNTERS = {
    "/v1/messages/count_tokens": lambda said: parse_count(json.dumps(anthropic(said)).encode()),
    "/tokenize": lambda said: of_tokenize({"messages": [{"role": "user", "content": said}]}),
    "Tokenize": lambda said: tokenize_call(proto_chat(said)),
}


@pytest.mark.parametrize("route", [*ADAPTERS, *COUNTERS])
def test_they_are_text_in_every_shape_of_a_chat(route: str) -> None:
    """Guards the routes of other shapes, and those that count for them: in system text, in results of tools, in blocks
    and in plain strings alike. What is counted is what would be read."""

    def counted(call: GenerateCall) -> list[int]:
        return asyncio.run(Intake(OF_TOOLS, RouterConfig()).tokenize(call, add_special=None, strings=False)).ids

    def read(content: str) -> list[int]:
        if route in ADAPTERS:
            return take(ADAPTERS[route](content), Intake(OF_TOOLS, RouterConfig())).record.tokens
        return counted(COUNTERS[route](content))

    calm, attacked = read("x"), read(ATTACK)
    assert spoken(attacked, FILES) == spoken(calm, FILES)
    # A place whose text is not in the prompt would prove nothing.
    places = json.dumps((anthropic if "messages" in route else response)("x")).count('"x"') if route[:2] == "/v" else 1
    literal = TEXT.encode(ATTACK, add_special=False, is_literal=True)
    runs = sum(attacked[at : at + len(literal)] == literal for at in range(len(attacked)))
    assert runs == places > 0
    if route == "/tokenize":
        asked = of_tokenize({"messages": [{"role": "user", "content": ATTACK}], "parse_control_tokens": True})
        assert len(spoken(counted(asked), FILES)) == len(spoken(calm, FILES)) + 3


def test_in_a_plain_prompt_they_are_tokens_unless_the_caller_says_otherwise() -> None:
    (start, end) = (controls(FILES)[name] for name in ("<|im_start|>system", "<|im_end|>"))
    prompt = "<|im_start|>system<|im_end|>"
    http = parse_completion(json.dumps({"prompt": prompt}).encode()).call
    grpc = call_from_proto(pb.GenerateRequest(prompt=prompt))
    for call in (http, grpc):
        assert [token for token in take(call).record.tokens if token in (start, end)] == [start, end]
    http = parse_completion(json.dumps({"prompt": prompt, "parse_control_tokens": False}).encode()).call
    grpc = call_from_proto(pb.GenerateRequest(prompt=prompt, parse_control_tokens=False))
    for call in (http, grpc):
        assert not {start, end} & set(take(call).record.tokens)


@pytest.mark.parametrize("parsed", [None, True])
def test_a_next_turn_begins_with_the_ids_of_the_turn_before(parsed: bool | None) -> None:
    """Guards the memory of conversations: what a user wrote is as literal in the turn after, to the token, and so is
    an answer that quotes it."""
    intake = Intake(TEXT, RouterConfig())
    turn = [{"role": "user", "content": ATTACK}]
    asked = {"parse_control_tokens": parsed}
    first = take(parse_chat(json.dumps({"messages": turn, **asked}).encode()).call, intake)
    answer = "you wrote <|im_start|>system" if parsed is None else "yes"
    emitted = TEXT.encode(answer, add_special=False, is_literal=True)
    turn_made = partial(turn_of, None, "r")
    chats, made = intake.conversations, (first.chat, first.record.namespace, first.prompt, turn_made)
    chats.keep(chats.finished(*made, answer, emitted))
    turn += [{"role": "assistant", "content": answer}, {"role": "user", "content": "no"}]
    call = parse_chat(json.dumps({"messages": turn, **asked}).encode()).call
    asked_again = chat([(one["role"], one["content"]) for one in turn], is_literal=parsed is None)
    text, known, rest = intake.conversations.begin(asked_again, b"")
    assert known[: len(first.record.tokens) + len(emitted)] == first.record.tokens + emitted
    assert text.endswith(rest) and len(rest) < len(text) // 2
    assert take(call, intake).record.tokens == TEXT.encode_chat_text(text)
