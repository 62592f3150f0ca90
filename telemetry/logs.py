"""Logging set-up of a process: plain lines for people or JSON lines for machines.

A log call adds the request it is about with `extra={"request": request_id}`, and figures that a machine
shall find with `extra={"facts": {...}}`; the worker's name is bound once, here. What peers and clients can write into a
line is kept in bounds (`telemetry.log_lines`).
"""

import json
import logging
import sys
import time
from typing import TextIO

from telemetry.log_lines import KindLimit, on_one_line, traceback_lines

LEVELS = ("debug", "info", "warning", "error")


class _PlainFormatter(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        request = getattr(record, "request", "")
        about = f"{self._worker} {request}" if request else self._worker
        line = on_one_line(f"{clock} {record.levelname.lower():7} [{about}] {record.getMessage()}")
        if record.exc_info:
            line += traceback_lines(self.formatException(record.exc_info))
        return line


class _JsonFormatter(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time_s": round(record.created, 6),
            "level": record.levelname.lower(),
            "worker": self._worker,
            "logger": record.name,
            "message": on_one_line(record.getMessage()),
        }
        request = getattr(record, "request", "")
        if request:
            entry["request"] = on_one_line(request)
        facts = getattr(record, "facts", None)
        if facts:
            entry["facts"] = facts
        if record.exc_info:
            entry["exception"] = traceback_lines(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False)


def configure(
    worker: str, level: str = "info", json_lines: bool = False, stream: TextIO | None = None
) -> None:
    """Send the process's log to `stream` (standard error when None), replacing earlier handlers.

    `worker` names the process in every line. Raises ValueError on an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown log level {level!r}: one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_JsonFormatter(worker) if json_lines else _PlainFormatter(worker))
    handler.addFilter(KindLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "grpc", "httpcore", "httpx", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
