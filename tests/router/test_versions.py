"""Routers and workers of releases before, which know no `ReadTold`, or no `SessionTold`: a frame with a record of a
kind that they do not know ends their stream, and with it what their requests had computed."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, get_args

import msgspec
import pytest

import router.dispatch
import worker.opening
import worker.streams
from decode_worker.role import open_decode_worker
from engine.kv.layout import KVLayout
from engine.messages import (
    PROTOCOL,
    DecodeOrder,
    DecodeRecord,
    PeerAddress,
    ProcessesTold,
    ReadTold,
    Record,
    RouterHello,
    SessionTold,
    TenantsTold,
    encode,
    guarded,
)
from prefill_worker.role import open_prefill_worker
from router.app import RouterApp
from router.config import RouterConfig
from router.core.events import WorkerSaid
from router.front.api import Finished, GenerateCall
from router.status.observer import NullObserver
from tests.integration.fake_device import fake_device
from tests.router.fake_cluster import ByteText, until
from tests.secrets_of_tests import SECRETS
from worker.config import DecodeConfig, PrefillConfig
from worker.worker import Worker

UNKNOWN: dict[int, tuple[type[Record], ...]] = {1: (ReadTold, SessionTold), 2: (SessionTold,)}
"""What a process of each protocol before this one cannot read."""
KINDS = (ProcessesTold, TenantsTold, ReadTold, SessionTold, *get_args(DecodeOrder))


def reader(kinds: Sequence[type[Record]], protocol: int) -> Callable[[bytes], list[Any]]:
    """Return the decoder of a process of an older protocol, of these kinds of records."""
    known = reduce(or_, [kind for kind in kinds if kind not in UNKNOWN[protocol]])
    return guarded(msgspec.msgpack.Decoder(list[known]).decode)  # type: ignore[valid-type]


LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=4, head_dim=1)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker[Any]]]:
    monkeypatch.setattr(worker.opening, "open_device", lambda *config: fake_device(LAYOUT, 256))
    opened: list[Worker[Any]] = [
        open_prefill_worker("p0", PrefillConfig(), "127.0.0.1", 0, SECRETS),
        open_decode_worker("d0", DecodeConfig(), "127.0.0.1", 0, SECRETS),
    ]
    yield opened
    for one in opened:
        one.stop()


def test_older_decoders_know_no_such_record() -> None:
    """What the other tests stand on: without a number of their releases, these streams would end."""
    samples: list[Record] = [ReadTold("p0", True, 1, b"", b""), SessionTold(b"", 1)]
    for protocol, kinds in UNKNOWN.items():
        for told in [one for one in samples if isinstance(one, kinds)]:
            for read in (reader(KINDS, protocol), reader(get_args(DecodeRecord), protocol)):
                with pytest.raises(msgspec.ValidationError):
                    read(encode([told]))


@pytest.mark.parametrize("protocol", UNKNOWN)
@pytest.mark.parametrize("older", ["worker", "router", "nobody"])
def test_a_release_before_is_not_told_what_it_cannot_read(
    older: str,
    protocol: int,
    workers: list[Worker[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards an upgrade: with two routers, each request broke the stream to a decode worker of the release before, and
    each of a newer router that of an older one. Both are named once, as what they miss costs hits."""
    told: list[Record] = []
    if older == "worker":
        monkeypatch.setattr(worker.streams, "decode_router_frame", reader(KINDS, protocol))
        for one in workers:
            one.info = msgspec.structs.replace(one.info, protocol=protocol)
    elif older == "router":
        monkeypatch.setattr(router.dispatch, "decode_worker_frame", reader(get_args(DecodeRecord), protocol))
    for one in workers:
        one.start()
    prefill, decode = ([PeerAddress(one.name, one.info.address)] for one in workers)
    call = GenerateCall(prompt="a prompt of several blocks", max_tokens=4, session="chat")

    async def body() -> None:
        apps = [RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS) for _ in "ab"]
        if older == "router":
            hello = apps[1]._links._hello
            apps[1]._links._hello = RouterHello(hello.incarnation, hello.name, protocol)
        heard = apps[1].hub.core._heard

        def hear(event: WorkerSaid, *more: Any) -> None:
            if isinstance(event.record, ReadTold | SessionTold):
                told.append(event.record)
            heard(event, *more)

        apps[1].hub.core._heard = hear  # type: ignore[method-assign]
        for app in apps:
            await app.start()
        try:
            for app in apps:
                app.set_routers([PeerAddress(f"router-{at}", f"h:{at + 1}") for at in range(2)])
                await app.set_workers(prefill, decode)
            await until(lambda: all(app.hub.ready() for app in apps), 10.0)
            streams = [app._links._outboxes["d0"] for app in apps]
            events = [event async for event in apps[0]._frontend.generate(call)]
            assert isinstance(events[-1], Finished)
            await asyncio.sleep(0.3)  # what was passed on is there
            assert [app._links._outboxes["d0"] for app in apps] == streams, "a stream has broken"
            unknown = UNKNOWN[protocol] if older != "nobody" else ()
            # A pin is said once more to a router that is heard of after it.
            kinds = list(dict.fromkeys(type(one) for one in told))
            assert kinds == [k for k in (ReadTold, SessionTold) if k not in unknown]
        finally:
            for app in apps:
                await app.stop(0.0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    named = f"of an older release (protocol {protocol}, here {PROTOCOL})"
    said = sum(named in record.getMessage() for record in caplog.records)
    assert said == {"worker": 2, "router": 1, "nobody": 0}[older]
    assert not any("not of this protocol" in record.getMessage() for record in caplog.records)
