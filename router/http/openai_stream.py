"""A streamed answer of the two OpenAI routes, event by event, from its beginning or from where a client left. Pure.

`usage` comes only when `stream_options.include_usage` asks for it, in a chunk of its own with no choices; with
`continuous_usage_stats` each chunk before it has that of its sample so far. The
`headrace` object (stages, migration, workers) is always there, in the last chunk; of several samples each has its own,
beside its finish reason.

Events of a resumable stream carry ids, which say where to go on: `TOKEN` and, for every sample of the answer,
`.next_index.text_bytes.closing`. It is what the client has of it once it has the event, in output tokens and bytes of
their text, since text may lag behind tokens, and how many closing events. A sample's first is its finish reason; those
that close the whole answer (usage, `[DONE]`) count on with sample 0. A client sends the last id back as `Last-Event-ID`
and gets the rest: written again, behind any event, it is the same to the byte.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from router.front.api import Delta, Finished, HttpForm, Started, invalid
from router.http.logprobs import TokenBytes, characters
from router.http.openai_reply import (
    ReplyChoice,
    ReplyText,
    echoed_text,
    encoded,
    finish_reason,
    last_choice,
    usage,
    written_logprobs,
)
from router.http.parsed_answer import PartsReader

FIELD = "Last-Event-ID"
_ID = re.compile(r"([A-Za-z0-9_-]+)((?:\.[0-9]{1,9}\.[0-9]{1,9}\.[0-9])+)", re.ASCII)
DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see traffic."""
KEEP_ALIVE_BETWEEN_IDS = b": keep-alive\n"
"""Has no empty line: OpenAI's Python client takes one after an id for an event, and fails on its lack of data."""


class EventPosition(msgspec.Struct, frozen=True):
    """A position behind some event of one sample."""

    next_index: int = 0
    text_bytes: int = 0
    closing: int = 0


def event_id(token: str, at: Sequence[EventPosition]) -> str:
    return token + "".join(f".{one.next_index}.{one.text_bytes}.{one.closing}" for one in at)


def positions(value: str, token: str) -> list[EventPosition]:
    """Return, by sample, what an id of the stream `token` names; an empty one names the beginning of all samples.

    Raises `ApiError` INVALID_ARGUMENT for anything that is no id of this stream.
    """
    if not value:
        return []
    match = _ID.fullmatch(value)
    if match is None:
        raise invalid(FIELD, "is not an event id of this server")
    if match[1] != token:
        raise invalid(FIELD, "belongs to another stream")
    numbers = [int(part) for part in match[2].split(".")[1:]]
    return [EventPosition(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]


_MARK = "\x00text\x00"
_IDS = (1234567890123456789,)


class StreamWriter:
    """Writes the events of one stream. Mutable state: the positions behind what was written, the accounts of samples
    that are over, and for each sample how many characters its tokens have begun, and what lies around the text, and the
    ids, of all its chunks but the first."""

    __slots__ = (
        "_around", "_at", "_characters", "_echoed", "_ends", "_form", "_has_ids", "_readers", "_started",
        "_token_bytes", "_wants_ids",
    )  # fmt: skip

    def __init__(
        self, started: Started, form: HttpForm, token_bytes: TokenBytes, at: Sequence[EventPosition] = ()
    ) -> None:
        self._started = started
        self._token_bytes = token_bytes
        had = started.had_ids or ((),) * started.samples
        self._characters = [sum(characters(token, token_bytes) for token in ids) for ids in had]
        self._form = form
        self._at = list(at) or [EventPosition()] * started.samples
        self._ends: dict[int, Finished] = {}
        self._echoed: set[int] = set()
        self._readers: dict[int, PartsReader] = {}
        self._around: dict[int, tuple[bytes, bytes, bytes]] = {}
        self._has_ids, self._wants_ids = bool(started.resume_token), form.return_token_ids

    def delta(self, item: Delta) -> bytes:
        """One event of new output, or nothing where the client asked for text and there is none yet.

        Raises `ApiError` for a client that said it had seen the output end.
        """
        sample, text, ids = item.sample, item.text, item.token_ids
        around = self._around.get(sample)
        if around is not None and not self._has_ids:
            return self._more(item, around)  # nobody comes back, so where it is matters no more
        at = self._at[sample]
        if at.closing:
            raise invalid(FIELD, "lies behind the end of the output")
        if self._form.echo is not None and sample not in self._echoed:
            return self._echo(sample) + self.delta(item)
        is_first = not self._has_output(sample)
        size = len(text) if text.isascii() else len(text.encode())
        self._at[sample] = EventPosition(at.next_index + len(ids), at.text_bytes + size)
        if self._form.parsing is not None:
            return self._in_parts(item, is_first=is_first)
        if self._form.logprobs is not None:
            return self._with_logprobs(item, is_first=is_first)
        if not text and not (self._form.return_token_ids and ids):
            return b""
        if is_first or self._form.is_counting:
            return self._event(self._output(sample, text, ids, is_first=is_first))
        if around is None:
            around = self._around[sample] = self._split(sample)
        return self._id() + self._more(item, around)

    def _more(self, item: Delta, around: tuple[bytes, bytes, bytes]) -> bytes:
        """Return one event without its id, of text that is not a sample's first."""
        text, ids, wants_ids = item.text, item.token_ids, self._wants_ids
        if not text and not (wants_ids and ids):
            return b""
        before, between, after = around
        return b"".join((before, _encode(text), between, _encode(ids) if wants_ids else b"", after))

    def _echo(self, sample: int) -> bytes:
        """One event with the prompt's text, before all output of a sample."""
        self._echoed.add(sample)
        prompt = sample * self._form.prompts // len(self._at)
        text = echoed_text(self._started, self._form, prompt, self._token_bytes)
        return self._event(self._output(sample, text, (), is_first=True)) if text else b""

    def _in_parts(self, item: Delta, *, is_first: bool) -> bytes:
        """One event for all parts that this output decides."""
        reader = self._reader(item.sample)
        parts = reader.delta(reader.push(item.text))
        wants_ids = self._form.return_token_ids or self._form.logprobs is not None
        if not parts and not (wants_ids and item.token_ids):
            return b""
        choice = ReplyChoice(index=item.sample, delta=({"role": "assistant"} if is_first else {}) | parts)
        if self._form.logprobs is not None:
            choice.logprobs = written_logprobs(self._form, item.logprobs, 0, self._token_bytes)
        if self._form.return_token_ids:
            choice.token_ids = item.token_ids
        return self._event(self._chunk([choice]))

    def _reader(self, sample: int) -> PartsReader:
        reader = self._readers.get(sample)
        if reader is None:
            assert self._form.parsing is not None
            had = self._started.had_text[sample] if self._started.had_text else ""
            reader = PartsReader(self._form.parsing, self._started.request_id, sample, had)
            self._readers[sample] = reader
        return reader

    def _with_logprobs(self, item: Delta, *, is_first: bool) -> bytes:
        """One event for all output, whether it has text or not."""
        begun = self._characters[item.sample]
        written = written_logprobs(self._form, item.logprobs, begun, self._token_bytes)
        self._characters[item.sample] += sum(characters(token, self._token_bytes) for token in item.token_ids)
        return self._event(self._output(item.sample, item.text, item.token_ids, written, is_first=is_first))

    def _split(self, sample: int) -> tuple[bytes, bytes, bytes]:
        """Return what lies before the text of an event that is not the first, between it and the ids, and behind."""
        before, rest = event(self._output(sample, _MARK, _IDS, is_first=False)).split(_encode(_MARK))
        between, _, after = rest.partition(_encode(_IDS))
        return before, between, after

    def _output(
        self,
        sample: int,
        text: str,
        ids: tuple[int, ...],
        logprobs: dict[str, Any] | None = None,
        *,
        is_first: bool,
    ) -> bytes:
        """Write a chunk of output."""
        choice = ReplyChoice(index=sample, logprobs=logprobs)
        if self._form.chat:
            choice.delta = ReplyText(text, role="assistant" if is_first else msgspec.UNSET)
        else:
            choice.text = text
        if self._form.return_token_ids:
            choice.token_ids = ids
        return self._chunk([choice])

    def last(self, end: Finished) -> list[bytes]:
        """The events that close a sample, and behind the last one the answer: the finish reason, the usage if asked
        for, and the end mark.

        Raises `ApiError` for a client that said it had more of them than there are.
        """
        self._ends[end.sample] = end
        at = self._at[end.sample]
        # A single sample's figures are in the last chunk of all, where there is one behind its finish reason.
        is_later = len(self._at) == 1 and self._form.include_usage
        events = []
        if not at.closing:
            self._at[end.sample] = msgspec.structs.replace(at, closing=1)
            events.append(self._event(self._chunk([self._finish(end)], None if is_later else end)))
        if len(self._ends) < len(self._at):
            return events
        bodies = [DONE]
        if self._form.include_usage:
            use = usage([self._ends[sample] for sample in sorted(self._ends)], self._form)
            bodies.insert(0, self._chunk([], end if is_later else None, use))
        had = self._at[0].closing - 1
        if had > len(bodies) or any(one.closing != 1 for one in self._at[1:]):
            raise invalid(FIELD, "lies behind the end of the stream")
        for closing, body in enumerate(bodies[had:], had + 2):
            self._at[0] = msgspec.structs.replace(self._at[0], closing=closing)
            events.append(self._event(body))
        return events

    def _finish(self, end: Finished) -> ReplyChoice:
        choice = last_choice(end, self._form)
        if self._form.parsing is not None:
            reader, is_first = self._reader(end.sample), not self._has_output(end.sample)
            parts = reader.delta(reader.flush())
            choice.delta = ({"role": "assistant"} if is_first else {}) | parts
            choice.finish_reason = finish_reason(end, reader)
        elif self._form.chat:
            choice.delta = {} if self._has_output(end.sample) else {"role": "assistant"}
        else:
            choice.text = ""
        return choice

    def _has_output(self, sample: int) -> bool:
        """Return whether some event of its output was written."""
        at = self._at[sample]
        has_ids = self._form.return_token_ids or self._form.logprobs is not None
        has_text = at.text_bytes if self._form.parsing is None else self._reader(sample).has_begun
        return bool(has_text or (has_ids and at.next_index))

    def _chunk(
        self, choices: list[ReplyChoice], end: Finished | None = None, use: dict[str, Any] | None = None
    ) -> bytes:
        shown = use if self._form.include_usage else msgspec.UNSET
        if choices and self._form.is_counting:
            at = choices[0].index
            shown = self._so_far(self._at[at].next_index if at not in self._ends else self._ends[at].output_tokens)
        return encoded(self._started, self._form, "chat.completion.chunk", choices, shown, end)

    def _so_far(self, tokens: int) -> dict[str, Any]:
        prompt = self._started.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _event(self, data: bytes) -> bytes:
        return self._id() + event(data)

    def _id(self) -> bytes:
        token = self._started.resume_token
        return f"id: {event_id(token, self._at)}\n".encode() if token else b""


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
