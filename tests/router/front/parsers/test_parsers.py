# ruff: noqa: E501 - answers of models stand in one line each
"""Parsers of answers: what they find, that cuts of the text change nothing, and that no text is lost."""

import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.front.parsers.choose import Parsing, parser_of
from router.front.parsers.pieces import Piece, PieceKind

Told = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and the calls with their arguments."""

HERMES = Parsing(tools="hermes")
QWEN = Parsing(tools="hermes", reasoning="think")
OPENED = Parsing(reasoning="think", is_open=True)
LLAMA = Parsing(tools="llama3")
MISTRAL = Parsing(tools="mistral")
HARMONY = Parsing(tools="harmony", reasoning="harmony")
ALL = {"hermes": HERMES, "qwen": QWEN, "opened": OPENED, "llama": LLAMA, "mistral": MISTRAL, "harmony": HARMONY}
A = '{"city": "Köln", "days": [1, {"x": "}\\" </tool_call>"}]}'
CALL = '<tool_call>\n{"name": "rain", "arguments": ' + A + "}\n</tool_call>"


def joined(pieces: list[Piece]) -> Told:
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece.kind:
            case PieceKind.REASONING:
                reasoning += piece.text
            case PieceKind.CONTENT:
                content += piece.text
            case PieceKind.CALL:
                assert piece.call == len(calls) and piece.text
                calls.append((piece.text, ""))
            case PieceKind.ARGUMENTS:
                assert piece.call == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return reasoning, content, calls


def told(parsing: Parsing, *parts: str) -> Told:
    parser = parser_of(parsing)
    return joined([piece for part in parts for piece in parser.push(part)] + parser.flush())


FOUND: list[tuple[Parsing, str, Told]] = [
    (HERMES, "Hello, world. ", ("", "Hello, world. ", [])),
    (HERMES, CALL, ("", "", [("rain", A)])),
    (HERMES, f"I look.\n{CALL}\n{CALL}\n", ("", "I look.", [("rain", A), ("rain", A)])),
    (HERMES, f"{CALL} done", ("", " done", [("rain", A)])),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', ("", "", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "parameters": {}}', ("", "", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', ("", "", [("f", '{"a": "b')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', ("", "", [("f", '{"a": 1')])),
    (HERMES, "<tool_call>rain please</tool_call>", ("", "<tool_call>rain please</tool_call>", [])),
    (HERMES, '<tool_call>{"name": 7, "arguments": {}}</tool_call>', ("", '<tool_call>{"name": 7, "arguments": {}}</tool_call>', [])),
    (HERMES, "a <tool_call> b", ("", "a<tool_call> b", [])),
    (HERMES, "a < b <tool", ("", "a < b <tool", [])),
    (QWEN, f"<think>\nhm <b>\n</think>\n\nSo: {CALL}", ("hm <b>", "So:", [("rain", A)])),
    (QWEN, "\n<think></think>x", ("", "x", [])),
    (QWEN, "<think>never ends </th", ("never ends </th", "", [])),
    (QWEN, " <thin", ("", " <thin", [])),
    (QWEN, "no <think>block</think>", ("", "no <think>block</think>", [])),
    (QWEN, f"<think>{CALL}</think>", (CALL, "", [])),
    (OPENED, "\nhm\n</think>\n\nHello", ("hm", "Hello", [])),
    (OPENED, "hm", ("hm", "", [])),
    (LLAMA, "Hello { }", ("", "Hello { }", [])),
    (LLAMA, '{"name": "f", "parameters": {"a": {}}}', ("", "", [("f", '{"a": {}}')])),
    (LLAMA, ' {"type": "function", "name": "f", "parameters": {}} ', ("", "", [("f", "{}")])),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}', ("", "", [("f", "{}"), ("g", "{}")])),
    (LLAMA, 'Wait. <|python_tag|> {"name": "f", "parameters": {}}', ("", "Wait.", [("f", "{}")])),
    (LLAMA, '{"name": "f", "parameters": {}} and more', ("", " and more", [("f", "{}")])),
    (LLAMA, '{"title": "f", "parameters": {}}', ("", '{"title": "f", "parameters": {}}', [])),
    (LLAMA, '{"name": "f", "param', ("", '{"name": "f", "param', [])),
    (LLAMA, '<|python_tag|>search("x")', ("", '<|python_tag|>search("x")', [])),
    (LLAMA, '{"name": "f", "parameters": {}}; <|python_tag|>{"name": "g", "parameters": {}}', ("", "", [("f", "{}"), ("g", "{}")])),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', ("", "", [("f", '{"a": 1}')])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}, {"name": "g", "arguments": {}}]', ("", "", [("f", "{}"), ("g", "{}")])),
    (MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', ("", "", [("f", '{"a": 1}'), ("g", "{}")])),
    (MISTRAL, 'Look: [TOOL_CALLS]f[ARGS]{"a": "b', ("", "Look:", [("f", '{"a": "b')])),
    (MISTRAL, "[TOOL_CALLS]two words", ("", "[TOOL_CALLS]two words", [])),
    (MISTRAL, '[TOOL_CALLS][{"name": 1}]', ("", '[TOOL_CALLS][{"name": 1}]', [])),
    (MISTRAL, "[TOOL] [TOOL_CALLS", ("", "[TOOL] [TOOL_CALLS", [])),
    (HARMONY, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>", ("hm", "Hi", [])),
    (
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.rain "
        f"<|constrain|>json<|message|>{A}<|call|>",
        ("hm", "", [("rain", A)]),
    ),
    (HARMONY, " to=functions.f<|channel|>commentary json<|message|>{}", ("", "", [("f", "{}")])),
    (HARMONY, "<|channel|>commentary<|message|>I look.<|channel|>final<|message|>Hi", ("", "I look.Hi", [])),
    (HARMONY, "no channel at all <b>", ("", "no channel at all <b>", [])),
    (HARMONY, "<|channel|>analysis and no message", ("", "<|channel|>analysis and no message", [])),
    (HARMONY, "<|start|>x\n\ny<|end|>z", ("", "<|start|>x\n\nyz", [])),
]  # fmt: skip


@pytest.mark.parametrize(("parsing", "text", "expected"), FOUND)
def test_what_is_found(parsing: Parsing, text: str, expected: Told) -> None:
    assert told(parsing, text) == expected


@pytest.mark.parametrize(("parsing", "text", "expected"), FOUND)
def test_no_cut_changes_anything(parsing: Parsing, text: str, expected: Told) -> None:
    """Guards every place at which a token may end: in a mark, in an escape, between a call's name and its arguments."""
    assert told(parsing, *text) == expected
    for at in range(len(text)):
        assert told(parsing, text[:at], text[at:]) == expected, (text[:at], text[at:])


@pytest.mark.parametrize(("parsing", "text"), [(parsing, text) for parsing, text, _ in FOUND])
def test_what_was_given_depends_on_the_text_before_alone(parsing: Parsing, text: str) -> None:
    """Guards resumed streams: a parser that is fed what its client has goes on exactly where the first one was."""
    check_prefixes(parsing, text)


def check_prefixes(parsing: Parsing, text: str) -> None:
    slowly, given = parser_of(parsing), list[Piece]()
    for at, letter in enumerate(text, 1):
        given += slowly.push(letter)
        at_once = parser_of(parsing)
        assert joined(at_once.push(text[:at])) == joined(given), text[:at]
        assert at_once.is_reasoning == slowly.is_reasoning
        more = text[at : at + 7]
        if more:
            again = parser_of(parsing)
            again.push(text[:at])
            rest = again.push(more)
            twin = parser_of(parsing)
            for one in text[:at]:
                twin.push(one)
            assert twin.push(more) == rest, (text[:at], more)


WORDS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {', '{"name": "f", "parameters": ',
    '"a": "b"', "}", "}}", "{", "[", "]", ",", ";", '"', "\\", "\n", " ", "x", "<", "<|python_tag|>", "[TOOL_CALLS]",
    "[ARGS]", "[CALL_ID]", '[{"name": "g", "arguments": {}', "f{", "<|start|>", "assistant", "<|channel|>", "analysis",
    "final", "<|message|>", "<|end|>", "<|call|>", " to=functions.f", "<tool", "_call>", "</thi", "nk>", "<|chan", "nel|>",
]  # fmt: skip


@given(st.sampled_from(sorted(ALL)), st.lists(st.sampled_from(WORDS), max_size=14), st.data())
def test_broken_answers_too(name: str, words: list[str], data: st.DataObject) -> None:
    """Guards against text that only some ways to cut it lose, double or take for a call."""
    parsing, text = ALL[name], "".join(words)
    whole = told(parsing, text)
    at = data.draw(st.integers(0, len(text)))
    assert told(parsing, text[:at], text[at:]) == told(parsing, *text) == whole
    check_prefixes(parsing, text[:120])
    if "x" in text:
        assert "".join([whole[0], whole[1], *map("".join, whole[2])]).count("x") == text.count("x"), "no text is lost"


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_call_that_never_begins_is_not_waited_for(name: str) -> None:
    """Guards a client that waits for text: a name without end is none, and is shown."""
    parser = parser_of(ALL[name])
    begun = {"llama": '{"name": "', "mistral": '[TOOL_CALLS][{"name": "', "harmony": "<|channel|>"}.get(name, "")
    given = parser.push(begun + "n" * 2000)
    assert "n" * 1000 in joined(given)[0] + joined(given)[1]


@given(st.dictionaries(st.text(max_size=5), st.recursive(st.text(max_size=9) | st.integers(), st.lists, max_leaves=4)))
def test_any_arguments_come_through(arguments: dict[str, object]) -> None:
    """Guards brackets, quotes and marks inside of strings."""
    written = json.dumps(arguments, ensure_ascii=False)
    calls = [("f", written)]
    assert told(HERMES, '<tool_call>{"name": "f", "arguments": ' + written + "}</tool_call>")[2] == calls
    assert told(LLAMA, '{"name": "f", "parameters": ' + written + "}")[2] == calls
    assert told(MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": ' + written + "}]")[2] == calls


BEGINNINGS = ["", "<tool_call>", '{"name": "', "<|python_tag|>", "[TOOL_CALLS]", "[TOOL_CALLS]a[", '[TOOL_CALLS][{"name": "', "[TOOL_CALLS]a{}"]
REPEATED = ["A", "[A", "[", " ", "\\", '"', '\\"', "{", "<", "_[A]", "\n,"]


@pytest.mark.parametrize("name", ALL)
def test_no_answer_holds_up_the_router(name: str) -> None:
    """Guards all streams from one whose model was told what to write: a page of capital letters behind
    `[TOOL_CALLS]a[` was tried in billions of ways."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("it takes too long")

    before = signal.signal(signal.SIGVTALRM, late)
    try:
        for beginning in BEGINNINGS:
            for repeated in REPEATED:
                signal.setitimer(signal.ITIMER_VIRTUAL, 5.0)
                page = repeated * (2000 // len(repeated))
                text = f"{beginning}{page}[{page}!"
                told(ALL[name], *(text[at : at + 8] for at in range(0, len(text), 8)))
                told(ALL[name], text)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


ITEM = '[TOOL_CALLS][{"name":"a","arguments":{}'
LONG: dict[str, tuple[Parsing, str, str, str]] = {
    "hermes": (HERMES, "", " " * 16, CALL),
    "hermes behind text": (HERMES, "a ", " " * 16, "b"),
    "hermes tail": (HERMES, '<tool_call>{"name":"a","arguments":{}', " " * 16, "}</tool_call>"),
    "hermes closed tail": (HERMES, '<tool_call>{"name":"a","arguments":{}}', " " * 16, "</tool_call>"),
    "hermes head": (HERMES, "<tool_call>", " " * 16, '{"name":"a","arguments":{}}</tool_call>'),
    "hermes whole": (HERMES, '<tool_call>{"arguments":{"a":"', "</tool_call", '"},"name":"a"}</tool_call>'),
    "before a block": (QWEN, "", " " * 16, "<think>a</think>b"),
    "inside of a block": (OPENED, "a", " " * 16, "</think>b"),
    "llama": (LLAMA, "", " " * 16, '{"name":"a","parameters":{}}'),
    "llama behind text": (LLAMA, "a", " " * 16, '<|python_tag|>{"name":"a","parameters":{}}'),
    "llama tail": (LLAMA, '{"name":"a","parameters":{}', " " * 16, "}"),
    "llama between": (LLAMA, '{"name":"a","parameters":{}};', " " * 16, '{"name":"b","parameters":{}}'),
    "mistral": (MISTRAL, "a", " " * 16, '[TOOL_CALLS]a{"b":1}'),
    "mistral first": (MISTRAL, "[TOOL_CALLS]", " " * 16, '[{"name":"a","arguments":{}}]'),
    "mistral item": (MISTRAL, "[TOOL_CALLS][", " " * 16, '{"name":"a","arguments":{}}]'),
    "mistral tail": (MISTRAL, ITEM, " " * 16, "}]"),
    "mistral tail with an id": (MISTRAL, ITEM + ', "id": "', "abcd", '"}]'),
    "mistral next": (MISTRAL, ITEM + "}", " " * 16, ', {"name":"b","arguments":{}}]'),
    "harmony": (HARMONY, "", " " * 16, "<|channel|>final<|message|>a"),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_held_is_not_gone_over_with_every_token(name: str) -> None:
    """Guards all streams of a router: a model that writes white space to its last token cost half a millisecond a token
    by then, or half a minute in all."""
    parsing, begun, token, rest = LONG[name]
    tokens = 500
    parser = parser_of(parsing)
    given = parser.push(begun)
    gone_over = 0
    for _ in range(tokens):
        given += parser.push(token)
        gone_over += len(parser._held)  # type: ignore[attr-defined]
    assert gone_over < 64 * len(token) * tokens, gone_over / tokens
    at_once = parser_of(parsing)
    assert joined(at_once.push(begun + token * tokens)) == joined(given)
    given += parser.push(rest) + parser.flush()
    assert joined(given) == told(parsing, begun + token * tokens + rest)
