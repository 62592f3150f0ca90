"""A worker in a process of its own, with a fake model whose keys and values are other ones under each adapter.

`python -m tests.integration.adapted_worker prefill p0` prints its address, and serves until its input ends. No kernels
apply an adapter yet, so that no worker of ours has any: this one has two, to move blocks under their digests.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

import worker.opening
from decode_worker.role import open_decode_worker
from engine.device import EngineDevice
from engine.kv.layout import KVLayout
from engine.messages import PeerAddress
from engine.step import Drawn, Row
from engine.types import BlockId, RequestRecord
from fakes.model import FakeRunner, fake_next
from prefill_worker.role import open_prefill_worker
from tests.integration.fake_device import VOCAB, fake_device
from tests.secrets_of_tests import SECRETS
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
BLOCKS = 400
ADAPTERS = ("5ad0" * 8, "5ad1" * 8)
"""As long as those of `engine.model.files.adapter`."""


def computed(tokens: Sequence[int], adapter: str) -> list[int]:
    """Return the tokens whose keys and values a prompt's are under an adapter."""
    shift = 1000 * (ADAPTERS.index(adapter) + 1) if adapter else 0
    return [token + shift for token in tokens]


def expected(record: RequestRecord) -> list[int]:
    """Return the answer, computed without any KV memory."""
    tokens = [*record.tokens]
    while len(tokens) < record.prompt_tokens + record.max_tokens:
        tokens.append(fake_next(computed(tokens, record.adapter), LAYOUT, VOCAB))
    return tokens[record.prompt_tokens :]


class AdaptedRunner(FakeRunner):
    """The fake model's runner, under whichever adapter a row has."""

    def _run(self, copies: Sequence[tuple[BlockId, BlockId]], rows: Sequence[Row]) -> Sequence[Drawn]:
        under = [replace(row, tokens=computed(row.tokens, row.record.adapter)) for row in rows]
        return super()._run(copies, under)


def device(*rest: object) -> EngineDevice:
    plain = fake_device(LAYOUT, BLOCKS)
    runner = AdaptedRunner(plain.kv, VOCAB, plain.matchers)  # type: ignore[arg-type]
    return dataclasses.replace(plain, runner=runner, adapters=frozenset(ADAPTERS))


def main(role: str, name: str, transport: str) -> None:
    opening = worker.opening
    opening.open_device = device  # type: ignore[assignment]
    transfer = TransferConfig(transport=transport)
    if role == "prefill":
        prefill = open_prefill_worker(name, PrefillConfig(transfer=transfer, chunk_tokens=16), "127.0.0.1", 0, SECRETS)
        prefill.start()
        address, stop = prefill.info.address, prefill.stop
    else:
        decode = open_decode_worker(name, DecodeConfig(transfer=transfer), "127.0.0.1", 0, SECRETS)
        decode.start()
        address, stop = decode.info.address, decode.stop
    print(address, flush=True)
    sys.stdin.read()
    stop()


class AdaptedWorker:
    """One such process. Raises AssertionError where it does not start."""

    def __init__(self, role: str, name: str, transport: str) -> None:
        command = [sys.executable, "-m", "tests.integration.adapted_worker", role, name, transport]
        environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        assert address, f"{name} did not start"
        self.peer = PeerAddress(name, address)

    def close(self) -> None:
        self._process.communicate(timeout=20)
        assert self._process.returncode == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
