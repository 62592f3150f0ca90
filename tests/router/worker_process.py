"""A `FakeWorkers` in a process of its own, to be stopped and killed.

`python -m tests.router.worker_process DECODE SLOW_S` prints its port, then serves until it is killed.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine.messages import PeerAddress
from tests.router.fake_cluster import FakeWorkers


class WorkerProcess:
    """One decode worker (and a prefill worker that nobody need dial) that can be frozen."""

    def __init__(self, decode: str, slow_s: float) -> None:
        command = [sys.executable, "-m", "tests.router.worker_process", decode, str(slow_s)]
        environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        self.peer = PeerAddress(decode, f"127.0.0.1:{int(self._process.stdout.readline())}")

    @property
    def state(self) -> str:
        """The kernel's letter: T is stopped, S sleeping, R running."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    def freeze(self) -> None:
        """Raises AssertionError if the process does not stop."""
        os.kill(self._process.pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + 1.0
        while self.state != "T":
            assert time.monotonic() < deadline_s, "the process did not stop"

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


async def _serve(decode: str, slow_s: float) -> None:
    workers = FakeWorkers(decode)
    workers.slow_s = slow_s
    await workers.start()
    print(workers.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2])))
