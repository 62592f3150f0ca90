"""The clients of `benchmarks.front` that hold up a router where one can be held up: slow ones, and long prompts.

They come and go: what the others wait is compared between moments with them and moments without, in one run.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

CLIENTS = 8
LONG_PROMPT_TOKENS = 32_768
PROMPTS_PER_S = 4.0
LOOK_S = 0.01


def serve_disturber(pipe: Connection, what: str, address: str) -> None:
    """Disturb over HTTP while the pipe's last word was True: `slow` or `prompt`."""
    one = partial(_ask_much, address) if what == "prompt" else lambda _: _read_nothing(address)
    asyncio.run(_disturb(pipe, one))


async def _disturb(pipe: Connection, one: Callable[[int], Any]) -> None:
    tasks: list[asyncio.Task[None]] = []
    while True:
        while not pipe.poll():
            await asyncio.sleep(LOOK_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks = [asyncio.create_task(one(number)) for number in range(CLIENTS if pipe.recv() else 0)]


def _request(address: str, body: dict[str, Any]) -> bytes:
    data = msgspec.json.encode(body)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _read_nothing(address: str) -> None:
    """Open a stream and leave all of it in buffers that are as small as they can be."""
    host, _, port = address.rpartition(":")
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        link.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(link, (host, int(port)))
        await loop.sock_sendall(link, _request(address, {"prompt": [1, 2, 3], "stream": True}))
        await asyncio.Event().wait()


async def _ask_much(address: str, number: int) -> None:
    """Send prompts of text, one after the other, for one token each; the clients take turns."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    next_s = loop.time() + number / PROMPTS_PER_S
    text = " ".join(f"{at:04x}" for at in range(LONG_PROMPT_TOKENS))
    request = _request(address, {"prompt": text, "stream": True})
    while True:
        await asyncio.sleep(next_s - loop.time())
        next_s += CLIENTS / PROMPTS_PER_S
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            with suppress(ConnectionError):
                await reader.readuntil(b"data: ")
        finally:
            writer.close()
