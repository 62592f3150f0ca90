"""A streamed answer of the two OpenAI routes, event by event, from its beginning or from where a client left. Pure.

`usage` comes only when `stream_options.include_usage` asks for it, in a chunk of its own with no choices. The
`headrace` object (stages, migration, workers) is always there, in the last chunk. Events of a resumable stream carry
ids (`router.event_ids`); written again, behind any of them, the rest is the same to the byte.
"""

import msgspec

from router.api import Delta, Finished, Started
from router.event_ids import START, At, bad_id, event_id
from router.form import HttpForm
from router.openai_reply import ChatText, Choice, Headrace, Usage, Writer, usage

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see traffic."""
KEEP_ALIVE_BETWEEN_IDS = b": keep-alive\n"
"""Without the empty line: OpenAI's Python client takes one after an id for an event, and fails on its lack of data."""


class StreamWriter:
    """Mutable state: the position behind what was written."""

    def __init__(self, started: Started, form: HttpForm, at: At = START) -> None:
        self._writer = Writer(started, form)
        self._form = form
        self._token = started.resume_token
        self._at = at

    def delta(self, item: Delta) -> bytes:
        """One event of new output, or nothing where the client asked for text and there is none yet.

        Raises `ApiError` for a client that said it had seen the output end.
        """
        if self._at.closing:
            raise bad_id("lies behind the end of the output")
        is_first = not self._has_output
        next_index = self._at.next_index + len(item.token_ids)
        self._at = At(next_index, self._at.text_bytes + len(item.text.encode()))
        if not item.text and not (self._form.return_token_ids and item.token_ids):
            return b""
        choice = Choice()
        if not self._form.chat:
            choice.text = item.text
        elif is_first:
            choice.delta = ChatText(item.text)
        else:
            choice.delta = ChatText(item.text, role=msgspec.UNSET)
        if self._form.return_token_ids:
            choice.token_ids = item.token_ids
        return self._event(self._chunk([choice], None, None))

    def last(self, end: Finished) -> list[bytes]:
        """The events that close the answer: the finish reason, the usage if asked for, and the end mark.

        Raises `ApiError` for a client that said it had more of them than there are.
        """
        choice = Choice(finish_reason=end.reason.value)
        if not self._form.chat:
            choice.text = ""
        else:
            choice.delta = {} if self._has_output else {"role": "assistant"}
        headrace = self._writer.headrace(end)
        if self._form.include_usage:
            bodies = [self._chunk([choice], None, None), self._chunk([], usage(end), headrace)]
        else:
            bodies = [self._chunk([choice], None, headrace)]
        bodies.append(DONE)
        had = self._at.closing
        if had > len(bodies):
            raise bad_id("lies behind the end of the stream")
        events = []
        for closing, body in enumerate(bodies[had:], had + 1):
            self._at = msgspec.structs.replace(self._at, closing=closing)
            events.append(self._event(body))
        return events

    @property
    def _has_output(self) -> bool:
        """Whether some event of output was written."""
        return bool(self._at.text_bytes or (self._form.return_token_ids and self._at.next_index))

    def _chunk(self, choices: list[Choice], use: Usage | None, headrace: Headrace | None) -> bytes:
        kind = "chat.completion.chunk" if self._form.chat else "text_completion"
        shown = use if self._form.include_usage else msgspec.UNSET
        return msgspec.json.encode(self._writer.reply(kind, choices, shown, headrace))

    def _event(self, data: bytes) -> bytes:
        if not self._token:
            return event(data)
        return f"id: {event_id(self._token, self._at)}\n".encode() + event(data)


DONE = b"[DONE]"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
