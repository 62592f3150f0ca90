"""What an answer's text is taken apart into, and what every parser of answers keeps to.

A parser is pure and incremental. What it has given after some text depends on that text alone, not on how it was cut:
a resumed stream goes on with a parser that was fed all text before at once. Nothing of the text is lost but the marks
of the parts and the white space around them: what turns out to be no call comes out as content.
"""

from collections.abc import Iterator
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


PART_CHARS = 4096
"""A parser's time for a text grows with its calls and with what lies behind each: a long one is given in parts."""


def parts_of(text: str) -> Iterator[str]:
    for at in range(0, len(text), PART_CHARS):
        yield text[at : at + PART_CHARS]


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


class Aside:
    """Text that decides nothing where it comes, and is looked at once, with what decides: so white space without an end
    costs no more than other text."""

    # Mutable state: the text, what decides (a mark, or, where it is empty, all that is no white space; None: whatever
    # comes), and the end of the text with which the mark may begin.

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._mark: str | None = None
        self._end = ""

    def takes(self, text: str) -> bool:
        """Return whether `text` decides nothing; then it is kept here."""
        if self._mark is None:
            return False
        if self._mark:
            self._end += text
            if self._mark in self._end:
                return False
            self._end = self._end[1 - len(self._mark) :]
        elif text and not text.isspace():
            return False
        self._parts.append(text)
        return True

    def release(self) -> str:
        """Return what was kept: from here on, whatever comes may decide."""
        self._mark = None
        if not self._parts:
            return ""
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def wait(self, held: str, mark: str = "") -> None:
        """Keep what comes until something decides: `mark`, where one is given, of which `held` may have a part; else
        what is no white space, if there is none in `held`."""
        if mark:
            self._mark, self._end = mark, held[1 - len(mark) :]
        elif not held or held.isspace():
            self._mark = ""
