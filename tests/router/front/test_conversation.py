"""Follow-up turns: exact ids where the text allows, plain tokenizing everywhere else."""

import pytest

from router.front.conversation import Conversations
from tests.router.fake_cluster import END, ByteText

ASKED = [("system", "be brief"), ("user", "one")]
NEXT = ("user", "two")


class Ambiguous(ByteText):
    """Decodes 257 to `ab`, which tokenizing never chooses."""


def remembered(emitted: list[int], answer: str, capacity: int = 1000) -> Conversations:
    chats = Conversations(Ambiguous(), capacity)
    prompt = chats.encode(ASKED, b"")
    chats.remember(ASKED, b"", prompt, answer, emitted)
    return chats


@pytest.mark.parametrize("emitted", [[257, 99, END], [257, 99]])
def test_next_turn_begins_with_the_ids_of_the_turn_before(emitted: list[int]) -> None:
    """Guards against re-tokenizing an answer the model spelled in its own way."""
    chats = remembered(emitted, "abc")
    first = chats.encode(ASKED, b"").ids
    chat = [*ASKED, ("assistant", "abc"), NEXT]
    rest = Ambiguous().encode_chat_text("<end>[user]two<end>[assistant]")
    assert chats.encode(chat, b"").ids == [*first, 257, 99, *rest]


@pytest.mark.parametrize(
    ("chat", "space"),
    [
        ([*ASKED, ("assistant", "ab"), NEXT], b""),
        ([*ASKED, ("assistant", "abc "), NEXT], b""),
        ([("user", "one"), ("assistant", "abc"), NEXT], b""),
        ([*ASKED, ("assistant", "abc"), NEXT], b"another tenant"),
    ],
)
def test_other_chats_are_tokenized_from_their_text(
    chat: list[tuple[str, str]], space: bytes
) -> None:
    """Guards against ids of a chat that was changed, or that belongs to somebody else."""
    text = Ambiguous()
    chats = remembered([257, 99, END], "abc")
    assert chats.encode(chat, space).ids == text.encode_chat_text(text.render_chat(chat))


def test_memory_is_bounded() -> None:
    """Guards against a router that grows with every chat it has seen."""
    chats = remembered([257, 99, END], "abc", capacity=10)
    assert repr(chats) == "Conversations(0 chats, 0 tokens)"
