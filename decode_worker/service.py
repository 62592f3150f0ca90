"""The decode worker's gRPC side: streams in, items for the engine's inbox out. No work per record."""

import itertools
from collections.abc import Callable

import msgspec

from worker import readers
from worker.rpc import RpcLoop, Send

ATTACH = "/headrace.v1.DecodeWorker/Attach"


class RouterUp(msgspec.Struct, frozen=True):
    link: int
    send: Send


class RouterFrame(msgspec.Struct, frozen=True):
    link: int
    data: bytes


class RouterGone(msgspec.Struct, frozen=True):
    link: int
    why: str


Item = RouterUp | RouterFrame | RouterGone | readers.FrameIn | readers.LinkLost


class _Session:
    def __init__(self, link: int, put: Callable[[Item], None]) -> None:
        self._link = link
        self._put = put

    def frame(self, data: bytes) -> None:
        self._put(RouterFrame(self._link, data))

    def closed(self, why: str) -> None:
        self._put(RouterGone(self._link, why))


def serve(rpc: RpcLoop, host: str, port: int, put: Callable[[Item], None]) -> int:
    """Serve `Attach` (routers) and readers (other decode workers); returns the port. Each router's stream gets a
    number of its own."""
    numbers = itertools.count(1)

    def attach(send: Send) -> _Session:
        link = next(numbers)
        put(RouterUp(link, send))
        return _Session(link, put)

    return rpc.start(host, port, {ATTACH: attach, **readers.attach(put)})
