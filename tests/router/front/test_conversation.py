"""Follow-up turns: exact ids where the text allows, plain tokenizing everywhere else."""

import gc
import tracemalloc

import pytest

from engine.text.messages import ChatMessage
from router.front.conversation import ENTRY_TOKENS, Conversations, TokenizedPrompt
from tests.engine.text.chats import chat
from tests.router.fake_cluster import END, ByteText

ASKED = [("system", "be brief"), ("user", "one")]
NEXT = ("user", "two")


class Ambiguous(ByteText):
    """Decodes 257 to `ab`, which tokenizing never chooses."""


def said(answer: str) -> ChatMessage:
    return ChatMessage("assistant", answer)


def encoded(chats: Conversations, messages: list[tuple[str, str]], space: bytes = b"") -> list[int]:
    _, known, rest = chats.begin(chat(messages), space)
    return known + Ambiguous().encode_chat_text(rest)


def remembered(emitted: list[int], answer: str, capacity: int = 10_000) -> Conversations:
    chats = Conversations(Ambiguous(), capacity)
    prompt = TokenizedPrompt(Ambiguous().render_chat(chat(ASKED)), encoded(chats, ASKED))
    chats.keep(chats.finished(chat(ASKED), b"", prompt, said, answer, emitted))
    return chats


@pytest.mark.parametrize("emitted", [[257, 99, END], [257, 99]])
def test_next_turn_begins_with_the_ids_of_the_turn_before(emitted: list[int]) -> None:
    """Guards against re-tokenizing an answer the model spelled in its own way."""
    chats = remembered(emitted, "abc")
    first = encoded(chats, ASKED)
    turns = [*ASKED, ("assistant", "abc"), NEXT]
    rest = Ambiguous().encode_chat_text("<end>[user]two<end>[assistant]")
    assert encoded(chats, turns) == [*first, 257, 99, *rest]


@pytest.mark.parametrize(
    ("emitted", "ends", "is_kept"),
    [
        ([*b"ab", 300, *b"c", END], (300,), True),  # in the middle: the model's own words, shown or not
        ([*b"abc", 300], (300,), False),
        ([*b"abc"], (ord("c"),), True),
        ([*b"ab", END, *b"c", END], (), False),
        ([*b"abc", END, END], (), True),
    ],
)
def test_ends_that_nobody_is_shown_are_not_in_the_next_turn(
    emitted: list[int], ends: tuple[int, ...], is_kept: bool
) -> None:
    """Guards the next prompt from a control token of `stop_token_ids`, and from ends that `ignore_eos` went past."""
    chats = Conversations(Ambiguous(), 10_000)
    prompt = TokenizedPrompt(Ambiguous().render_chat(chat(ASKED)), encoded(chats, ASKED))
    chats.keep(chats.finished(chat(ASKED), b"", prompt, said, "abc", emitted, ends))
    assert bool(chats.begin(chat([*ASKED, ("assistant", "abc"), NEXT]), b"")[1]) == is_kept


@pytest.mark.parametrize(
    ("turns", "space"),
    [
        ([*ASKED, ("assistant", "ab"), NEXT], b""),
        ([*ASKED, ("assistant", "abc "), NEXT], b""),
        ([("user", "one"), ("assistant", "abc"), NEXT], b""),
        ([*ASKED, ("assistant", "abc"), NEXT], b"another tenant"),
    ],
)
def test_other_chats_are_tokenized_from_their_text(
    turns: list[tuple[str, str]], space: bytes
) -> None:
    """Guards against ids of a chat that was changed, or that belongs to somebody else."""
    text = Ambiguous()
    chats = remembered([257, 99, END], "abc")
    assert encoded(chats, turns, space) == text.encode_chat_text(text.render_chat(chat(turns)))


def test_memory_is_bounded() -> None:
    """Guards against a router that grows with every chat it has seen."""
    chats = remembered([257, 99, END], "abc", capacity=10)
    assert repr(chats) == "Conversations(0 chats, 0 tokens)"


def test_memory_is_known_from_the_number_of_tokens() -> None:
    """Guards against a budget of tokens of which each took up to 70 bytes, and a short chat hundreds beside them: the
    router grew by 2 MB with every thousand chats, up to some 70 MB."""
    capacity = 40_000
    chats = Conversations(ByteText(), capacity)

    def ask(number: int) -> None:
        turns = [("user", f"question {number}")]
        prompt = TokenizedPrompt(ByteText().render_chat(chat(turns)), encoded(chats, turns))
        chats.keep(chats.finished(chat(turns), b"", prompt, said, "answer", [*b"answer", END]))

    ask(0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, 1000):
            ask(number)
        gc.collect()  # also empties the interpreter's own lists of free tuples
        grown_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 300 < len(chats._known) < capacity / ENTRY_TOKENS, "it is full"
    assert grown_bytes < 6 * capacity
    last = [("user", "question 999"), ("assistant", "answer"), NEXT]
    assert encoded(chats, last) == ByteText().encode_chat_text(ByteText().render_chat(chat(last)))
