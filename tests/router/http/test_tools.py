"""Calls and reasoning in OpenAI's form: whole, streamed, and to the byte the same where a stream goes on."""

import json
from typing import Any

import msgspec
import pytest

from engine.types import FinishReason
from router.front.api import Delta, Finished, HttpForm, Started
from router.front.parsers.choose import Parsing
from router.front.parsers.pieces import PART_CHARS
from router.front.parsers.turn import turn_of
from router.front.tokenizing import advance, at_once
from router.http.openai_reply import whole
from router.http.openai_stream import StreamWriter, positions
from tests.router.http.fakes import FINISHED

PARSING = Parsing(tools="hermes", reasoning="think")
FORM = HttpForm(chat=True, include_usage=True, return_token_ids=False, created=7, parsing=PARSING)
STARTED = Started("r1", "tiny", 5, form=FORM)
CALL = '<tool_call>{"name": "rain", "arguments": {"city": "Köln"}}</tool_call>'
ANSWER = f"<think>\nhm, é\n</think>\n\nI look. {CALL}\n{CALL}"
END = msgspec.structs.replace(FINISHED, reason=FinishReason.STOP, reasoning_tokens=2)


def no_bytes(token: int) -> tuple[bytes, bool]:
    return b"", True


def deltas(size: int, text: str = ANSWER) -> list[Delta]:
    return [Delta(text[at : at + size], (at,)) for at in range(0, len(text), size)]


def chunks(events: bytes) -> list[dict[str, Any]]:
    bodies = [line.partition("data: ")[2] for line in events.decode().split("\n") if "data: " in line]
    return [json.loads(body) for body in bodies if body != "[DONE]"]


def streamed(given: list[Delta], end: Finished, form: HttpForm = FORM) -> bytes:
    writer = StreamWriter(msgspec.structs.replace(STARTED, form=form), form, no_bytes)
    return b"".join([writer.delta(one) for one in given] + writer.last(end))


def joined(given: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the chunks together as OpenAI's clients do, by index."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}}
    for chunk in given:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] not in message["calls"] and call["function"]["name"], "id and name come once"
                    message["calls"][call["index"]] = [call["id"], call["function"]["name"], ""]
                message["calls"][call["index"]][2] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_streamed_answer_is_the_whole_one(size: int) -> None:
    """Guards every client that puts deltas together: index, name and id once, the arguments in pieces."""
    body = json.loads(at_once(whole(STARTED, FORM, [deltas(size)], [END], no_bytes)))
    message = body["choices"][0]["message"]
    arguments = '{"city": "Köln"}'
    assert (message["reasoning_content"], message["content"]) == ("hm, é", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "rain", "arguments": arguments}] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    given = chunks(streamed(deltas(size), END))
    told = joined(given)
    assert (told["reasoning_content"], told["content"], told["finish_reason"]) == ("hm, é", "I look.", "tool_calls")
    assert list(told["calls"].values()) == [[call["id"], "rain", arguments] for call in message["tool_calls"]]
    roles = [choice["delta"].get("role") for chunk in given for choice in chunk["choices"]]
    assert roles[0] == "assistant" and not any(roles[1:])
    assert given[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_a_turn_that_only_calls_has_no_content() -> None:
    body = json.loads(at_once(whole(STARTED, FORM, [deltas(9, CALL)], [END], no_bytes)))
    message = body["choices"][0]["message"]
    assert message["content"] is None and message["reasoning_content"] is None
    cut = msgspec.structs.replace(END, reason=FinishReason.LENGTH)
    body = json.loads(at_once(whole(STARTED, FORM, [deltas(9, CALL)], [cut], no_bytes)))
    assert body["choices"][0]["finish_reason"] == "length"


def test_text_that_is_no_call_comes_out_at_the_end() -> None:
    """Guards against the end of an answer that a parser still held."""
    given = chunks(streamed(deltas(4, "so <tool_ca"), END))
    assert joined(given)["content"] == "so <tool_ca"
    assert given[-2]["choices"][0]["finish_reason"] == "stop"


def test_only_one_call_is_given_where_one_is_asked_for() -> None:
    form = msgspec.structs.replace(FORM, parsing=msgspec.structs.replace(PARSING, single=True))
    assert len(joined(chunks(streamed(deltas(5), END, form)))["calls"]) == 1
    started = msgspec.structs.replace(STARTED, form=form)
    message = json.loads(at_once(whole(started, form, [deltas(5)], [END], no_bytes)))["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("size", [1, 3, 11, 60])
def test_a_resumed_stream_is_the_same_to_the_byte(size: int, ids: bool) -> None:
    """Guards against ids drawn anew, a role said twice, and a parser that does not know where it is."""
    form = msgspec.structs.replace(FORM, return_token_ids=ids)
    started = msgspec.structs.replace(STARTED, form=form, resume_token="t")
    writer = StreamWriter(started, form, no_bytes)
    given = deltas(size)
    events = [event for one in given if (event := writer.delta(one))] + writer.last(END)
    assert len(events) > 4
    for at, event in enumerate(events):
        name = event.split(b"\n")[0].removeprefix(b"id: ").decode()
        (place,) = positions(name, "t")
        had = ANSWER.encode()[: place.text_bytes].decode()
        again = StreamWriter(msgspec.structs.replace(started, had_text=(had,)), form, no_bytes, [place])
        rest = [again.delta(one) for one in given[place.next_index :] if not place.closing]
        if place.closing:
            assert had == ANSWER
        # Ids count from where each delta began: here a delta is one id.
        assert b"".join(rest + again.last(END)) == b"".join(events[at + 1 :])


def test_many_calls_are_taken_apart_in_pieces() -> None:
    """Guards the event loop: an answer of three thousand small calls took it an eighth of a second at once, as what lay
    behind each was copied with it."""
    call = '<tool_call>{"name": "rain", "arguments": {}}</tool_call>'
    calls = 4 * PART_CHARS // len(call)
    answer = [Delta(call * calls, (1,))]
    steps, pauses = whole(STARTED, FORM, [answer], [END], no_bytes), 0
    while (body := advance(steps)) is None:
        pauses += 1
    assert pauses == 3
    message = json.loads(body)["choices"][0]["message"]
    assert [made["function"]["name"] for made in message["tool_calls"]] == ["rain"] * calls
    turn = turn_of(FORM.parsing, STARTED.request_id, call * calls)
    assert [made.id for made in turn.tool_calls] == [made["id"] for made in message["tool_calls"]]
