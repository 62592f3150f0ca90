"""Workers of which one part hangs when told to, while the others live: the engine in a step, or the transfer thread.

The test creates `FOLDER/hang`; the first process that comes by takes it away, writes its pid into `FOLDER/hung`, and
never comes back from that call.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import worker.opening
from decode_worker.role import open_decode_worker
from prefill_worker.role import open_prefill_worker
from tests.chaos.hosts import FOLDER
from worker.worker import Worker

NEVER_S = 1e6


def hang_if_told() -> None:
    folder = Path(os.environ[FOLDER])
    try:
        (folder / "hang").unlink()
    except FileNotFoundError:
        return
    (folder / "hung").write_text(str(os.getpid()))
    time.sleep(NEVER_S)


class _Hanging:
    """Any object; `method` may never return."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner = inner
        self._method = method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            hang_if_told()
        return getattr(self._inner, name)


def _replace(name: str, change: Callable[[Any], Any]) -> None:
    """What `worker.opening` opens by this name is changed, in a process of its own where nobody else reads the name."""
    opening: Any = worker.opening
    real = getattr(opening, name)
    setattr(opening, name, lambda *arguments: change(real(*arguments)))


def _hang_engine() -> None:
    def hanging(device: Any) -> Any:
        return dataclasses.replace(device, runner=_Hanging(device.runner, "launch"))

    _replace("open_device", hanging)


def engine_hangs_decode(*arguments: Any) -> Worker[Any]:
    _hang_engine()
    return open_decode_worker(*arguments)


def engine_hangs_prefill(*arguments: Any) -> Worker[Any]:
    _hang_engine()
    return open_prefill_worker(*arguments)


def transfer_hangs(*arguments: Any) -> Worker[Any]:
    def hanging(transports: dict[str, Any]) -> dict[str, Any]:
        return {name: _Hanging(one, "recv") for name, one in transports.items()}

    _replace("open_transports", hanging)
    return open_decode_worker(*arguments)
