"""The formats in which an answer to one HTTP request is written, by its form. Pure."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.front.api import ApiError, Delta, Finished, HttpForm, Started
from router.http.adapters.messages_reply import MessageWriter, anthropic_error, whole_message
from router.http.adapters.responses_reply import ResponseWriter, whole_response
from router.http.logprobs import TokenBytes
from router.http.openai_reply import error_reply, whole
from router.http.openai_stream import EventPosition, StreamWriter, event


class EventWriter(Protocol):
    """Writes the events of one streamed answer."""

    def delta(self, item: Delta) -> bytes: ...

    def last(self, end: Finished) -> list[bytes]: ...


def writer_of(
    started: Started, form: HttpForm, token_bytes: TokenBytes, at: Sequence[EventPosition] = ()
) -> EventWriter:
    match form.api:
        case "messages":
            return MessageWriter(started, form)
        case "responses":
            return ResponseWriter(started, form)
        case _:
            return StreamWriter(started, form, token_bytes, at)


def body_of(
    started: Started,
    form: HttpForm,
    answers: Sequence[Sequence[Delta]],
    ends: Sequence[Finished],
    token_bytes: TokenBytes,
) -> bytes:
    match form.api:
        case "messages":
            return whole_message(started, form, answers, ends)
        case "responses":
            return whole_response(started, form, answers, ends)
        case _:
            return whole(started, form, answers, ends, token_bytes)


def failure_of(error: ApiError, writer: EventWriter | None) -> bytes:
    """An error as the last event of a stream."""
    if isinstance(writer, MessageWriter | ResponseWriter):
        return writer.failure(error)
    return event(msgspec.json.encode(error_reply(error).envelope))


def envelope_of(error: ApiError, api: str, label: str) -> object:
    """The body of an error that is the whole answer."""
    return anthropic_error(error, label) if api == "messages" else error_reply(error).envelope
