"""The intake: one pass from a call to its record. Single fields are tried in tests/router/http/test_fuzz.py."""

import asyncio
import threading

import pytest

from router.config import RouterConfig
from router.front.api import ApiError, ChatMessage, GenerateCall
from router.front.intake import Arrival, Intake
from router.front.namespaces import CacheNamespaces
from router.front.resume import unpack
from tests.engine.text.chats import chat
from tests.router.fake_cluster import ByteText

CHAT = [ChatMessage("user", "hi")]


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
