"""Harmony, the channels of gpt-oss: `<|channel|>analysis<|message|>…<|end|>` is reasoning, `final` is the answer, and a
message `to=functions.NAME` is a call. A header that never ends in `<|message|>` is content, as is text without one."""

import re

from router.front.parsers.pieces import Aside, Piece, PieceKind, held_back

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
"""What ends a message. The last two begin another, whose end was left out."""
MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
MAX_HEADER_CHARS = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser:
    # Mutable state: what is not decided yet, what came behind that and decides nothing, the header under way, and what
    # the message's text is: none between two.

    def __init__(self) -> None:
        self._held = ""
        self._aside = Aside()
        self._in_header = True
        self._kind = PieceKind.CONTENT
        self._calls = 0

    @property
    def is_reasoning(self) -> bool:
        return not self._in_header and self._kind is PieceKind.REASONING

    def push(self, text: str) -> list[Piece]:
        if self._aside.takes(text):
            return []
        self._held += self._aside.release() + text
        pieces: list[Piece] = []
        while True:
            was_in_header = self._in_header
            pieces += self._header() if was_in_header else self._body()
            if self._in_header is was_in_header:
                break
        if self._in_header:
            self._aside.wait(self._held)
        return pieces

    def flush(self) -> list[Piece]:
        rest, self._held = self._held + self._aside.release(), ""
        if self._in_header:
            return [Piece(PieceKind.CONTENT, rest)] if rest.strip() else []
        return self._piece(rest)

    def _header(self) -> list[Piece]:
        rest = self._held.lstrip()
        at = rest.find(MESSAGE)
        if 0 <= at <= MAX_HEADER_CHARS and _is_header(rest[:at]):
            self._held = rest[at + len(MESSAGE) :]
            self._in_header = False
            return self._begin(rest[:at])
        if at >= 0 or not _may_be_header(rest):
            # It never was one. It is shown, and what ends a message ends it too.
            self._kind = PieceKind.CONTENT
            self._in_header = False
            shown = next((mark for mark in (START, CHANNEL) if rest.startswith(mark)), "")
            self._held = rest[len(shown) :] if shown else self._held
            return self._piece(shown)
        return []

    def _begin(self, header: str) -> list[Piece]:
        to, channel = _TO.search(header), _CHANNEL.search(header)
        if to is not None:
            self._kind = PieceKind.ARGUMENTS
            self._calls += 1
            return [Piece(PieceKind.CALL, to[1].removeprefix("functions."), self._calls - 1)]
        is_analysis = channel is not None and channel[1] == "analysis"
        self._kind = PieceKind.REASONING if is_analysis else PieceKind.CONTENT
        return []

    def _body(self) -> list[Piece]:
        found = [(at, mark) for mark in ENDS if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            text, self._held = self._held[:at], self._held[at:]
            if mark not in (START, CHANNEL):
                self._held = self._held[len(mark) :]
            self._in_header = True
        else:
            cut = len(self._held) - held_back(self._held, *ENDS)
            text, self._held = self._held[:cut], self._held[cut:]
        return self._piece(text)

    def _piece(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Piece(self._kind, text, self._calls - 1 if self._kind is PieceKind.ARGUMENTS else 0)]


def _is_header(text: str) -> bool:
    """Return whether this is all that stands before `<|message|>`: channel and recipient, each at most once."""
    return _may_be_header(text) and (CHANNEL in text or _TO.search(text) is not None)


def _may_be_header(text: str) -> bool:
    """Return whether `text` is the beginning of a header. Behind the assistant's name the template may have left it to
    the model to begin with the recipient."""
    if len(text) > MAX_HEADER_CHARS + len(MESSAGE) or "\n\n" in text:
        return False
    begins = (START, CHANNEL, "to=")
    return any(text.startswith(mark) or mark.startswith(text) for mark in begins)
