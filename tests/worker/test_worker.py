"""Real workers over a fake model, in this process: how they open, whom they answer, and what is left when they end."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import worker.opening
import worker.worker
from decode_worker.role import open_decode_worker
from decode_worker.scheduler.holding import NEVER
from engine.config import TierConfig
from engine.device import EngineDevice
from engine.handshake import Party
from engine.kv.layout import KVLayout
from engine.kv.tiers.tiers import Tiers
from engine.loop import Ran
from engine.messages import (
    PROTOCOL,
    Handoff,
    Hello,
    LifeOfProcess,
    Load,
    OrphansTold,
    ProcessesTold,
    ReadTold,
    RouterHello,
    SessionTold,
    StartPrefill,
    Stop,
    WorkerInfo,
    decode_from_prefill_frame,
    decode_worker_frame,
    encode,
)
from engine.step import StepPlan
from engine.types import Incarnation, RequestId, RequestRecord
from prefill_worker.role import PrefillRole, open_prefill_worker
from telemetry.audit import AuditError
from tests.integration.fake_device import fake_device
from tests.secrets_of_tests import SECRETS
from tests.telemetry.pages import samples
from transfer.handoff.commands import Connect, Disconnect, Unreachable
from transfer.mover import Mover
from worker.backlog import RECORDS_PER_TURN
from worker.config import DecodeConfig, PrefillConfig
from worker.rpc import FrameIn, RpcLoop, Send
from worker.streams import ATTACH, ReaderStream, RouterStream
from worker.worker import Worker

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
SOON_S = 10.0
ROUTER = Party("router", "router", Incarnation(9))
OPEN: dict[str, Callable[[], Worker[Any]]] = {
    "prefill": lambda: prefill_worker(),
    "decode": lambda: decode_worker(),
}


def prefill_worker(port: int = 0) -> Worker[Any]:
    return open_prefill_worker("w", PrefillConfig(), "127.0.0.1", port, SECRETS)


def decode_worker(name: str = "w") -> Worker[Any]:
    return open_decode_worker(name, DecodeConfig(), "127.0.0.1", 0, SECRETS)


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
    loop = RpcLoop("router", ROUTER, SECRETS)
    loop.start("127.0.0.1", 0, {})
    yield loop
    loop.stop()


class Listener:
    """A router's end of a stream."""

    unread_bytes = 0

    def proven(self, peer: Party) -> None:
        assert peer.name == "w"

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

    def open_session(send: Send) -> Listener:
        made.append(Listener(send))
        return made[-1]

    rpc.connect(address, ATTACH[role], open_session)
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
        assert info.chunk_tokens == (128 if role == "prefill" else 64), "a router reckons with it who goes before whom"
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


def test_it_says_what_its_tiers_can_hold(tmp_path: Path) -> None:
    """Guards the router's belief, which would forget what went to host memory, or never forget what left the disk."""
    block_bytes = LAYOUT.block_bytes
    tiers = TierConfig(host_bytes=7 * block_bytes, disk_bytes=90 * block_bytes, disk_dir=str(tmp_path))
    for config, sizes in ((tiers, (8, 7, 90)), (TierConfig(host_bytes=0), (8, 0, 0))):
        one = open_prefill_worker("w", PrefillConfig(tiers=config), "127.0.0.1", 0, SECRETS)
        try:
            assert (one.info.blocks, one.info.host_blocks, one.info.disk_blocks) == sizes
        finally:
            one.stop()


def test_a_router_that_takes_it_for_another_role_finds_nobody(rpc: RpcLoop) -> None:
    """Guards a router that dials the port of an earlier worker, at which another one answers by now."""
    one = prefill_worker()
    try:
        listener = attach(rpc, one.start().address, "decode")
        assert listener.ended.wait(SOON_S) and not listener.heard
    finally:
        one.stop()


def test_what_a_router_says_to_a_prefill_worker_harms_nobody(rpc: RpcLoop) -> None:
    one = prefill_worker()
    try:
        listener = attach(rpc, one.start().address, "prefill")
        listener.send(b"anything")
        until(listener.ended.is_set)
        other = attach(rpc, one.info.address, "prefill")
        until(lambda: len(other.heard) > 2)
    finally:
        one.stop()


@pytest.mark.parametrize("told", [ReadTold("p0", True, 40, b"", b"12345678" * 2), SessionTold(b"s" * 32, 7, "p0")])
def test_what_a_router_has_decided_reaches_the_other_one(told: ReadTold | SessionTold, rpc: RpcLoop) -> None:
    """Guards bursts over several routers, of which each learnt of a prompt when it was cached, and conversations whose
    turns reach another one."""
    other = RpcLoop("router", Party("router", "other", Incarnation(10)), SECRETS)
    other.start("127.0.0.1", 0, {})
    one = decode_worker()
    try:
        address = one.start().address
        here, there = attach(rpc, address, "decode"), attach(other, address, "decode")
        there.send(encode([RouterHello(Incarnation(10), "other", PROTOCOL)]))
        until(lambda: any(OrphansTold() in frame for frame in there.heard) and len(here.heard) > 1)
        here.send(encode([told]))
        until(lambda: any(told in frame for frame in there.heard))
        assert not any(record == told for frame in here.heard for record in frame)
    finally:
        one.stop()
        other.stop()


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
        prefill_worker(taken.getsockname()[1])
    assert is_closed(devices[0]) and not ours()


def test_a_role_that_cannot_be_made_leaves_nothing_open(
    devices: list[EngineDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise ValueError("no such role")

    monkeypatch.setattr(PrefillRole, "__init__", fails)
    with pytest.raises(ValueError, match="no such role"):
        prefill_worker()
    assert is_closed(devices[0]) and not ours()


class Reading:
    """A prefill worker and one who reads from it: what is said to the transfer thread there, and to the reader."""

    def __init__(self, commands: list[object]) -> None:
        self.source, self.reader = prefill_worker(), decode_worker("r")
        self.commands = commands
        self.sent: list[bytes | None] = []
        info = self.reader.parts.info
        self._party = Party("decode", info.name, info.incarnation)
        listed = ProcessesTold([LifeOfProcess(info.name, info.incarnation, info.pid, info.host)])
        router = RouterStream(1, ROUTER, lambda data: None, lambda item: None)
        self.source.hear([router, FrameIn(router, encode([listed]))])

    def hello(self, renewal: bytes = b"") -> Hello:
        ways = [way.describe(self.source.parts.info.incarnation) for way in self.reader.parts.transports.values()]
        return msgspec.structs.replace(self.reader.parts.hello, endpoints=ways, renewal=renewal)

    def stream(self) -> ReaderStream:
        return ReaderStream(self._party, self.sent.append, lambda item: None)

    def start(self, decode: Incarnation, prefill: Incarnation) -> StartPrefill:
        record = RequestRecord(request=RequestId("made-up"), tokens=[1, 2, 3], prompt_tokens=3, max_tokens=1, seed=0)
        return StartPrefill(Handoff(record.request, 1, 1, decode, prefill), record=record, have_tokens=0)

    def answer(self) -> Hello:
        (record,) = decode_from_prefill_frame(self.sent[-1] or b"")
        assert isinstance(record, Hello)
        return record


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    commands: list[object] = []
    monkeypatch.setattr(Mover, "submit", lambda self, command: commands.append(command))
    found = Reading(commands)
    yield found
    found.source.stop()
    found.reader.stop()


@pytest.mark.parametrize("wrong", ["a second hello", "another reader's handoff", "another source's handoff"])
def test_a_reader_that_breaks_the_protocol_loses_its_stream(wrong: str, reading: Reading) -> None:
    """Guards against a reader that has made up a mapping per hello, or holds blocks under names that nobody ends."""
    source, hello, stream = reading.source, reading.hello(), reading.stream()
    mine, other = reading.reader.parts.info.incarnation, Incarnation(77)
    names = (other, source.parts.info.incarnation) if wrong.startswith("another reader") else (mine, other)
    start = reading.start(*names)
    source.hear([FrameIn(stream, encode([hello]))])
    assert None not in reading.sent
    source.hear([FrameIn(stream, encode([hello if wrong == "a second hello" else start, start]))])
    assert reading.sent[-1] is None and not source.scheduler.source.items
    assert [type(command) for command in reading.commands] == [Connect, Disconnect]
    assert sum(data is None for data in reading.sent) == 1


def test_the_way_to_a_reader_is_closed_before_its_newer_one_is_made(reading: Reading) -> None:
    """Guards every send to a reader whose stream broke unheard: what belongs to its older stream would take the newer
    one's way with it, were the scheduler told of the loss only after the whole frame."""
    reading.source.hear([FrameIn(reading.stream(), encode([reading.hello()]))])
    renewal = reading.answer().renewal
    reading.source.hear([FrameIn(reading.stream(), encode([reading.hello(renewal)]))])
    assert [type(command) for command in reading.commands] == [Connect, Disconnect, Connect]


def test_a_reader_that_nothing_can_be_sent_to_comes_again_by_a_new_way(reading: Reading) -> None:
    """Guards a prefill worker that could not make its way to a reader once, for want of a descriptor, and failed every
    handoff from then on: nobody ended the stream, so nobody made another way."""
    source, reader = reading.source, reading.reader.parts.info.incarnation
    source.hear([FrameIn(reading.stream(), encode([reading.hello()]))])
    renewal = reading.answer().renewal
    source.hear([Unreachable(reader, "no descriptor is free"), Unreachable(reader, "again")])
    assert reading.sent.count(None) == 1, "its stream has ended"
    source.hear([FrameIn(reading.stream(), encode([reading.hello(renewal)]))])
    assert reading.answer() and [type(c) for c in reading.commands] == [Connect, Disconnect, Connect]
    source.hear([Unreachable(Incarnation(77), "a stranger")])


def test_a_reader_that_says_too_much_holds_up_nobody(reading: Reading) -> None:
    """Guards the engine: two frames of 59 MiB held one for 31 s, until it was killed as hung."""
    source, stream = reading.source, reading.stream()
    mine, here = reading.reader.parts.info.incarnation, source.parts.info.incarnation
    source.hear([FrameIn(stream, encode([reading.hello()]))])
    stops = [Stop(Handoff(RequestId("r"), 1, attempt, mine, here)) for attempt in range(3 * RECORDS_PER_TURN)]
    stream.frame(encode(stops))
    source.hear([FrameIn(stream, encode(stops))])
    router = RouterStream(2, ROUTER, lambda data: None, lambda item: None)
    source.hear([router, FrameIn(router, encode([ProcessesTold([])]))])
    assert stream.unread_bytes > 0, "a frame was heard to its end at once"
    assert source.step(), "what waits is forgotten until something comes"
    for _ in range(4):
        source.hear([])
    assert stream.unread_bytes <= 0 and not source.step()


def test_nobody_waits_for_a_copy_while_a_step_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the device: whoever lingers then is late with the next step."""
    made = OPEN["decode"]()
    try:
        made._copying = 1
        assert made.is_settling()
        monkeypatch.setattr(type(made._engine), "is_busy", True)
        assert not made.is_settling()
    finally:
        made.stop()


def run_one_step(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a worker's engine run one step, and have nothing to do in the next three; no report is due by its time."""
    steps = iter([Ran(StepPlan((), (), 1), 0.01, None), None, None, None])
    monkeypatch.setattr(made._engine, "step", lambda: next(steps))
    monkeypatch.setattr(made._role, "turned", lambda *_: None)
    monkeypatch.setattr(worker.worker, "REPORT_S", 1e9)
    monkeypatch.setattr(worker.worker, "HEARTBEAT_S", 1e9)


def test_a_report_tells_what_is_promised() -> None:
    """Guards routers against offers to a pool that is free, and kept for those who run."""
    made = OPEN["decode"]()
    try:
        kv = made.parts.kv
        lease = kv.acquire(b"", [1], match_limit=0, room_tokens=1, grow_tokens=4 * kv.block_size)
        assert lease is not None
        report = made._load([], 0.0)
        assert (report.active_blocks, report.promised_blocks) == (1, 3)
        assert report.free_blocks + report.cached_blocks - report.promised_blocks == kv.available
        kv.release(lease)
        assert made._load([], 0.0).promised_blocks == 0
    finally:
        made.stop()


def test_a_worker_that_has_become_idle_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards routers' queues: the last step of a prompt ended within 50 ms of a report, and for the quarter of a second
    until the next one its tokens were taken to be still to compute."""
    made, reports = OPEN["decode"](), list[float]()
    try:
        run_one_step(made, monkeypatch)
        whole = made._report

        def report(now: float) -> None:
            reports.append(now)
            whole(now)

        monkeypatch.setattr(made, "_report", report)
        made._reported_at = time.monotonic()
        told = []
        for _ in range(3):
            made.step()
            told.append(len(reports))
        assert told == [0, 1, 1]
    finally:
        made.stop()


def test_what_went_and_what_moved_is_told_in_pieces_the_moves_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a frame that is larger than may be where a whole tier is dropped, and the routers' belief of blocks that
    went, came back and were demoted within one report; what a load takes is told with each."""
    made, said = OPEN["prefill"](), list[bytes]()
    names = [bytes([number]) * 16 for number in range(7)]
    try:
        kv: Any = made.parts.kv
        kv.tiers = Tiers(4, 4096)
        kv.tiers.cost.measured(2, 0.5, 0, 0.0)
        monkeypatch.setattr(worker.worker, "EVICTED_AT_ONCE", 2)
        monkeypatch.setattr(kv, "take_evicted", lambda: names[:5])
        monkeypatch.setattr(kv, "take_moved", lambda limit: {"host": names[5:][:limit]})
        made.parts.routers[1] = RouterStream(1, ROUTER, lambda data: said.append(data or b""), lambda item: None)
        made._report(0.0)
        loads = [one for data in said for one in decode_worker_frame(data) if isinstance(one, Load)]
        assert [one.evicted for one in loads] == [names[:2], names[2:4], names[4:5]]
        assert [one.moved for one in loads] == [{}, {}, {"host": names[5][:8] + names[6][:8]}]
        assert all(one.s_per_loaded_block == {"host": 0.25} for one in loads)
    finally:
        made.stop()


def test_a_worker_that_holds_its_next_step_has_not_become_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards routers against a report for every step that waits for rows that are about to land."""
    made, reports = OPEN["decode"](), list[float]()
    try:
        run_one_step(made, monkeypatch)
        monkeypatch.setattr(made, "_report", reports.append)
        made._reported_at = time.monotonic()
        made.step()
        hold = made.scheduler.batch.hold  # type: ignore[attr-defined]
        hold.due = made._reported_at + 60.0
        made.step()
        assert not reports
        hold.due = NEVER
        monkeypatch.setattr(type(made.scheduler), "has_put_off", True)
        made.step()
        assert not reports and made.rest_s() == 0.0, "what was put off goes on at once"
        monkeypatch.setattr(type(made.scheduler), "has_put_off", False)
        made.step()
        assert len(reports) == 1
    finally:
        made.stop()


def test_the_auditor_looks_between_steps_that_never_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an auditor of idle workers only: under steady load a leaked block was never found."""
    made = OPEN["decode"]()
    try:
        monkeypatch.setattr(made._engine, "step", lambda: Ran(StepPlan((), (), 1), 0.01, None))
        monkeypatch.setattr(made._role, "turned", lambda *_: None)
        made.parts.kv.pool.allocate(1)
        with pytest.raises(AuditError, match="the kv ledger does not add up: LedgerError: 1 leaked"):
            assert made.step(), "there was nothing to compute"
    finally:
        made.stop()


@pytest.mark.parametrize(("broken", "off"), [("leaked", -1), ("of two owners", 1)])
def test_the_metrics_page_tells_blocks_that_do_not_add_up(broken: str, off: int) -> None:
    """Guards the gauge of blocks, which was made of sums that move in pairs: it added up whatever was wrong."""
    made = OPEN["decode"]()
    pool, page = made.parts.kv.pool, made.parts.metrics.render

    def told() -> tuple[float, float]:
        made._recount_at = 0.0
        made._load([], time.monotonic())
        seen = samples(page())
        by_state = [seen["headrace_kv_blocks", (("state", state),)] for state in pool.counts()]
        return sum(by_state), seen["headrace_kv_pool_blocks", ()]

    try:
        assert told() == (pool.total, pool.total)
        if broken == "leaked":
            pool._free.pop()
        else:
            pool._free.insert(0, pool._free[0])
        assert sum(pool.counts().values()) == pool.total
        assert told() == (pool.total + off, pool.total)
    finally:
        made.stop()


def test_blocks_are_not_counted_more_often_than_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards engines with many blocks, which report twenty times a second."""
    made, counted = OPEN["decode"](), list[float]()
    recount, began = made.parts.kv.pool.recount, time.monotonic()
    monkeypatch.setattr(worker.worker, "RECOUNT_SHARE", 1e-9)
    monkeypatch.setattr(made.parts.kv.pool, "recount", lambda: counted.append(began) or recount())
    try:
        for turn in range(5):
            made._load([], began + turn)
        assert len(counted) == 1
    finally:
        made.stop()


@pytest.mark.parametrize("broken", [True, False])
def test_an_engine_that_fails_on_a_block_of_two_owners_died_of_its_ledger(
    monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Guards the cause that is counted: such a block ended the engine before its audit was due, as any other defect."""
    made = OPEN["decode"]()
    pool = made.parts.kv.pool

    def step() -> bool:
        if broken:
            pool._free.insert(0, pool._free[0])
        raise RuntimeError("of something else")

    monkeypatch.setattr(made, "step", step)
    made.start()
    try:
        with pytest.raises(AuditError if broken else RuntimeError, match="kv ledger" if broken else "something else"):
            made.wait()
    finally:
        made.stop()
