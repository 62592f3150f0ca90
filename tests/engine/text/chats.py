"""Chats for tests, from (role, content) pairs."""

from collections.abc import Iterable

from engine.text.messages import ChatMessage, ChatPrompt


def chat(messages: Iterable[tuple[str, str] | ChatMessage], **more: object) -> ChatPrompt:
    made = tuple(one if isinstance(one, ChatMessage) else ChatMessage(*one) for one in messages)
    return ChatPrompt(messages=made, **more)  # type: ignore[arg-type]
