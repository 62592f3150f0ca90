"""A sending worker in a process of its own: commands as JSON lines on stdin, answers on stdout. Run by the tests."""

import json
import select
import sys
from typing import Any

import numpy as np

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Handoff
from engine.types import BlockId, Incarnation, RequestId
from tests.transfer.wire import open_any, open_pool, put, whole
from transfer.transport import BlockSlice, Move


class Worker:
    """One life of the worker: a pool and its transport."""

    def __init__(
        self, kind: str, incarnation: int, layout: dict[str, Any], blocks: int, device: str
    ) -> None:
        self.kind = kind
        self.me = Incarnation(incarnation)
        self.pool = open_pool(KVLayout(**layout), blocks, device)
        self.transport = open_any(kind, self.pool, self.me)

    def connect(self, peer: int, details: dict[str, Any], spans: list[list[int]]) -> None:
        endpoint = Endpoint(transport=self.kind, details=details)
        sent, received = [BlockSlice(*span) for span in spans] or [whole(self.pool.layout)] * 2
        self.transport.connect(Incarnation(peer), endpoint, sent, received)

    def fill(self, seeds: list[tuple[BlockId, int]]) -> None:
        for block, seed in seeds:
            content = np.random.default_rng(seed).bytes(self.pool.block_bytes)
            put(self.pool, block, content)

    def send(self, peer: int, request: str, seq: int, sources: list[BlockId]) -> None:
        handoff = Handoff(RequestId(request), 1, 1, Incarnation(peer), self.me)
        self.transport.send(Incarnation(peer), Move(handoff, seq, tuple(sources)))

    def advance(self, blocks: list[BlockId]) -> None:
        self.pool.advance(blocks)

    def script(self, verb: str, action: int, rank: int, skip: int) -> None:
        """Make the fake libnccl fail here."""
        from tests.transfer.fake_device import Fault

        Fault(verb, action, rank=rank, skip=skip)

    def packing(self) -> str:
        """Return what nccl has packed ahead."""
        return repr(self.transport._dispatch.packing)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.transport.close()
        self.pool.close()


def main() -> None:
    worker: Worker | None = None
    while True:
        poller = select.poll()
        poller.register(0, select.POLLIN)
        if worker is not None:
            poller.register(worker.transport.fileno(), select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        if worker is not None and ready - {0}:
            worker.transport.poll(0.0)
        if 0 not in ready:
            continue
        line = sys.stdin.buffer.raw.readline()  # unbuffered, so that poll sees what is left
        if not line:
            return
        op, *args = json.loads(line)
        answer: object = None
        if op == "setup":
            *made, receiver = args
            worker = Worker(*made)
            answer = worker.transport.describe(receiver).details
        else:
            assert worker is not None
            answer = getattr(worker, op)(*args)
            if op == "close":
                worker = None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
