"""Control tokens in what users write, from each front to the record that workers get."""

import asyncio
import json
from functools import partial

import pytest

from protos import headrace_pb2 as pb
from router.config import RouterConfig
from router.front.api import GenerateCall
from router.front.intake import Arrival, Intake
from router.front.parsers.turn import turn_of
from router.grpc.convert import call_from_proto
from router.http.openai import parse_chat, parse_completion
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
    intake.conversations.remember(first.chat, first.record.namespace, first.prompt, turn_made, answer, emitted)
    turn += [{"role": "assistant", "content": answer}, {"role": "user", "content": "no"}]
    call = parse_chat(json.dumps({"messages": turn, **asked}).encode()).call
    asked_again = chat([(one["role"], one["content"]) for one in turn], is_literal=parsed is None)
    text, known, rest = intake.conversations.begin(asked_again, b"")
    assert known[: len(first.record.tokens) + len(emitted)] == first.record.tokens + emitted
    assert text.endswith(rest) and len(rest) < len(text) // 2
    assert take(call, intake).record.tokens == TEXT.encode_chat_text(text)
