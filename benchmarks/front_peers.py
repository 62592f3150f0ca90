"""`smg` in the place of the router of `benchmarks.front`, before the same scripted workers, which speak HTTP to it.

What it does for a token is less than what a router of token ids does: workers of its HTTP mode send text, an event a
token and stream, and it passes events on. It chooses workers in turn, as there is nothing to know about these.
"""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.peers import free_port, is_ready

START_S = 240.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ABOUT = {
    b"/v1/models": b'{"object":"list","data":[{"id":"hex","object":"model"}]}',
    b"/health": b'{"status":"ok"}',
    b"/server_info": b'{"model_path":"hex","served_model_name":"hex","is_generation":true}',
    b"/model_info": b'{"model_path":"hex","served_model_name":"hex","is_generation":true}',
}


class TextWorker:
    """One worker: every prompt opens a stream, and each step sends the time as text on all of them. Mutable state: the
    streams."""

    def __init__(self) -> None:
        self.port = 0
        self._streams: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                if method == b"POST" and path.startswith(b"/v1/completions"):
                    # The prompt does not matter, and nothing else comes on this connection while it is open.
                    writer.write(HEAD)
                    self._streams.add(writer)
                    while await reader.read(65536):
                        pass
                    raise ConnectionError("the router has closed it")
                body = next((told for known, told in ABOUT.items() if path.startswith(known)), b"")
                status = b"200 OK" if body else b"404 Not Found"
                kind = b"content-type: application/json\r\n"
                writer.write(b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._streams.discard(writer)
            writer.close()

    def step(self, tick: int) -> None:
        event = (
            b'data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"hex","choices":[{"index":0,'
            b'"text":" %04x","logprobs":null,"finish_reason":null}]}\n\n' % tick
        )
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        for writer in self._streams:
            if not writer.transport.is_closing():
                writer.write(chunk)


async def due_steps(pipe: Connection, count: int) -> AsyncIterator[int]:
    """Yield, when it is due, which of `count` workers steps, each at the rate that the pipe last named."""
    rate, begin_s = 20.0, time.monotonic()
    due = [begin_s + at / count / rate for at in range(count)]
    while True:
        if pipe.poll():
            rate, now = pipe.recv(), time.monotonic()
            due = [now + at / count / rate for at in range(count)]
        at = min(range(count), key=due.__getitem__)
        await asyncio.sleep(max(0.0, min(due[at] - time.monotonic(), 0.05)))
        if time.monotonic() >= due[at]:
            yield at
            # As in `benchmarks.front`: a step is never made up for.
            due[at] = max(due[at] + 1 / rate, time.monotonic())


async def _serve(pipe: Connection, count: int, tick_s: float, period: int) -> None:
    workers = [TextWorker() for _ in range(count)]
    for worker in workers:
        await worker.start()
    pipe.send([f"http://127.0.0.1:{worker.port}" for worker in workers])
    async for at in due_steps(pipe, count):
        workers[at].step(int(time.monotonic() / tick_s) % period)


def serve_text_workers(pipe: Connection, count: int, tick_s: float, period: int) -> None:
    """Step `count` workers at the rate that the pipe last named; its first word is their addresses. A token is the time
    in units of `tick_s`, which comes round after `period` of them."""
    asyncio.run(_serve(pipe, count, tick_s, period))


class FrontProcess:
    """A front of others in a process of its own, which is ended as one of `multiprocessing` is."""

    def __init__(self, command: Callable[[int], list[str]], ready: str) -> None:
        """`command` starts one that listens at a port, and answers 200 at `ready` when it can serve. Raises
        RuntimeError if it does not start."""
        port = free_port()
        self._log = TemporaryFile()  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            command(port), stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT
        )
        self.pid = self.process.pid
        self.address = f"127.0.0.1:{port}"
        until_s = time.monotonic() + START_S
        while not is_ready(port, ready):
            if self.process.poll() is not None or time.monotonic() > until_s:
                self._log.seek(0)
                told = self._log.read()[-600:].decode(errors="replace")
                self.kill()
                self.join()
                raise RuntimeError(f"it does not start: {told}")
            time.sleep(0.2)

    def kill(self) -> None:
        self.process.kill()

    def join(self) -> None:
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._log.close()


class SmgFront(FrontProcess):
    """A process of `smg` before HTTP workers."""

    def __init__(self, python: Path, workers: list[str]) -> None:
        """Raises RuntimeError if it does not start."""
        options = {
            "--host": "127.0.0.1",
            "--prometheus-port": free_port(),
            "--policy": "round_robin",
            "--log-level": "error",
            "--request-timeout-secs": 3600,
            "--max-concurrent-requests": 100_000,
        }
        command = [str(python), "-m", "smg.launch_router", "--worker-urls", *workers, "--disable-retries"]
        command += [str(part) for option in options.items() for part in option]
        super().__init__(lambda port: [*command, "--port", str(port)], "/readiness")
