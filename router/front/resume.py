"""Resumable streams by their tokens: how long each waits for its client, and what a later router needs to continue it.

A stream is kept from the moment its client can know the token. While somebody reads it, it stays; from the moment its
reader is gone it has `window_s`, whether or not the answer was complete: that the last event was written does not mean
that it arrived. Pure: time is an argument.
"""

import hashlib
from collections import OrderedDict

import msgspec

from engine.messages import guarded
from engine.text.messages import ChatPrompt
from router.core.sessions import Session
from router.front.api import ApiError, HttpForm
from router.front.samples import Samples

MAX_UNREAD = 4096
"""Streams that wait for their clients; of the tenant that has most of them the longest waiting go first."""


KEY_BYTES = 16


def unknown_token(why: str = "is unknown, or came too late") -> ApiError:
    return ApiError("NOT_FOUND", f"resume_token: {why}", "resume_token")


def resume_key(token: str) -> bytes:
    """Return what names the requests of a token to workers, who are not told the token."""
    return hashlib.sha256(token.encode()).digest()[:KEY_BYTES] if token else b""


class Context(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A note in a resumable request's record, for the router that may come after this one: enough to serve the client
    again from nothing but the record, the output tokens and this. All else about the answer's text follows from the
    tokens.

    `chat` is all that was rendered, so that the finished answer is remembered for the next turn;
    `form` is how the answer is written, where the call came over HTTP; `samples` how many of them there are. `tenant`
    is whose it is: who goes on with it counts and charges it. `session` is the conversation's, if it has a name.
    `continues`: the answer's first word keeps the space before it."""

    token: str
    model: str
    stop: tuple[str, ...] = ()
    chat: ChatPrompt | None = None
    form: HttpForm | None = None
    samples: int = 1
    tenant: str = ""
    session: Session | None = None
    continues: bool = False

    def __repr__(self) -> str:
        """Leave out the caller's text, and what lets others read the answer."""
        messages = 0 if self.chat is None else len(self.chat.messages)
        return f"Context({self.model}: {len(self.stop)} stop strings, {messages} messages)"


_decode = guarded(msgspec.msgpack.Decoder(Context).decode)


def pack(context: Context) -> bytes:
    return msgspec.msgpack.encode(context)


def unpack(data: bytes) -> Context | None:
    """Return None if these bytes were not written by a router like this one."""
    try:
        return _decode(data)
    except msgspec.MsgspecError:
        return None


class Resumables:
    # Mutable state: every stream by token; since when those without a reader wait, longest first; and their tokens by
    # tenant, none of whom is without one.

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: dict[str, Samples] = {}
        self._unread: OrderedDict[str, float] = OrderedDict()
        self._unread_of: dict[str, dict[str, None]] = {}

    def __repr__(self) -> str:
        return f"Resumables({len(self._kept)} streams, {len(self._unread)} unread)"

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, token: str) -> Samples | None:
        return self._kept.get(token)

    def keep(self, token: str, kept: Samples) -> None:
        """Make `token` known; somebody reads its stream."""
        self._kept[token] = kept

    def attached(self, token: str) -> None:
        if self._unread.pop(token, None) is None:
            return
        tenant = self._kept[token].tenant
        del self._unread_of[tenant][token]
        if not self._unread_of[tenant]:
            del self._unread_of[tenant]

    def detached(self, token: str, now: float) -> list[Samples]:
        """Note that its reader is gone; return what is given up to make room."""
        self.attached(token)
        self._unread[token] = now
        self._unread_of.setdefault(self._kept[token].tenant, {})[token] = None
        if len(self._unread) <= MAX_UNREAD:
            return []
        most = max(self._unread_of.values(), key=len)
        return [self._drop(next(iter(most)))]

    def forget(self, token: str) -> Samples | None:
        return self._drop(token) if token in self._kept else None

    def expired(self, now: float) -> list[Samples]:
        """Forget, and return, the streams whose clients did not come back in time."""
        late = []
        while self._unread:
            token, since_s = next(iter(self._unread.items()))
            if now - since_s < self._window_s:
                break
            late.append(self._drop(token))
        return late

    def _drop(self, token: str) -> Samples:
        self.attached(token)
        return self._kept.pop(token)
