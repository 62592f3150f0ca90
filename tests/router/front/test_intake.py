"""The intake: one pass from a call to its record. Single fields are tried in tests/router/http/test_fuzz.py."""

import asyncio
import json
import secrets
import threading
from typing import Any

import pytest

from engine import identity
from engine.types import Constraint, ConstraintKind, SamplingParams
from router.config import RouterConfig
from router.front.api import ApiError, ChatMessage, GenerateCall, SamplingOverrides
from router.front.intake import Arrival, Intake
from router.front.namespaces import CacheNamespaces
from router.front.resume import unpack
from router.front.tokenizing import WHOLE_CHARS
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


class Gated(ByteText):
    """Tokenizes when its gate is open."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()

    def encode(self, text: str, *, add_special: bool, is_literal: bool = False) -> list[int]:
        self.entered.set()
        assert self.gate.wait(5)
        return super().encode(text, add_special=add_special, is_literal=is_literal)


def roomy(model: ByteText) -> ByteText:
    """Give a model a long context."""
    model.context_tokens = 1 << 16
    return model


def take(call: GenerateCall, model: ByteText | None = None) -> Arrival:
    config = RouterConfig(namespace_key="secret", tokenize_inline_bytes=100)
    return asyncio.run(Intake(model or ByteText(), config).take(call))


def test_the_blocks_of_a_long_prompt_are_named_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the others' streams: placing a long prompt hashed all of it on the loop."""
    monkeypatch.setattr("router.front.intake.NAMED_TOKENS", 25)
    named: list[str] = []

    def noting(parent: bytes, packed: bytes, stride: int) -> tuple[bytes, ...]:
        named.append(threading.current_thread().name)
        return identity.hash_piece(parent, packed, stride)

    monkeypatch.setattr(identity, "_hasher", noting)
    kinds = (("model", 4), ("another", 8))
    intake = Intake(roomy(ByteText()), RouterConfig(tokenize_inline_bytes=100), kinds=lambda: kinds)
    whole = 4 * identity.PIECE_BLOCKS
    for call, pieces in (
        (GenerateCall(prompt=secrets.token_hex(2 * whole)), 6),
        (GenerateCall(prompt=[n % 256 for n in range(4 * whole)]), 6),
        (GenerateCall(prompt=[7] * 25), 0),
    ):
        named.clear()
        record = asyncio.run(intake.take(call)).record
        assert len(named) == pieces and all(name.startswith("tokenizer") for name in named)
        # Whoever places it finds its pieces named.
        named.clear()
        for model, size in kinds if pieces else ():
            assert identity.chain(identity.root(record.space, model), record.tokens, size)
        assert not named
    intake.close()


def test_a_prompt_is_taken_where_there_is_no_room_to_name_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards prompts of ids from texts that fill the budget: what names them is only sooner."""
    monkeypatch.setattr("router.front.intake.NAMED_TOKENS", 25)
    config = RouterConfig(tokenize_inline_bytes=100, tokenize_budget_bytes=1000, tokenize_threads=1)

    async def run() -> list[int]:
        model = Gated()
        intake = Intake(roomy(model), config, kinds=lambda: (("model", 4),))
        text = asyncio.create_task(intake.take(GenerateCall(prompt="x" * 990)))
        await asyncio.to_thread(model.entered.wait, 5)
        try:
            return (await intake.take(GenerateCall(prompt=list(range(200))))).record.tokens
        finally:
            model.gate.set()
            await text
            intake.close()

    assert asyncio.run(run()) == list(range(200))


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


def test_an_answer_is_as_long_as_it_must_be_at_least() -> None:
    """Guards `min_tokens` above the usual length, which was lowered without a word."""
    config = RouterConfig(default_max_tokens=8)
    record = asyncio.run(Intake(ByteText(), config).take(GenerateCall(prompt="x", min_tokens=12))).record
    assert (record.min_tokens, record.max_tokens) == (12, 12)
    with pytest.raises(ApiError, match="at most 511 are possible") as refused:
        asyncio.run(Intake(ByteText(), config).take(GenerateCall(prompt="x", min_tokens=512)))
    assert (refused.value.code, refused.value.field) == ("OUT_OF_RANGE", "min_tokens")


@pytest.mark.parametrize("chars", [300, WHOLE_CHARS + 300])
def test_a_chat_that_is_cut_is_no_beginning_of_its_next_turn(chars: int) -> None:
    """Guards the history of a long chat: the ids of its end were taken for those of all of it."""
    call = GenerateCall(prompt=[ChatMessage("user", "x" * chars)], truncate_prompt_tokens=100, max_tokens=9)
    arrival = asyncio.run(Intake(roomy(ByteText()), RouterConfig()).take(call))
    assert (len(arrival.record.tokens), arrival.chat, arrival.prompt.text) == (100, None, "")
