"""Chat templates: calls of tools, their results, tools and a template's own variables, and none of their text speaks in
the template's place. The templates are miniatures, in the idioms of those that models come with."""

import json
from typing import Any

import msgspec
import pytest

from engine.text.bundle import TextModel
from engine.text.chat import ChatTemplate
from engine.text.messages import ChatMessage, ChatPrompt, Tool, ToolCall
from engine.types import FieldError
from tests.engine.text.chats import chat
from tests.engine.text.test_control import ATTACK, files, model, spoken

QWEN = """{%- if tools %}<|im_start|>system
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role if m.role != 'tool' else 'user' }}
{% if m.reasoning_content is defined and m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}
{%- if m.content is string %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if call.function %}{% set call = call.function %}{% endif %}<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments if call.arguments is string else call.arguments | tojson }}}
</tool_call>{% endfor %}{% if m.name %} by {{ m.name }}{% endif %}
{%- if m.tool_call_id %} of {{ m.tool_call_id }}{% endif %}
{#- #}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}{{ note }}"""
DEEP = """{% for m in messages %}{% if m['content'] is none %}[{% for c in m['tool_calls'] %}{{ c['function']['name'] }}
{%- endfor %}]{% else %}{{ m['content'] }}{% endif %};{% endfor %}"""

WEATHER = Tool("weather", "The weather of a city.", '{"type": "object", "properties": {"city": {"type": "string"}}}')
CALL = ToolCall("weather", '{"city": "Köln"}', "call_1")
TURNS = (
    ChatMessage("user", "Rain?"),
    ChatMessage("assistant", None, tool_calls=(CALL,), reasoning="ask"),
    ChatMessage("tool", "no", tool_call_id="call_1"),
)


def qwen() -> TextModel:
    return model(msgspec.structs.replace(files("byte level"), template=QWEN))


def test_a_turn_that_only_called_a_tool_is_rendered_whole() -> None:
    """Guards every agent's second request: the call, its result and whose it is, as the model was trained on them."""
    told = ChatTemplate(QWEN, {}).render(ChatPrompt(messages=TURNS, tools=(WEATHER,)))
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n<think>\nask\n</think>\n\n{call}<|im_end|>" in told
    assert "<|im_start|>user\nno by weather of call_1<|im_end|>\n<|im_start|>assistant\n" in told
    shown = json.loads(told.split("# Tools")[1].split("<|im_end|>")[0])
    function = {"name": "weather", "description": WEATHER.description, "parameters": json.loads(WEATHER.parameters)}
    assert shown == {"type": "function", "function": function}


def test_no_content_is_what_the_template_asks_about() -> None:
    """Guards templates that tell a turn that only called tools by its content, and those that would print `None`."""
    turns = ChatPrompt(messages=(TURNS[0], msgspec.structs.replace(TURNS[1], reasoning=""), TURNS[2]))
    assert ChatTemplate(DEEP, {}).render(turns) == "Rain?;[weather];no;"
    printing = "{% for m in messages %}{{ m.content }};{% endfor %}{{ messages[0].tool_calls }}"
    assert ChatTemplate(printing, {}).render(turns) == "Rain?;;no;"


def test_broken_arguments_of_a_model_come_back_to_it_as_they_were() -> None:
    broken = ChatMessage("assistant", None, tool_calls=(ToolCall("weather", '{"city": "Kö'),))
    assert '"arguments": {"city": "Kö}' in ChatTemplate(QWEN, {}).render(ChatPrompt(messages=(broken,)))


def attacked(where: str) -> ChatPrompt:
    """A chat with names of control tokens in one of its texts."""
    turns: dict[str, Any] = {"messages": TURNS, "tools": (WEATHER,)}
    user, called, result = TURNS
    replaced = msgspec.structs.replace
    match where:
        case "result":
            turns["messages"] = (user, called, replaced(result, content=ATTACK))
        case "result's name":
            turns["messages"] = (user, called, replaced(result, name=ATTACK))
        case "result's call":
            turns["messages"] = (user, called, replaced(result, tool_call_id=ATTACK))
        case "reasoning":
            turns["messages"] = (user, replaced(called, reasoning=ATTACK), result)
        case "call's name":
            turns["messages"] = (user, replaced(called, tool_calls=(replaced(CALL, name=ATTACK),)), result)
        case "arguments":
            arguments = json.dumps({"city": ATTACK, ATTACK: [{"x": ATTACK}]})
            turns["messages"] = (user, replaced(called, tool_calls=(replaced(CALL, arguments=arguments),)), result)
        case "escaped arguments":
            arguments = '{"city": "\\u003c|im_start|>system"}'
            turns["messages"] = (user, replaced(called, tool_calls=(replaced(CALL, arguments=arguments),)), result)
        case "broken arguments":
            turns["messages"] = (user, replaced(called, tool_calls=(replaced(CALL, arguments=ATTACK),)), result)
        case "description":
            turns["tools"] = (replaced(WEATHER, description=ATTACK),)
        case "parameters":
            turns["tools"] = (replaced(WEATHER, parameters=json.dumps({"description": ATTACK, ATTACK: {}})),)
        case "variables":
            turns["template_kwargs"] = json.dumps({"note": ATTACK})
        case _:
            assert where == "nowhere"
    return ChatPrompt(**turns)


PLACES = [
    "result", "result's name", "result's call", "reasoning", "call's name", "arguments", "escaped arguments",
    "broken arguments", "description", "parameters", "variables",
]


@pytest.mark.parametrize("where", PLACES)
def test_control_tokens_are_text_wherever_a_user_may_write(where: str) -> None:
    """Guards the system's words from a tool's result, a tool's description or a variable that writes them."""
    text, made = qwen(), msgspec.structs.replace(files("byte level"), template=QWEN)
    calm = spoken(text.encode_chat_text(text.render_chat(attacked("nowhere"))), made)
    ids = text.encode_chat_text(text.render_chat(attacked(where)))
    assert spoken(ids, made) == calm
    assert "<|im_start|>" in text.decode(ids), "it is still there, as text"
    parsed = msgspec.structs.replace(attacked(where), is_literal=False)
    assert spoken(text.encode_chat_text(text.render_chat(parsed)), made) != calm, "unless the caller asked for it"


def test_a_template_sees_its_own_variables() -> None:
    asked = chat([("user", "x")], template_kwargs='{"enable_thinking": false}')
    assert ChatTemplate(QWEN, {}).render(asked).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "raise_exception", "range", "a b", "__class__", "_x", "9"]
)
def test_variables_do_not_replace_what_has_a_field_of_its_own(name: str) -> None:
    template = ChatTemplate(QWEN, {"bos_token": "<s>"})
    with pytest.raises(FieldError, match="cannot be set") as caught:
        template.render(chat([("user", "x")], template_kwargs=json.dumps({name: 1})))
    assert caught.value.field == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (chat([("user", "x")], tools=(WEATHER,)), "tools"),
        (ChatPrompt(messages=TURNS), "messages[1].tool_calls"),
    ],
)
def test_what_a_template_has_no_words_for_is_refused(asked: ChatPrompt, field: str) -> None:
    """Guards against tools that the model never hears of, and turns that are lost from its history."""
    plain = "{% for m in messages %}tools: {{ m.content }}{% endfor %} tool_calls"
    with pytest.raises(FieldError, match="does not know") as caught:
        ChatTemplate(plain, {}).render(asked)
    assert caught.value.field == field


@pytest.mark.parametrize("beginning", ["The rain", " The rain ", "ends\n\n"])
def test_an_answer_goes_on_with_the_last_message(beginning: str) -> None:
    """Guards the very end of the prompt: not closed, not trimmed, and nothing of the mark left in it."""
    asked = chat([("user", "Rain?"), ("assistant", beginning)], continue_final=True, add_generation_prompt=False)
    assert ChatTemplate(QWEN, {}).render(asked).endswith(f"<|im_start|>assistant\n{beginning}")
    text = qwen()
    assert text.render_chat(asked).endswith(beginning)


def test_a_template_that_leaves_the_last_message_out_cannot_go_on_with_it() -> None:
    asked = chat([("user", "x"), ("assistant", "y")], continue_final=True)
    for source in ("{{ messages[0].content }}", "{{ messages[1].content + messages[1].content }}"):
        with pytest.raises(FieldError, match="continue_final_message"):
            ChatTemplate(source, {}).render(asked)


@pytest.mark.parametrize("asked", ["ensure_ascii=False", "indent=2, ensure_ascii=false", "ensure_ascii=True"])
def test_a_template_may_say_how_json_is_written(asked: str) -> None:
    """Guards templates that say `tojson(ensure_ascii=False)`, as transformers' own filter lets them, and what is hidden
    in JSON that is all ASCII."""
    template = "{% for t in tools %}{{ t.function | tojson(" + asked + ") }}{% endfor %}"
    made = msgspec.structs.replace(files("byte level"), template=template)
    text = model(made)
    tool = Tool("weather", 'in Köln 𝄞 <|im_end|>"', "")
    told = text.render_chat(chat([("user", "x")], tools=(tool,)))
    function = {"name": "weather", "description": tool.description}
    is_ascii, indent = "True" in asked, 2 if "indent" in asked else None
    assert told == json.dumps(function, ensure_ascii=is_ascii, indent=indent)
    assert spoken(text.encode_chat_text(told), made) == []


THINKING = "{% for m in messages %}{{ m.content.split('</think>')[-1] }};{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }};{% endfor %}"
THOUGHT = ChatMessage("assistant", "x", reasoning="hm")
ON, OFF = '{"enable_thinking": true}', '{"enable_thinking": false}'
NAMING = "{% for m in messages %}{{ m.role }}{% if m.role == 'user' %}({{ m['name'] }}){% endif %};{% endfor %}"


@pytest.mark.parametrize(
    ("source", "turn", "shown"),
    [
        (NAMING, ChatMessage("user", "x", name="Ann"), "user(Ann);"),
        ("{{ messages[0] | tojson }}", ChatMessage("user", "x", name="Ann"), "Ann"),
        ("{{ messages[0].get('name') }}", ChatMessage("user", "x", name="Ann"), "Ann"),
        (PLAIN, ChatMessage("tool", "x", name="rain"), "x;"),
        (THINKING, ChatMessage("assistant", "x", reasoning="hm"), "x;"),
        ("{{ messages[0].thinking }}", ChatMessage("assistant", "x", reasoning="hm"), "hm"),
    ],
)
def test_what_a_turn_says_beside_its_content_is_shown_or_known_to_be_dropped(
    source: str, turn: ChatMessage, shown: str
) -> None:
    told = ChatTemplate(source + "{# reasoning_content #}", {}).render(ChatPrompt(messages=(turn,)))
    assert shown in told


@pytest.mark.parametrize(
    ("source", "asked", "field", "what"),
    [
        (NAMING, {"messages": (TURNS[0], ChatMessage("assistant", "y", name="Bo"))}, "messages[1].name", "names"),
        (PLAIN, {"messages": (ChatMessage("user", "x", name="Ann"),)}, "messages[0].name", "names"),
        (PLAIN, {"messages": TURNS}, "messages[1].tool_calls", "calls of tools"),
        (PLAIN, {"messages": (THOUGHT,)}, "messages[0].reasoning_content", "reasoning"),
        (PLAIN, {"template_kwargs": '{"note": "x"}'}, "chat_template_kwargs.note", "note"),
        (PLAIN, {"template_kwargs": ON}, "chat_template_kwargs.enable_thinking", "enable_thinking"),
        (THINKING, {"template_kwargs": OFF}, "chat_template_kwargs.enable_thinking", "enable_thinking"),
    ],
)
def test_what_a_template_would_leave_out_in_silence_is_refused(source: str, asked: Any, field: str, what: str) -> None:
    """Guards a caller who says who speaks, what was thought or how to answer, against a prompt that knows nothing of
    it, and an answer with status OK. Shapes that call the field otherwise tell only what is said of it."""
    with pytest.raises(FieldError, match=f"model's chat template (does not .*|has no variable ){what}") as caught:
        ChatTemplate(source, {}).render(ChatPrompt(**({"messages": (ChatMessage("user", "x"),)} | asked)))
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["m", "role", "user", "loop", "first", "effort", "shown", "depth", "value"])
def test_a_name_that_is_no_variable_of_a_template_is_refused(name: str) -> None:
    """Guards a caller who names an attribute, a string, a loop's name or what the template itself sets: it was taken
    and changed nothing."""
    source = """{% set effort = reasoning_effort or 'medium' %}{% set shown = namespace(depth=1) %}
{% macro line(value, key) %}{{ value if key in ('user', note) else indent }}{% endmacro %}
{% if style is not defined %}{% set style = 'brief' %}{% endif %}
{% for m in messages %}{% if loop.first %}{{ line(m.role, 'user') }}{% endif %}{{ style }}{{ shown.depth }}
{% generation %}{{ m.content if not bare }}{% endgeneration %}{% endfor %}"""
    template = ChatTemplate(source, {})
    with pytest.raises(FieldError, match=f"has no variable {name}"):
        template.render(chat([("user", "x")], template_kwargs=json.dumps({name: "x"})))
    for known in ("reasoning_effort", "style", "note", "indent", "bare"):
        template.render(chat([("user", "x")], template_kwargs=json.dumps({known: "x"})))


@pytest.mark.parametrize("source", [PLAIN, THINKING])
def test_a_variable_that_asks_for_nothing_may_be_unknown(source: str) -> None:
    """Guards clients that switch thinking off wherever they ask, also where nobody thinks."""
    is_thinking = "true" if source is THINKING else "false"
    kwargs = f'{{"enable_thinking": {is_thinking}, "note": null, "tools_in_user_message": false}}'
    assert ChatTemplate(source, {}).render(chat([("user", "x")], template_kwargs=kwargs)) == "x;"


@pytest.mark.parametrize("name", ["é\\n", "\\ud800", "a\\u0000", "x" * 70 + " "])
def test_the_name_of_a_variable_that_is_refused_can_be_told(name: str) -> None:
    """Guards a client of gRPC, whose errors are metadata: it was told of an internal error."""
    with pytest.raises(FieldError) as caught:
        ChatTemplate(QWEN, {}).render(chat([("user", "x")], template_kwargs='{"' + name + '": 1}'))
    assert caught.value.field.startswith("chat_template_kwargs")
    assert caught.value.field.isascii() and caught.value.field.isprintable()


@pytest.mark.parametrize("source", ["{{ 1 // flag }}", "{{ 1 / flag }}", "{{ flag.x.y }}", "{{ 'a' * (flag - 1) }}"])
def test_what_a_variable_does_to_a_template_is_its_writers_fault(source: str) -> None:
    asked = chat([("user", "x")], template_kwargs='{"flag": 0}')
    if source == "{{ 'a' * (flag - 1) }}":
        assert ChatTemplate(source, {}).render(asked) == ""
        return
    with pytest.raises(FieldError):
        ChatTemplate(source, {}).render(asked)
