"""The text side of the served model, and how one answer's token ids become text.

Ids are detokenized as they come, and cut at the first stop string.
Text that may be the beginning of a stop string is held back until it is decided, so nothing that was
shown is ever taken back. Half a character is never shown: that is the detokenizer's promise.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engine.packed_logprobs import PackedLogprobs
from engine.text.dialect import Dialect
from engine.text.messages import ChatPrompt
from engine.types import SamplingParams
from router.front.api import Delta
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

    # Mutable state: the ids, their log probabilities, the text in UTF-8, and how far both reached behind each event.

    def __init__(self, *, events: bool) -> None:
        self._keeps_events = events
        self._ids = array("I")
        self._text = bytearray()
        self._ends = array("Q")
        self._logprobs = PackedLogprobs()

    def add(self, delta: Delta) -> None:
        self._ids.extend(delta.token_ids)
        self._text += delta.text.encode()
        if self._keeps_events:
            self._ends.extend((len(self._ids), len(self._text)))
            if delta.logprobs:
                self._logprobs.extend(delta.logprobs)

    @property
    def ids(self) -> list[int]:
        return self._ids.tolist()

    @property
    def text(self) -> str:
        return self._text.decode()

    def events(self) -> Iterator[Delta]:
        """Yield what was given, event by event; all as one where the events were not kept."""
        ends = self._ends if self._keeps_events else (len(self._ids), len(self._text))
        ids_from = text_from = 0
        for ids_end, text_end in zip(ends[::2], ends[1::2], strict=True):
            text = self._text[text_from:text_end].decode()
            logprobs = self._logprobs.part(ids_from, ids_end)
            yield Delta(text, tuple(self._ids[ids_from:ids_end]), logprobs=logprobs)
            ids_from, text_from = ids_end, text_end


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
