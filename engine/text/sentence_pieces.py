"""The text of SentencePiece's tokens, a few at a time. Each has its own, but for runs of byte-fallback tokens
(`<0xE2>`), which are held back until they end, since their bytes make characters together.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

SPACE = "\u2581"
"""Stands for a space in the names of tokens."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PIECE_STEPS = ("Replace", "ByteFallback", "Fuse", "Strip")
_NO_REPLACE = {"pattern": {"String": SPACE}, "content": SPACE}
_NO_STRIP = {"content": " ", "start": 0, "stop": 0}


def byte_of(name: str) -> bytes | None:
    """Return what a byte-fallback token of this name stands for; None for any other."""
    return bytes.fromhex(name[3:5]) if _BYTE_TOKEN.fullmatch(name) else None


class Pieces(msgspec.Struct, frozen=True):
    """What a decoder of SentencePiece's kind does, in this order: it replaces `mark` by `text` in each token, makes
    characters of runs of byte-fallback tokens, joins all, and strips up to `stripped` of `strip` from the beginning."""

    mark: str
    text: str
    has_bytes: bool
    strip: str
    stripped: int

    @classmethod
    def of(cls, decoder: dict[str, Any]) -> "Pieces | None":
        """Return None for a decoder that does anything else, as the tokenizers library writes it in JSON."""
        steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else []
        kinds = [step["type"] for step in steps]
        if "Fuse" not in kinds or kinds != [kind for kind in _PIECE_STEPS if kind in kinds]:
            return None
        by_kind = dict(zip(kinds, steps, strict=True))
        replace, strip = by_kind.get("Replace", _NO_REPLACE), by_kind.get("Strip", _NO_STRIP)
        mark = replace["pattern"].get("String")
        if not mark or strip["stop"]:
            return None
        return cls(mark, replace["content"], "ByteFallback" in kinds, strip["content"], strip["start"])


class PieceTable(dict[int, str | bytes | None]):
    """The text of each token met so far, the byte of a byte token, None for one that is skipped. Threads may share it:
    whoever fills an entry fills in the same."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], pieces: Pieces) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._pieces = pieces

    def __missing__(self, token: int) -> str | bytes | None:
        piece = self[token] = self._piece(token)
        return piece

    def _piece(self, token: int) -> str | bytes | None:
        name = None if token in self._skipped else self._tokenizer.id_to_token(token)
        if name is None:
            return None
        text = name.replace(self._pieces.mark, self._pieces.text)
        return (byte_of(text) if self._pieces.has_bytes else None) or text


class PieceDetokenizer:
    """A `Detokenizer` (`engine/text/detokenize.py`)."""

    # Mutable state: how many characters may still be stripped, the run of bytes that is held back, and whether a text
    # can be shown as it stands.

    __slots__ = ("_is_plain", "_run", "_strip", "_strippable", "_table")

    def __init__(self, table: PieceTable, pieces: Pieces) -> None:
        self._table = table
        self._strip = pieces.strip
        self._strippable = pieces.stripped
        self._run = b""
        self._is_plain = not pieces.stripped

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete, perhaps none."""
        table = self._table
        if self._is_plain and len(ids) == 1 and isinstance(whole := table[ids[0]], str):
            return whole  # as nearly every step's token is
        texts: list[str] = []
        for token in ids:
            piece = table[token]
            if isinstance(piece, bytes):
                self._run += piece
            elif piece is not None:
                texts += (self._end_run(), piece)
        return self._shown("".join(texts))

    def flush(self) -> str:
        """Return what was held back; called once, at the end."""
        return self._shown(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "�" * len(run)

    def _shown(self, text: str) -> str:
        while text and self._strippable:
            if not text.startswith(self._strip):
                self._strippable = 0
            else:
                text, self._strippable = text[1:], self._strippable - 1
        self._is_plain = not self._run and not self._strippable
        return text
