"""Resumable streams by their tokens, and for how long each waits for its client. Pure: time is an argument.

A stream is kept from the moment its client can know the token. While somebody reads it, it stays; from the moment its
reader is gone it has `window_s`, whether or not the answer was complete: that the last event was written does not mean
that it arrived.
"""

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from router.front.api import ApiError
from router.front.samples import Samples
from router.front.stream import SampleStream

MAX_UNREAD = 4096
"""Streams that wait for their clients; the longest waiting go first."""


def unknown_token(why: str = "is unknown, or came too late") -> ApiError:
    return ApiError("NOT_FOUND", f"resume_token: {why}", "resume_token")


class Kept(msgspec.Struct, frozen=True):
    """One answer's samples; `remember` notes a finished one for the chat's next turn."""

    samples: Samples
    remember: Callable[[SampleStream], None]


class Resumables:
    # Mutable state: every stream by token, and since when those without a reader wait, longest first.

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: dict[str, Kept] = {}
        self._unread: OrderedDict[str, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"Resumables({len(self._kept)} streams, {len(self._unread)} unread)"

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, token: str) -> Kept | None:
        return self._kept.get(token)

    def keep(self, token: str, kept: Kept) -> None:
        """From now on `token` is known, and somebody reads."""
        self._kept[token] = kept

    def attached(self, token: str) -> None:
        self._unread.pop(token, None)

    def detached(self, token: str, now: float) -> list[Kept]:
        """Its reader is gone; returns what is given up to make room."""
        self._unread[token] = now
        crowded = list(self._unread)[: max(len(self._unread) - MAX_UNREAD, 0)]
        return [self._drop(token) for token in crowded]

    def forget(self, token: str) -> Kept | None:
        return self._drop(token) if token in self._kept else None

    def expired(self, now: float) -> list[Kept]:
        """Forget, and return, the streams whose clients did not come back in time."""
        late = []
        while self._unread:
            token, since_s = next(iter(self._unread.items()))
            if now - since_s < self._window_s:
                break
            late.append(self._drop(token))
        return late

    def _drop(self, token: str) -> Kept:
        self._unread.pop(token, None)
        return self._kept.pop(token)
