"""Lets a follow-up turn begin with the very token ids of the turn before.

A model may write ids that its tokenizer would not choose for the same text, and then tokenizing the
next turn's text again would miss the cache from there on. So the ids of finished chats are kept, by
the messages they hold: when a chat comes whose first messages are known, only the rest of its
rendered text is tokenized. A cut lies always behind a message, after what the template writes to
close it, where tokenizers cut too.

A chat is kept as its ids, two or four bytes each, and a digest of its text, so that what all chats take is known from
their number of tokens: with a million, 5 MB at most.

What cannot match: an answer that the client changed, trimmed or cut; one that the template itself
changes (some strip white space); an answer cut by a stop string;
a template whose rendering of early messages depends on later ones; whatever was forgotten; of a long chat's samples
all but the first that ended.
Such a chat is tokenized from its text, which is always right and only less often cached.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from engine.text.messages import ChatMessage, ChatPrompt
from engine.types import FieldError
from router.front.output import ServedModel

ENTRY_TOKENS = 64
"""What a remembered chat takes beside its ids, in ids: its key, its digest, its place in the order."""


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt's text, rendered where it is a chat, and its ids. A chat of an earlier router has lost its text."""

    text: str
    ids: list[int]


class FinishedChat(msgspec.Struct, frozen=True, gc=False):
    """A finished chat: how long its rendered text is, a digest of it, and its ids, each in two bytes where all fit."""

    characters: int
    digest: bytes
    packed: bytes
    is_wide: bool

    @classmethod
    def of(cls, text: str, ids: list[int]) -> "FinishedChat":
        is_wide = max(ids, default=0) >= 1 << 16
        return cls(len(text), _digest(text), array("I" if is_wide else "H", ids).tobytes(), is_wide)

    @property
    def cost_tokens(self) -> int:
        return ENTRY_TOKENS + len(self.packed) // (4 if self.is_wide else 2)

    @property
    def ids(self) -> list[int]:
        return array("I" if self.is_wide else "H", self.packed).tolist()

    def begins(self, text: str) -> bool:
        return len(text) >= self.characters and _digest(text[: self.characters]) == self.digest


class Conversations:
    """Remembered chats, least recently used forgotten first: at most `capacity_tokens` ids in all, where each chat
    counts ENTRY_TOKENS more than it has.

    Tenants' chats are kept apart by `namespace`. Chats may be begun in several threads at once, as
    the lookups are safe, and finished there; `keep` belongs to the event loop.
    """

    # Mutable state: the chats by digest of (namespace, messages), and what they cost in all.

    def __init__(self, text: ServedModel, capacity_tokens: int) -> None:
        self._text = text
        self._capacity_tokens = capacity_tokens
        self._known: OrderedDict[bytes, FinishedChat] = OrderedDict()
        self._tokens = 0

    def __repr__(self) -> str:
        return f"Conversations({len(self._known)} chats, {self._tokens} tokens)"

    def begin(self, chat: ChatPrompt, namespace: bytes) -> tuple[str, list[int], str]:
        """Return a chat's text as the model's prompt, the ids that are known of its beginning, and the rest of the
        text. Raises FieldError as the template does."""
        text = self._text.render_chat(chat)
        keys = _keys(chat, namespace)
        for index in range(len(chat.messages) - 1, -1, -1):
            if chat.messages[index].role != "assistant":
                continue
            known = self._known.get(keys[index])
            if known is not None and known.begins(text):
                return text, known.ids, text[known.characters :]
        return text, [], text

    def finished(
        self,
        chat: ChatPrompt,
        namespace: bytes,
        prompt: TokenizedPrompt,
        turn: Callable[[str], ChatMessage],
        answer: str,
        emitted: Sequence[int],
        ends: Sequence[int] = (),
    ) -> dict[bytes, FinishedChat]:
        """Return what is to be kept of a finished turn, perhaps nothing: `answer` is the text of all `emitted` ids, and
        `turn` makes of it the message that its client will send back. `ends` are the tokens that end an answer beside
        the model's own. One with an end in it that its text does not show is not kept."""
        whole = _with_answer(chat, turn(answer))
        try:
            text = self._text.render_chat(whole)
            spoken = (prompt.text or self._text.render_chat(chat)) + answer
        except FieldError:
            # The template refuses the chat with its answer; then no follow-up can come either.
            return {}
        if not text.startswith(spoken):
            return {}
        ids = list(emitted)
        while ids and ids[-1] in self._text.stop_ids:
            ids.pop()
        if not self._text.stop_ids.isdisjoint(ids):
            return {}
        if ids and ids[-1] in ends and not all(self._text.token_bytes(ids[-1])):
            return {}
        ids = prompt.ids + ids + self._text.encode_chat_text(text[len(spoken) :])
        return {_keys(whole, namespace)[-1]: FinishedChat.of(text, ids)}

    def keep(self, chats: dict[bytes, FinishedChat]) -> None:
        """Keep what `finished` has returned."""
        for key, kept in chats.items():
            replaced = self._known.pop(key, None)
            if replaced is not None:
                self._tokens -= replaced.cost_tokens
            self._known[key] = kept
            self._tokens += kept.cost_tokens
        while self._tokens > self._capacity_tokens:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= oldest.cost_tokens


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16, person=b"headrace text").digest()


def _with_answer(chat: ChatPrompt, answer: ChatMessage) -> ChatPrompt:
    """Return the chat as its next turn will begin. An answer that went on with a message is a part of it."""
    before = chat.messages
    if chat.continue_final:
        last, before = before[-1], before[:-1]
        answer = msgspec.structs.replace(answer, content=(last.content or "") + (answer.content or ""))
    return msgspec.structs.replace(
        chat, messages=(*before, answer), add_generation_prompt=False, continue_final=False
    )


def _keys(chat: ChatPrompt, namespace: bytes) -> list[bytes]:
    """A digest of each non-empty beginning of a chat, shortest first. It need not tell all chats apart that differ:
    what was remembered is held against the text."""
    running = blake2b(digest_size=16, person=b"headrace chat")
    running.update(len(namespace).to_bytes(8, "little") + namespace)
    keys = []
    for message in chat.messages:
        calls = [part for call in message.tool_calls for part in (call.name, call.arguments)]
        for part in (message.role, message.content or "", *calls):
            data = part.encode()
            running.update(len(data).to_bytes(8, "little") + data)
        keys.append(running.digest())
    return keys
