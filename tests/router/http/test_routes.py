"""The routes in this process: answers, streams, errors and their envelopes."""

import json

import msgspec
import pytest

from router.front.api import ApiError, Delta
from router.http import answers as http_stream
from tests.router.http.fakes import ANSWER, FINISHED, STARTED, FakeFrontend, FakeState, ask, refusal

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def events(body: str) -> list[str]:
    parts = body.split("\n\n")
    assert parts[-1] == ""
    return [part.removeprefix("data: ") for part in parts[:-1]]


def test_chat_answer() -> None:
    frontend = FakeFrontend()
    reply = ask(frontend, "POST", CHAT, json={"messages": HI})
    body = reply.json()
    assert reply.status_code == 200
    assert reply.headers["x-request-id"] == "r1"
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-r1", "chat.completion", "tiny")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Héllo", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    headrace = body["headrace"]
    assert headrace["prefill"] == {"worker": "prefill-0", "cached_tokens": 4}
    assert headrace["decode"] == {"worker": "decode-0", "cached_tokens": 0}
    assert headrace["migration"] == {
        "blocks": 2,
        "bytes": 1024,
        "seconds": 0.01,
        "transport": "shm",
    }
    assert headrace["timing"]["stages"] == {"admit": 0.001, "unattributed": 0.0}
    assert frontend.open == 0


def test_completion_answer_with_token_ids() -> None:
    body = ask(FakeFrontend(), "POST", TEXT, json={"prompt": [1], "return_token_ids": True}).json()
    assert (body["id"], body["object"]) == ("cmpl-r1", "text_completion")
    assert body["choices"][0]["text"] == "Héllo"
    assert body["choices"][0]["token_ids"] == [7, 8, 9]


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


@pytest.mark.parametrize(
    ("field", "message", "param", "shown"),
    [
        ("token_ids[3]", "token_ids[3]: is 9", "prompt[3]", "prompt[3]: is 9"),
        ("timeout_s", "timeout_s: is 0", "timeout", "timeout: is 0"),
        ("top_p", "is 2", "top_p", "top_p: is 2"),
        ("", "no field", None, "no field"),
    ],
)
def test_fields_have_the_names_of_this_front(
    field: str, message: str, param: str | None, shown: str
) -> None:
    """Guards against errors that name a field which the caller never sent."""
    frontend = FakeFrontend(ApiError("INVALID_ARGUMENT", message, field))
    error = ask(frontend, "POST", TEXT, json={"prompt": [1]}).json()["error"]
    assert (error["param"], error["message"]) == (param, shown)


@pytest.mark.parametrize(("retry_after_s", "header"), [(None, "1"), (0.2, "1"), (2.1, "3")])
def test_retry_after_is_whole_seconds(retry_after_s: float | None, header: str) -> None:
    frontend = FakeFrontend(refusal("RESOURCE_EXHAUSTED", retry_after_s=retry_after_s))
    reply = ask(frontend, "POST", TEXT, json={"prompt": "hi"})
    assert reply.headers["retry-after"] == header


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
    monkeypatch.setattr(http_stream, "KEEP_ALIVE_S", 0.02)
    frontend = FakeFrontend(STARTED, 0.15, *tail)  # type: ignore[arg-type]
    reply = ask(frontend, "POST", TEXT, json={"prompt": "hi", "stream": True})
    assert reply.status_code == 200
    assert reply.text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert ("late" in reply.text) == ("[DONE]" in reply.text) == (len(tail) == 2)
    assert ("unavailable" in reply.text) == (len(tail) == 1)


def test_the_label_is_passed_on_and_returned() -> None:
    frontend = FakeFrontend()
    headers = {"x-request-id": "job 7", "x-request-timeout-s": "2"}
    reply = ask(frontend, "POST", TEXT, json={"prompt": "hi"}, headers=headers)
    assert reply.headers["x-request-id"] == "job 7"
    assert (frontend.calls[0].request_id, frontend.calls[0].timeout_s) == ("job 7", 2.0)
    assert reply.json()["headrace"]["request_id"] == "r1"


@pytest.mark.parametrize("label", ["x" * 129, "tab\there", "\xe9"])
def test_unusable_labels_are_dropped(label: str) -> None:
    frontend = FakeFrontend()
    headers = {"x-request-id": label.encode("latin-1")}
    reply = ask(frontend, "POST", TEXT, json={"prompt": "hi"}, headers=headers)
    assert reply.headers["x-request-id"] == "r1"
    assert frontend.calls[0].request_id == ""


def test_bodies_over_the_limit_are_refused_unparsed() -> None:
    body = b" " * (4 * 1024 * 1024 + 1)
    declared = ask(FakeFrontend(), "POST", TEXT, content=body)

    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(5):
            yield b" " * 1024 * 1024

    undeclared = ask(FakeFrontend(), "POST", TEXT, content=chunks())
    for reply in (declared, undeclared):
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"


def test_a_body_of_the_limit_is_read() -> None:
    body = b'{"prompt":"hi"}'
    reply = ask(FakeFrontend(), "POST", TEXT, content=body + b" " * (4 * 1024 * 1024 - len(body)))
    assert reply.status_code == 200


def test_routes_beside_generation() -> None:
    frontend = FakeFrontend()
    assert ask(frontend, "GET", "/health").status_code == 200
    assert ask(frontend, "GET", "/ready").json() == {"ready": True}
    assert ask(frontend, "GET", "/ready", state=FakeState(ready=False)).status_code == 503
    assert ask(frontend, "GET", "/health", state=FakeState(ready=False)).status_code == 200
    assert ask(frontend, "GET", "/version").json()["version"]
    metrics = ask(frontend, "GET", "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert metrics.text == "headrace_requests_total 1.0\n"
    # Prometheus reached the router by this name, which is not the address it listens on.
    discovered = ask(frontend, "GET", "/sd", headers={"host": "gateway:8000"})
    assert discovered.headers["content-type"].startswith("application/json")
    assert discovered.json() == [{"targets": ["gateway:8000"], "labels": {"worker": "router"}}]
    models = ask(frontend, "GET", "/v1/models").json()
    assert [card["id"] for card in models["data"]] == ["tiny", "org/tiny"]
    assert ask(frontend, "GET", "/v1/models/org/tiny").json()["id"] == "org/tiny"
    unknown = ask(frontend, "GET", "/v1/models/huge")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), (CHAT, 405), (TEXT, 405)])
def test_starlettes_refusals_wear_the_envelope(path: str, status: int) -> None:
    reply = ask(FakeFrontend(), "GET", path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_the_answer_is_what_the_script_says() -> None:
    """The fake itself: every event of ANSWER is delivered, so that a lost one would show above."""
    reply = ask(FakeFrontend(*ANSWER), "POST", TEXT, json={"prompt": "hi"})
    assert reply.json()["choices"][0]["text"] == "".join(
        item.text for item in ANSWER if isinstance(item, Delta)
    )


@pytest.mark.parametrize(("asked", "stream"), [(True, True), (False, True), (True, False)])
def test_a_stream_is_resumable_where_it_is_asked_for(asked: bool, stream: bool) -> None:
    """Guards against requests that run on for clients who never asked, and a token that does not reach who did."""
    started = msgspec.structs.replace(STARTED, resume_token="secret-token")
    frontend = FakeFrontend(*[started if asked and stream else STARTED, *ANSWER[1:]])
    headers = {"x-headrace-resumable": "1"} if asked else {}
    body = {"prompt": "hi", "stream": stream}
    reply = ask(frontend, "POST", "/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200
    assert frontend.calls[0].resumable == (asked and stream)
    token = reply.headers.get("x-headrace-resume-token")
    assert token == ("secret-token" if asked and stream else None)
