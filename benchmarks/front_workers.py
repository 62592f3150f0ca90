"""Workers without a model for `benchmarks.front`: real streams and handshakes, and a token a step for each request.

Any number of routers may attach to one: each hears of its own requests, in a frame of its own.
"""

import os
import queue
import time
from multiprocessing.connection import Connection
from typing import Any

from engine.handshake import Keyring, Party
from engine.messages import (
    PROTOCOL,
    Accepted,
    Cancel,
    Ended,
    Finish,
    Load,
    PeerAddress,
    Place,
    Record,
    RequestStats,
    Tokens,
    WorkerInfo,
    decode_router_frame,
    frames,
)
from engine.types import FinishReason, Incarnation
from router.dispatch import ATTACH
from worker.rpc import RpcLoop, Send, ServedStream

SECRETS = Keyring((b"the front benchmark keeps no secrets",))
MODEL = "hex"
VOCABULARY = 1 << 16
TICK_S = 1e-4
"""The unit of a token's time; it comes round after 6.5 s."""
BLOCKS = 1 << 22
CONTEXT_TOKENS = 1 << 22
REPORT_S = 0.05
"""As in `worker/worker.py`, whose imports a router's process has no use for."""
SILENT_S = 1.0
"""Between two steps, a worker that is asked nothing reports as often."""


def ticks() -> int:
    return int(time.monotonic() / TICK_S) % VOCABULARY


class ScriptedLink:
    """One router's stream. The rpc loop's thread puts what the router says into `_said`; the one thread that calls
    `step` does all else. Mutable state: the next index and the placement of every request, and when it reports."""

    def __init__(self, send: Send) -> None:
        self._said: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._send: Send | None = send
        self._next: dict[Any, tuple[int, int]] = {}
        self._steps = 0
        self._report_s = 0.0

    @property
    def unread_bytes(self) -> int:
        return 0

    def frame(self, data: bytes) -> None:
        for record in decode_router_frame(data):
            self._said.put(record)

    def closed(self, why: str) -> None:
        self._send = None

    def answer(self) -> None:
        """Answer what was said, as a worker does that has no step under way; say something now and then."""
        records = self._answers()
        if records or time.monotonic() >= self._report_s + SILENT_S:
            self._tell(records)

    def step(self, token: int) -> None:
        """Answer what was said, and send the next token of every request, in one frame."""
        records = self._answers()
        for request, (placement, index) in self._next.items():
            records.append(Tokens(request, placement, index, [token]))
            self._next[request] = (placement, index + 1)
        self._steps += 1
        self._tell(records)

    def _answers(self) -> list[Record]:
        records: list[Record] = []
        while not self._said.empty():
            record = self._said.get_nowait()
            if isinstance(record, Place):
                self._next[record.record.request] = (record.placement, 0)
                records.append(Accepted(record.record.request, record.placement, 0))
            elif isinstance(record, Cancel | Finish) and record.request in self._next:
                del self._next[record.request]
                why = record.reason if isinstance(record, Cancel) else FinishReason.STOP
                end = Ended(request=record.request, placement=record.placement, reason=why, stats=RequestStats())
                records.append(end)
        return records

    def _tell(self, records: list[Record]) -> None:
        """Send records, and the load where a report is due."""
        if time.monotonic() >= self._report_s:
            self._report_s = time.monotonic() + REPORT_S
            records.append(
                Load(
                    step=self._steps,
                    free_blocks=BLOCKS,
                    cached_blocks=0,
                    active_blocks=0,
                    reserved_blocks=0,
                    quarantined_blocks=0,
                    running_requests=len(self._next),
                    s_per_token=1e-4,
                )
            )
        if self._send is not None:
            for data in frames(records):
                self._send(data)


class ScriptedWorker:
    """One worker, and a link for every router that has attached."""

    def __init__(self, name: str, role: Any, number: int) -> None:
        self._me = Party(role, name, Incarnation(number))
        self._rpc = RpcLoop(name, self._me, SECRETS)
        self._links: list[ScriptedLink] = []
        served = ServedStream(frozenset({"router"}), self._accept)
        self.address = PeerAddress(name, f"127.0.0.1:{self._rpc.start('127.0.0.1', 0, {ATTACH[role]: served})}")

    def _accept(self, send: Send, router: Party) -> ScriptedLink:
        info = WorkerInfo(
            name=self._me.name, role=self._me.role, incarnation=self._me.incarnation, address=self.address.address,
            model=MODEL, fingerprint="f", block_size=16, blocks=BLOCKS, context_tokens=CONTEXT_TOKENS,
            pid=os.getpid(), host="here", growth_tokens=16, protocol=PROTOCOL,
        )  # fmt: skip
        for data in frames([info]):
            send(data)
        link = ScriptedLink(send)
        self._links.append(link)
        return link

    def step(self) -> None:
        token = ticks()
        for link in tuple(self._links):
            link.step(token)

    def answer(self) -> None:
        for link in tuple(self._links):
            link.answer()


def serve_workers(pipe: Connection, count: int) -> None:
    """Step `count` decode workers at the rate that the pipe last named, and a prefill worker four times a second. All
    answer within REPORT_S, however rare steps are: else a request waits for one before it has a worker."""
    decode = [ScriptedWorker(f"decode-{i}", "decode", 100 + i) for i in range(count)]
    prefill = ScriptedWorker("prefill-0", "prefill", 99)
    pipe.send({"prefill": [prefill.address], "decode": [worker.address for worker in decode]})
    rate = 20.0
    begin_s = time.monotonic()
    due = [(begin_s + i / count / rate, worker) for i, worker in enumerate(decode)]
    beat_s = answer_s = begin_s
    while True:
        due.sort(key=lambda one: one[0])
        at_s, worker = due[0]
        if pipe.poll(max(0.0, min(at_s, answer_s) - time.monotonic())):
            rate = pipe.recv()
            now = time.monotonic()
            due = [(now + i / count / rate, worker) for i, (_, worker) in enumerate(due)]
            continue
        if (now := time.monotonic()) >= answer_s:
            answer_s = now + REPORT_S
            for one in decode:
                one.answer()
        if now < at_s:
            continue
        worker.step()
        # A step is never made up for: a worker that is late is later from then on.
        due[0] = (max(at_s + 1 / rate, time.monotonic()), worker)
        if time.monotonic() > beat_s:
            beat_s += 0.25
            prefill.step()
