"""Lets a follow-up turn begin with the very token ids of the turn before.

A model may write ids that its tokenizer would not choose for the same text, and then tokenizing the
next turn's text again would miss the cache from there on. So the ids of finished chats are kept, by
the messages they hold: when a chat comes whose first messages are known, only the rest of its
rendered text is tokenized. A cut lies always behind a message, after what the template writes to
close it, where tokenizers cut too.

What cannot match: an answer that the client changed, trimmed or cut; one that the template itself
changes (some strip white space); an answer cut by a stop string;
a template whose rendering of early messages depends on later ones; whatever was forgotten.
Such a chat is tokenized from its text, which is always right and only less often cached.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from engine.types import FieldError
from router.front.output import ServedModel

Messages = Sequence[tuple[str, str]]


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt's text, rendered where it is a chat, and its ids. A chat of an earlier router has lost its text."""

    text: str
    ids: list[int]


class Conversations:
    """Remembered chats, at most `capacity_tokens` ids in all, least recently used forgotten first.

    Tenants' chats are kept apart by `namespace`. Safe to encode from several threads at once, as
    the lookups are; `remember` belongs to the event loop.
    """

    # Mutable state: digest of (namespace, messages) -> rendered text and ids; the ids' total.

    def __init__(self, text: ServedModel, capacity_tokens: int) -> None:
        self._text = text
        self._capacity_tokens = capacity_tokens
        self._known: OrderedDict[bytes, TokenizedPrompt] = OrderedDict()
        self._tokens = 0

    def __repr__(self) -> str:
        return f"Conversations({len(self._known)} chats, {self._tokens} tokens)"

    def encode(self, messages: Messages, namespace: bytes) -> TokenizedPrompt:
        """A chat as the model's prompt. Raises FieldError("messages") as the template does."""
        text = self._text.render_chat(messages)
        keys = _keys(messages, namespace)
        for index in range(len(messages) - 1, -1, -1):
            if messages[index][0] != "assistant":
                continue
            known = self._known.get(keys[index])
            if known is not None and text.startswith(known.text):
                rest = self._text.encode_chat_text(text[len(known.text) :])
                return TokenizedPrompt(text, known.ids + rest)
        return TokenizedPrompt(text, self._text.encode_chat_text(text))

    def remember(
        self,
        messages: Messages,
        namespace: bytes,
        prompt: TokenizedPrompt,
        answer: str,
        emitted: Sequence[int],
    ) -> None:
        """Keep a finished turn: `answer` is the text of all `emitted` ids."""
        whole = [*messages, ("assistant", answer)]
        try:
            text = self._text.render_chat(whole, add_generation_prompt=False)
            spoken = (prompt.text or self._text.render_chat(messages)) + answer
        except FieldError:
            # The template refuses the chat with its answer; then no follow-up can come either.
            return
        if not text.startswith(spoken):
            return
        ids = list(emitted)
        while ids and ids[-1] in self._text.stop_ids:
            ids.pop()
        ids = prompt.ids + ids + self._text.encode_chat_text(text[len(spoken) :])
        key = _keys(whole, namespace)[-1]
        replaced = self._known.pop(key, None)
        if replaced is not None:
            self._tokens -= len(replaced.ids)
        self._known[key] = TokenizedPrompt(text, ids)
        self._tokens += len(ids)
        while self._tokens > self._capacity_tokens:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= len(oldest.ids)


def _keys(messages: Messages, namespace: bytes) -> list[bytes]:
    """A digest of each non-empty beginning of `messages`, shortest first."""
    running = blake2b(digest_size=16, person=b"headrace chat")
    running.update(len(namespace).to_bytes(8, "little") + namespace)
    keys = []
    for role, content in messages:
        for part in (role.encode(), content.encode()):
            running.update(len(part).to_bytes(8, "little") + part)
        keys.append(running.digest())
    return keys
