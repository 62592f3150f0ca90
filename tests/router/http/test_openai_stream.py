"""A streamed answer, event by event: its shape, its ids, and what is written to a client that comes back.

Tried elsewhere too: connections that are cut anywhere in test_resume.py, streams of several samples from real requests
in tests/router/front/test_samples.py, errors and silence in test_answers.py.
"""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import TokenLogprobs
from router.front.api import ApiError, Delta, Finished, HttpForm, Started
from router.http.openai_stream import EventPosition, StreamWriter, event_id, positions
from tests.router.http.fakes import CHAT, FINISHED, HI, TEXT, FakeFrontend, ask, events, token_bytes

DELTAS = [
    [Delta("Hé", (7, 0xC3)), Delta("", (0xA9,)), Delta("llo", (300,))],
    [Delta("", (4,)), Delta("x", (5,)), Delta("y", ())],
]


def told(ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple([TokenLogprobs(token, -0.1 * token, ((65, -0.5), (token, -0.1 * token))) for token in ids])


def form(
    chat: bool = True, include_usage: bool = False, return_token_ids: bool = False, logprobs: int | None = None
) -> HttpForm:
    return HttpForm(
        chat=chat, include_usage=include_usage, return_token_ids=return_token_ids, created=7, logprobs=logprobs
    )


def started(samples: int = 1) -> Started:
    return Started("r1", "tiny", 5, "tok", samples=samples)


def finished(sample: int = 0) -> Finished:
    return msgspec.structs.replace(FINISHED, sample=sample)


def behind(at: EventPosition, sample: int) -> list[Delta]:
    """What a frontend still has for a client that has so much of this sample."""
    tokens, size, rest = at.next_index, at.text_bytes, []
    for delta in DELTAS[sample]:
        data = delta.text.encode()
        ids = delta.token_ids[tokens:]
        left = Delta(data[size:].decode(), ids, sample, told(ids))
        tokens, size = max(0, tokens - len(delta.token_ids)), max(0, size - len(data))
        if left.text or left.token_ids:
            rest.append(left)
    return rest


def write(how: HttpForm, samples: int, at: list[EventPosition] | None = None) -> list[bytes]:
    """The events for a client that is at `at`: output of the samples in turns, then their ends, the last first."""
    every = [tuple(token for delta in part for token in delta.token_ids) for part in DELTAS]
    had = tuple(every[sample][: one.next_index] for sample, one in enumerate(at or []))
    writer = StreamWriter(msgspec.structs.replace(started(samples), had_ids=had), how, token_bytes, at or [])
    todo = [behind(one, sample) for sample, one in enumerate(at or [EventPosition()] * samples)]
    out = [writer.delta(part.pop(0)) for _ in range(3) for part in todo if part]
    for sample in reversed(range(samples)):
        out += writer.last(finished(sample))
    return [one for one in out if one]




def test_chat_stream_without_usage() -> None:
    """Guards the OpenAI shape: role once, no usage unless asked for, DONE last, nothing for empty text."""
    reply = ask(FakeFrontend(), "POST", CHAT, json={"messages": HI, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-request-id"] == "r1"
    *chunks, done = events(reply.text)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in parsed] == [
        {"content": "Hé", "role": "assistant"},
        {"content": "llo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in parsed] == [None, None, "length"]
    assert not any("usage" in chunk for chunk in parsed)
    assert ["headrace" in chunk for chunk in parsed] == [False, False, True]


def test_completion_stream_with_usage_and_token_ids() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    reply = ask(FakeFrontend(), "POST", TEXT, json={"prompt": "hi"} | options)
    *chunks, done = events(reply.text)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    choices = [chunk["choices"][0] for chunk in parsed[:-1]]
    assert [choice["text"] for choice in choices] == ["Hé", "", "llo", ""]
    assert [choice.get("token_ids") for choice in choices] == [[7], [8], [9], None]
    assert [chunk["usage"] for chunk in parsed[:-1]] == [None] * 4
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert parsed[-1]["headrace"]["request_id"] == "r1"


FORMS = [form(), form(include_usage=True), form(chat=False, return_token_ids=True), form(False, True, True)]
WITH_LOGPROBS = [form(logprobs=2), form(True, True, True, 0), form(chat=False, logprobs=2), form(False, logprobs=0)]


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("how", [*FORMS, *WITH_LOGPROBS])
def test_behind_any_event_the_rest_of_each_sample_is_the_same(how: HttpForm, samples: int) -> None:
    """Guards the bytes of a resumed stream: a second role, a second finish reason, a usage chunk that is lost."""
    whole = write(how, samples)
    assert whole[-1].endswith(b"data: [DONE]\n\n")
    bodies = [one.split(b"\n", 1)[1] for one in whole]
    for count, one in enumerate(whole, 1):
        at = positions(one.split(b"\n")[0].removeprefix(b"id: ").decode(), "tok")
        rest = [again.split(b"\n", 1)[1] for again in write(how, samples, at)]
        # Samples take turns anew, so their order among each other may be another one.
        assert sorted(rest) == sorted(bodies[count:])
        assert rest[-1:] == bodies[count:][-1:]


def test_the_answer_is_closed_behind_its_last_sample_only() -> None:
    """Guards against an end mark, or the usage of a part, after the first of several samples."""
    writer = StreamWriter(started(2), form(include_usage=True), token_bytes)
    (first,) = writer.last(finished(1))
    assert b'"finish_reason":"length"' in first and b'"usage":null' in first
    finish, use, done = writer.last(finished(0))
    assert b'"finish_reason":"length"' in finish and b'"completion_tokens":6' in use
    assert done == b"id: tok.0.0.3.0.0.1\ndata: [DONE]\n\n"
    assert b'"headrace"' in first and b'"headrace"' in finish and b'"headrace"' not in use


def test_an_answer_without_text_has_its_role_and_one_with_text_has_it_once() -> None:
    (end, _) = StreamWriter(started(), form(), token_bytes).last(finished())
    assert b'"delta":{"role":"assistant"}' in end
    whole = b"".join(write(form(), 2))
    assert whole.count(b'"role":"assistant"') == 2


@pytest.mark.parametrize(
    ("samples", "at"),
    [
        (1, [EventPosition(4, 6, 3)]),
        (2, [EventPosition(4, 6, 1), EventPosition(2, 2, 2)]),
    ],
)
def test_more_than_there_is_was_never_had(samples: int, at: list[EventPosition]) -> None:
    """Guards against a silent end for a client whose id was never written."""
    with pytest.raises(ApiError) as caught:
        write(form(), samples, at)
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "Last-Event-ID")


def test_no_output_comes_behind_its_end() -> None:
    """Guards against a client that says it has the finish reason, and not yet the text before it."""
    with pytest.raises(ApiError, match="behind the end of the output"):
        write(form(), 1, [EventPosition(1, 1, 1)])


def test_a_stream_that_nobody_can_resume_has_no_ids() -> None:
    writer = StreamWriter(msgspec.structs.replace(started(), resume_token=""), form(), token_bytes)
    assert writer.delta(Delta("a", (1,))).startswith(b"data: ")


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(0, 2**31 - 1)).map(tuple), st.sampled_from(FORMS), st.integers(0, 1))
def test_a_chunk_put_together_from_its_parts_is_the_one_written_whole(
    text: str, ids: tuple[int, ...], how: HttpForm, sample: int
) -> None:
    """Guards the bytes of all chunks but the first, of which only text and ids are encoded: quotes, line ends."""
    writer = StreamWriter(started(2), how, token_bytes)
    writer.delta(Delta("a", (1,), sample))
    parts = writer.delta(Delta(text, ids, sample))
    whole = writer._event(writer._output(sample, text, ids, is_first=False))
    assert parts == (whole if text or (how.return_token_ids and ids) else b"")


a_position = st.tuples(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1), st.integers(0, 9))


@given(st.lists(a_position, min_size=1, max_size=4))
def test_ids_are_read_as_they_were_written(numbers: list[tuple[int, int, int]]) -> None:
    assert positions(event_id("a-_9", [EventPosition(*n) for n in numbers]), "a-_9") == [
        EventPosition(*n) for n in numbers
    ]


pieces: Any = st.sampled_from(["tok", ".", "0", "1", "-1", "٣", "9" * 30, " ", "\n", "1e3", "é"])


@settings(max_examples=500)
@given(st.one_of(st.text(max_size=40), st.lists(pieces, max_size=9).map("".join)))
def test_any_last_event_id(value: str) -> None:
    """Guards against ids of other servers, or spoiled ones, that become our fault, or a position nobody named."""
    try:
        at = positions(value, "tok")
    except ApiError as error:
        assert (error.code, error.field) == ("INVALID_ARGUMENT", "Last-Event-ID")
    else:
        written = [n for one in at for n in msgspec.structs.astuple(one)]
        assert [int(n) for n in value.split(".")[1:]] == written


@pytest.mark.parametrize("samples", [1, 2])
def test_each_chunk_may_count_what_its_sample_has_so_far(samples: int) -> None:
    """Guards load clients that count tokens as they come, whatever share a chunk, and a client that comes back."""
    how = msgspec.structs.replace(form(include_usage=True), is_counting=True)
    out = [json.loads(one.split(b"data: ")[1]) for one in write(how, samples) if b"[DONE]" not in one]
    counts: dict[int, list[int]] = {}
    for chunk in out[:-1]:
        use = chunk["usage"]
        assert use["prompt_tokens"] == 5 and use["total_tokens"] == 5 + use["completion_tokens"]
        counts.setdefault(chunk["choices"][0]["index"], []).append(use["completion_tokens"])
    assert counts == {0: [2, 4, 3], 1: [2, 2, 3]} if samples == 2 else {0: [2, 4, 3]}
    assert out[-1]["choices"] == [] and out[-1]["usage"]["prompt_tokens_details"]
