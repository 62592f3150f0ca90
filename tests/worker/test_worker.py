"""Real workers over a fake model, in this process: how they open, whom they answer, and what is left when they end."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import worker.opening
from decode_worker.role import open_decode_worker
from engine.device import EngineDevice
from engine.kv.layout import KVLayout
from engine.messages import Handoff, Load, StartPrefill, WorkerInfo, decode_worker_frame, encode
from engine.types import Incarnation, RequestId, RequestRecord
from prefill_worker.role import PrefillRole, open_prefill_worker
from tests.integration.fake_device import fake_device
from transfer.handoff.commands import Connect, Disconnect
from transfer.mover import Mover
from worker.config import DecodeConfig, PrefillConfig
from worker.rpc import FrameIn, RpcLoop, Send
from worker.streams import ATTACH, ReaderStream
from worker.worker import Worker

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
SOON_S = 10.0
OPEN: dict[str, Callable[[], Worker[Any]]] = {
    "prefill": lambda: open_prefill_worker("w", PrefillConfig()),
    "decode": lambda: open_decode_worker("w", DecodeConfig()),
}


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> list[EngineDevice]:
    """Record the devices that were opened; at the end of a test nothing of them may be left."""
    opened: list[EngineDevice] = []

    def open_device(*config: object) -> EngineDevice:
        opened.append(fake_device(LAYOUT, 8))
        return opened[-1]

    monkeypatch.setattr(worker.opening, "open_device", open_device)
    return opened


@pytest.fixture
def rpc() -> Iterator[RpcLoop]:
    loop = RpcLoop("router")
    loop.start("127.0.0.1", 0, {})
    yield loop
    loop.stop()


class Listener:
    """A router's end of a stream."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.heard: list[list[object]] = []
        self.ended = threading.Event()

    def frame(self, data: bytes) -> None:
        self.heard.append(list(decode_worker_frame(data)))

    def closed(self, why: str) -> None:
        self.ended.set()


def attach(rpc: RpcLoop, address: str, role: str) -> Listener:
    made: list[Listener] = []

    def accept(send: Send) -> Listener:
        made.append(Listener(send))
        return made[-1]

    rpc.connect(address, ATTACH[role], accept)
    until(lambda: bool(made))
    return made[0]


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def is_closed(device: EngineDevice) -> bool:
    """Say whether its pool's descriptor is gone, and nobody maps it."""
    kv: Any = device.kv
    try:
        os.fstat(kv.fd)
    except OSError:
        return True
    return False


def ours() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("w-") or t.name == "transfer"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_router_hears_who_it_is_and_how_it_stands_until_it_has_left(
    role: str, rpc: RpcLoop, devices: list[EngineDevice]
) -> None:
    one = OPEN[role]()
    info = one.start()
    try:
        listener = attach(rpc, info.address, role)
        until(lambda: len(listener.heard) >= 2)
        assert info.role == role and info.blocks == 8
        assert (info.growth_tokens is not None) == (role == "decode")
        first, *later = listener.heard
        assert first[0] == info and isinstance(first[0], WorkerInfo) and isinstance(first[1], Load)
        assert all(isinstance(record, Load) for frame in later for record in frame)
        one.leave(SOON_S)
        one.wait()
        assert listener.ended.wait(SOON_S) and one.is_leaving
        last = listener.heard[-1][-1]
        assert isinstance(last, Load) and last.leaving
    finally:
        one.stop()
    assert is_closed(devices[0]) and not ours()
    one.stop()


def test_a_router_that_takes_it_for_another_role_finds_nobody(rpc: RpcLoop) -> None:
    """Guards a router that dials the port of an earlier worker, at which another one answers by now."""
    one = open_prefill_worker("w", PrefillConfig())
    try:
        listener = attach(rpc, one.start().address, "decode")
        assert listener.ended.wait(SOON_S) and not listener.heard
    finally:
        one.stop()


def test_what_a_router_says_to_a_prefill_worker_harms_nobody(rpc: RpcLoop) -> None:
    one = open_prefill_worker("w", PrefillConfig())
    try:
        listener = attach(rpc, one.start().address, "prefill")
        listener.send(b"anything")
        before = len(listener.heard)
        until(lambda: len(listener.heard) > before + 2)
    finally:
        one.stop()


@pytest.mark.parametrize("role", sorted(OPEN))
def test_what_is_compiled_while_it_serves_is_told_apart(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a count that stays at 0 because nobody said that serving has begun, and a transfer thread that compiles
    while a request waits."""
    warmed: list[str] = []
    monkeypatch.setattr(Mover, "warm_up", lambda self, wire: warmed.append(wire))
    one = OPEN[role]()
    try:
        compilations = one.parts.device.compilations
        compilations.compiled("before")
        assert warmed == [one.parts.transfer.wire]
        one.start()
        compilations.compiled("too late")
        assert compilations.counts == {"start": 1, "serving": 1}
    finally:
        one.stop()


def test_a_taken_port_leaves_nothing_open(devices: list[EngineDevice]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        open_prefill_worker("w", PrefillConfig(), port=taken.getsockname()[1])
    assert is_closed(devices[0]) and not ours()


def test_a_role_that_cannot_be_made_leaves_nothing_open(
    devices: list[EngineDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise ValueError("no such role")

    monkeypatch.setattr(PrefillRole, "__init__", fails)
    with pytest.raises(ValueError, match="no such role"):
        open_prefill_worker("w", PrefillConfig())
    assert is_closed(devices[0]) and not ours()


@pytest.mark.parametrize("wrong", ["a second hello", "another reader's handoff", "another source's handoff"])
def test_a_reader_that_breaks_the_protocol_loses_its_stream(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a reader that has made up a mapping per hello, or holds blocks under names that nobody ends."""
    commands: list[object] = []
    monkeypatch.setattr(Mover, "submit", lambda self, command: commands.append(command))
    source = open_prefill_worker("w", PrefillConfig())
    reader = open_decode_worker("r", DecodeConfig())
    try:
        sent: list[bytes | None] = []
        stream = ReaderStream(sent.append, lambda item: None)
        hello = msgspec.structs.replace(reader.parts.hello, stream=1)
        mine, other = reader.parts.info.incarnation, Incarnation(77)
        names = (other, source.parts.info.incarnation) if wrong.startswith("another reader") else (mine, other)
        record = RequestRecord(request=RequestId("made-up"), tokens=[1, 2, 3], prompt_tokens=3, max_tokens=1, seed=0)
        start = StartPrefill(Handoff(record.request, 1, 1, *names), record=record, have_tokens=0)
        source.hear([FrameIn(stream, encode([hello]))])
        assert None not in sent
        source.hear([FrameIn(stream, encode([hello if wrong == "a second hello" else start, start]))])
        assert sent[-1] is None and not source.scheduler.source.items
        assert [type(command) for command in commands] == [Connect, Disconnect]
        assert sum(data is None for data in sent) == 1
    finally:
        source.stop()
        reader.stop()


def test_the_way_to_a_reader_is_closed_before_its_newer_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards every send to a reader whose stream broke unheard: what belongs to its older stream would take the newer
    one's way with it, were the scheduler told of the loss only after the whole frame."""
    commands: list[object] = []
    monkeypatch.setattr(Mover, "submit", lambda self, command: commands.append(command))
    source = open_prefill_worker("w", PrefillConfig())
    reader = open_decode_worker("r", DecodeConfig())
    try:
        for number in (1, 2):
            hello = msgspec.structs.replace(reader.parts.hello, stream=number)
            stream = ReaderStream(lambda data: None, lambda item: None)
            source.hear([FrameIn(stream, encode([hello]))])
        assert [type(command) for command in commands] == [Connect, Disconnect, Connect]
    finally:
        source.stop()
        reader.stop()
