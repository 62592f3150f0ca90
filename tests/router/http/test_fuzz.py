"""Whatever a client sends, the answer is its fault or an answer: never a 500, never a record that cannot travel."""

import json
from collections.abc import AsyncGenerator

import httpx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.messages import PeerAddress, Place, decode_router_frame, encode
from engine.types import FieldError, RequestId, SamplingParams, TooLongError
from router.config import RouterConfig
from router.front.api import ApiError, GenerateCall, GenerateEvent
from router.front.intake import to_record
from router.front.namespaces import CacheNamespaces
from router.front.validate import UnknownModelError, check_call
from router.http.openai import UNSUPPORTED, ChatRequest, CompletionRequest
from tests.router.http.fakes import ANSWER, ask

ROUTES = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
EXPECTED = {200, 400, 404, 413}


class Model:
    name = "tiny"
    vocab_size = 100
    drawable_tokens = 100
    stop_ids = frozenset({99})
    context_tokens = 64
    sampling = SamplingParams()


class CheckingFrontend:
    """Applies the router's real checks, and sends the record through the wire's encoding."""

    async def generate(self, call: GenerateCall, outlet: object = None) -> AsyncGenerator[GenerateEvent, None]:
        model, config = Model(), RouterConfig()
        try:
            check_call(call, model, config)
            ids = call.prompt if call.prompt and isinstance(call.prompt[0], int) else [1, 2]
            record = to_record(  # type: ignore[arg-type]
                call, ids, model, config, request=RequestId("r"), seed=1, namespaces=CacheNamespaces("key")
            )
        except UnknownModelError as error:
            raise ApiError("NOT_FOUND", str(error), error.field) from error
        except TooLongError as error:
            raise ApiError("OUT_OF_RANGE", str(error), error.field) from error
        except FieldError as error:
            raise ApiError("INVALID_ARGUMENT", str(error), error.field) from error
        place = Place(record=record, placement=1, prefill=PeerAddress("p", "a:1"))
        assert decode_router_frame(encode([place])) == [place]
        for event in ANSWER:
            yield event


def send(path: str, body: bytes) -> httpx.Response:
    reply = ask(CheckingFrontend(), "POST", path, content=body)  # type: ignore[arg-type]
    assert reply.status_code in EXPECTED, (reply.status_code, reply.text, body[:500])
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        if error["param"]:
            assert error["message"].startswith(error["param"] + ": ")
    return reply


numbers = st.one_of(
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, -(10**400)]),
    st.floats(),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.one_of(st.sampled_from(["user", "system", "tool"]), values),
            "content": values,
        },
    ),
    max_size=3,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    """A request that would be served, with some of its fields replaced by anything."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    names = (*ROUTES[path].__struct_fields__, *UNSUPPORTED)
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "hi"}],
        "prompt": "hi",
        "max_tokens": 4,
    }
    body |= draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    if draw(st.booleans()):
        body["messages"] = draw(messages)
    if draw(st.booleans()):
        body["prompt"] = draw(st.one_of(values, st.lists(st.integers(-1, 101), max_size=70)))
    return path, body


@settings(max_examples=400, deadline=None)
@given(bodies())
@example(("/v1/completions", {"prompt": "\ud800"}))
@example(("/v1/completions", {"prompt": [1] * 64}))
@example(("/v1/completions", {"prompt": "hi", "stop": [""] * 10_000}))
@example(("/v1/completions", {"prompt": "hi", "model": "x" * 100_000}))
@example(("/v1/chat/completions", {"messages": [{"role": "user", "content": []}]}))
@example(("/v1/chat/completions", {"messages": [{"role": "user", "content": "\0"}]}))
def test_any_value_in_any_field(request_: tuple[str, dict[str, object]]) -> None:
    """Guards against one odd value that becomes our fault, or passes both checks and cannot be encoded."""
    path, body = request_
    send(path, json.dumps(body).encode())


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(ROUTES)), st.binary(max_size=200))
def test_any_bytes(path: str, body: bytes) -> None:
    send(path, body)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_requests(data: st.DataObject) -> None:
    """Cuts and replaced bytes reach deeper into the parser than random bytes do."""
    good = json.dumps({"prompt": "h\u00e9\ud83d\ude00", "stop": ["a"], "temperature": 0.5}).encode()
    at = data.draw(st.integers(0, len(good) - 1))
    end = data.draw(st.sampled_from([at, at + 1, len(good)]))
    send("/v1/completions", good[:at] + data.draw(st.binary(max_size=6)) + good[end:])


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["x-request-id", "x-request-timeout-s", "content-type"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=200),
    )
)
def test_any_headers(headers: dict[str, str]) -> None:
    reply = ask(
        CheckingFrontend(),  # type: ignore[arg-type]
        "POST",
        "/v1/completions",
        json={"prompt": "hi"},
        headers=headers,
    )
    assert reply.status_code in {200, 400}


def test_the_checks_are_the_real_ones() -> None:
    """The fuzzing above would pass with a frontend that checks nothing; this one refuses what it must."""
    refused = {
        "temperature": 2.5,
        "top_p": 0,
        "max_tokens": 0,
        "seed": -1,
        "stop": [""],
        "stop_token_ids": [100],
        "timeout": 10**9,
    }
    for name, value in refused.items():
        reply = send("/v1/completions", json.dumps({"prompt": "hi", name: value}).encode())
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].partition("[")[0] == name
    assert send("/v1/completions", b'{"prompt":"hi","model":"x"}').status_code == 404
    long = send("/v1/completions", json.dumps({"prompt": [1] * 64}).encode()).json()["error"]
    assert (long["code"], long["param"]) == ("context_length_exceeded", "prompt")
