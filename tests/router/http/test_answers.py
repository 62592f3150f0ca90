"""Answers as ASGI applications: which status they begin with, how they end, and what fills their silence.

Their bytes are tried in test_openai_reply.py and test_openai_stream.py, streams that are cut and resumed in
test_resume.py, clients that leave in test_socket.py, all of it over real sockets.
"""

import asyncio
import json
from collections.abc import AsyncGenerator

import msgspec
import pytest
from starlette.types import Message

from router.front.api import ApiError, Delta, GenerateEvent, HttpForm, Started
from router.http import answers
from router.http.answers import StreamedAnswer, WholeAnswer
from router.http.openai_stream import EventPosition
from tests.router.http.fakes import CHAT, FINISHED, HI, STARTED, TEXT, FakeFrontend, ask, events, refusal, token_bytes

FORM = HttpForm(chat=False, include_usage=False, return_token_ids=True, created=7)


async def play(*script: GenerateEvent) -> AsyncGenerator[GenerateEvent, None]:
    for event in script:
        yield event


def sent(answer: WholeAnswer | StreamedAnswer) -> tuple[int, dict[str, str], bytes]:
    """Run the application: status, headers, body."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("the request has been read")

    asyncio.run(answer({"type": "http"}, receive, send))  # type: ignore[arg-type]
    start, *bodies = messages
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert not bodies[-1].get("more_body"), "the answer was not ended"
    return start["status"], headers, b"".join(body["body"] for body in bodies)




STATUSES = [
    ("INVALID_ARGUMENT", 400, "invalid_argument"),
    ("OUT_OF_RANGE", 400, "context_length_exceeded"),
    ("UNAUTHENTICATED", 401, "unauthenticated"),
    ("PERMISSION_DENIED", 403, "permission_denied"),
    ("NOT_FOUND", 404, "model_not_found"),
    ("DEADLINE_EXCEEDED", 408, "deadline_exceeded"),
    ("RESOURCE_EXHAUSTED", 429, "resource_exhausted"),
    ("CANCELLED", 499, "cancelled"),
    ("INTERNAL", 500, "internal"),
    ("UNAVAILABLE", 503, "unavailable"),
    ("NO_SUCH_CODE", 500, "no_such_code"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("code", "status", "openai_code"), STATUSES)
def test_error_statuses(code: str, status: int, openai_code: str, stream: bool) -> None:
    """Guards against a refusal hidden in a 200 stream: with no output yet, the status itself must tell."""
    frontend = FakeFrontend(STARTED, refusal(code, field="max_tokens"))
    reply = ask(frontend, "POST", TEXT, json={"prompt": "hi", "stream": stream})
    error = reply.json()["error"]
    assert reply.status_code == status
    assert (error["code"], error["param"]) == (openai_code, "max_tokens")
    assert error["message"] == "max_tokens: because"
    assert ("retry-after" in reply.headers) == (status == 429)
    assert frontend.open == 0


def test_an_error_in_mid_stream_ends_it_without_done() -> None:
    """Guards against a broken answer that a client takes for a complete one."""
    frontend = FakeFrontend(STARTED, Delta("a", (1,)), ApiError("UNAVAILABLE", "worker lost"))
    reply = ask(frontend, "POST", CHAT, json={"messages": HI, "stream": True})
    assert reply.status_code == 200
    first, last = events(reply.text)
    assert json.loads(first)["choices"][0]["delta"]["content"] == "a"
    assert json.loads(last)["error"] == {
        "message": "worker lost",
        "type": "server_error",
        "param": None,
        "code": "unavailable",
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        (RuntimeError("secret"),),
        (STARTED, RuntimeError("secret")),
        (STARTED,),
        (Delta("a", (1,)), FINISHED),
    ],
    ids=["at once", "later", "no finish", "no start"],
)
def test_our_own_faults_are_500_and_tell_nothing(script: tuple[object, ...], stream: bool) -> None:
    frontend = FakeFrontend(*script)  # type: ignore[arg-type]
    reply = ask(frontend, "POST", TEXT, json={"prompt": "hi", "stream": stream})
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal"
    assert "secret" not in reply.text
    assert frontend.open == 0


@pytest.mark.parametrize("tail", [(Delta("late", (1,)), FINISHED), (refusal("UNAVAILABLE"),)])
def test_silence_is_filled_with_comments(
    tail: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against proxies that cut a stream which says nothing while its prompt waits."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.02)
    frontend = FakeFrontend(STARTED, 0.15, *tail)  # type: ignore[arg-type]
    reply = ask(frontend, "POST", TEXT, json={"prompt": "hi", "stream": True})
    assert reply.status_code == 200
    assert reply.text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert ("late" in reply.text) == ("[DONE]" in reply.text) == (len(tail) == 2)
    assert ("unavailable" in reply.text) == (len(tail) == 1)


def test_samples_of_a_whole_answer_keep_their_order() -> None:
    """Guards against choices in the order in which samples happen to end, and texts that are mixed up."""
    started = msgspec.structs.replace(STARTED, samples=2)
    ends = [msgspec.structs.replace(FINISHED, sample=at) for at in (1, 0)]
    script = (started, Delta("a", (1,), 1), Delta("b", (2,)), Delta("c", (3,), 1), *ends)
    status, _, body = sent(WholeAnswer(play(*script), FORM, token_bytes))
    choices = json.loads(body)["choices"]
    assert status == 200
    assert [(c["index"], c["text"], c["token_ids"]) for c in choices] == [(0, "b", [2]), (1, "ac", [1, 3])]


@pytest.mark.parametrize("label", ["", "mine"])
@pytest.mark.parametrize("kind", [WholeAnswer, StreamedAnswer])
def test_an_error_has_the_name_under_which_its_request_is_looked_for(
    kind: type[WholeAnswer | StreamedAnswer], label: str
) -> None:
    async def fails() -> AsyncGenerator[GenerateEvent, None]:
        yield STARTED
        raise refusal("UNAVAILABLE")

    status, headers, _ = sent(kind(fails(), msgspec.structs.replace(FORM, label=label), token_bytes))
    assert (status, headers["x-request-id"]) == (503, label or "r1")


def test_a_client_that_had_everything_is_told_to_stay_away() -> None:
    """Guards browsers, which come back for ever after a 200 that says nothing, against it; and no other client: one
    that lacks the end mark gets it."""
    started = msgspec.structs.replace(STARTED, resume_token="t")
    script = (started, FINISHED)
    assert sent(StreamedAnswer(play(*script), FORM, token_bytes, [EventPosition(3, 6, 2)]))[::2] == (204, b"")
    status, headers, body = sent(StreamedAnswer(play(*script), FORM, token_bytes, [EventPosition(3, 6, 1)]))
    assert (status, headers["x-headrace-resume-token"]) == (200, "t")
    assert body == b"id: t.3.6.2\ndata: [DONE]\n\n"


def test_a_resumed_stream_begins_before_there_is_more_to_say() -> None:
    """Guards a client in the middle of its answer, which must know at once that it was found."""

    async def fails() -> AsyncGenerator[GenerateEvent, None]:
        yield msgspec.structs.replace(STARTED, resume_token="t")
        raise refusal("UNAVAILABLE")

    assert sent(StreamedAnswer(fails(), FORM, token_bytes, [EventPosition(1, 1, 0)]))[0] == 200
    assert sent(StreamedAnswer(fails(), FORM, token_bytes, [EventPosition(3, 6, 2)]))[0] == 503


def test_a_stream_goes_on_in_the_form_that_it_was_begun_in() -> None:
    """Guards against a guess at the form of a stream that was begun over gRPC: it has none."""
    status, _, body = sent(StreamedAnswer(play(STARTED, FINISHED), None, token_bytes))
    assert (status, json.loads(body)["error"]["code"]) == (404, "stream_not_found")
    started = Started("r1", "tiny", 5, form=msgspec.structs.replace(FORM, chat=True, label="mine"))
    status, headers, body = sent(StreamedAnswer(play(started, FINISHED), None, token_bytes))
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert json.loads(events(body.decode())[0])["object"] == "chat.completion.chunk"


def test_nothing_is_read_behind_the_last_end() -> None:
    """Guards the frontend's iterator, which is closed at the end and neither before the last sample's nor never."""
    started = msgspec.structs.replace(STARTED, samples=2)
    ends = [msgspec.structs.replace(FINISHED, sample=at) for at in (0, 1)]
    for stream in True, False:
        frontend = FakeFrontend(started, *ends, RuntimeError("read too far"))
        assert ask(frontend, "POST", TEXT, json={"prompt": "hi", "stream": stream}).status_code == 200
        assert (frontend.open, frontend.yielded) == (0, 2)
