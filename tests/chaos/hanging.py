"""Workers of which one part hangs when told to, while the others live: the engine in a step, or the transfer thread.

The test creates `FOLDER/hang`; the first process that comes by takes it away, writes its pid into `FOLDER/hung`, and
never comes back from that call.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import decode_worker.worker
import prefill_worker.worker
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.chaos.hosts import FOLDER

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


def _hang_engine(module: Any) -> None:
    real = module.open_device

    def opened(*config: Any) -> Any:
        device = real(*config)
        return dataclasses.replace(device, runner=_Hanging(device.runner, "run"))

    module.open_device = opened


class EngineHangsDecode(DecodeWorker):
    def start(self, progress=None):  # type: ignore[no-untyped-def]
        _hang_engine(decode_worker.worker)
        return super().start(progress)


class EngineHangsPrefill(PrefillWorker):
    def start(self, progress=None):  # type: ignore[no-untyped-def]
        _hang_engine(prefill_worker.worker)
        return super().start(progress)


class TransferHangs(DecodeWorker):
    def start(self, progress=None):  # type: ignore[no-untyped-def]
        module: Any = decode_worker.worker
        real = module.open_transports

        def opened(*rest: Any) -> dict[str, Any]:
            return {name: _Hanging(one, "recv") for name, one in real(*rest).items()}

        module.open_transports = opened
        return super().start(progress)
