"""Clients of `benchmarks.front`, which read streams over gRPC and SSE and note how old each token is.

A worker sends the time of its step as the token, and a client reads it from the text; it checks that none is missing.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from benchmarks.front_workers import CONTEXT_TOKENS, MODEL, VOCABULARY, ticks

CHARACTERS = 5
"""The length of a token's text."""
TEXT = re.compile(rb'"text":"([^"]*)"')
UNOPENED = 1024
"""Streams that a client process asks for at once where they do not all arrive together: a host that has 4,096
connections waiting to be accepted resets some of those beyond."""
TIMED, TOKENS, MESSAGES, OPEN = range(4)
"""The words that a client shares with its parent: in which of two lists it shall note ages, if in any, and counts."""


class ClientCounts:
    """What one client process has received; all but the ages and times is in `shared`, which its parent reads."""

    def __init__(self, shared: Any) -> None:
        self.shared = shared
        self.ages: tuple[list[int], list[int]] = ([], [])
        self.first_s: list[float] = []

    def opened(self, asked_s: float) -> None:
        self.shared[OPEN] += 1
        self.first_s.append(time.monotonic() - asked_s)

    def took(self, text: str) -> None:
        count, rest = divmod(len(text), CHARACTERS)
        assert not rest, f"text is missing: {text!r}"
        self.shared[TOKENS] += count
        self.shared[MESSAGES] += 1
        if window := self.shared[TIMED]:
            now = ticks()
            sent = [int(text[at + 1 : at + 5], 16) for at in range(0, len(text), CHARACTERS)]
            self.ages[window - 1].extend([(now - at) % VOCABULARY for at in sent])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def read_grpc(address: str, tally: ClientCounts, calls: int = 1) -> None:
    """So many calls on one connection. The few frames of HTTP/2 that they take are written out here: gRPC's own
    client costs more CPU a message than its server, and with it this would measure the clients."""
    from protos import headrace_pb2 as pb

    host, _, port = address.rpartition(":")
    asked_s = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port))
    named = {
        ":method": "POST", ":scheme": "http", ":path": "/headrace.v1.Headrace/Generate", ":authority": address,
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    head = b"".join(b"\0%c%b%c%b" % (len(k), k.encode(), len(v), v.encode()) for k, v in named.items())
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])).SerializeToString()
    window = (1 << 30).to_bytes(4, "big")
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"\0\4" + window) + _frame(8, 0, 0, window))
    for call in range(1, 2 * calls, 2):
        asked = b"\0" + len(message).to_bytes(4, "big") + message
        writer.write(_frame(1, 4, call, head) + _frame(0, 1, call, asked))
    data, bodies, opened = b"", dict.fromkeys(range(1, 2 * calls, 2), b""), set[int]()
    while came := await reader.read(65536):
        data += came
        at = 0
        while len(data) - at >= 9 and len(data) - at >= (end := 9 + int.from_bytes(data[at : at + 3], "big")):
            kind, flags, payload = data[at + 3], data[at + 4], data[at + 9 : at + end]
            call = int.from_bytes(data[at + 5 : at + 9], "big")
            at += end
            if kind == 0:
                body = bodies[call] + payload
                while len(body) >= 5 and len(body) >= (end := 5 + int.from_bytes(body[1:5], "big")):
                    text, body = pb.GenerateResponse.FromString(body[5:end]).delta.text, body[end:]
                    if text:
                        if call not in opened:
                            tally.opened(asked_s)
                            opened.add(call)
                        tally.took(text)
                bodies[call] = body
            elif kind in (3, 7) or (kind == 1 and flags & 1):
                raise RuntimeError(f"the call has ended, frame {kind}: {payload!r}")
            elif kind in (4, 6) and not flags & 1:
                writer.write(_frame(kind, 1, 0, payload if kind == 6 else b""))
        data = data[at:]


async def read_sse(address: str, tally: ClientCounts, calls: int = 1) -> None:
    assert calls == 1, "HTTP/1.1 has one answer at a time"
    host, _, port = address.rpartition(":")
    asked_s, is_first = time.monotonic(), True
    reader, writer = await asyncio.open_connection(host, int(port))
    body = msgspec.json.encode(
        {"model": MODEL, "prompt": [1, 2, 3], "stream": True, "max_tokens": CONTEXT_TOKENS // 8}
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(status.decode())
    left = b""
    while data := await reader.read(65536):
        *events, left = (left + data).split(b"\n\n")
        for event in events:
            if (found := TEXT.search(event)) is not None:
                if is_first:
                    tally.opened(asked_s)
                    is_first = False
                tally.took(found[1].decode())


READERS: dict[str, Callable[[str, ClientCounts, int], Any]] = {
    "grpc": read_grpc,
    "sse": read_sse,
    "smg": read_sse,
    "vllm": read_sse,
    "bare-grpc": read_grpc,
    "bare-sse": read_sse,
}


def serve_client(
    pipe: Connection, shared: Any, front: str, address: str, streams: int, pause_s: float, calls: int
) -> None:
    """Open `streams` streams, `calls` on each connection, `pause_s` apart (0: all at once); answer the closing pipe's
    one word with ages and first tokens."""

    async def main() -> None:
        tally = ClientCounts(shared)
        tasks: list[asyncio.Task[None]] = []
        for at in range(0, streams, calls):
            while pause_s and at - shared[OPEN] >= UNOPENED and not any(task.done() for task in tasks):
                await asyncio.sleep(0.02)
            tasks.append(asyncio.create_task(READERS[front](address, tally, min(calls, streams - at))))
            await asyncio.sleep(pause_s)
        while not pipe.poll():
            await asyncio.sleep(0.02)
            for task in tasks:
                if task.done():
                    task.result()
                    raise RuntimeError("a stream has ended")
        pipe.send((tally.ages, tally.first_s))

    asyncio.run(_ending(main(), pipe))


async def _ending(work: Any, pipe: Connection) -> None:
    try:
        await work
    except Exception as error:
        pipe.send(error)
        raise
    os._exit(0)
