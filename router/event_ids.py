"""The ids of a resumable stream's events (server-sent events): they say where to go on. Pure.

`TOKEN.next_index.text_bytes.closing`: the stream's token; what the client has once it has the event, in output tokens
and bytes of their text, since text may lag behind tokens; and how many of the events that close the answer (finish
reason, usage, `[DONE]`) it has. A client sends the last one back as `Last-Event-ID` and gets the rest.
"""

import re

import msgspec

from router.api import ApiError

FIELD = "Last-Event-ID"
_ID = re.compile(r"(?P<token>[A-Za-z0-9_-]+)\.([0-9]{1,9})\.([0-9]{1,9})\.([0-9])", re.ASCII)


class At(msgspec.Struct, frozen=True):
    """A position behind some event."""

    next_index: int = 0
    text_bytes: int = 0
    closing: int = 0


START = At()


def event_id(token: str, at: At) -> str:
    return f"{token}.{at.next_index}.{at.text_bytes}.{at.closing}"


def position(value: str, token: str) -> At:
    """The position that an id of the stream `token` names; an empty one names the beginning.

    Raises `ApiError` INVALID_ARGUMENT for anything that is no id of this stream.
    """
    if not value:
        return START
    match = _ID.fullmatch(value)
    if match is None:
        raise bad_id("is not an event id of this server")
    if match["token"] != token:
        raise bad_id("belongs to another stream")
    next_index, text_bytes, closing = (int(part) for part in match.groups()[1:])
    return At(next_index, text_bytes, closing)


def bad_id(why: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", f"{FIELD}: {why}", FIELD)
