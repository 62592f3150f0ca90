"""What the OpenAI routes say: bodies of whole answers, figures, and errors in OpenAI's envelope.

Statuses over the routes are tried in test_answers.py, chunks of streams in test_openai_stream.py, answers of several
samples from real requests in tests/router/front/test_samples.py, scores of searches in test_beams.py.
"""

import json

import msgspec
import pytest

from engine.types import FinishReason, TokenLogprobs
from router.front.api import ApiError, Delta, HttpForm
from router.front.parsers.choose import Parsing
from router.front.tokenizing import advance, at_once
from router.http.logprobs import chat_logprobs, prompt_logprobs
from router.http.openai_reply import (
    PIECE_TOKENS,
    error_reply,
    finish_reason,
    last_choice,
    usage,
    whole,
    written_logprobs,
)
from router.http.parsed_answer import PartsReader
from tests.router.http.fakes import ANSWER, CHAT, FINISHED, HI, STARTED, TEXT, FakeFrontend, ask, refusal, token_bytes

FORM = HttpForm(chat=False, include_usage=True, return_token_ids=False, created=7)


def test_the_answer_is_what_the_script_says() -> None:
    """The fake itself: every event of ANSWER is delivered, so that a lost one would show above."""
    reply = ask(FakeFrontend(*ANSWER), "POST", TEXT, json={"prompt": "hi"})
    assert reply.json()["choices"][0]["text"] == "".join(
        item.text for item in ANSWER if isinstance(item, Delta)
    )


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


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (ApiError("NOT_FOUND", "who?", "model"), 404, "model_not_found", "model"),
        (ApiError("NOT_FOUND", "who?", "resume_token"), 404, "stream_not_found", "resume_token"),
        (ApiError("INVALID_ARGUMENT", "no", "text_bytes"), 400, "invalid_argument", "Last-Event-ID"),
        (ApiError("INVALID_ARGUMENT", "no", "positions[2]"), 400, "invalid_argument", "Last-Event-ID[2]"),
        (ApiError("INVALID_ARGUMENT", "no", "request_id"), 400, "invalid_argument", "x-request-id"),
        (ApiError("WHAT", "no"), 500, "what", None),
    ],
)
def test_an_error_says_what_a_caller_of_http_can_mend(error: ApiError, status: int, code: str, param: str) -> None:
    reply = error_reply(error)
    said = reply.envelope["error"]
    assert (reply.status, said["code"], said["param"]) == (status, code, param)
    assert said["message"] == (f"{param}: {error.message}" if param else error.message)


@pytest.mark.parametrize(
    ("code", "retry_after_s", "header"),
    [("UNAVAILABLE", None, None), ("UNAVAILABLE", 2.1, "3"), ("INTERNAL", 2.1, None)],
)
def test_only_who_may_come_back_is_told_when(code: str, retry_after_s: float | None, header: str | None) -> None:
    assert error_reply(refusal(code, retry_after_s=retry_after_s)).headers.get("Retry-After") == header


def test_samples_share_one_prompt_and_their_figures_are_those_of_the_first() -> None:
    """Guards a bill that counts the prompt once for each sample, or calls cached what only one of them found."""
    ends = [msgspec.structs.replace(FINISHED, sample=at, output_tokens=at + 2, cached_tokens=4 - at) for at in (0, 1)]
    ends[1] = msgspec.structs.replace(ends[1], e2e_s=9.0)
    assert usage(ends, FORM) == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    body = json.loads(at_once(whole(STARTED, FORM, [[Delta("a", (1,))], [Delta("b", (2,))]], ends, token_bytes)))
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "b")]
    assert (body["headrace"]["timing"]["e2e_s"], body["created"]) == (0.2, 7)
    assert all("token_ids" not in choice for choice in body["choices"])


def test_only_answers_of_a_search_have_a_score() -> None:
    """Guards against a score of null, or of 0, for what was drawn."""
    for score in None, 0.0, -1.5:
        choice = json.loads(msgspec.json.encode(last_choice(msgspec.structs.replace(FINISHED, beam_score=score), FORM)))
        assert choice.get("beam_score", "none") == ("none" if score is None else score)


def test_the_token_that_nobody_is_shown_does_not_end_a_prompt_alone() -> None:
    """Guards `max_tokens: 0`, for which one token is drawn: it said `stop` where that was an end token."""
    for prompt_only, reason in (True, "length"), (False, "stop"):
        form = msgspec.structs.replace(FORM, echo=prompt_only or None, is_prompt_only=prompt_only)
        end = msgspec.structs.replace(FINISHED, reason=FinishReason.STOP)
        assert last_choice(end, form).finish_reason == reason


def test_a_stop_string_in_a_call_leaves_no_call_to_make() -> None:
    """Guards clients that act on `tool_calls`: the arguments end in the middle."""
    reader = PartsReader(Parsing(tools="hermes"), "r1")
    at_once(reader.message('<tool_call>{"name": "rain", "arguments": {"a": "'))
    assert reader.calls
    end = msgspec.structs.replace(FINISHED, reason=FinishReason.STOP)
    assert finish_reason(end, reader) == "tool_calls"
    assert finish_reason(msgspec.structs.replace(end, stop_matched="x"), reader) == "stop"


def test_a_long_answer_is_written_in_pieces() -> None:
    """Guards the event loop from a chat's log probabilities, sixteen megabytes of which took it two seconds; joined,
    the pieces are what was written in one."""
    given = tuple(TokenLogprobs(97 + at % 20, -0.5, ((98, -1.0),)) for at in range(2 * PIECE_TOKENS + 1))
    form = msgspec.structs.replace(FORM, chat=True, logprobs=1)
    answers = [[Delta("a", (1,), 0, given[:5]), Delta("b", (1,), 0, given[5:])], [Delta("", (), 1, ())]]
    ends = [FINISHED, msgspec.structs.replace(FINISHED, sample=1)]
    steps = whole(msgspec.structs.replace(STARTED, samples=2), form, answers, ends, token_bytes)
    pauses = 0
    try:
        while True:
            next(steps)
            pauses += 1
    except StopIteration as end:
        body = json.loads(end.value)
    assert pauses == 2 + 1, "between three pieces of one sample, and before the other"
    first, second = body["choices"]
    assert first["logprobs"] == json.loads(msgspec.json.encode(chat_logprobs(given, token_bytes)))
    assert second["logprobs"] == {"content": [], "refusal": None}


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_no_step_writes_more_than_a_piece(chat: bool) -> None:
    """Guards the event loop from log probabilities: of a completion, and of a prompt, all were written in one step."""
    looked_at = 0

    def counted(token: int) -> tuple[bytes, bool]:
        nonlocal looked_at
        looked_at += 1
        return token_bytes(token)

    tokens, top = 6 * PIECE_TOKENS, tuple((97 + at, -1.0 - at) for at in range(20))
    given = tuple(TokenLogprobs(97 + at % 20, -0.5, top) for at in range(tokens))
    form = msgspec.structs.replace(FORM, chat=chat, logprobs=20, echo=None if chat else ("",), says_prompt=True)
    started = msgspec.structs.replace(STARTED, prompt_ids=((97,) * (tokens + 1),))
    steps = whole(started, form, [[Delta("a", (1,), 0, given, given)]], [FINISHED], counted)
    most = pauses = 0
    while (body := advance(steps)) is None:
        most, looked_at, pauses = max(most, looked_at), 0, pauses + 1
    assert pauses == (11 if chat else 18)
    assert max(most, looked_at) <= PIECE_TOKENS * 32
    choice = json.loads(body)["choices"][0]
    told = json.loads(body) if chat else choice
    listed = written_logprobs(form, given if chat else [97, *given, *given], 0, token_bytes)
    want = [prompt_logprobs(given, token_bytes), listed]
    assert [told["prompt_logprobs"], choice["logprobs"]] == json.loads(msgspec.json.encode(want))
