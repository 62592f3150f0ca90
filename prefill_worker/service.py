"""The prefill worker's gRPC side: streams in, items for the engine's inbox out. No work per record."""

from collections.abc import Callable
from dataclasses import dataclass

from worker import readers
from worker.rpc import RpcLoop, Send

WATCH = "/headrace.v1.PrefillWorker/Watch"


@dataclass(frozen=True, slots=True, eq=False)
class Watcher:
    """Somebody who wants this worker's reports. Identity is by object."""

    send: Send


@dataclass(frozen=True, slots=True)
class Watching:
    watcher: Watcher


@dataclass(frozen=True, slots=True)
class WatcherLeft:
    watcher: Watcher


Item = readers.FrameIn | readers.LinkLost | Watching | WatcherLeft


class _Session:
    def __init__(self, watcher: Watcher, put: Callable[[Item], None]) -> None:
        self._watcher = watcher
        self._put = put

    def frame(self, data: bytes) -> None:
        """A watcher says nothing."""

    def closed(self, why: str) -> None:
        self._put(WatcherLeft(self._watcher))


def serve(rpc: RpcLoop, host: str, port: int, put: Callable[[Item], None]) -> int:
    """Serve readers (decode workers) and `Watch` (routers); returns the port."""

    def watch(send: Send) -> _Session:
        watcher = Watcher(send)
        put(Watching(watcher))
        return _Session(watcher, put)

    return rpc.start(host, port, readers.attach(put), watches={WATCH: watch})
