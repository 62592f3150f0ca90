"""From a chat with tools to what its client sends back: the dialect, the marks that parsers must see, the reasoning's
tokens, and the next turn's ids."""

import asyncio
import json

import msgspec
import pytest

from engine.constraints.text import JSON_OBJECT
from engine.text.bundle import TextModel
from engine.text.dialect import Dialect, dialect_of
from engine.types import Constraint
from router.config import RouterConfig
from router.front.api import ApiError, ChatMessage, GenerateCall, HttpForm, Tool, ToolChoice
from router.front.grammars import GrammarTrials
from router.front.intake import Arrival, Intake
from router.front.output import Output
from router.front.parsers.choose import Parsing, parser_of
from router.front.parsers.turn import turn_of
from router.http.openai import parse_chat
from tests.engine.text.test_chat import QWEN
from tests.engine.text.test_control import files, model

FORM = HttpForm(chat=True, include_usage=False, return_token_ids=False, created=1)
TOOL = Tool("rain", "", '{"type": "object"}')
ASKED = GenerateCall(prompt=[ChatMessage("user", "Rain?")], tools=(TOOL,), form=FORM, max_tokens=5)
ANSWER = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "rain", "arguments": {"city": "Köln"}}\n</tool_call>'


def qwen(template: str = QWEN) -> TextModel:
    made = files("byte level")
    settings = msgspec.structs.replace(made.settings, context_tokens=4000)
    return model(msgspec.structs.replace(made, template=template, settings=settings))


def take(call: GenerateCall, text: TextModel | None = None, **config: object) -> Arrival:
    return asyncio.run(Intake(text or qwen(), RouterConfig(**config)).take(call))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "added", "dialect"),
    [
        (QWEN, [], Dialect("hermes", "think")),
        ("{{ tools }}", ["<|python_tag|>"], Dialect("llama3")),
        ("{{ tools }}<think>", ["[TOOL_CALLS]"], Dialect("mistral", "think")),
        ("{{ tools }}", ["<|channel|>", "<|message|>"], Dialect("harmony", "harmony")),
        ("{{ tools }}", ["<|im_end|>"], Dialect()),
    ],
)
def test_the_dialect_shows_in_template_and_tokens(template: str, added: list[str], dialect: Dialect) -> None:
    assert dialect_of(template, added) == dialect


def test_the_form_says_how_the_answer_is_taken_apart() -> None:
    """Guards a resumed stream, which knows of the model's dialect only what its form says."""
    form = take(ASKED).form
    assert form is not None and form.parsing == Parsing(tools="hermes", reasoning="think")
    form = take(msgspec.structs.replace(ASKED, tools=())).form
    assert form is not None and form.parsing == Parsing(reasoning="think")
    form = take(msgspec.structs.replace(ASKED, tools=()), reasoning_parser="none").form
    assert form is not None and form.parsing is None
    assert take(msgspec.structs.replace(ASKED, form=None)).form is None


def test_a_block_that_the_template_opens_is_known() -> None:
    opening = qwen(QWEN.replace("{{ note }}", "") + "{% if not enable_thinking is defined %}<think>\n{% endif %}")
    form = take(ASKED, opening).form
    assert form is not None and form.parsing is not None and form.parsing.is_open
    form = take(msgspec.structs.replace(ASKED, chat_template_kwargs='{"enable_thinking": false}'), opening).form
    assert form is not None and form.parsing is not None and not form.parsing.is_open
    begun = [ChatMessage("user", "x"), ChatMessage("assistant", "<think>so")]
    form = take(msgspec.structs.replace(ASKED, prompt=begun, continue_final_message=True), opening).form
    assert form is not None and form.parsing is not None and form.parsing.is_open


def test_a_block_whose_mark_is_a_control_token_is_known() -> None:
    """Guards models whose tokenizer calls the mark special: a prompt's text has no name of such a token."""
    made = files("byte level")
    settings = msgspec.structs.replace(made.settings, context_tokens=4000)
    special = json.loads(made.tokenizer.replace("<|end|>", "<think>"))
    assert next(one for one in special["added_tokens"] if one["content"] == "<think>")["special"]
    opening = "{{ messages[0].content }}<think>\n{# </think> #}"
    replaced = msgspec.structs.replace(made, template=opening, settings=settings, tokenizer=json.dumps(special))
    form = take(msgspec.structs.replace(ASKED, tools=()), model(replaced)).form
    assert form is not None and form.parsing is not None and form.parsing.is_open


def test_tools_whose_calls_nobody_could_read_are_refused() -> None:
    """Guards clients from calls that come as text: the configuration says which parser, or that there is none."""
    unknown = qwen("{{ tools }}{{ messages[0].content }}")
    with pytest.raises(ApiError, match="not known here") as caught:
        take(ASKED, unknown)
    assert caught.value.field == "tools"
    form = take(ASKED, unknown, tool_parser="mistral").form
    assert form is not None and form.parsing == Parsing(tools="mistral")
    with pytest.raises(ApiError, match="switched off"):
        take(ASKED, tool_parser="none")


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    without = take(msgspec.structs.replace(ASKED, tools=()))
    none = take(msgspec.structs.replace(ASKED, tool_choice=ToolChoice("none")))
    assert none.record.tokens == without.record.tokens != take(ASKED).record.tokens


def test_a_parser_sees_its_marks_and_nobody_else_does() -> None:
    """Guards calls behind a mark that is a control token: detokenizing skips those."""
    text = model(files("byte level"))
    ids = [token for name in ("<|end|>", "<|im_start|>") for token in text.encode(name, add_special=False)]
    assert len(ids) == 2
    plain, showing = text.detokenizer(), text.detokenizer(frozenset({"<|end|>"}))
    assert (plain.push(ids), showing.push(ids)) == ("", "<|end|>")
    assert text.detokenizer().push(ids) == "", "one answer's marks are not another's"
    pieces = model(files("sentence piece"))
    ids = pieces.encode("</s>", add_special=False)
    assert (pieces.detokenizer().push(ids), pieces.detokenizer(frozenset({"</s>"})).push(ids)) == ("", "</s>")


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_tokens_of_the_reasoning_are_counted_one_by_one(size: int, stop: tuple[str, ...]) -> None:
    """Guards the count against how many tokens come at once: a resumed stream says the same."""
    text = model(files("byte level"))
    answer = "<think>hm, so</think>Hi"
    ids = text.encode(answer, add_special=False)
    output = Output(text.detokenizer(), stop, parser_of(Parsing(reasoning="think")))
    shown = "".join(output.push(ids[at : at + size])[0] for at in range(0, len(ids), size))
    assert shown + output.flush() == answer
    assert output.reasoning_tokens == len("<think>hm, so</think>") - len("<think") == 15


def test_a_turn_is_what_the_client_sends_back() -> None:
    turn = turn_of(Parsing(tools="hermes", reasoning="think"), "r1", ANSWER)
    assert (turn.content, turn.reasoning) == (None, "hm")
    (call,) = turn.tool_calls
    assert (call.name, call.arguments) == ("rain", '{"city": "Köln"}')
    assert call.id.startswith("call_") and turn_of(Parsing(tools="hermes"), "r1", ANSWER).tool_calls[0].id == call.id
    assert turn_of(Parsing(tools="hermes"), "r2", ANSWER).tool_calls[0].id != call.id
    mistral = turn_of(Parsing(tools="mistral"), "r1", "[TOOL_CALLS]f{}").tool_calls[0].id
    assert len(mistral) == 9 and mistral.isalnum()
    assert turn_of(None, "r1", ANSWER) == ChatMessage("assistant", ANSWER)


def test_the_turn_after_a_call_begins_with_the_very_ids_of_the_call() -> None:
    """Guards an agent's cache: every one of its turns follows a call."""
    text = qwen()
    intake = Intake(text, RouterConfig())
    first = asyncio.run(intake.take(ASKED))
    assert first.chat is not None and first.form is not None
    # Ids that the tokenizer would not choose: byte by byte, and the last is the end of the turn.
    emitted = text.encode(ANSWER, add_special=False, is_literal=True)
    turn = turn_of(first.form.parsing, "r1", ANSWER)
    intake.conversations.keep(
        intake.conversations.finished(
            first.chat, first.record.namespace, first.prompt, lambda answer: turn, ANSWER, [*emitted, *text.stop_ids]
        )
    )
    result = ChatMessage("tool", "no", tool_call_id=turn.tool_calls[0].id)
    call = msgspec.structs.replace(ASKED, prompt=[*ASKED.prompt, turn, result])
    chat = asyncio.run(intake.take(call)).chat
    assert chat is not None
    _, known, rest = intake.conversations.begin(chat, b"")
    assert known[: len(first.record.tokens) + len(emitted)] == first.record.tokens + emitted
    assert "no by rain" in rest and "Köln" not in rest
    other = msgspec.structs.replace(chat, tools=(Tool("snow"),))
    assert intake.conversations.begin(other, b"")[1] == [], "other tools make another text"
    broken = json.dumps({"city": "Bonn"})
    changed = msgspec.structs.replace(turn, tool_calls=(msgspec.structs.replace(turn.tool_calls[0], arguments=broken),))
    again = msgspec.structs.replace(chat, messages=(chat.messages[0], changed, chat.messages[2]))
    assert intake.conversations.begin(again, b"")[1] == [], "so does another call"


def test_a_demanded_call_becomes_a_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `required` and a named function, which hold an answer that the model would rather begin otherwise."""

    async def approved(self: GrammarTrials, constraint: Constraint, field: str, tenant: str) -> Constraint:
        assert field == "tool_choice"
        return constraint

    # The trial itself needs a prepared model (tests/router/front/parsers/test_forced.py compiles what is made here).
    monkeypatch.setattr(GrammarTrials, "approved", approved)
    checked: list[str] = []
    monkeypatch.setattr("router.front.validate.check_schema", lambda text, field: checked.append(field))
    required = take(msgspec.structs.replace(ASKED, tool_choice=ToolChoice("required"))).record
    assert required.constraint is not None and "<tool_call>" in required.constraint.text
    assert len(checked) == len(ASKED.tools), "each schema once: a megabyte of them takes a twentieth of a second"
    tools = (TOOL, Tool("snow"))
    named = take(msgspec.structs.replace(ASKED, tools=tools, tool_choice=ToolChoice("required", "snow")))
    assert named.record.constraint is not None and "rain" not in named.record.constraint.text
    assert named.form is not None and named.form.parsing is not None and named.form.parsing.single
    assert take(ASKED).record.constraint is None
    odd = [
        ({"tools": ()}, "needs tools"),
        ({"tool_choice": ToolChoice("required", "hail")}, "none of the tools"),
        ({"constraint": JSON_OBJECT, "constraint_field": "response_format"}, "not allowed with response_format"),
        ({"form": None}, "taken apart"),
    ]
    for fields, message in odd:
        asked = msgspec.structs.replace(ASKED, **{"tool_choice": ToolChoice("required"), **fields})
        with pytest.raises(ApiError, match=message) as caught:
            take(asked)
        assert caught.value.field == "tool_choice"


def test_a_budget_of_thinking_becomes_a_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `budget_tokens`, which was let pass and kept by nobody, and callers whose model does not think."""

    async def approved(self: GrammarTrials, constraint: Constraint, field: str, tenant: str) -> Constraint:
        return constraint

    monkeypatch.setattr(GrammarTrials, "approved", approved)
    asked = msgspec.structs.replace(ASKED, tools=(), reasoning_budget=7)
    plain = qwen("{% for m in messages %}{{ m.content }}{% endfor %}")
    for text, why in ((plain, "does not think"), (qwen(), "cannot be bounded")):
        with pytest.raises(ApiError, match=why) as caught:
            take(asked, text)
        assert caught.value.field == "reasoning_budget"
    marked = qwen()
    marked.added_ids = dict(marked.added_ids) | {"<think>": 300, "</think>": 301}
    bound = take(asked, marked).record.constraint
    assert bound is not None and "{0,7}" in bound.text and "<[301]>" in bound.text
    with pytest.raises(ApiError, match="not allowed with response_format"):
        take(msgspec.structs.replace(asked, constraint=JSON_OBJECT, constraint_field="response_format"), marked)
    forced = msgspec.structs.replace(ASKED, tool_choice=ToolChoice("required"), reasoning_budget=10**9)
    held = take(forced, marked).record.constraint
    assert held is not None and f"{{0,{marked.context_tokens}}}" in held.text and "<tool_call>" in held.text


def test_a_chat_over_http_says_how_long_and_how_hard_to_think(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the two fields from the body to the record: a budget that nobody keeps, and an effort that no template
    shows, which must be refused."""

    async def approved(self: GrammarTrials, constraint: Constraint, field: str, tenant: str) -> Constraint:
        return constraint

    monkeypatch.setattr(GrammarTrials, "approved", approved)

    def sent(**fields: object) -> GenerateCall:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5} | fields
        return parse_chat(json.dumps(body).encode()).call

    marked = qwen()
    marked.added_ids = dict(marked.added_ids) | {"<think>": 300, "</think>": 301}
    bound = take(sent(thinking_token_budget=7), marked).record.constraint
    assert bound is not None and "{0,7}" in bound.text and take(sent(), marked).record.constraint is None
    with pytest.raises(ApiError, match="is thinking_token_budget meant"):
        sent(thinking_budget=7)
    with pytest.raises(ApiError, match="thinking_token_budget"):
        sent(thinking_token_budget=-1)
    knows = qwen("{% for m in messages %}{{ m.content }}{% endfor %}Reasoning: {{ reasoning_effort }}")
    told = take(sent(reasoning_effort="high"), knows)
    assert told.prompt.text.endswith("Reasoning: high")
    both = sent(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low", "enable_thinking": None})
    assert take(both, knows).prompt.text.endswith("Reasoning: low")
    with pytest.raises(ApiError, match="disagrees"):
        sent(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    with pytest.raises(ApiError, match="must be a JSON object"):
        sent(reasoning_effort="low", chat_template_kwargs=[1])
    with pytest.raises(ApiError, match="no variable reasoning_effort"):
        take(sent(reasoning_effort="high"))


@pytest.mark.parametrize("name", ["", "rain"])
@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ('{"type": "array"}', "type object"),
        ('{"type": ["integer", "null"]}', "type object"),
        ('{"properties": {"id": {"enum": [9007199254740993]}}}', "double"),
        ('{"properties": {"id": {"type": "integer", "minimum": 99999999999999999999}}}', "minimum"),
    ],
)
def test_parameters_that_no_demanded_call_can_keep_to_are_refused(name: str, parameters: str, says: str) -> None:
    """Guards a demanded call that comes back as text, or with another number. A call of the model's own is not held."""
    call = msgspec.structs.replace(ASKED, tools=(Tool("snow"), Tool("rain", "", parameters)))
    with pytest.raises(ApiError, match=says) as caught:
        take(msgspec.structs.replace(call, tool_choice=ToolChoice("required", name)))
    assert caught.value.field == "tools[1].function.parameters"
    assert take(call).record.constraint is None
