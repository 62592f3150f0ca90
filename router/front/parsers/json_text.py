"""A JSON object that arrives piece by piece: where it ends, and whether a text may still become a call's beginning."""

import re
from collections.abc import Sequence

MAX_HEAD_CHARS = 512
"""A call whose arguments have not begun by then is none."""


class ObjectScan:
    """Finds the end of one JSON object. Only brackets and strings are looked at: what is broken otherwise is whoever
    reads it to judge."""

    # Mutable state: how many brackets are open, and whether the next character stands in a string, or behind `\`.

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Go on with `text`; return how much of it belongs to the object, None where all of it does and more may come.

        A `<` outside of a string is no JSON: there the object ends too, broken."""
        for at, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
            elif character == "<":
                return at
        return None


class Head:
    """What stands before a call's arguments, in one of several ways."""

    def __init__(self, *ways: Sequence[str]) -> None:
        """`ways`: each is a sequence of patterns of one character, or a repeated one, with NAME among them."""
        self._whole = re.compile("|".join("(?:" + "".join(way) + r"(?=\{))" for way in _named(ways)))
        self._begun = re.compile("|".join(_beginnings(way) for way in ways))

    def match(self, text: str) -> tuple[str, int] | None:
        """Return the JSON text of the name, and where the arguments begin; None where it is not there, or not yet."""
        found = self._whole.match(text)
        if found is None or found.end() > MAX_HEAD_CHARS:
            return None
        return next(name for name in found.groups() if name is not None), found.end()

    def may_follow(self, text: str) -> bool:
        """Return whether `text` is the beginning of one."""
        return len(text) <= MAX_HEAD_CHARS and self._begun.fullmatch(text) is not None


NAME = "(NAME)"
"""Stands for the JSON string that is the function's name."""
_STRING = r'"(?:[^"\\]|\\.)*"'
_PART_OF_STRING = r'"(?:(?:[^"\\]|\\.)*(?:\\|")?)?'


def letters(text: str) -> list[str]:
    return [re.escape(character) for character in text]


def member(key: str) -> list[str]:
    """The atoms of a key and its colon."""
    return [*letters(f'"{key}"'), r"\s*", ":", r"\s*"]


def _named(ways: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[f"({_STRING})" if atom == NAME else atom for atom in way] for way in ways]


def _beginnings(way: Sequence[str]) -> str:
    pattern = ""
    for atom in reversed(way):
        inner = f"{_PART_OF_STRING}|{_STRING}{pattern}" if atom == NAME else f"{atom}{pattern}"
        pattern = f"(?:{inner})?"
    return pattern
