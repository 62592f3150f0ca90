"""Looks at a worker from outside, through the same stream that a router reads, dialled again when it breaks."""

import contextlib
import threading
import time

import grpc

from engine.handshake import HandshakeError
from engine.messages import Load, WorkerInfo, decode_worker_frame
from tests.integration.proven import ProvenStream
from worker.streams import ATTACH

REDIAL_S = 0.1


class Probe:
    """Follows one worker's reports. `role` is prefill or decode."""

    def __init__(self, role: str, address: str, secrets: tuple[bytes, ...]) -> None:
        self.info: WorkerInfo | None = None
        self.load: Load | None = None
        self._channel = grpc.insecure_channel(address)
        self._role = role
        self._secrets = secrets
        self._silence = threading.Event()
        self._call: ProvenStream | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Keep the latest report. A worker that was stopped may end the stream when it goes on: what it said before is
        old by then."""
        while not self._silence.is_set():
            # ValueError: the channel is closed.
            with contextlib.suppress(grpc.RpcError, HandshakeError, StopIteration, ValueError):
                self._call = ProvenStream(self._channel, ATTACH[self._role], self._secrets)
                for frame in self._call:
                    self._take(frame)
            self.load = None
            self._silence.wait(REDIAL_S)

    def _take(self, frame: bytes) -> None:
        for record in decode_worker_frame(frame):
            if isinstance(record, WorkerInfo):
                self.info = record
            elif isinstance(record, Load):
                self.load = record

    def close(self) -> None:
        self._silence.set()
        if self._call is not None:
            self._call.close()
        self._channel.close()
        self._thread.join(5)

    def wait_quiet(self, timeout_s: float) -> Load:
        """The first report in which no request holds a block; fails after `timeout_s`, or if blocks are missing."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            load = self.load
            if load is not None and is_quiet(load):
                assert self.info is not None
                assert load.free_blocks + load.cached_blocks == self.info.blocks
                return load
            time.sleep(0.01)
        raise AssertionError(f"blocks are still held after {timeout_s} s: {self.load}")

    def wait_busy(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self.load is not None and not is_quiet(self.load):
                return
            time.sleep(0.005)
        raise AssertionError(f"no block was ever held: {self.load}")


def is_quiet(load: Load) -> bool:
    return not (
        load.active_blocks
        or load.reserved_blocks
        or load.quarantined_blocks
        or load.waiting_requests
        or load.running_requests
    )
