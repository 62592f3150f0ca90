"""`smg` and `vllm-router` as their makers ship them, each as a process before workers that the simulation answers for.

Over HTTP both keep a tree of prompts, smg of their characters and vllm-router of what a worker's `/tokenize` makes of
them, here a token a character; they hear of no evictions. A block of a prompt is BLOCK_CHARS characters, equal for
equal blocks. A tree may be as large as what it stands for (smg's: all prefill workers' caches together, vllm-router's:
each one's), and is cut every second of the wall: with their default sizes nothing would ever be forgotten in a run of
seconds.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.peers import free_port, is_ready
from benchmarks.routers.held_workers import HeldWorkers
from benchmarks.routers.policy import PeerError
from benchmarks.routing.workloads import BLOCK
from engine.types import RequestId

BLOCK_CHARS = 16
START_S = 60.0

MODULES = {"smg": "smg.launch_router", "vllm-router": "vllm_router.launch_router"}
ONE_TREE = ("smg",)
"""Those whose option for the size of a tree is of all workers' together."""


def version(package: str, python: Path) -> str:
    """Return the version of a package for an interpreter; empty where it is not installed there."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def text(tokens: Sequence[int], tenant: bytes) -> str:
    """Return a prompt whose common beginning with another one is as long as that of the tokens, in blocks' shares."""
    # The digits in which blocks differ come first, so that part of a block differs too.
    blocks = [f" {tokens[at] // BLOCK:0{BLOCK_CHARS - 1}x}"[::-1] for at in range(0, len(tokens), BLOCK)]
    whole, rest = divmod(len(tokens), BLOCK)
    if rest:
        blocks[whole] = blocks[whole][: -(-rest * BLOCK_CHARS // BLOCK)]
    return tenant.decode() + "".join(blocks)


class HttpRouter:
    """A router's process, `cache_aware`, before workers of these names."""

    def __init__(self, name: str, workers: Sequence[str], blocks: int, python: Path = Path(sys.executable)) -> None:
        """`blocks`: of each worker. Raises PeerError if it does not start."""
        trees_of = len(workers) if name in ONE_TREE else 1
        self._workers = HeldWorkers(workers)
        self._port, metrics = free_port(), free_port()
        self._log = TemporaryFile()  # noqa: SIM115 - as long as the process
        options = {
            "--host": "127.0.0.1",
            "--port": self._port,
            "--prometheus-port": metrics,
            "--policy": "cache_aware",
            "--max-tree-size": blocks * trees_of * BLOCK_CHARS,
            "--eviction-interval-secs": 1,
            "--log-level": "error",
            "--request-timeout-secs": 3600,
            "--max-concurrent-requests": 10_000,
        }
        command = [str(python), "-m", MODULES[name], "--worker-urls", *self._workers.urls]
        command += [str(part) for option in options.items() for part in option] + ["--disable-retries"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self._wait(len(workers))
        except PeerError:
            self.close()
            raise

    def choose(self, request: RequestId, tokens: Sequence[int], tenant: bytes) -> str:
        """Return the worker that gets the prompt. Raises PeerError."""
        return self._workers.send(self._port, request, text(tokens, tenant))

    def computed(self, request: RequestId) -> None:
        """Answer for the worker, so that the router counts the request no more."""
        self._workers.answer(request)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._workers.close()
        self._log.close()

    def _wait(self, workers: int) -> None:
        """Wait until every worker has been given a prompt: then all are known."""
        until_s, reached, number = time.monotonic() + START_S, set[str](), 0
        while len(reached) < workers:
            if self._process.poll() is not None or time.monotonic() > until_s:
                self._log.seek(0)
                raise PeerError(f"the router does not start: {self._log.read()[-600:].decode(errors='replace')}")
            if not is_ready(self._port, "/readiness"):
                time.sleep(0.2)
                continue
            number += 1
            request = RequestId(f"warm-{number}")
            # Prompts that share nothing go where the fewest were before; held, so that each goes elsewhere.
            reached.add(self._workers.send(self._port, request, f"{number:04d}" * 40))
        for done in range(1, number + 1):
            self._workers.answer(RequestId(f"warm-{done}"))
