"""The prefill worker's gRPC side: streams in, items for the engine's inbox out. No work per record."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.types import Incarnation
from transfer.rpc import Accept, RpcLoop, Send

SERVICE = "headrace.v1.PrefillWorker"


class Link:
    """One stream, as the engine thread knows it. `peer` and `stream` are known once its hello has come. Identity is by
    object."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.peer: Incarnation | None = None
        self.stream = 0


@dataclass(frozen=True, slots=True)
class FrameIn:
    """Bytes from a decode worker."""

    link: Link
    data: bytes


@dataclass(frozen=True, slots=True)
class LinkLost:
    link: Link
    why: str


@dataclass(frozen=True, slots=True)
class Watching:
    """Somebody wants this worker's reports on `link`."""

    link: Link


Item = FrameIn | LinkLost | Watching


class _Session:
    def __init__(self, link: Link, put: Callable[[Item], None]) -> None:
        self._link = link
        self._put = put

    def frame(self, data: bytes) -> None:
        self._put(FrameIn(self._link, data))

    def closed(self, why: str) -> None:
        self._put(LinkLost(self._link, why))


def serve(rpc: RpcLoop, host: str, port: int, put: Callable[[Item], None]) -> int:
    """Serve `Attach` (decode workers) and `Watch` (routers); returns the port."""

    def attach(send: Send) -> _Session:
        return _Session(Link(send), put)

    def watch(send: Send) -> _Session:
        link = Link(send)
        put(Watching(link))
        return _Session(link, put)

    streams: dict[str, Accept] = {"Attach": attach}
    return rpc.start(host, port, SERVICE, streams, watches={"Watch": watch})
