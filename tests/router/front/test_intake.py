"""The intake: one pass from a call to its record. Single fields are tried in tests/router/http/test_fuzz.py."""

import asyncio
import json
import threading
from typing import Any

import pytest

from engine.types import Constraint, ConstraintKind, SamplingParams
from router.config import RouterConfig
from router.front.api import ApiError, ChatMessage, GenerateCall, SamplingOverrides
from router.front.intake import Arrival, Intake
from router.front.namespaces import CacheNamespaces
from router.front.resume import unpack
from router.http.openai import parse_completion
from tests.engine.text.chats import chat
from tests.router.fake_cluster import ByteText

CHAT = [ChatMessage("user", "hi")]
OPEN = {"continue_final_message": True, "add_generation_prompt": False}


class Watched(ByteText):
    """Notes the thread that tokenizes."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str, *, add_special: bool, is_literal: bool = False) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return super().encode(text, add_special=add_special, is_literal=is_literal)


def take(call: GenerateCall, model: ByteText | None = None) -> Arrival:
    config = RouterConfig(namespace_key="secret", tokenize_inline_bytes=100)
    return asyncio.run(Intake(model or ByteText(), config).take(call))


def test_a_chat_becomes_a_whole_record() -> None:
    """Guards against a record that another worker, or a later router, could not go on with."""
    arrival = take(GenerateCall(prompt=CHAT, stop=("x",), resumable=True, tenant="t", seed=5))
    record = arrival.record
    rendered = ByteText().render_chat(chat([("user", "hi")]))
    assert record.tokens == arrival.prompt.ids == ByteText().encode_chat_text(rendered)
    assert (record.prompt_tokens, record.seed) == (len(record.tokens), 5)
    assert record.namespace == CacheNamespaces("secret").of("t") != CacheNamespaces("another key").of("t")
    context = unpack(record.context)
    assert context is not None and context.token == arrival.token != ""
    assert (context.stop, context.chat) == (("x",), arrival.chat) == (("x",), chat([("user", "hi")]))


@pytest.mark.parametrize(
    ("fields", "continues"),
    [
        ({"prompt": "hi"}, True),
        ({"prompt": [104, 105]}, True),
        ({"prompt": CHAT}, False),
        ({"prompt": CHAT, "truncate_prompt_tokens": 3}, False),
        ({"prompt": [*CHAT, ChatMessage("assistant", "ho")], **OPEN}, True),
        ({"prompt": CHAT, "constraint": Constraint(ConstraintKind.REGEX, " yes")}, True),
    ],
)
def test_an_answer_that_goes_on_with_a_text_keeps_its_space(
    fields: dict[str, Any], continues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the space before an answer's first word, which vocabularies of SentencePiece's kind strip from a text: it
    was missing behind a plain prompt, behind a message that the answer goes on with, and in what a constraint says."""

    async def approved(self: Intake, call: GenerateCall, constraint: Constraint) -> GenerateCall:
        return call

    monkeypatch.setattr(Intake, "_constrained", approved)
    arrival = take(GenerateCall(**fields, resumable=True))
    context = unpack(arrival.record.context)
    assert context is not None and context.continues == arrival.continues == continues


@pytest.mark.parametrize(
    ("tokens", "fields", "prompts", "field"),
    [
        (400, {"echo": True, "logprobs": 20, "max_tokens": 1}, 7, ""),
        (400, {"echo": True, "logprobs": 20, "max_tokens": 1}, 8, "prompt_logprobs"),
        (10, {"logprobs": 20, "max_tokens": 100}, 124, ""),
        (10, {"logprobs": 20, "max_tokens": 100}, 125, "logprobs"),
    ],
)
def test_several_prompts_share_the_values_of_one_answer(
    tokens: int, fields: dict[str, object], prompts: int, field: str
) -> None:
    """Guards the event loop from answers of 128 times as many values as are allowed, and memory."""
    call = parse_completion(json.dumps({"prompt": [[1] * tokens] * prompts, **fields}).encode()).calls[0]
    if not field:
        assert take(call).record.prompt_tokens == tokens
        return
    with pytest.raises(ApiError) as refused:
        take(call)
    assert (refused.value.code, refused.value.field) == ("INVALID_ARGUMENT", field)


def test_what_ends_with_its_connection_needs_no_context() -> None:
    arrival = take(GenerateCall(prompt=[1, 2, 3]))
    assert (arrival.record.tokens, arrival.record.context) == ([1, 2, 3], b"")
    assert (arrival.chat, arrival.token) == (None, "")


@pytest.mark.parametrize(
    ("call", "code", "field"),
    [
        (GenerateCall(prompt="x" * 600), "OUT_OF_RANGE", "prompt"),
        (GenerateCall(prompt="x", model="another"), "NOT_FOUND", "model"),
        (GenerateCall(prompt="x", n=0), "INVALID_ARGUMENT", "n"),
        (GenerateCall(prompt=[]), "INVALID_ARGUMENT", "prompt"),
    ],
)
def test_bad_input_stops_here(call: GenerateCall, code: str, field: str) -> None:
    with pytest.raises(ApiError) as refused:
        take(call)
    assert (refused.value.code, refused.value.field) == (code, field)


@pytest.mark.parametrize(("text", "is_inline"), [("x" * 100, True), ("x" * 101, False)])
def test_long_text_is_tokenized_in_a_thread(text: str, is_inline: bool) -> None:
    """Guards the event loop: a megabyte of text would hold up every stream while it is tokenized."""
    model = Watched()
    take(GenerateCall(prompt=text), model)
    (thread,) = model.threads
    assert (thread == threading.main_thread().name) is is_inline


def test_what_is_said_of_a_prompt_is_bounded_by_its_tokens() -> None:
    """Guards routers and workers from a message of many megabytes: it is refused before a worker sees it."""

    class Wide(ByteText):
        context_tokens = 10**6

    take(GenerateCall(prompt=[1] * (65_536 // 21), prompt_logprobs=20), Wide())
    with pytest.raises(ApiError) as caught:
        take(GenerateCall(prompt=[1] * (65_536 // 21 + 1), prompt_logprobs=20), Wide())
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "prompt_logprobs")


class Recommending(ByteText):
    sampling = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)


def sampled(call: GenerateCall, **settings: object) -> SamplingParams:
    config = RouterConfig(namespace_key="secret", **settings)  # type: ignore[arg-type]
    return asyncio.run(Intake(Recommending(), config).take(call)).record.sampling


def test_what_a_call_does_not_say_of_sampling_is_the_models() -> None:
    """Guards against temperature 1.0 from the whole vocabulary, which small models answer with gibberish, and against
    a recommendation in the place of what the caller said."""
    assert sampled(GenerateCall(prompt="x")) == Recommending.sampling
    warm = GenerateCall(prompt="x", sampling=SamplingOverrides(temperature=1.5, top_k=0))
    assert sampled(warm) == SamplingParams(temperature=1.5, top_k=0, repetition_penalty=1.1)
    greedy = sampled(GenerateCall(prompt="x", sampling=SamplingOverrides(temperature=0.0)))
    assert (greedy.temperature, greedy.top_k) == (0.0, 20)
    whole = SamplingParams(temperature=0.0)
    assert sampled(GenerateCall(prompt="x", sampling=whole)) == whole


def test_recommendations_can_be_turned_off() -> None:
    assert sampled(GenerateCall(prompt="x"), generation_config="off") == SamplingParams()


def test_a_search_is_not_refused_for_a_penalty_that_nobody_asked_for() -> None:
    """Guards against the model's own repetition penalty, with which a beam search would be INVALID_ARGUMENT."""
    assert sampled(GenerateCall(prompt="x", beam_width=2)) == SamplingParams()


def test_a_value_out_of_range_is_refused_whoever_else_has_one() -> None:
    with pytest.raises(ApiError, match="temperature: is 3"):
        sampled(GenerateCall(prompt="x", sampling=SamplingOverrides(temperature=3.0)))


@pytest.mark.parametrize("asked", [None, "first", "second"])
def test_every_name_of_the_model_may_be_asked_for(asked: str | None) -> None:
    """Guards against an answer under a name that its caller does not know, and a stream that a later router would not
    go on with: it finds the name in the context."""
    config = RouterConfig(namespace_key="secret", served_model_names=("first", "second"))
    call = GenerateCall(prompt="x", model=asked, resumable=True)
    context = unpack(asyncio.run(Intake(ByteText(), config).take(call)).record.context)
    assert context is not None and context.model == (asked or "first")
    with pytest.raises(ApiError, match="'bytes' is not served here, 'first' and 'second' are"):
        asyncio.run(Intake(ByteText(), config).take(GenerateCall(prompt="x", model="bytes")))


def test_what_is_said_of_an_answer_is_bounded_by_its_tokens_and_samples() -> None:
    """Guards the stream to a worker from a record that no message can carry: it would break again and again."""

    class Wide(ByteText):
        context_tokens = 10**6

    def asked(tokens: int, alternatives: int, samples: int) -> None:
        take(GenerateCall(prompt=[1], max_tokens=tokens, logprobs=alternatives, n=samples), Wide())

    asked(262_144, 0, 1)
    asked(65_536, 1, 2)
    for tokens, alternatives, samples in ((262_145, 0, 1), (65_536, 1, 3), (12_484, 20, 1)):
        with pytest.raises(ApiError) as caught:
            asked(tokens, alternatives, samples)
        assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "logprobs")
