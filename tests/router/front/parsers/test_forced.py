# ruff: noqa: E501 - answers of models stand in one line each
"""Calls that are demanded: what the grammar allows is what the parser of the same dialect reads, and nothing else is."""

import json

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from engine.constraints.grammar import compile_constraint
from engine.constraints.text import check_constraint
from engine.text.messages import Tool
from engine.types import Constraint, FieldError
from router.front.parsers.choose import Parsing, parser_of
from router.front.parsers.forced import ReasoningBudget, budgeted, forced_calls
from tests.engine.text.test_control import byte_level
from tests.router.front.parsers.test_parsers import joined

MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|channel|>", "<|message|>", "<|end|>"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}},
    "$defs": {"number": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = (Tool("f", "", json.dumps(SCHEMA)), Tool("g"))
F, G = ("f", '{"a": 1}'), ("g", '{"b": ["c", {}]}')


def tokenizer(*more: str) -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken(name, normalized=False) for name in [*MARKS, "<|start|>", "<|constrain|>", *more]])
    return made


def allowed(parsing: Parsing, text: str, *more: str, tools: tuple[Tool, ...] = TOOLS, has_marks: bool = True) -> bool:
    """Return whether the whole of `text` may be the answer."""
    made = tokenizer(*more) if has_marks else byte_level()
    added = {token.content: index for index, token in made.get_added_tokens_decoder().items()}
    constraint = forced_calls(parsing, tools, added)
    return written(constraint, made, text)


def written(constraint: Constraint, made: Tokenizer, text: str) -> bool:
    check_constraint(constraint)
    end = made.token_to_id("<|im_end|>")
    matcher = compile_constraint(constraint, LLTokenizer(made.to_str(), n_vocab=320, eos_token=end))
    ids = made.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HARMONY = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + F[1]
THOUGHT = "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant"
GOOD = [
    (Parsing(tools="hermes"), hermes(*F), (), [F]),
    (Parsing(tools="hermes"), f"{hermes(*F)}\n{hermes(*G)}", (), [F, G]),
    (Parsing(tools="hermes", reasoning="think"), hermes(*G), (), [G]),
    (Parsing(tools="hermes", reasoning="think"), f"<think>\na < b\n</think>\n\n{hermes(*F)}", (), [F]),
    (Parsing(tools="hermes", reasoning="think", is_open=True), f"\nhm\n</think>\n\n{hermes(*F)}", (), [F]),
    (Parsing(tools="llama3"), '{"name": "f", "parameters": {"a": 1}}', (), [F]),
    (Parsing(tools="mistral"), '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', (), [F]),
    (Parsing(tools="mistral"), '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": ["c", {}]}}]', (), [F, G]),
    (Parsing(tools="mistral"), '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": ["c", {}]}', ("[ARGS]",), [F, G]),
    (Parsing(tools="harmony", reasoning="harmony"), HARMONY, (), [F]),
    (Parsing(tools="harmony", reasoning="harmony"), THOUGHT + HARMONY, (), [F]),
]  # fmt: skip


@pytest.mark.parametrize(("parsing", "text", "more", "calls"), GOOD)
def test_what_is_allowed_is_what_the_parser_reads(
    parsing: Parsing, text: str, more: tuple[str, ...], calls: list[tuple[str, str]]
) -> None:
    """Guards a client that demanded a call against an answer that holds to the grammar and is read as text."""
    assert allowed(parsing, text, *more)
    parser = parser_of(parsing)
    _, content, found = joined(parser.push(text) + parser.flush())
    assert (found, content) == (calls, "")


@pytest.mark.parametrize(
    ("parsing", "text"),
    [
        (Parsing(tools="hermes"), "No."),
        (Parsing(tools="hermes"), hermes("h", "{}")),
        (Parsing(tools="hermes"), hermes("f", '{"a": "x"}')),
        (Parsing(tools="hermes"), hermes("f", "{}")),
        (Parsing(tools="hermes"), hermes("g", "[]")),
        (Parsing(tools="hermes"), f"{hermes(*F)} and more"),
        (Parsing(tools="hermes", single=True), f"{hermes(*F)}\n{hermes(*G)}"),
        (Parsing(tools="hermes", reasoning="think", is_open=True), hermes(*F)),
        (Parsing(tools="llama3"), '{"name": "h", "parameters": {}}'),
        (Parsing(tools="mistral"), '[TOOL_CALLS][]'),
        (Parsing(tools="harmony", reasoning="harmony"), THOUGHT),
    ],
)
def test_nothing_else_is_allowed(parsing: Parsing, text: str) -> None:
    """Guards what `required` promises: a call, of a tool that there is, with arguments that its schema takes."""
    assert not allowed(parsing, text)


def test_marks_that_are_no_tokens_are_text() -> None:
    parsing = Parsing(tools="hermes", reasoning="think")
    assert allowed(parsing, f"<think>hm</think>{hermes(*F)}", has_marks=False)
    assert not allowed(parsing, f"<think>hm</think>{hermes('h', '{}')}", has_marks=False)


def test_one_named_tool_is_the_only_one() -> None:
    assert allowed(Parsing(tools="hermes", single=True), hermes(*G), tools=TOOLS[1:])
    assert not allowed(Parsing(tools="hermes", single=True), hermes(*F), tools=TOOLS[1:])


@pytest.mark.parametrize("is_open", [False, True])
def test_a_think_block_is_closed_at_its_budget_and_anything_follows(is_open: bool) -> None:
    """Guards `budget_tokens` against a model that thinks on: by tokens, wherever it is in what it thinks."""
    made = tokenizer()
    added = {token.content: index for index, token in made.get_added_tokens_decoder().items()}
    parsing = Parsing(reasoning="think", is_open=is_open)
    budget = ReasoningBudget(4, {made.token_to_id("<|im_end|>")})
    bound = budgeted(parsing, added, budget)
    opened = "" if is_open else "<think>"
    assert written(bound, made, opened + "a b?</think>\n\nYes <think> {no}. <tool_call>")
    assert written(bound, made, opened + "</think>") and not written(bound, made, opened + "abcde</think>x")
    assert written(bound, made, "No.") is not is_open, "a model that opens the block by itself need not"
    assert not written(bound, made, f"{opened}ab<|im_end|>")
    none = budgeted(parsing, added, budget._replace(tokens=0))
    assert written(none, made, f"{opened}</think>Yes.") and not written(none, made, f"{opened}a</think>Yes.")
    call = forced_calls(Parsing(tools="hermes", reasoning="think", is_open=is_open), TOOLS, added, budget)
    assert written(call, made, f"{opened}abcd</think>\n{hermes(*F)}")
    assert not written(call, made, f"{opened}abcde</think>\n{hermes(*F)}")


@pytest.mark.parametrize(
    ("parsing", "marks"), [(Parsing(), MARKS), (Parsing(reasoning="think"), []), (Parsing(reasoning="harmony"), MARKS)]
)
def test_a_budget_that_cannot_be_kept_is_refused(parsing: Parsing, marks: list[str]) -> None:
    with pytest.raises(FieldError, match="reasoning_budget"):
        budgeted(parsing, {name: 300 + at for at, name in enumerate(marks)}, ReasoningBudget(4, ()))


@pytest.mark.parametrize("kind", ["object", ["object", "null"], None])
def test_arguments_are_an_object(kind: object) -> None:
    """Guards a demanded call against arguments that its parser takes for text."""
    tools = (Tool("g", "", json.dumps({} if kind is None else {"type": kind})),)
    assert allowed(Parsing(tools="hermes"), hermes("g", "{}"), tools=tools)
    assert not allowed(Parsing(tools="hermes"), hermes("g", "null"), tools=tools)
