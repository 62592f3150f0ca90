"""The text side of the served model, and how one answer's token ids become text.

Ids are detokenized as they come, and cut at the first stop string.
Text that may be the beginning of a stop string is held back until it is decided, so nothing that was
shown is ever taken back. Half a character is never shown: that is the detokenizer's promise.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Protocol

import msgspec

from engine.packed_logprobs import PackedLogprobs
from engine.text.dialect import Dialect
from engine.text.messages import ChatPrompt
from engine.types import SamplingParams, TokenLogprobs
from router.front.api import Delta, Position
from router.front.parsers.pieces import AnswerParser


class IncrementalDecoder(Protocol):
    """`engine.text.detokenize.Detokenizer`, or one that stands in for it."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class ServedModel(Protocol):
    """`engine.text.bundle.TextModel`, or one that stands in for it."""

    name: str
    vocab_size: int
    drawable_tokens: int
    """Ids from here on are in the vocabulary and of no token: the engine never draws them."""
    context_tokens: int
    stop_ids: frozenset[int]
    dialect: Dialect
    model_dir: Path | None
    """The prepared model, for those who read more of it; None where there is none."""
    sampling: SamplingParams

    @property
    def added_ids(self) -> Mapping[str, int]:
        """The tokens that were added to the vocabulary, by name."""

    def encode(self, text: str, *, add_special: bool, is_literal: bool = False) -> list[int]: ...

    def render_chat(self, chat: ChatPrompt) -> str: ...

    def encode_chat_text(self, rendered: str) -> list[int]: ...

    def token_strings(self, ids: Sequence[int]) -> list[str]: ...

    def text_of(self, ids: Sequence[int]) -> str: ...

    def tokenizer_files(self) -> Mapping[str, str]: ...

    def detokenizer(self, shown: frozenset[str] = frozenset(), *, continues: bool = False) -> IncrementalDecoder: ...

    def token_bytes(self, token: int) -> tuple[bytes, bool]:
        """The bytes that a token stands for, and whether answers show them; of one that they skip, its name's."""


class Stopped(msgspec.Struct, frozen=True):
    """The first `tokens_kept` output tokens complete the stop string `matched`."""

    tokens_kept: int
    matched: str


class OutputHistory:
    """What the reader of an answer was given, in a few bytes a token: for the chat's next turn, and, with `events`, for
    a client that reads it again event by event."""

    # Mutable state: the ids, their log probabilities, the text in UTF-8, and how far ids and text reached behind each
    # event.

    def __init__(self, *, events: bool) -> None:
        self.keeps_events = events
        self._ids = array("I")
        self._text = bytearray()
        self._ids_ends = array("Q")
        self._text_ends = array("Q")
        self._logprobs = PackedLogprobs()

    def __len__(self) -> int:
        """Return how many events are kept."""
        return len(self._ids_ends)

    @property
    def size(self) -> Position:
        """How far all that is kept reaches."""
        return Position(len(self._ids), len(self._text))

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self._ids.extend(delta.token_ids)
            self._text += delta.text.encode()
            if self.keeps_events:
                self._ids_ends.append(len(self._ids))
                self._text_ends.append(len(self._text))
                if delta.logprobs:
                    self._logprobs.extend(delta.logprobs)

    def add_each(self, texts: Sequence[str], ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Keep an event for each id, of its text and its log probabilities, where there are any."""
        data = [text.encode() for text in texts]
        self._ids_ends.extend(range(len(self._ids) + 1, len(self._ids) + len(ids) + 1))
        self._text_ends.extend(islice(accumulate(map(len, data), initial=len(self._text)), 1, None))
        self._ids.extend(ids)
        self._text += b"".join(data)
        self._logprobs.extend(logprobs)

    @property
    def ids(self) -> list[int]:
        return self._ids.tolist()

    @property
    def text(self) -> str:
        return self._text.decode()

    def text_byte(self, at: int) -> int:
        """Return a byte of the text in UTF-8."""
        return self._text[at]

    def first_behind(self, at: Position) -> int:
        """Return the first event that reaches behind a position; how many are kept, where none does."""
        return min(bisect_right(self._ids_ends, at.next_index), bisect_right(self._text_ends, at.text_bytes))

    def event(self, index: int, behind: Position) -> Delta:
        """Return what one event holds that lies behind a position."""
        ids_from, text_from = (self._ids_ends[index - 1], self._text_ends[index - 1]) if index else (0, 0)
        ids_from, text_from = max(ids_from, behind.next_index), max(text_from, behind.text_bytes)
        ids_end = self._ids_ends[index]
        text = self._text[text_from : self._text_ends[index]].decode()
        return Delta(text, tuple(self._ids[ids_from:ids_end]), logprobs=self._logprobs.part(ids_from, ids_end))


class Output:
    """The text side of one request. After a stop string it takes no more tokens."""

    __slots__ = (
        "_beginnings", "_detokenizer", "_held", "_is_plain", "_longest", "_min_tokens", "_reasoning", "_stop",
        "_tokens", "reasoning_tokens", "stopped",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: IncrementalDecoder,
        stop: Sequence[str],
        reasoning: AnswerParser | None = None,
        min_tokens: int = 0,
    ) -> None:
        """`reasoning` is a parser of its own, by which the tokens of the reasoning are counted. In the text of the
        first `min_tokens` no stop string is looked for."""
        self.reasoning_tokens = 0
        self._reasoning = reasoning
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._is_plain = not stop and reasoning is None
        self._beginnings = frozenset(text[:n] for text in stop for n in range(1, len(text)))
        self._longest = max((len(text) - 1 for text in stop), default=0)
        self._held = ""
        self._min_tokens, self._tokens = min_tokens, 0
        self.stopped: Stopped | None = None

    def push(self, ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        """The text that may be shown now and the ids that count, up to a stop string."""
        if self._is_plain:
            return self._detokenizer.push(ids), ids
        kept: list[int] = []
        shown: list[str] = []
        for token in ids:
            if self.stopped is not None:
                break
            kept.append(token)
            self._tokens += 1
            text = self._detokenizer.push((token,))
            if self._reasoning is not None:
                self._count_reasoning(self._reasoning, text)
            shown.append(self._add(text) if self._stop else text)
        return "".join(shown), kept

    def push_each(self, ids: Sequence[int]) -> list[str]:
        """The text that may be shown with each of the ids that count, up to a stop string."""
        if self._is_plain:
            return [self._detokenizer.push((token,)) for token in ids]
        texts: list[str] = []
        for token in ids:
            text, kept = self.push((token,))
            if not kept:
                break
            texts.append(text)
        return texts

    def flush(self) -> str:
        """The rest, at the end of the answer; an unfinished character may complete a stop string."""
        if self.stopped is not None:
            return ""
        text = self._detokenizer.flush()
        if self._stop:
            text = self._add(text)
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _count_reasoning(self, parser: AnswerParser, text: str) -> None:
        """A token counts that the reasoning goes on behind, or that has ended it: token by token, so that the count is
        the same however they come."""
        before = parser.is_reasoning
        parser.push(text)
        self.reasoning_tokens += before or parser.is_reasoning

    def _add(self, text: str) -> str:
        if not text or self._tokens <= self._min_tokens:
            return text
        self._held += text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda place: place[0])
            self.stopped = Stopped(self._tokens, stop)
            shown, self._held = self._held[:at], ""
            return shown
        cut = len(self._held) - self._undecided()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _undecided(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        lengths = range(min(self._longest, len(self._held)), 0, -1)
        return next((length for length in lengths if self._held[-length:] in self._beginnings), 0)
