"""The dialect of a model's answers: how it writes calls of tools and what it thinks, by its template and its tokens."""

from collections.abc import Container

import msgspec

TOOL_DIALECTS = ("hermes", "llama3", "mistral", "harmony")
REASONING_DIALECTS = ("think", "harmony")


class Dialect(msgspec.Struct, frozen=True):
    """Empty where nothing shows which it is."""

    tools: str = ""
    reasoning: str = ""


def dialect_of(template: str, added: Container[str]) -> Dialect:
    """Return what a chat template, and the names of the tokens that were added to the vocabulary, show."""
    if "<|channel|>" in added and "<|message|>" in added:
        return Dialect("harmony", "harmony")
    reasoning = "think" if "<think>" in template or "</think>" in template else ""
    if "[TOOL_CALLS]" in added:
        return Dialect("mistral", reasoning)
    if "<tool_call>" in template:
        return Dialect("hermes", reasoning)
    if "<|python_tag|>" in added:
        return Dialect("llama3", reasoning)
    return Dialect("", reasoning)
