"""transformers' `generate` behind `/v1/completions`, in static batches: what waits is computed together, padded on the
left, and who comes meanwhile waits for the end of the batch. 32-bit, prompts as token ids, one temperature for a batch.

VENV/bin/python -m benchmarks.transformers_server PORT THREADS SLOTS

Needs the `dev` extra; the product itself never imports transformers.
"""

import json
import queue
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from benchmarks.checkpoint import read

QUIET_S = 0.01
"""A batch begins when nobody has come for so long."""


@dataclass
class _Asked:
    """One request; `told` gets each token, then None."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    told: "queue.SimpleQueue[int | None]" = field(default_factory=queue.SimpleQueue)


class BatchStreamer:
    """What `generate` gives the tokens of each step to; the first thing it gives are the prompts."""

    def __init__(self, batch: list[_Asked]) -> None:
        self._batch = batch
        self._step = 0

    def put(self, value: Tensor) -> None:
        """`value` has a token of each row, `[rows]`."""
        if self._step:
            for asked, token in zip(self._batch, value.tolist(), strict=True):
                if self._step <= asked.max_tokens:
                    asked.told.put(token)
                if self._step == asked.max_tokens:
                    asked.told.put(None)
        self._step += 1

    def end(self) -> None:
        pass


def take(waiting: "queue.Queue[_Asked]", slots: int) -> list[_Asked]:
    """Wait for a request, and return it with those that come right behind it."""
    batch = [waiting.get()]
    while len(batch) < slots:
        try:
            batch.append(waiting.get(timeout=QUIET_S))
        except queue.Empty:
            break
    return batch


def padded(batch: list[_Asked]) -> tuple[Tensor, Tensor]:
    """Return ids and mask, `[rows, longest prompt]`."""
    longest = max(len(asked.prompt) for asked in batch)
    gaps = [longest - len(asked.prompt) for asked in batch]
    ids = torch.tensor([[0] * gap + asked.prompt for gap, asked in zip(gaps, batch, strict=True)])
    mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
    return ids, mask


def drawing(temperature: float) -> dict[str, Any]:
    """Return what `generate` is to be told of a temperature: the likeliest token, or any of all."""
    if temperature <= 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def handler(waiting: "queue.Queue[_Asked]") -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked = _Asked(body["prompt"], body["max_tokens"], body["temperature"])
            waiting.put(asked)
            is_stream = body.get("stream", False)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
            self.end_headers()
            made = []
            while (token := asked.told.get()) is not None:
                made.append(token)
                if is_stream:
                    self._event({"choices": [{"text": "", "token_ids": [token]}]})
            usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(made)}
            if is_stream:
                self._event({"choices": [], "usage": usage})
                self.wfile.write(b"data: [DONE]\n\n")
            else:
                answer = {"choices": [{"text": "", "token_ids": made}], "usage": usage}
                self.wfile.write(json.dumps(answer).encode())

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: %b\n\n" % json.dumps(event).encode())

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def main(port: int, threads: int, slots: int) -> None:
    torch.set_num_threads(threads)
    model = read()
    waiting: queue.Queue[_Asked] = queue.Queue()
    server = ThreadingHTTPServer(("127.0.0.1", port), handler(waiting))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with torch.inference_mode():
        while True:
            batch = take(waiting, slots)
            ids, mask = padded(batch)
            most = max(asked.max_tokens for asked in batch)
            streamer = BatchStreamer(batch)
            limits = {"pad_token_id": 0, "eos_token_id": None, **drawing(batch[0].temperature)}
            model.generate(ids, attention_mask=mask, max_new_tokens=most, streamer=streamer, **limits)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
