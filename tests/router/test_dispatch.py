"""The router's streams to its workers: how their tasks end. What travels on them is tried in `test_server.py` and, with
real processes, in `tests/chaos`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf, nan
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec import structs

import router.dispatch
from access.config import AccessConfig
from access.internal import INTERNAL_NAME
from access.limits import TELL_ALL_S, TenantLimits
from access.siblings import MOST_NAMED
from access.tenants import MAX_NAME_CHARS, Tenant
from engine.handshake import Keyring
from engine.messages import (
    FRAME_BYTES,
    Cancel,
    DecodeRecord,
    HeldRun,
    HoldingTold,
    LifeOfProcess,
    Orphan,
    PeerAddress,
    Place,
    ProcessesTold,
    RouterRecord,
    TenantsTold,
    frames,
)
from engine.types import FinishReason, Incarnation, RequestId
from router.app import RouterApp
from router.config import RouterConfig
from router.core.recovery import TOGETHER_S
from router.dispatch import RECORD_BYTES, RECORDS_AT_ONCE, TOKENS_AT_ONCE, Outbox, _end, _most_bytes
from router.status.observer import NullObserver
from tests.access.certificates import make_authority, make_certificate
from tests.router import fake_cluster
from tests.router.core.parts import request_record
from tests.router.fake_cluster import ByteText, FakeWorkers, load, until, worker_info
from tests.secrets_of_tests import SECRETS


def test_who_is_cancelled_while_a_task_ends_hears_of_it() -> None:
    """Guards a link to a lost worker: its stream broke, it waited for its writer to end, and was told to end itself. It
    took that for the writer's end, dialled again, and whoever had told it waited for ever."""

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            await asyncio.sleep(0.01)

    async def body() -> None:
        writer = asyncio.create_task(slow_to_end())
        await asyncio.sleep(0)
        link = asyncio.create_task(_end(writer))
        await asyncio.sleep(0)
        link.cancel()
        with pytest.raises(asyncio.CancelledError):
            await link
        await asyncio.wait([writer])
        assert writer.cancelled()

    asyncio.run(body())


def test_what_a_task_failed_of_is_raised_when_it_ends() -> None:
    async def failing() -> None:
        try:
            await asyncio.sleep(10.0)
        except asyncio.CancelledError:
            raise ValueError("it failed") from None

    async def body() -> None:
        task = asyncio.create_task(failing())
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="it failed"):
            await _end(task)

    asyncio.run(body())


def _app() -> RouterApp:
    return RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS)


def _telling(told: list[TenantsTold], tenant: Tenant) -> RouterApp:
    """A router whose tenants are all as this one; what it tells other routers goes to `told`."""
    app = _app()
    app._limits = TenantLimits(lambda name: tenant, 1.0)
    app._links.tell_siblings = told.append  # type: ignore[method-assign]
    return app


@pytest.mark.parametrize("wrong", ["secret", "name"])
def test_a_stranger_is_no_worker(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards prompts, which a router sends to whoever answers at an address; and a worker's name."""

    async def body() -> None:
        workers = FakeWorkers()
        prefill, decode = [PeerAddress("p0", "")], [PeerAddress("d0", "")]
        if wrong == "secret":
            workers.secrets = Keyring((b"x" * 32,))
        else:
            workers.decode, workers.prefill = "another", "other"
        app = _app()
        try:
            await app.start()
            await workers.start()
            address = f"127.0.0.1:{workers.port}"
            prefill, decode = ([PeerAddress(peer.name, address)] for (peer,) in (prefill, decode))
            await app.set_workers(prefill, decode)
            await until(lambda: len(_refusals(caplog)) == 2)
            await asyncio.sleep(1.5)  # it is dialled again meanwhile
            assert not app.hub.ready() and not workers.got and len(_refusals(caplog)) == 2, "said once"
            said = "does not know the secret" if wrong == "secret" else "answers at its address"
            assert all(said in record.getMessage() for record in _refusals(caplog))
            workers.secrets, workers.decode, workers.prefill = SECRETS, "d0", "p0"
            await until(app.hub.ready)
        finally:
            await app.stop(0.0)
            await workers.stop()

    with caplog.at_level(logging.ERROR, "router.dispatch"):
        asyncio.run(body())


def test_a_worker_whose_stream_was_cut_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker that read nothing for a while, whose stream the router ends itself: it was lost for ever."""

    async def body() -> None:
        workers = FakeWorkers()
        async with _serving(workers) as app:
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            with monkeypatch.context() as patched:
                patched.setattr(router.dispatch, "MAX_UNSENT_BYTES", RECORD_BYTES)
                for _ in range(3):
                    app._links.send("d0", Cancel(RequestId("r"), 1, FinishReason.CANCELLED))
            await until(lambda: not app.hub.ready())
            await until(app.hub.ready)

    asyncio.run(body())


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"blocks": -1}, {"context_tokens": 0}, {"growth_tokens": -1}])
def test_a_worker_of_impossible_sizes_is_none(wrong: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards all requests of a router against one worker by whose sizes nothing can be divided."""
    make = worker_info
    monkeypatch.setattr(fake_cluster, "worker_info", lambda *a, **more: structs.replace(make(*a, **more), **wrong))

    async def body() -> None:
        workers = FakeWorkers()
        async with _serving(workers) as app:
            await app.set_workers(*workers.peers)
            await asyncio.sleep(0.5)
            assert not workers.hellos and not app.hub.ready() and not app.hub.core.registry.role("decode")
            monkeypatch.setattr(fake_cluster, "worker_info", make)
            await until(app.hub.ready)

    asyncio.run(body())


@pytest.mark.parametrize(
    "wrong", [{"s_per_token": nan}, {"s_per_token": -1e9}, {"s_per_block": {"p0": inf}}, {"waiting_tokens": -5}]
)
def test_a_worker_whose_report_no_worker_can_make_gets_nothing(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards all requests of a router against one worker that seems to be infinitely quick, or that compares with
    nobody."""
    make = load
    monkeypatch.setattr(fake_cluster, "load", lambda **more: structs.replace(make(**more), **wrong))

    async def body() -> None:
        workers = FakeWorkers()
        async with _serving(workers) as app:
            await app.set_workers(*workers.peers)
            await until(lambda: bool(workers.hellos))
            await asyncio.sleep(0.5)
            assert not app.hub.ready()
            monkeypatch.setattr(fake_cluster, "load", make)
            await until(app.hub.ready)

    asyncio.run(body())


def test_a_worker_without_tls_is_refused_where_streams_have_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards prompts against a worker in plain text, and an operator against a cluster that waits and says nothing."""
    authority = make_authority(tmp_path)
    pair = make_certificate(tmp_path, authority, INTERNAL_NAME, san=f"DNS:{INTERNAL_NAME}")
    access = AccessConfig(internal_cert_file=pair.cert, internal_key_file=pair.key, internal_ca_file=authority.cert)
    config = RouterConfig(grpc_port=0, http_port=-1, access=access)

    async def body() -> None:
        workers, app = FakeWorkers(), RouterApp(config, ByteText(), NullObserver(), SECRETS)
        try:
            await app.start()
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(lambda: len(_refusals(caplog)) == 2)
            assert all("it speaks without TLS" in record.getMessage() for record in _refusals(caplog))
            assert not app.hub.ready() and not workers.got
        finally:
            await app.stop(0.0)
            await workers.stop()

    with caplog.at_level(logging.ERROR, "router.dispatch"):
        asyncio.run(body())


def test_a_prefill_worker_that_is_down_is_not_dialled_and_is_expected() -> None:
    """Guards readiness between a prefill worker's death and its next life, and after its pool was taken away."""

    async def body() -> None:
        workers = FakeWorkers()
        app = _app()
        try:
            await app.start()
            await workers.start()
            (prefill,), (decode,) = workers.peers
            await app.set_workers([prefill], [decode])
            await until(app.hub.ready)
            await app.set_workers([PeerAddress(prefill.name, "")], [decode])
            assert not app.hub.ready()
            await app.set_workers([], [decode])
            assert app.hub.ready()
        finally:
            await app.stop(0.0)
            await workers.stop()

    asyncio.run(body())


def test_a_decode_worker_that_is_down_is_listed_until_it_is_named_no_more() -> None:
    """Guards the list that alerts go by against a worker that died, was taken away while it was down, and would be
    missed for ever."""

    async def body() -> None:
        fakes = FakeWorkers(), FakeWorkers("d1", "p1")
        async with _serving(*fakes) as app:
            (prefill, (stays,)), (_, (goes,)) = (workers.peers for workers in fakes)
            await app.set_workers(prefill, [stays, goes])
            await until(lambda: all(app.hub.core.registry.get(peer.name) for peer in (stays, goes)))
            await app.set_workers(prefill, [stays, PeerAddress(goes.name, "")])
            assert goes.name in _listed(app) and app.hub.core.registry.get(goes.name) is None
            await app.set_workers(prefill, [stays])
            assert goes.name not in _listed(app) and stays.name in _listed(app)

    asyncio.run(body())


@asynccontextmanager
async def _serving(*fakes: FakeWorkers) -> AsyncIterator[RouterApp]:
    """A router that serves, and workers that can be dialled."""
    app = _app()
    try:
        await app.start()
        for workers in fakes:
            await workers.start()
        yield app
    finally:
        await app.stop(0.0)
        for workers in fakes:
            await workers.stop()


def _listed(app: RouterApp) -> list[str]:
    core = app.hub.core
    return [view.peer for view in app.hub.roster.views(core.registry, core.index, 0.0)]


def test_of_a_worker_at_another_address_nothing_was_heard() -> None:
    """Guards a router against its own index: it forgets what it was told of a worker whose address is another now, and
    said to the same life that it had heard it, so that it was never told again."""

    async def body() -> None:
        workers = FakeWorkers()
        app = _app()
        try:
            await app.start()
            await workers.start()
            (prefill,), (decode,) = workers.peers
            await app.set_workers([prefill], [decode])
            await until(app.hub.ready)
            run = HeldRun(b"", b"12345678")
            workers._outbox.put_nowait(HoldingTold([run], 3))
            index = app.hub.core.index
            await until(lambda: index.held_blocks("d0") == 1)
            app._links.sever("d0")
            await until(lambda: [hello.heard for hello in workers.hellos] == [0, 3])
            assert index.held_blocks("d0") == 1, "the same life is back"
            there = PeerAddress("d0", decode.address.replace("127.0.0.1", "localhost"))
            await app.set_workers([prefill], [there])
            await until(lambda: [hello.heard for hello in workers.hellos] == [0, 3, 0])
            assert index.held_blocks("d0") == 0
        finally:
            await app.stop(0.0)
            await workers.stop()

    asyncio.run(body())


def test_what_a_worker_says_while_others_leave_is_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards the log, and the stream of a worker that is not named any more: while the streams of others were ended it
    said what it holds, and nobody knew its life."""
    end = router.dispatch._end

    async def body() -> None:
        workers = FakeWorkers()
        app = _app()
        heard = asyncio.Event()

        async def slowly(task: asyncio.Task[None]) -> None:
            """End a stream, but let the decode worker have spoken before."""
            if task.get_name().startswith("link"):
                workers._outbox.put_nowait(HoldingTold([HeldRun(b"", b"12345678")], 1))
                await asyncio.wait_for(heard.wait(), 5.0)
            await end(task)

        try:
            await app.start()
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            hear = app.hub.heard

            def told(name: str, records: Sequence[DecodeRecord]) -> None:
                hear(name, records)
                if any(isinstance(record, HoldingTold) for record in records):
                    heard.set()

            monkeypatch.setattr(app.hub, "heard", told)
            monkeypatch.setattr(router.dispatch, "_end", slowly)
            await app.set_workers([], [])
            assert heard.is_set() and not app._links._heard
        finally:
            monkeypatch.setattr(router.dispatch, "_end", end)
            await app.stop(0.0)
            await workers.stop()

    asyncio.run(body())
    assert "failed" not in caplog.text


def _refusals(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "is refused" in record.getMessage()]


def test_every_worker_is_told_of_all_as_their_supervisor_knows_them() -> None:
    """Guards the one list by which workers know whom they may read for, and whose death counts: what a worker says of
    its own process gives way to what its supervisor says."""

    async def body() -> None:
        workers = FakeWorkers()
        app = _app()
        try:
            await app.start()
            await workers.start()
            (prefill,), (decode,) = workers.peers
            await app.set_workers([prefill], [decode])
            await until(lambda: {life.name for life in workers.listed} == {"d0", "p0"})
            assert {life.pid for life in workers.listed} == {1}, "as they have said themselves"
            named = msgspec.structs.replace(prefill, incarnation=workers.incarnation, pid=77, host="there")
            await app.set_workers([named], [decode])
            await until(lambda: any(life.pid == 77 and life.host == "there" for life in workers.listed))
            assert {life.name: life.pid for life in workers.listed} == {"p0": 77, "d0": 1}
            assert all(life.incarnation == workers.incarnation for life in workers.listed)
        finally:
            await app.stop(0.0)
            await workers.stop()

    asyncio.run(body())


@pytest.mark.parametrize("record", ["cancel", "place", "processes"])
def test_a_worker_that_takes_nothing_costs_its_stream(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a router's memory against a worker that does not read: long prompts count as what they are."""
    said: dict[str, tuple[RouterRecord, int]] = {
        "cancel": (Cancel(RequestId("r"), 1, FinishReason.CANCELLED), RECORD_BYTES),
        "place": (Place(record=request_record(tokens=50_000), placement=1, prefill=None), 250_000 + RECORD_BYTES),
        "processes": (ProcessesTold([LifeOfProcess("p", Incarnation(1), 7, "h")] * 100), 101 * RECORD_BYTES),
    }
    told, most_bytes = said[record]
    assert len(frames([told])[0]) <= most_bytes, "the estimate is from above"
    monkeypatch.setattr(router.dispatch, "MAX_UNSENT_BYTES", 3 * most_bytes)
    cut: list[bool] = []
    outbox = Outbox(lambda: cut.append(True))
    for _ in range(4):
        assert not cut
        outbox.put(told)
    assert cut == [True]


def test_what_has_left_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr(router.dispatch, "MAX_UNSENT_BYTES", 2 * RECORD_BYTES)
        cut: list[bool] = []
        outbox = Outbox(lambda: cut.append(True))
        for _ in range(5):
            outbox.put(Cancel(RequestId("r"), 1, FinishReason.CANCELLED))
            assert await outbox.frames()
        assert not cut

    asyncio.run(body())


def test_a_frame_that_is_no_frame_ends_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    """Guards requests whose tokens were in it: what is missed would never come. The worker is dialled again."""

    async def body() -> None:
        workers = FakeWorkers()
        app = _app()
        try:
            await app.start()
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            links = app._links
            before = links._outboxes["d0"]
            workers._outbox.put_nowait(cast(Any, "no record"))
            await until(lambda: links._outboxes.get("d0") not in (None, before))
            await until(app.hub.ready)
        finally:
            await app.stop(0.0)
            await workers.stop()

    with caplog.at_level(logging.INFO, "router.dispatch"):
        asyncio.run(body())
    assert "no stream to worker d0" in caplog.text


def _charge(app: RouterApp) -> None:
    """Have a tenant charged for tokens of an answer."""
    app.hub.core._share.go_on(RequestId("r"), "a", 1.0)
    app.hub.core._share.wrote(RequestId("r"), 7)


def test_what_many_tenants_use_is_told_in_turns_and_counts_by_its_bytes() -> None:
    """Guards frames, of which one holds any single record and none may pass 8 MiB, the memory behind a worker that
    takes nothing, and the loop of every router: a report of thousands of tenants was one record, counted as 1 KiB, and
    later several at each tick."""
    told: list[TenantsTold] = []
    app = _telling(told, Tenant(concurrency=1))
    names = [f"{at:06d}" + "\U0001f600" * (MAX_NAME_CHARS - 6) for at in range(2 * MOST_NAMED + 1)]
    for name in names:
        app._limits.admit(name, 1, 0.0)
    lined = dict.fromkeys(names[:MOST_NAMED], (0.0, True, True))
    _charge(app)
    app.hub.core.lines = lambda now, *, is_stopping: (4, lined)  # type: ignore[method-assign]
    for _ in range(3):
        app._tell_siblings(0.0)
    assert [one.number for one in told] == [2, 3, 4], "some of it may be of long ago"
    assert sorted(name for one in told for name in one.uses) == sorted(names)
    assert [len(one.uses) for one in told] == [MOST_NAMED, MOST_NAMED, 1]
    assert all(one.lines == lined for one in told)
    assert all(one.epoch == 4 for one in told)
    for one in told:
        assert len(frames([one])[0]) < FRAME_BYTES
        assert len(frames([one])[0]) <= _most_bytes(one)
    app.hub.core.lines = lambda now, *, is_stopping: (4, {})  # type: ignore[method-assign]
    app._tell_siblings(TELL_ALL_S / 2)
    assert len(told) == 3, "nothing has changed"
    app.hub.core.lines = lambda now, *, is_stopping: (4, {"a": (1.0, False, False)})  # type: ignore[method-assign]
    app._tell_siblings(TELL_ALL_S / 2)
    assert (told[3].number, told[3].uses, told[3].lines) == (5, {}, {"a": (1.0, False, False)})


def test_the_first_report_of_a_router_that_was_alone_is_none_of_one_that_begins() -> None:
    """Guards tenants of a router that has served alone for long: the next router to come would charge them for it."""
    told: list[TenantsTold] = []
    app = _telling(told, Tenant(tokens_per_s=1.0))
    app._limits.admit("a", 1, 0.0).spend(100)
    app._tell_siblings(0.0)
    assert [one.number for one in told] == [2]
    for is_charged in (False, True):
        app = _telling(told, Tenant())
        if is_charged:
            _charge(app)
        app.hub.core.lines = lambda now, *, is_stopping: (0, {"a": (0.0, True, True)})  # type: ignore[method-assign]
        app._tell_siblings(0.0)
    assert [one.number for one in told] == [2, 1, 2], "nor where its line has served something"


def test_two_that_went_in_one_moment_are_seen_to_go_together() -> None:
    """Guards bystanders of a host that goes: one of its workers is missed at once, another falls silent first."""
    options = dict(router.dispatch.CHANNEL_OPTIONS)
    silent_s = (options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"]) / 1e3
    assert silent_s < TOGETHER_S


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        ([100] * 6, [6]),
        ([TOKENS_AT_ONCE] * 3, [1, 1, 1]),
        ([TOKENS_AT_ONCE // 2] * 5, [2, 2, 1]),
        ([10 * TOKENS_AT_ONCE, 1, 1], [1, 2]),
        ([0] * (2 * RECORDS_AT_ONCE + 1), [RECORDS_AT_ONCE, RECORDS_AT_ONCE, 1]),
        ([], []),
    ],
    ids=lambda value: str(value[:1]),
)
def test_what_a_worker_has_kept_is_heard_with_pauses(tokens: list[int], sizes: list[int]) -> None:
    """Guards the streams of a router that takes over: a frame of a hundred requests with all their tokens was heard
    without a pause, since one counted the requests."""
    heard: list[list[DecodeRecord]] = []
    turns: list[int] = []

    async def body() -> None:
        app = _app()
        app.hub.heard = lambda worker, records: heard.append(list(records))  # type: ignore[method-assign]
        half = [[1] * (count // 2) for count in tokens]
        orphans = [
            Orphan(record=request_record("a", tokens=len(one)), placement=1, prefill="", tokens=one, age_s=1.0)
            for one in half
        ]

        async def others() -> None:
            while True:
                turns.append(len(heard))
                await asyncio.sleep(0)

        other = asyncio.create_task(others())
        await app._links._hear(worker_info("d0", "decode"), orphans)
        other.cancel()
        assert [one for part in heard for one in part] == orphans
        app._frontend.close()

    asyncio.run(body())
    assert [len(part) for part in heard] == sizes
    assert turns == list(range(1, len(sizes))), "others had a turn in between"
