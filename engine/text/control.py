"""Control tokens (`<|im_start|>`, `<|eot_id|>`): which texts become them, and which are only texts that look like them.

A tokenizer turns the name of a control token into that token wherever it stands, so a user who writes one would speak
in the template's place. Here the tokenizer reads all names as plain text, and knows each control token by a mark that
nobody can write: private characters, drawn anew in every process. Whoever may write control tokens has their names
replaced by marks. In a chat that is the template: names in a message are hidden from it while it is rendered, the
names that are there then are its own, and what was hidden comes back as text.

A template may write a message's text between brackets of its own (`<function=NAME>`). So a text that ends as a name
begins, or begins as one ends, is parted there by one more mark until the template is rendered. Left aside is a template
that puts both sides of a name around a text; that is how some write roles, which are no user's words.
"""

import json
import re
import secrets
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import Normalizer

_OPEN, _CLOSE, _DIGITS = "\ue000", "\ue001", 0xE100
_ESCAPED = re.compile(r"\\+u(e[01][0-9a-f]{2})")
"""A private character as Python shows it in the text of an error."""
TOLD_CHARS = 500
"""A template's refusal may hold all of a message: its beginning is told."""


class ControlTokens:
    """Control tokens of one tokenizer, by their marks. Stateless, and safe to share between threads.

    They are those that the tokenizer calls special, and those that end an answer whatever it calls them."""

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int]) -> None:
        """Raises ValueError for a tokenizer with gaps among its ids: the library would give one of them twice."""
        tokenizer = _with_special(tokenizer, frozenset(ends))
        added = tokenizer.get_added_tokens_decoder()
        controls = {token.content: index for index, token in added.items() if token.special}
        drawn = secrets.randbits(64) << 24
        private = {name: _private(drawn + at) for at, name in enumerate(controls)}
        self._marks = {name: f"{_OPEN}{number}{_CLOSE}" for name, number in private.items()}
        self._hidden = {name: f"{_CLOSE}{number}{_OPEN}" for name, number in private.items()}
        taken = tokenizer.get_vocab(with_added_tokens=True).values()
        normalizer = tokenizer.normalizer
        tokenizer.add_tokens([_like(added[index], self._marks[name], normalizer) for name, index in controls.items()])
        tokenizer.encode_special_tokens = True
        self.tokenizer = tokenizer
        self._ids = {tokenizer.token_to_id(self._marks[name]): index for name, index in controls.items()}
        if not self._ids.keys().isdisjoint(taken):
            raise ValueError("ids are missing among those of its tokens, which leaves none for marks")
        self.marks = frozenset(index for index in self._ids if index is not None)
        """Ids of the marks, which no text is to show: the model's vocabulary may have room for them."""
        # Where names overlap, the tokenizer takes the first, and of several there the longest.
        self._names = _any_of(controls)
        self._added = _any_of((token.content for token in added.values()), _words(added.values()))
        self._beginnings = frozenset(name[:end] for name in controls for end in range(1, len(name)))
        self._endings = frozenset(name[begin:] for name in controls for begin in range(1, len(name)))
        self._longest = max(map(len, controls), default=0)
        self._seam = f"{_CLOSE}{_private(drawn + len(controls))}{_OPEN}"
        self._shown = {hidden: name for name, hidden in self._hidden.items()} | {self._seam: ""}
        self._hiding = _any_of(self._shown)

    def mark(self, text: str) -> str:
        """Return `text` whose names of control tokens stand for these."""
        return self._added.sub(lambda found: self._marks.get(found[0], found[0]), text)

    def hide(self, text: str) -> str:
        """Return a message's text whose names a template does not see, nor `mark`."""
        text = self._names.sub(lambda found: self._hidden[found[0]], text)
        # Templates trim what is blank around a text.
        inner = text.strip()
        lengths = range(1, min(self._longest, len(inner) + 1))
        if any(inner[:length] in self._endings for length in lengths):
            text = text.replace(inner, self._seam + inner, 1)
        if any(inner[-length:] in self._beginnings for length in lengths):
            blank = len(text) - len(text.rstrip())
            text = text[: len(text) - blank] + self._seam + text[len(text) - blank :]
        return text

    def show(self, text: str) -> str:
        """Return a text with what was hidden in it, as plain text."""
        return self._hiding.sub(lambda found: self._shown[found[0]], text)

    def told(self, message: str) -> str:
        """Return the message of a template's error as it can be told: with what was hidden, as text that can travel."""
        message = self.show(_ESCAPED.sub(lambda found: chr(int(found[1], 16)), message))
        return message.encode(errors="backslashreplace").decode()[:TOLD_CHARS]

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the ids of a text: of marks, those of their control tokens; of names, those of their letters.

        Raises what the library raises for text that is not valid Unicode."""
        encoded = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0]
        return [self._ids.get(token, token) for token in encoded.ids]


def _with_special(tokenizer: Tokenizer, ends: frozenset[int]) -> Tokenizer:
    """A copy of the tokenizer, in which the added tokens that end an answer are special."""
    written = tokenizer.to_str()
    added = tokenizer.get_added_tokens_decoder()
    if all(added[index].special for index in ends & added.keys()):
        return Tokenizer.from_str(written)
    whole = json.loads(written)
    for token in whole["added_tokens"]:
        token["special"] |= token["id"] in ends
    return Tokenizer.from_str(json.dumps(whole))


def _like(token: AddedToken, mark: str, normalizer: Normalizer | None) -> AddedToken:
    """A token that is found as `token` is, by another name. Where it must be a whole word, `mark` has seen to that.

    The library normalizes the name of a token that it looks for in normalized text. A name with a space put before it,
    as by SentencePiece's normalizers, would be found at the beginning of a text alone: elsewhere a mark would be text,
    that whoever decodes the prompt could read."""
    is_kept = normalizer is None or normalizer.normalize_str(mark) == mark
    return AddedToken(
        mark,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and is_kept,
        special=False,
    )


def _private(number: int) -> str:
    """A number in private characters, which no template changes."""
    return "".join(chr(_DIGITS + int(digit, 16)) for digit in f"{number:x}")


def _words(added: Iterable[AddedToken]) -> frozenset[str]:
    return frozenset(token.content for token in added if token.single_word)


def _any_of(names: Iterable[str], words: frozenset[str] = frozenset()) -> re.Pattern[str]:
    """A pattern that matches the longest of `names`, those of `words` only where they are whole words; without names,
    nothing."""
    longest_first = sorted(names, key=len, reverse=True)
    parts = [rf"(?<!\w){re.escape(name)}(?!\w)" if name in words else re.escape(name) for name in longest_first]
    return re.compile("|".join(parts) or r"(?!)")
