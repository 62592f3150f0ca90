"""What an answer's text is taken apart into, and what every parser of answers keeps to.

A parser is pure and incremental. What it has given after some text depends on that text alone, not on how it was cut:
a resumed stream goes on with a parser that was fed all text before at once. Nothing of the text is lost but the marks
of the parts and the white space around them: what turns out to be no call comes out as content.
"""

from enum import StrEnum
from typing import Protocol

import msgspec


class PieceKind(StrEnum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"
    """A call begins; the text is its function's name, and it is given once."""
    ARGUMENTS = "arguments"
    """More of the arguments of a call that has begun."""


class Piece(msgspec.Struct, frozen=True):
    """`call` counts the calls of one answer."""

    kind: PieceKind
    text: str
    call: int = 0


class AnswerParser(Protocol):
    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is a part of the reasoning."""

    def push(self, text: str) -> list[Piece]:
        """Return what more of the text has decided, perhaps nothing."""

    def flush(self) -> list[Piece]:
        """Return the rest, once, at the end of the answer."""


def held_back(text: str, *marks: str) -> int:
    """Return the length of the longest end of `text` with which one of `marks` may begin."""
    longest = min(max(map(len, marks)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def undecided(text: str, *marks: str) -> int:
    """Return the length of the end of `text` that is white space, and perhaps the beginning of one of `marks`."""
    cut = len(text) - held_back(text, *marks)
    return len(text) - len(text[:cut].rstrip())
