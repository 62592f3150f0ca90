"""Workers of no engine behind an HTTP router: each says when a prompt has reached it, and answers when it is told to.

So a router's own count of what runs where is what the simulation says, although no simulated second passes here.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from threading import Event, Thread

from benchmarks.routers.policy import PeerError
from engine.types import RequestId

ANSWER_S = 20.0
"""How long a router may take to pass on a prompt, or an answer."""
MODEL = "m"


class _HeldServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of connections that a router has closed."""


class _HeldHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, reached: Callable[[str], Event], *arguments: object) -> None:
        self._reached = reached
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path.startswith("/v1/models"):
            self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif self.path in ("/health", "/health_generate"):
            self._send(200, {"status": "ok"})
        elif self.path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            self._send(200, {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True})
        else:
            self._send(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/tokenize":
            # Without it vllm-router knows no prompt again, and goes by load alone.
            text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            self._send(200, {"count": len(text), "max_model_len": 1 << 20, "tokens": [ord(char) for char in text]})
            return
        if self.path != "/v1/chat/completions":
            self._send(404, {})
            return
        self._reached(body["user"]).wait()
        message = {"role": "assistant", "content": "x"}
        choice = {"index": 0, "message": message, "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        made = {"id": body["user"], "object": "chat.completion", "created": 0, "model": MODEL}
        self._send(200, {**made, "choices": [choice], "usage": usage})

    def _send(self, status: int, body: object) -> None:
        packed = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(packed)))
        self.end_headers()
        self.wfile.write(packed)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: there are thousands of requests."""


class HeldWorkers:
    """One HTTP server for each name, on a port of its own."""

    # Mutable state: what has reached whom, what is held back, and who waits for an answer.

    def __init__(self, names: Sequence[str]) -> None:
        self._arrived: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._held: dict[str, Event] = {}
        self._clients: dict[str, Thread] = {}
        self._failed: dict[str, str] = {}
        self._servers = {
            name: _HeldServer(("127.0.0.1", 0), partial(_HeldHandler, partial(self._reached, name))) for name in names
        }
        for server in self._servers.values():
            Thread(target=server.serve_forever, daemon=True).start()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{server.server_port}" for server in self._servers.values()]

    def send(self, port: int, request: RequestId, prompt: str) -> str:
        """Send a prompt to the router at this port of this host; return the worker that it has reached. Raises
        PeerError where it reaches none."""
        self._held[request] = Event()
        client = self._clients[request] = Thread(target=self._ask, args=(port, request, prompt), daemon=True)
        client.start()
        while True:
            try:
                reached, name = self._arrived.get(timeout=ANSWER_S)
            except Empty:
                raise PeerError(f"{request} reaches no worker: {self._failed.get(request, 'no answer')}") from None
            if reached == request:
                return name

    def answer(self, request: RequestId) -> None:
        """Let the worker answer; return once the answer has come through. Raises PeerError if it was an error."""
        self._held.pop(request).set()
        client = self._clients.pop(request)
        client.join(ANSWER_S)
        if client.is_alive() or request in self._failed:
            raise PeerError(f"{request} is not answered: {self._failed.get(request, 'no answer')}")

    def close(self) -> None:
        for held in self._held.values():
            held.set()
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def _reached(self, name: str, request: str) -> Event:
        held = self._held[request]
        self._arrived.put((request, name))
        return held

    def _ask(self, port: int, request: str, prompt: str) -> None:
        message = {"role": "user", "content": prompt}
        body = json.dumps({"model": MODEL, "messages": [message], "max_tokens": 1, "user": request})
        connection = HTTPConnection("127.0.0.1", port)
        try:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            told = answer.read()
            if answer.status != 200:
                self._failed[request] = f"status {answer.status}: {told[:200]!r}"
        except (OSError, HTTPException) as error:
            self._failed[request] = str(error)
        finally:
            connection.close()
