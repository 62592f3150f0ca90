"""Peers of the data path: workers that send text, and the service that chooses workers in a process of its own."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import vllm_front
from benchmarks.front_peers import TextWorker
from benchmarks.front_router import HexText
from benchmarks.routers.policy import PeerError, knows_repeats
from benchmarks.routers.selection_service import SelectionRouter
from engine.types import RequestId

# The package's place in a process: it keeps each prompt's first token where the first of them went.
STAND_IN = """
class SelectionService:
    def __init__(self, indexer_threads):
        self.workers, self.homes, self.open = [], {}, set()
    async def upsert_worker(self, worker):
        assert worker["total_kv_blocks"] == 7
        self.workers.append(worker["worker_id"])
    def ready(self):
        return {"schedulable_workers": len(self.workers)}
    async def select_and_reserve(self, asked):
        self.open.add(asked["selection_id"])
        first = asked["token_ids"][0]
        return {"worker_id": self.homes.setdefault(first, len(self.homes) % len(self.workers))}
    async def prefill_complete(self, name):
        assert name in self.open
    async def free_reservation(self, name):
        self.open.remove(name)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dynamo"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "llm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("stand_in")
def test_a_service_in_another_process_is_asked_and_told() -> None:
    """Guards the lines between the two processes, and tenants: equal tokens of another tenant are others there."""
    router = SelectionRouter(["a", "b"], 7)

    def choose(name: str, tokens: Sequence[int], tenant: bytes = b"") -> str:
        return router.choose(RequestId(name), tokens, tenant)

    try:
        assert [choose("r1", [1]), choose("r2", [2]), choose("r3", [1]), choose("r4", [1], b"t")] == [
            "a",
            "b",
            "a",
            "a",
        ]
        assert choose("r5", [2], b"t") == "b"
        for name in ("r1", "r2", "r3", "r4", "r5"):
            router.computed(RequestId(name))
        assert knows_repeats(router)
        with pytest.raises(PeerError, match="has ended"):
            router.computed(RequestId("r1"))
    finally:
        router.close()


def test_a_service_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PeerError, match="No module named 'dynamo'"):
        SelectionRouter(["a"], 7, Path(sys.executable))


def test_text_workers_answer_what_a_router_asks_and_stream_to_all() -> None:
    """Guards what smg is measured before: an event a step on every open stream, none on others."""

    async def body() -> None:
        worker = TextWorker()
        await worker.start()
        asked = [await asyncio.open_connection("127.0.0.1", worker.port) for _ in range(3)]
        asked[0][1].write(b"GET /v1/models HTTP/1.1\r\n\r\n")
        assert b"200 OK" in await asked[0][0].readuntil(b'"model"}]}')
        for reader, writer in asked[1:]:
            writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
            await reader.readuntil(b"\r\n\r\n")
        worker.step(0xABC)
        worker.step(0xABD)
        for reader, _ in asked[1:]:
            assert b'"text":" 0abc"' in await reader.readuntil(b"\n\n\r\n")
            assert b'"text":" 0abd"' in await reader.readuntil(b"\n\n\r\n")
        asked[2][1].close()
        await asyncio.sleep(0.05)
        assert len(worker._streams) == 1
        for _, writer in asked:
            writer.close()
            await writer.wait_closed()
        await worker.close()
        await asyncio.sleep(0.05)

    asyncio.run(body())


def test_a_model_for_vllm_reads_as_the_clients_expect(tmp_path: Path) -> None:
    """Guards the comparison: clients find missing text by the very characters of the scripted workers' tokens."""
    vllm_front.write_model(tmp_path, 1 << 16)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = HexText().detokenizer()
    assert tokenizer.decode([0xAB, 0xFFFF]) == text.push([0xAB, 0xFFFF]) == " 00ab ffff"
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == 1 << 16 < config["vocab_size"]
    compile(vllm_front.SERVER, "server", "exec")
