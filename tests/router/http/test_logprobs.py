"""Log probabilities over HTTP: what is asked for, and how both routes write them, whole and streamed; and what callers
who score texts ask beside them: echo, several prompts, the best of some."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from engine.types import TokenLogprobs
from router.front.api import ApiError, Delta, GenerateCall, GenerateEvent
from router.front.outlet import Outlet
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


IDS = (72, 0xC3, 0xA9)
OF_PROMPT = (TokenLogprobs(0xC3, -0.25, ((65, -0.2),)), TokenLogprobs(0xA9, -0.125, ((0xA9, -0.125),)))
SCORED: list[GenerateEvent] = [
    msgspec.structs.replace(STARTED, prompt_ids=(IDS,)),
    Delta("!", (33,), 0, (TokenLogprobs(33, -0.75, ((33, -0.75),)),), OF_PROMPT),
    FINISHED,
]


def answered(
    fields: dict[str, object], *script: GenerateEvent, path: str = TEXT
) -> tuple[dict[str, Any], FakeFrontend]:
    frontend = FakeFrontend(*script)
    reply = ask(frontend, "POST", path, json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json(), frontend


def test_an_echo_has_the_prompt_before_the_answer() -> None:
    """Guards those who score texts: the first token is known nothing of, and the lists fit the text."""
    body, frontend = answered({"prompt": list(IDS), "echo": True, "logprobs": 1, "max_tokens": 1}, *SCORED)
    assert frontend.calls[0].prompt_logprobs == frontend.calls[0].logprobs == 1
    (choice,) = body["choices"]
    assert choice["text"] == "Hé!"
    assert choice["logprobs"] == {
        "tokens": ["H", "bytes:\\xc3", "bytes:\\xa9", "!"],
        "token_logprobs": [None, -0.25, -0.125, -0.75],
        "top_logprobs": [None, {"A": -0.2, "bytes:\\xc3": -0.25}, {"bytes:\\xa9": -0.125}, {"!": -0.75}],
        "text_offset": [0, 1, 2, 2],
    }


def test_a_prompt_alone_is_answered_without_output() -> None:
    fields = {"prompt": "Hé", "echo": True, "logprobs": 1, "max_tokens": 0}
    body, frontend = answered(fields, *SCORED)
    assert frontend.calls[0].max_tokens == 1, "an engine draws one, which is not shown"
    (choice,) = body["choices"]
    assert choice["text"] == "Hé" and choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.125]
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "ids", "text", "offsets"),
    [
        ({"prompt": "<end>ab<end>"}, (300, 97, 98, 300), "ab", [0, 0, 1, 2, 2]),
        ({"prompt": "cut to ab", "truncate_prompt_tokens": 2}, (97, 98), "ab", [0, 1, 2]),
        ({"prompt": "cut in é", "truncate_prompt_tokens": 2}, (0xA9, 98), "b", [0, 0, 1]),
    ],
    ids=["control tokens", "cut", "cut in a character"],
)
def test_offsets_are_of_the_text_that_was_echoed(
    fields: dict[str, object], ids: tuple[int, ...], text: str, offsets: list[int]
) -> None:
    """Guards those who look a token up in the text: it was the prompt as given, in which other things stand there."""
    told = Delta("!", (33,), 0, (TokenLogprobs(33, -0.75),), tuple(TokenLogprobs(one, -1.0) for one in ids[1:]))
    script = [msgspec.structs.replace(STARTED, prompt_ids=(ids,)), told, FINISHED]
    body, _ = answered(fields | {"echo": True, "logprobs": 1, "max_tokens": 1}, *script)
    (choice,) = body["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == (text + "!", offsets)


@pytest.mark.parametrize(("fields", "text"), [({}, "as it was given"), ({"truncate_prompt_tokens": 3}, "Hé")])
def test_an_echo_is_the_text_that_was_given_and_of_a_cut_prompt_what_was_read(
    fields: dict[str, object], text: str
) -> None:
    body, _ = answered({"prompt": "as it was given", "echo": True, **fields}, *SCORED)
    assert body["choices"][0]["text"] == text + "!"


def test_prompt_log_probabilities_have_a_field_of_their_own() -> None:
    want = [
        None,
        {
            "65": {"logprob": -0.2, "decoded_token": "A"},
            "195": {"logprob": -0.25, "decoded_token": "\ufffd"},
        },
        {"169": {"logprob": -0.125, "decoded_token": "\ufffd"}},
    ]
    body, _ = answered({"prompt": "x", "prompt_logprobs": 1}, *SCORED)
    assert body["choices"][0]["prompt_logprobs"] == want and body["choices"][0]["text"] == "!"
    body, _ = answered(chat_body(prompt_logprobs=1), *SCORED, path=CHAT)
    assert body["prompt_logprobs"] == want and "prompt_logprobs" not in body["choices"][0]


def test_an_echo_is_streamed_first() -> None:
    reply = ask(FakeFrontend(*SCORED), "POST", TEXT, json={"prompt": list(IDS), "echo": True, "stream": True})
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in events(reply.text)[:-1]]
    assert texts == ["Hé", "!", ""]


class Each:
    """A frontend that answers each prompt by itself, the later ones first."""

    model = FakeFrontend().model

    def __init__(self, refuses: int | None = None) -> None:
        self.calls: list[GenerateCall] = []
        self.refuses = refuses
        self.closed = 0

    async def generate(self, call: GenerateCall, outlet: Outlet | None = None) -> AsyncGenerator[GenerateEvent, None]:
        at = len(self.calls)
        self.calls.append(call)
        try:
            await asyncio.sleep(0.02 * (3 - at))
            if at == self.refuses:
                raise ApiError("RESOURCE_EXHAUSTED", "no room")
            started = msgspec.structs.replace(STARTED, request_id=f"r{at}", samples=call.n, prompt_tokens=5 + at)
            yield msgspec.structs.replace(started, prompt_ids=((65 + at,),))
            for sample in reversed(range(call.n)):
                told = (TokenLogprobs(48, -1.0 - 0.5 * sample), TokenLogprobs(49, -float(sample == 0)))
                yield Delta(f"{at}.{sample}", (48, 49), sample, told)
                if self.refuses is not None:
                    await asyncio.sleep(10)
                end = msgspec.structs.replace(FINISHED, sample=sample, prompt_tokens=5 + at, cached_tokens=at)
                yield end
        finally:
            self.closed += 1


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[65], [66], [67]]])
def test_choices_go_by_prompt_and_then_by_sample(prompts: list[object]) -> None:
    frontend = Each()
    body = ask(frontend, "POST", TEXT, json={"prompt": prompts, "n": 2, "echo": True}).json()  # type: ignore[arg-type]
    assert [call.prompt for call in frontend.calls] == prompts
    given = prompts if isinstance(prompts[0], str) else ["A", "B", "C"]
    texts = [f"{given[at]}{at}.{sample}" for at in range(3) for sample in range(2)]
    assert [(one["index"], one["text"]) for one in body["choices"]] == list(enumerate(texts))
    use = body["usage"]
    assert (use["prompt_tokens"], use["completion_tokens"]) == (5 + 6 + 7, 6 * 3)
    assert use["prompt_tokens_details"]["cached_tokens"] == 0 + 1 + 2
    assert body["id"] == "cmpl-r0" and frontend.closed == 3


def test_several_prompts_are_streamed_side_by_side() -> None:
    reply = ask(Each(), "POST", TEXT, json={"prompt": ["a", "b"], "stream": True})  # type: ignore[arg-type]
    *chunks, done = events(reply.text)
    said: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = json.loads(chunk)["choices"]
        said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    assert said == {0: "0.0", 1: "1.0"} and done == "[DONE]"


def test_one_prompt_that_is_refused_ends_all() -> None:
    """Guards places that are kept for nobody."""
    frontend = Each(refuses=0)
    reply = ask(frontend, "POST", TEXT, json={"prompt": ["a", "b", "c"]})  # type: ignore[arg-type]
    assert reply.status_code == 429 and frontend.closed == 3


def test_the_best_are_those_with_the_greatest_mean() -> None:
    """Guards the order and the number: of four, whose means are -1, -0.75, -1 and -1.25, the best two."""
    frontend = Each()
    body = ask(frontend, "POST", TEXT, json={"prompt": "a", "best_of": 4, "n": 2}).json()  # type: ignore[arg-type]
    assert frontend.calls[0].n == 4 and frontend.calls[0].logprobs == 0
    assert [(one["index"], one["text"]) for one in body["choices"]] == [(0, "0.1"), (1, "0.0")]
    assert all(one["logprobs"] is None for one in body["choices"])
    assert body["usage"]["completion_tokens"] == 4 * 3, "all four are paid for"
    every = ask(Each(), "POST", TEXT, json={"prompt": "a", "best_of": 4, "n": 4}).json()  # type: ignore[arg-type]
    assert [one["text"] for one in every["choices"]] == ["0.1", "0.0", "0.2", "0.3"], "also where all are answered"
    assert not parse_completion(b'{"prompt": "a", "best_of": 1, "stream": true}').form.best, "which asks for nothing"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "echo"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "n": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "beam_width": 2}, "best_of"),
        ({"best_of": 2, "n": 2, "beam_width": 2}, "best_of"),
        ({"best_of": 3, "n": 0}, "n"),
        ({"best_of": 3, "n": -1}, "n"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 0}, "n"),  # else as many requests as it likes
        ({"prompt": ["a"] * 100, "n": -1}, "n"),
        ({"prompt": ["a"] * 100, "n": -2, "best_of": -1}, "n"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", "b"], "resumable": True, "stream": True}, "resumable"),
        ({"echo": True, "resumable": True, "stream": True}, "resumable"),
    ],
)
def test_a_completion_that_makes_no_sense_is_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion(json.dumps({"prompt": "hi", **fields}).encode())
    assert caught.value.field == field
