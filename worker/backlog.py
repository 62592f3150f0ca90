"""What has come on the streams of a worker and is still to be heard: so many records a turn, and each stream in its
turn. Pure.

A frame may hold a hundred thousand records, and a peer may send frame after frame: the engine would hear nobody else,
run no step and be taken for hung. Where little comes, which is nearly always, nothing waits here, and the order of all
streams together is kept; the order of each stream always is.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

from engine.messages import Record
from worker.rpc import FrameIn, InboxStream, StreamEnded, StreamProven

RECORDS_PER_TURN = 1024
RECORDS_AT_ONCE = 128
"""What one stream may say before the next one is heard."""


class RecordsIn(msgspec.Struct, frozen=True):
    """Records of a frame, as many of them as are heard at once."""

    stream: InboxStream
    records: list[Record]


StreamItem = FrameIn | StreamProven | StreamEnded


class _Opened:
    """A frame that is being heard."""

    def __init__(self, frame: FrameIn) -> None:
        self.frame = frame
        self.records = frame.stream.decode(frame.data)
        self.at = 0


class Backlog:
    """Mutable state: what waits, by stream, the stream whose turn it is first. Owner: the engine thread."""

    def __init__(self) -> None:
        self._waiting: dict[InboxStream, deque[StreamItem]] = {}
        self._opened: dict[InboxStream, _Opened] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, item: StreamItem) -> None:
        self._waiting.setdefault(item.stream, deque()).append(item)

    def take(self, limit: int) -> Iterator[RecordsIn | StreamProven | StreamEnded]:
        """Yield what is to be heard next, up to `limit` records in all; anything else counts as one."""
        while self._waiting and limit > 0:
            stream, items = next(iter(self._waiting.items()))
            # Its next turn comes after all others'.
            del self._waiting[stream]
            item = items[0]
            if isinstance(item, FrameIn):
                opened = self._opened.pop(stream, None) or _Opened(item)
                some = opened.records[opened.at : opened.at + min(limit, RECORDS_AT_ONCE)]
                opened.at += len(some)
                limit -= max(1, len(some))
                if opened.at < len(opened.records):
                    self._opened[stream] = opened
                else:
                    items.popleft()
                    stream.heard(item)
                if items:
                    self._waiting[stream] = items
                yield RecordsIn(stream, some)
            else:
                limit -= 1
                items.popleft()
                if items:
                    self._waiting[stream] = items
                yield item
