"""Log probabilities over HTTP: what is asked for, and how both routes write them, whole and streamed."""

import json
from typing import Any

import pytest

from engine.types import TokenLogprobs
from router.front.api import ApiError, Delta, GenerateEvent
from router.http.openai import parse_chat, parse_completion
from tests.router.http.fakes import CHAT, FINISHED, HI, STARTED, TEXT, FakeFrontend, ask, events

H, E1, E2, END = TokenLogprobs(72, -0.5), TokenLogprobs(0xC3, -1.0), TokenLogprobs(0xA9, 0.0), TokenLogprobs(300, -2.0)
ANSWER: list[GenerateEvent] = [
    STARTED,
    Delta("H", (72,), logprobs=(TokenLogprobs(72, -0.5, ((72, -0.5), (0xC3, -3.0))),)),
    Delta("", (0xC3,), logprobs=(TokenLogprobs(0xC3, -1.0, ((65, -0.9), (66, -0.95))),)),
    Delta("é", (0xA9, 300), logprobs=(E2, END)),
    FINISHED,
]


def chat_body(**more: object) -> dict[str, Any]:
    return {"messages": HI, **more}


def test_a_chat_says_each_token_with_its_bytes_and_alternatives() -> None:
    frontend = FakeFrontend(*ANSWER)
    reply = ask(frontend, "POST", CHAT, json=chat_body(logprobs=True, top_logprobs=2)).json()
    assert frontend.calls[0].logprobs == 2
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[72], [0xC3], [0xA9], list(b"<end>")]
    assert [entry["token"] for entry in content] == ["H", "\ufffd", "\ufffd", "<end>"]
    assert [entry["logprob"] for entry in content] == [-0.5, -1.0, 0.0, -2.0]
    assert content[0]["top_logprobs"] == [
        {"token": "H", "logprob": -0.5, "bytes": [72]},
        {"token": "\ufffd", "logprob": -3.0, "bytes": [0xC3]},
    ]


def test_a_completion_says_them_in_four_lists() -> None:
    """Guards callers who look a token up among its alternatives, and offsets into the text that was answered."""
    reply = ask(FakeFrontend(*ANSWER), "POST", TEXT, json={"prompt": "hi", "logprobs": 2}).json()
    choice = reply["choices"][0]
    assert choice["text"] == "Hé"
    assert choice["logprobs"] == {
        "tokens": ["H", "bytes:\\xc3", "bytes:\\xa9", "<end>"],
        "token_logprobs": [-0.5, -1.0, 0.0, -2.0],
        "top_logprobs": [
            {"H": -0.5, "bytes:\\xc3": -3.0},
            {"A": -0.9, "B": -0.95, "bytes:\\xc3": -1.0},
            {"bytes:\\xa9": 0.0},
            {"<end>": -2.0},
        ],
        "text_offset": [0, 1, 2, 2],
    }


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_says_the_same_piece_by_piece(path: str) -> None:
    """Guards tokens that have no text yet, whose values must not be lost."""
    body = chat_body(logprobs=True, top_logprobs=2) if path == CHAT else {"prompt": "hi", "logprobs": 2}
    whole = ask(FakeFrontend(*ANSWER), "POST", path, json=body).json()["choices"][0]["logprobs"]
    *chunks, _ = events(ask(FakeFrontend(*ANSWER), "POST", path, json=body | {"stream": True}).text)
    parts = [json.loads(chunk)["choices"][0]["logprobs"] for chunk in chunks]
    assert parts[-1] is None and len(parts) == 4
    for name in ("content",) if path == CHAT else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts[:-1] for one in part[name]] == whole[name]


def test_who_does_not_ask_is_given_null() -> None:
    for path, body in ((CHAT, chat_body(logprobs=False)), (TEXT, {"prompt": "hi"})):
        frontend = FakeFrontend(*ANSWER)
        assert ask(frontend, "POST", path, json=body).json()["choices"][0]["logprobs"] is None
        assert frontend.calls[0].logprobs is None


@pytest.mark.parametrize(
    ("fields", "wanted"), [({"logprobs": 0}, 0), ({"logprobs": 3}, 3), ({"logprobs": None}, None), ({}, None)]
)
def test_a_completion_says_how_many(fields: dict[str, object], wanted: int | None) -> None:
    parsed = parse_completion(json.dumps({"prompt": "hi", **fields}).encode())
    assert parsed.call.logprobs == parsed.form.logprobs == wanted


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias[...]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids[0]"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(json.dumps(chat_body(**fields)).encode())
    assert caught.value.field == field


def test_biases_and_allowed_tokens_are_read() -> None:
    body = {"prompt": "hi", "logit_bias": {"15": -100, "3": 2.5}, "allowed_token_ids": [3, 15]}
    call = parse_completion(json.dumps(body).encode()).call
    assert call.logit_bias == ((3, 2.5), (15, -100.0)) and call.allowed_token_ids == (3, 15)
