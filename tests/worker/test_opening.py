"""What a worker is made of, and what it says of itself. That all of it is closed, and what a whole worker does with it,
is tried in test_worker.py; the tiers beside it in tests/integration/test_tiers_fake.py and test_tiers_processes.py."""

import os
import socket
from contextlib import ExitStack

import msgspec
import pytest

import worker.opening
from engine.config import TierConfig
from engine.device import EngineDevice
from engine.messages import Endpoint
from engine.types import Incarnation
from tests.integration.fake_device import fake_device
from tests.secrets_of_tests import SECRETS
from tests.worker.test_worker import LAYOUT, is_closed, ours
from transfer.config import TransferConfig
from transfer.liveness import host_id
from transfer.mover import Mover
from worker.config import DecodeConfig
from worker.opening import Parts, open_parts
from worker.rpc import RpcLoop

BLOCKS = 8


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> list[EngineDevice]:
    opened: list[EngineDevice] = []

    def open_device(*config: object) -> EngineDevice:
        opened.append(fake_device(LAYOUT, BLOCKS))
        return opened[-1]

    monkeypatch.setattr(worker.opening, "open_device", open_device)
    return opened


def open_one(closing: ExitStack, host: str = "127.0.0.1", **config: object) -> Parts:
    return open_parts("decode", "w", DecodeConfig(**config), host, 0, SECRETS, closing)  # type: ignore[arg-type]


def test_a_worker_says_what_it_has_opened() -> None:
    """Guards against peers that are told another pool, or another address, than there is."""
    with ExitStack() as closing:
        parts = open_one(closing)
        info = parts.info
        assert (info.name, info.role, info.pid, info.host) == ("w", "decode", os.getpid(), host_id())
        assert (info.blocks, info.block_size, info.fingerprint) == (BLOCKS, LAYOUT.block_size, "fake")
        assert info.address.startswith("127.0.0.1:") and not info.address.endswith(":0")
        assert info.metrics_address.startswith("127.0.0.1:") and info.metrics_address != info.address
        assert parts.hello.info == info
        assert msgspec.convert(parts.hello.layout, type(LAYOUT)) == LAYOUT
        assert parts.kv.available == BLOCKS


@pytest.mark.parametrize(("transport", "ways"), [("auto", ["shm", "tcp"]), ("tcp", ["tcp"])])
def test_every_way_to_its_memory_can_be_told(transport: str, ways: list[str]) -> None:
    """Guards a way that is open and that nobody hears of; and one that everybody is told of, who are told at once."""
    with ExitStack() as closing:
        parts = open_one(closing, transfer=TransferConfig(transport=transport))
        assert parts.hello.endpoints == []
        endpoints = [way.describe(Incarnation(7)) for way in parts.transports.values()]
        assert all(isinstance(endpoint, Endpoint) for endpoint in endpoints)
        assert [endpoint.transport for endpoint in endpoints] == ways


def test_its_hello_says_how_blocks_shall_travel() -> None:
    """Guards settings that stop at the config: the other side takes the stricter, or the common, of both hellos."""
    transfer = TransferConfig(digests="sampled", digest_sample=0.25, digest_algorithm="wp64", wire="int8")
    with ExitStack() as closing:
        hello = open_one(closing, transfer=transfer).hello
        assert (hello.digest_share, hello.digest, hello.wire) == (0.25, "wp64", "int8")


def test_no_two_lives_are_the_same() -> None:
    """Guards fences and placements: a restarted worker must not pass for its earlier life."""
    with ExitStack() as closing:
        lives = {open_one(closing).info.incarnation for _ in range(2)}
        assert len(lives) == 2 and all(0 <= life < 2**64 for life in lives)


def test_there_are_lower_tiers_where_they_are_asked_for() -> None:
    with ExitStack() as closing:
        assert open_one(closing, tiers=TierConfig(host_bytes=0)).tier_mover is None
        assert open_one(closing, tiers=TierConfig(host_bytes=64 * LAYOUT.block_bytes)).tier_mover is not None


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_host_that_nobody_can_dial_is_refused_before_a_model_is_loaded(
    host: str, devices: list[EngineDevice]
) -> None:
    with ExitStack() as closing, pytest.raises(ValueError, match="name an address"):
        open_one(closing, host)
    assert devices == []


@pytest.mark.parametrize("step", ["open_tiers", "open_transports", "WorkerMetrics", "GpuMetrics", "host_id"])
def test_what_fails_half_way_leaves_nothing_open(
    step: str, devices: list[EngineDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a supervisor that starts a worker again and again beside the memory of those that failed."""

    def fails(*arguments: object) -> None:
        raise OSError(f"{step} fails")

    monkeypatch.setattr(worker.opening, step, fails)
    with pytest.raises(OSError, match=step), ExitStack() as closing:
        open_one(closing)
    assert is_closed(devices[0]) and not ours()


def test_streams_are_closed_before_the_memory_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a peer that reads blocks of a pool which is gone already."""
    order: list[str] = []
    rpc_stop, mover_stop = RpcLoop.stop, Mover.stop
    monkeypatch.setattr(RpcLoop, "stop", lambda self, *a: (order.append("streams"), rpc_stop(self, *a)))
    monkeypatch.setattr(Mover, "stop", lambda self, *_: (order.append("transfers"), mover_stop(self)))
    with ExitStack() as closing:
        parts = open_one(closing)
        close = parts.device.kv.close
        monkeypatch.setattr(parts.device.kv, "close", lambda: (order.append("memory"), close()))
    assert order[:2] == ["streams", "transfers"] and is_closed(parts.device)
    host, port = parts.info.metrics_address.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 1.0)
