"""Turns token ids back to text, a few at a time, without ever showing half a character.

Three ways, by how the tokenizer decodes. A byte-level vocabulary gives every token a fixed string of bytes, so an
incremental UTF-8 decoder is exact. One of SentencePiece gives every token a fixed text, but for its bytes
(`engine/text/sentence_pieces.py`). Both look a token up in a table. Any other is decoded through the library over a
short window that ends on a whole token.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import islice
from string import ascii_letters
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

from engine.text.sentence_pieces import SPACE, PieceDetokenizer, Pieces, PieceTable, byte_of

_LETTERS = frozenset(ascii_letters)


class Detokenizer(Protocol):
    """One per answer. All pushes and the flush, joined, equal decoding all ids at once, or where the answer continues a
    text, what decoding both adds to it; special tokens are skipped."""

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete, perhaps none."""

    def flush(self) -> str:
        """Return what was held back; called once, at the end."""


class DetokenizerFactory:
    """Makes the detokenizers of a model, and holds what they share."""

    def __init__(self, tokenizer: Tokenizer, unknown: frozenset[int] = frozenset()) -> None:
        """`unknown` ids stand for no text, whatever the tokenizer calls them."""
        self._tokenizer = tokenizer
        self._unknown = unknown
        added = {index: token for index, token in tokenizer.get_added_tokens_decoder().items() if index not in unknown}
        self.added = {token.content: index for index, token in added.items()}
        self._special = {token.content: index for index, token in added.items() if token.special}
        self._skipped = unknown | frozenset(self._special.values())
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._pieces = Pieces.of(decoder)
        self._makers: dict[tuple[frozenset[int], bool], Callable[[], Detokenizer]] = {}
        self.token_bytes = cache(self._token_bytes)

    def make(self, shown: frozenset[str] = frozenset(), *, continues: bool = False) -> Detokenizer:
        """Return one that skips special tokens, but for those whose names are in `shown`. `continues`: a text stands
        before the answer, so that its first word keeps its space."""
        kept = frozenset(index for name, index in self._special.items() if name in shown)
        key = kept, continues and not self._is_byte_level
        maker = self._makers.get(key)
        if maker is None:
            maker = self._makers[key] = self._maker(self._skipped - kept, continues)
        return maker()

    def _maker(self, skipped: frozenset[int], continues: bool) -> Callable[[], Detokenizer]:
        if self._is_byte_level:
            return partial(_ByteLevelDetokenizer, _ByteLevelTable(self._tokenizer, skipped))
        if self._pieces is not None:
            pieces = msgspec.structs.replace(self._pieces, stripped=0) if continues else self._pieces
            return partial(PieceDetokenizer, PieceTable(self._tokenizer, skipped, pieces), pieces)
        return partial(_WindowDetokenizer, self._tokenizer, skipped, self._letter() if continues else ())

    def _letter(self) -> tuple[int, ...]:
        """Return a token that is a letter, to stand for the text before an answer."""
        size = self._tokenizer.get_vocab_size()
        letters = (token for token in range(size) if (name := self._tokenizer.id_to_token(token)) and name in _LETTERS)
        return tuple(islice(letters, 1))

    def _token_bytes(self, token: int) -> tuple[bytes, bool]:
        """Return the bytes of a token by itself, and whether answers show them."""
        name = "" if token in self._unknown else self._tokenizer.id_to_token(token) or ""
        if token in self._skipped:
            return name.encode(), False
        if self._is_byte_level:
            return _bytes_of(name), True
        return byte_of(name) or name.replace(SPACE, " ").encode(), True


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a token. Added ones may hold characters outside the alphabet; they stand for themselves."""
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


class _ByteLevelTable(dict[int, str | None]):
    """The text of each token met so far; None for one that begins or ends inside a character. A skipped one has none.
    Threads may share it: whoever fills an entry fills in the same."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self.data = cache(self._data)

    def __missing__(self, token: int) -> str | None:
        try:
            text: str | None = self.data(token).decode()
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text

    def _data(self, token: int) -> bytes:
        return b"" if token in self._skipped else _bytes_of(self._tokenizer.id_to_token(token) or "")


class _ByteLevelDetokenizer:
    # Mutable state: the decoder, and whether it holds the beginning of a character.

    __slots__ = ("_decoder", "_is_inside", "_table")

    def __init__(self, table: _ByteLevelTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_inside = False

    def push(self, ids: Sequence[int]) -> str:
        if not self._is_inside:
            table = self._table
            if len(ids) == 1 and (whole := table[ids[0]]) is not None:
                return whole  # as nearly every step's token is
            texts = [text for i in ids if (text := table[i]) is not None]
            if len(texts) == len(ids):
                return "".join(texts)
        text = self._decoder.decode(b"".join([self._table.data(i) for i in ids]))
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    # `_window[:_shown]` has been shown and is kept as context for what follows: decoders treat the first token of a
    # text differently (they drop its leading space).
    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window = list(before)
        self._shown = len(before)

    def push(self, ids: Sequence[int]) -> str:
        self._window += [token for token in ids if token not in self._skipped]
        return "" if len(self._window) == self._shown or self._open_run() else self._show()

    def flush(self) -> str:
        return self._show()

    def _open_run(self) -> bool:
        last = self._tokenizer.id_to_token(self._window[-1]) or ""
        return byte_of(last) is not None

    def _show(self) -> str:
        before = self._decode(self._window[: self._shown])
        text = self._decode(self._window)[len(before) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))
