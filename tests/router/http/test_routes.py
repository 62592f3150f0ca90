"""The routes in this process: headers, limits, refusals, and what there is beside generation.

What they answer with is tried in test_answers.py, test_openai_reply.py and test_openai_stream.py, bodies in
test_openai.py, odd ones in test_fuzz.py, over real sockets in test_socket.py, resumed streams in test_resume.py.
"""

import msgspec
import pytest

from tests.router.http.fakes import ANSWER, CHAT, STARTED, TEXT, FakeFrontend, FakeState, ask


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
    one = models["data"][0]
    assert (one["root"], one["max_model_len"], one["default_sampling"]["temperature"]) == ("tiny", 512, 0.5)
    unknown = ask(frontend, "GET", "/v1/models/huge")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), (CHAT, 405), (TEXT, 405)])
def test_starlettes_refusals_wear_the_envelope(path: str, status: int) -> None:
    reply = ask(FakeFrontend(), "GET", path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"prompt": "a", "echo": True}])
def test_what_cannot_be_gone_on_with_is_not_resumable(fields: dict[str, object]) -> None:
    """Guards requests that would run on for a client who can never come back to them: a header is meant for what can
    be resumed, and these are refused where the body asks."""
    frontend = FakeFrontend(msgspec.structs.replace(STARTED, prompt_ids=((7,), (8,))), *ANSWER[1:])
    headers = {"x-headrace-resumable": "1"}
    ask(frontend, "POST", "/v1/completions", json={"stream": True, **fields}, headers=headers)
    assert frontend.calls and not any(call.resumable for call in frontend.calls)


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
