"""The ids of a resumable stream's events (server-sent events): they say where to go on. Pure.

`TOKEN` and, for every sample of the answer, `.next_index.text_bytes.closing`: what the client has of it once it has
the event, in output tokens and bytes of their text, since text may lag behind tokens, and how many closing events. A
sample's first is its finish reason; those that close the whole answer (usage, `[DONE]`) count on with sample 0. A
client sends the last id back as `Last-Event-ID` and gets the rest.
"""

import re
from collections.abc import Sequence

import msgspec

from router.front.api import ApiError

FIELD = "Last-Event-ID"
_ID = re.compile(r"([A-Za-z0-9_-]+)((?:\.[0-9]{1,9}\.[0-9]{1,9}\.[0-9])+)", re.ASCII)


class At(msgspec.Struct, frozen=True):
    """A position behind some event of one sample."""

    next_index: int = 0
    text_bytes: int = 0
    closing: int = 0


def event_id(token: str, at: Sequence[At]) -> str:
    return token + "".join(f".{one.next_index}.{one.text_bytes}.{one.closing}" for one in at)


def positions(value: str, token: str) -> list[At]:
    """By sample, what an id of the stream `token` names; an empty one names the beginning, whatever the samples.

    Raises `ApiError` INVALID_ARGUMENT for anything that is no id of this stream.
    """
    if not value:
        return []
    match = _ID.fullmatch(value)
    if match is None:
        raise bad_id("is not an event id of this server")
    if match[1] != token:
        raise bad_id("belongs to another stream")
    numbers = [int(part) for part in match[2].split(".")[1:]]
    return [At(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]


def bad_id(why: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", f"{FIELD}: {why}", FIELD)
