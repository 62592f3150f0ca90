"""NVIDIA Dynamo's selection service (`ai-dynamo-runtime`), in a process of the interpreter that has it.

It gets token ids, as its own frontends send them, and is told when a prompt has been computed. Without events of KV
caches it believes what it has routed, in a least-recently-used cache for each worker of that worker's own size: its
other way of forgetting goes by the wall's clock, which means nothing here.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.routers.policy import PeerError
from benchmarks.routing.workloads import BLOCK
from engine.types import RequestId

PACKAGE = "ai-dynamo-runtime"
# What runs in that process: a line of JSON in, a line out. It cannot import anything of ours.
SERVICE = """
import asyncio, json, os, sys
os.environ["DYN_ROUTER_USE_KV_EVENTS"] = "false"
os.environ["DYN_ROUTER_APPROXIMATE_CACHE_POLICY"] = "lru"
os.environ.setdefault("DYN_LOG", "error")
out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
os.dup2(2, 1)
from dynamo.llm import SelectionService
async def main():
    names, block, blocks = sys.argv[3:], int(sys.argv[1]), int(sys.argv[2])
    service = SelectionService(indexer_threads=1)
    for number, name in enumerate(names):
        await service.upsert_worker({"worker_id": number, "model_name": "m", "endpoint": "http://" + name,
            "block_size": block, "data_parallel_size": 1, "total_kv_blocks": blocks})
    assert service.ready()["schedulable_workers"] == len(names), service.ready()
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        if "tokens" in told:
            chosen = await service.select_and_reserve(
                {"model_name": "m", "selection_id": told["request"], "token_ids": told["tokens"]})
            print(chosen["worker_id"], file=out, flush=True)
        else:
            await service.prefill_complete(told["request"])
            await service.free_reservation(told["request"])
            print("ok", file=out, flush=True)
asyncio.run(main())
"""


class SelectionRouter:
    """The service before workers of these names, each of which holds `blocks` blocks."""

    def __init__(self, workers: Sequence[str], blocks: int, python: Path = Path(sys.executable)) -> None:
        """Raises PeerError if it does not start."""
        self._names = list(workers)
        self._log = TemporaryFile()  # noqa: SIM115 - as long as the process
        command = [str(python), "-c", SERVICE, str(BLOCK), str(blocks), *workers]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, text=True)
        try:
            self._read()
        except PeerError:
            self.close()
            raise

    def choose(self, request: RequestId, tokens: Sequence[int], tenant: bytes) -> str:
        """Return the worker that gets the prompt. Raises PeerError."""
        # Two tenants' prompts share nothing: each has tokens of its own.
        other = hash(tenant) & 0x7FFFFFFF if tenant else 0
        return self._names[int(self._ask({"request": request, "tokens": [token ^ other for token in tokens]}))]

    def computed(self, request: RequestId) -> None:
        """Tell it that the prompt has been computed, and that nothing is left of the request."""
        self._ask({"request": request})

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()

    def _ask(self, what: dict[str, object]) -> str:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"the service is gone: {error}") from error
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise PeerError(f"the service has ended: {self._log.read()[-600:].decode(errors='replace')}")
        return line.strip()
