"""The streams on which routers attach: to each the worker's reports, from a decode worker also the records of requests.

A stream begins with the worker's `WorkerInfo` and its load. Each has a number by which a scheduler knows it.
"""

import itertools
from collections.abc import Callable

from engine.messages import Record, encode
from worker.rpc import Accept, InboxStream, Send

METHODS = {
    "prefill": "/headrace.v1.PrefillWorker/Attach",
    "decode": "/headrace.v1.DecodeWorker/Attach",
}
"""By role, so that a router which dials the address of an earlier worker finds nobody."""


class RouterStream(InboxStream):
    """One stream. It is itself the item that says that it has opened."""

    def __init__(self, link: int, send: Send, put: Callable[[object], None]) -> None:
        super().__init__(send, put)
        self.link = link


def accept_routers(put: Callable[[object], None]) -> Accept:
    numbers = itertools.count(1)

    def accept(send: Send) -> RouterStream:
        stream = RouterStream(next(numbers), send, put)
        put(stream)
        return stream

    return accept


class RouterStreams:
    """All streams of routers. Owner: the engine thread."""

    def __init__(self) -> None:
        self._streams: dict[int, RouterStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def joined(self, stream: RouterStream) -> None:
        self._streams[stream.link] = stream

    def left(self, stream: RouterStream) -> None:
        del self._streams[stream.link]

    def send(self, link: int, records: list[Record]) -> None:
        """To a router that is gone nothing is sent: its loss is known to the scheduler."""
        if link in self._streams:
            self._streams[link].send(encode(records))

    def send_all(self, data: bytes) -> None:
        for stream in self._streams.values():
            stream.send(data)

    def close(self) -> None:
        """End every stream, behind what was said on it."""
        for stream in self._streams.values():
            stream.send(None)
