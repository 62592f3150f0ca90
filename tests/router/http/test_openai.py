"""Reading OpenAI request bodies: what is accepted, and that every refusal names its field. Values of any
kind in any field are tried in test_fuzz.py, ranges in tests/router/front/test_validate.py."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.front.api import ApiError, ChatMessage, GenerateCall, SamplingOverrides, Tool, ToolCall, ToolChoice
from router.http.fields import HARMLESS
from router.http.openai import UNSUPPORTED, parse_chat, parse_completion, timeout_from
from router.http.openai_reply import error_reply
from tests.router.http.fakes import TEXT, FakeFrontend, ask

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": HI} | fields).encode()


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "hi"} | fields).encode()


def test_every_supported_field_reaches_the_call() -> None:
    """Guards against a field that is parsed and then forgotten."""
    fields = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
    }
    body = chat(
        model="tiny",
        max_completion_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        seed=-7,
        timeout=2.5,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        user="someone",
        **fields,
    )
    parsed = parse_chat(body, label="mine", timeout_s=4.0)
    call = parsed.call
    assert call.prompt == [ChatMessage("user", "hi")]
    assert {name: getattr(call.sampling, name) for name in fields} == fields
    assert (call.model, call.max_tokens, call.min_tokens, call.seed) == ("tiny", 9, 2, -7)
    assert (call.stop, call.stop_token_ids, call.ignore_eos) == (("a", "b"), (4,), True)
    assert (call.request_id, call.timeout_s, call.tenant) == ("mine", 2.5, "")
    assert (parsed.stream, call.form, parsed.form.include_usage) == (True, parsed.form, True)
    assert (parsed.form.return_token_ids, parsed.form.label) == (True, "mine")


def test_both_ways_to_say_that_all_tokens_may_be_drawn() -> None:
    """Guards clients of servers that write -1 for it; what a body leaves out stays the model's own."""
    assert parse_chat(chat(top_k=-1)).call.sampling.top_k == 0
    assert parse_completion(completion(top_k=-1)).call.sampling.top_k == 0
    assert parse_chat(chat(top_k=-2)).call.sampling.top_k == -2, "for the checks behind the front to refuse"
    assert parse_chat(chat()).call.sampling.top_k is None


def test_absent_and_null_both_mean_the_servers_default() -> None:
    """Guards against null overwriting a default: many clients send every field."""
    nulls = dict.fromkeys(
        ["model", "max_tokens", "temperature", "top_p", "stop", "seed", "n", "logit_bias", "stream"]
    )
    bare, full = parse_completion(completion()), parse_completion(completion(**nulls))
    assert bare == full
    assert bare.call.sampling == SamplingOverrides()
    assert bare.call.max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", "text"),
        (["text"], "text"),
        ([1, 2], [1, 2]),
        ([[1, 2]], [1, 2]),
        ([5], [5]),
        ("", ""),
        ([], []),
    ],
)
def test_prompt_forms(prompt: object, read: object) -> None:
    assert parse_completion(completion(prompt=prompt)).call.prompt == read


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    assert parse_chat(chat(messages=messages)).call.prompt == [
        ChatMessage("system", "be kind"),
        ChatMessage("user", "a\nb"),
    ]


def test_messages_with_calls_and_results() -> None:
    """Guards an agent's history: every part of it that a template may show reaches the call."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    other = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"b": 1}}}
    messages = [
        {"role": "user", "content": "x", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call, other], "reasoning_content": "hm"},
        {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "c1"},
    ]
    read = parse_chat(chat(messages=messages, chat_template_kwargs={"a": 1}, continue_final_message=True)).call
    assert read.prompt == [
        ChatMessage("user", "x", name="ann"),
        ChatMessage(
            "assistant", None,
            tool_calls=(ToolCall("f", '{"a": "é"}', "c1"), ToolCall("g", '{"b": 1}', "c2")), reasoning="hm",
        ),
        ChatMessage("tool", "4", tool_call_id="c1"),
    ]
    assert (read.chat_template_kwargs.replace(" ", ""), read.continue_final_message) == ('{"a":1}', True)
    assert parse_chat(chat(chat_template_kwargs=None, add_generation_prompt=False)).call.add_generation_prompt is False


def test_tools_and_what_is_chosen_of_them() -> None:
    function = {"name": "f", "description": "does f", "parameters": {"type": "object"}, "strict": True}
    tools = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}]
    named = {"type": "function", "function": {"name": "g"}}
    call = parse_chat(chat(tools=tools, tool_choice=named, parallel_tool_calls=False)).call
    assert call.tools == (Tool("f", "does f", '{"type": "object"}'), Tool("g"))
    assert (call.tool_choice, call.parallel_tool_calls) == (ToolChoice("required", "g"), False)
    assert parse_chat(chat(tools=tools, tool_choice="none")).call.tool_choice == ToolChoice("none")
    assert parse_chat(chat(tools=tools)).call.tool_choice == ToolChoice()


NEUTRAL = [("n", 1), ("tools", []), ("tool_choice", "auto"), ("logprobs", False), ("echo", False)]


@pytest.mark.parametrize(("name", "value"), [*NEUTRAL, ("response_format", {"type": "text"})])
def test_unsupported_fields_pass_when_they_ask_for_nothing(name: str, value: object) -> None:
    parse_chat(chat(**{name: value}))


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "field", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "json_schema", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": SCHEMA}}},
            "response_format.json_schema.schema",
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"guided_json": SCHEMA}, "guided_json", "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json", "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, "guided_regex", "regex", "a+"),
        ({"guided_choice": ["a", 'b"c']}, "guided_choice", "lark", 'start: "a" | "b\\"c"'),
        ({"guided_grammar": 'root ::= "x"'}, "guided_grammar", "lark", 'root ::= "x"'),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "a"}, "guided_json": None}, "structured_outputs.regex", "regex", "a"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", "lark", 'start: "a"'),
        ({"structured_outputs": {"grammar": "start: A"}}, "structured_outputs.grammar", "lark", "start: A"),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            "json_schema",
            '{"type":"object"}',
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_the_answer_must_be_like(fields: dict[str, object], field: str, kind: str, text: str) -> None:
    """Guards the order of a schema's properties too, which is that of the answer's."""
    call = parse_chat(chat(**fields)).call
    assert call.constraint is not None
    assert (call.constraint_field, call.constraint.kind, call.constraint.text) == (field, kind, text)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_an_answer_is_free_unless_it_is_asked_for_otherwise(fields: dict[str, object]) -> None:
    assert parse_chat(chat(**fields)).call.constraint is None


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("value", ["x", {"a": 1}, True, 0])
def test_harmless_fields_change_nothing(name: str, value: object) -> None:
    assert parse_chat(chat(**{name: value})) == parse_chat(chat())
    assert parse_completion(completion(**{name: value})) == parse_completion(completion())


def test_harmless_fields_of_parts_and_options_change_nothing() -> None:
    part = {"type": "text", "text": "hi"}
    said = {"role": "user", "content": [part | {"cache_control": {"type": "ephemeral"}}]}
    nulls = dict.fromkeys(["refusal", "annotations", "audio", "function_call", "tool_calls"])
    assert parse_chat(chat(messages=[said | nulls])) == parse_chat(chat())
    options = {"include_obfuscation": False, "continuous_usage_stats": False}
    assert parse_chat(chat(stream=True, stream_options=options)) == parse_chat(chat(stream=True))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_every_unsupported_field_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for value in (None, *UNSUPPORTED[name]):
        assert parse_chat(chat(**{name: value})) == parse_chat(chat())
    with pytest.raises(ApiError) as caught:
        parse_chat(chat(**{name: {"odd": ["value"]}}))
    assert caught.value.field == name


def test_the_page_names_the_fields_that_are_let_pass_or_refused() -> None:
    """Guards against a field that docs/http.md does not tell of, and one that it tells of wrongly."""
    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    for began, names in (("- Let pass", HARMLESS), ("- Refused", UNSUPPORTED)):
        paragraph = page.partition(f"\n{began}")[2].partition("\n- ")[0]
        assert set(names) <= set(re.findall(r"`([a-z_]+)`", paragraph)), began


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (chat(max_token=5), "max_token", "max_token: is not a field here; is max_tokens meant?"),
        (chat(temprature=0), "temprature", "temprature: is not a field here; is temperature meant?"),
        (chat(prompt="hi"), "prompt", "prompt: is not supported"),
        (completion(messages=HI), "messages", "messages: is not supported"),
        (completion(token_ids=[1]), "token_ids", "token_ids: is not supported"),
        (chat(timeout_s=1), "timeout_s", "timeout_s: is not a field here; is timeout meant?"),
        (chat(**{"x" * 1000: 1}), "x" * 64 + "…", "x" * 64 + "…: is not supported"),
        (chat(**{"": 1}), None, ": is not supported"),
        (chat(messages=[HI[0] | {"thought": "x"}]), "messages[0].thought", "messages[0].thought: is not supported"),
        (
            chat(stream=True, stream_options={"include_use": True}),
            "stream_options.include_use",
            "stream_options.include_use: is not supported",
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_unknown_fields_are_refused(body: bytes, param: str | None, message: str) -> None:
    """Guards against an answer without what its caller asked for, under 200; and against a param that is our own
    name of some field."""
    parse = parse_chat if b'"messages": [{' in body and b'"prompt": "hi", "messages"' not in body else parse_completion
    with pytest.raises(ApiError) as caught:
        parse(body)
    error = error_reply(caught.value).envelope["error"]
    assert (caught.value.code, error["param"], error["message"]) == ("INVALID_ARGUMENT", param, message)


IMAGE = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]
BAD_CHATS: list[tuple[dict[str, object], str]] = [
    ({"n": "2"}, "n"),
    ({"n": True}, "n"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"guided_regex": "a", "guided_grammar": "start: A"}, "guided_grammar"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"grammar": "root ::= yes"}, "grammar"),
    ({"store": True}, "store"),
    ({"continue_final_message": 0}, "continue_final_message"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"messages": [HI[0] | {"tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [HI[0] | {"reasoning_content": "so"}]}, "messages[0].reasoning_content"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 10**4000}, "seed"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_k": 1.0}, "top_k"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"timeout": 0}, "timeout"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": IMAGE}, "messages[0].content[1].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
]


@pytest.mark.parametrize(("fields", "field"), BAD_CHATS, ids=lambda value: repr(value)[:40])
def test_bad_chat_fields_are_named(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(chat(**fields))
    error = caught.value
    assert (error.code, error.field) == ("INVALID_ARGUMENT", field)
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        (7, "prompt"),
        ([1, "b"], "prompt"),
        ([1.5], "prompt[0]"),
        ([[1, True]], "prompt[0][1]"),
        ([2**70], "prompt[0]"),
    ],
)
def test_bad_prompts_are_named(prompt: object, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion(completion(prompt=prompt))
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", field)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"prompt":"a"} x',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a","temperature":-1e999}',
        b'{"prompt":"a\\ud800"}',
        b'{"prompt":"a","unknown":"\\udc00"}',
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"a","unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":' + b'{"a":' * 100_000,
        b'{"prompt":"a","seed":1' + b"0" * 5000 + b"}",
        "﻿{}".encode("utf-16"),
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_not_json_is_the_callers_fault(body: bytes) -> None:
    """Guards against NaN, lone surrogates, invalid UTF-8 and deep nesting surfacing as 500."""
    with pytest.raises(ApiError) as caught:
        parse_completion(body)
    assert caught.value.code == "INVALID_ARGUMENT"


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion(b'{"model":"tiny"}')
    assert (caught.value.field, caught.value.message) == ("prompt", "prompt: is required")


def test_seeds_have_the_range_that_grpc_has() -> None:
    assert parse_completion(completion(seed=2**64 - 1)).call.seed == 2**64 - 1


def test_the_last_of_two_equal_keys_counts() -> None:
    assert parse_completion(b'{"prompt":"a","prompt":"b"}').call.prompt == "b"


@pytest.mark.parametrize("value", ["", "soon", "nan", "inf", "-1", "0"])
def test_bad_timeout_headers(value: str) -> None:
    with pytest.raises(ApiError) as caught:
        timeout_from(value, "x-request-timeout-s")
    assert caught.value.field == "x-request-timeout-s"


@pytest.mark.parametrize(
    ("field", "told"), [("prompt", "prompt[1]"), ("token_ids[3]", "prompt[1][3]"), ("temperature", "temperature")]
)
def test_of_several_prompts_an_error_says_which(field: str, told: str) -> None:
    class Refusing(FakeFrontend):
        async def generate(self, call: GenerateCall, outlet: object = None) -> Any:
            if call.prompt == "b":
                raise ApiError("INVALID_ARGUMENT", f"{field}: is wrong", field)
            await asyncio.sleep(1)
            yield

    error = ask(Refusing(), "POST", TEXT, json={"prompt": ["a", "b"]}).json()["error"]
    assert (error["param"], error["message"]) == (told, f"{told}: is wrong")
