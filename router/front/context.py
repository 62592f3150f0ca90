"""What a router writes into a resumable request's record, for the router that may come after it.

Enough to serve the client again from nothing but the record, the output tokens and this: everything else about the
answer's text follows from the tokens.
"""

import msgspec

from router.front.form import HttpForm


class Context(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`chat` holds (role, content) of the messages, so that the finished answer is remembered for the next turn;
    `form` is how the answer is written, where the call came over HTTP; `samples` how many of them there are."""

    token: str
    model: str
    stop: tuple[str, ...] = ()
    chat: tuple[tuple[str, str], ...] = ()
    form: HttpForm | None = None
    samples: int = 1

    def __repr__(self) -> str:
        """Without the caller's text, and without what lets others read the answer."""
        return f"Context({self.model}: {len(self.stop)} stop strings, {len(self.chat)} messages)"


_decoder = msgspec.msgpack.Decoder(Context)


def pack(context: Context) -> bytes:
    return msgspec.msgpack.encode(context)


def unpack(data: bytes) -> Context | None:
    """None if these bytes are not of a router like this one."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return None
