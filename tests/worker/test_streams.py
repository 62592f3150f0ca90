"""Who is a reader, by which way its blocks go, and when it is lost, or dead for certain.

Tried elsewhere too: over real streams in test_rpc.py and test_worker.py, what two hellos agree on in tests/transfer,
what a scheduler makes of a reader's loss in tests/transfer/handoff/test_source.py, all of it with faults in tests/sim.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.handshake import Party
from engine.kv.layout import KVLayout
from engine.messages import (
    Endpoint,
    Handoff,
    Hello,
    LifeOfProcess,
    RankEndpoint,
    Stop,
    WorkerInfo,
    decode_from_prefill_frame,
    encode,
)
from engine.types import Incarnation, RequestId
from transfer.handoff.commands import Connect, ReaderDead, ReaderEvent, ReaderLost, ReaderUp
from transfer.handoff.negotiation import MAX_PEER_RANKS
from worker.rpc import FrameIn, StreamEnded
from worker.streams import ATTACH, LISTED_S, READ, Readers, ReaderStream, RouterStream, methods

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
ME, READER = Incarnation(1), Incarnation(2)
HANDOFF = Handoff(RequestId("a"), 1, 1, READER, ME)


def hello(
    life: int = READER,
    host: str = "here",
    pid: int = 0,
    model: str = "m",
    name: str = "",
    role: str = "decode",
    **more: object,
) -> Hello:
    info = WorkerInfo(
        name=name or f"w{life}", role=role, incarnation=Incarnation(life), address="somewhere:1", model=model,
        fingerprint="f", block_size=4, blocks=8, context_tokens=64, pid=pid or os.getpid(), host=host,
    )  # fmt: skip
    endpoints = [Endpoint(transport=name) for name in ("shm", "tcp")]
    return Hello(info=info, layout=LAYOUT.describe(), endpoints=endpoints, **more)  # type: ignore[arg-type]


class Way:
    """A transport that is asked for its address only."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reads_remotely = name == "shm"

    def describe(self, peer: Incarnation, ranks: int = 0) -> Endpoint:
        return Endpoint(transport=self.name, details={"for": peer})


class Bench:
    """`all` is what the transfer thread and the scheduler were told, in their common order. Whoever says hello is
    listed before, as the process that it says it is, unless `lists` is False."""

    lists = True
    now = 0.0

    def __init__(self) -> None:
        self.all: list[object] = []
        self.told: dict[str, LifeOfProcess] = {}
        ways: Any = {name: Way(name) for name in ("shm", "tcp")}
        self.readers = Readers(hello(ME), ways, self.all.append)

    def stream(self, life: int = READER) -> tuple[ReaderStream, list[bytes | None]]:
        sent: list[bytes | None] = []
        return ReaderStream(Party("decode", f"w{life}", Incarnation(life)), sent.append, self.all.append), sent

    def take(self) -> list[object]:
        taken, self.all[:] = list(self.all), []
        return taken

    def list_processes(self, *infos: WorkerInfo) -> list[object]:
        told = [LifeOfProcess(info.name, info.incarnation, info.pid, info.host) for info in infos]
        self.told = {**self.told, **{one.name: one for one in told}}
        self.readers.listed(1, list(self.told.values()), self.hear)
        return self.take()

    def say(self, stream: ReaderStream, *records: Any) -> list[object]:
        hellos = [record.info for record in records if isinstance(record, Hello)]
        if self.lists and hellos:
            self.list_processes(*hellos)
        self.readers.records(stream, stream.decode(encode(list(records))), self.hear, self.now)
        return self.take()

    def hear(self, event: ReaderEvent) -> None:
        self.all.append(event)

    def end(self, stream: ReaderStream) -> list[object]:
        self.readers.ended(stream, "it broke", self.hear)
        return self.take()


def answer_of(sent: list[bytes | None]) -> Hello:
    assert len(sent) == 1 and sent[0] is not None
    (record,) = decode_from_prefill_frame(sent[0])
    assert isinstance(record, Hello)
    return record


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is told otherwise."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one:
        yield one
        one.kill()


def test_routers_are_numbered_and_their_coming_is_an_item() -> None:
    """Guards a worker that does not greet its router, and two routers that a scheduler cannot tell apart."""
    inbox: list[object] = []
    served = methods("decode", inbox.append)
    assert set(served) == {ATTACH["decode"], READ}
    assert served[ATTACH["decode"]].roles == {"router"} and served[READ].roles == {"decode"}
    router = Party("router", "router", Incarnation(9))
    streams = [served[ATTACH["decode"]].accept(lambda data: None, router) for _ in range(2)]
    assert inbox == streams and [s.link for s in streams if isinstance(s, RouterStream)] == [1, 2]
    reader: Any = served[READ].accept(lambda data: None, Party("decode", "d", READER))
    assert len(inbox) == 2, "a reader is nobody before its hello"
    reader.frame(b"x")
    reader.closed("bye")
    assert inbox[2:] == [FrameIn(reader, b"x"), StreamEnded(reader, "bye")]
    assert reader.unread_bytes > 1, "what a frame costs counts too"
    reader.heard(inbox[2])
    assert reader.unread_bytes == 0, "it is done with"


@pytest.mark.parametrize(("host", "way"), [("here", "shm"), ("there", "tcp")])
def test_one_way_is_chosen_and_both_sides_are_told(host: str, way: str) -> None:
    """Guards against a reader that goes another way than its sender, and handoffs it still reads for that are lost."""
    bench = Bench()
    stream, sent = bench.stream()
    connect, up = bench.say(stream, hello(host=host, unfinished=[HANDOFF]))
    assert isinstance(connect, Connect) and (connect.peer, connect.endpoint.transport) == (READER, way)
    assert up == ReaderUp(READER, way == "shm", (HANDOFF,))
    answer = answer_of(sent)
    assert answer.endpoints == [Endpoint(transport=way, details={"for": READER})]
    assert answer.info.incarnation == ME


def test_a_reader_that_does_not_fit_is_told_why_and_is_none() -> None:
    """Guards wrong KV: its own hello lets the reader see what differs, and leave."""
    bench = Bench()
    stream, sent = bench.stream()
    assert bench.say(stream, hello(model="another"), Stop(HANDOFF)) == []
    assert answer_of(sent).info.model == "m"
    bench.readers.send(READER, [Stop(HANDOFF)])
    assert len(sent) == 1 and bench.end(stream) == []


def test_nothing_is_made_for_more_ranks_than_a_peer_may_have() -> None:
    """Guards the engine from seconds of work, and an answer of megabytes, for one frame."""
    bench = Bench()
    bench.readers.transports["tcp"].describe = None  # type: ignore[method-assign, assignment]
    stream, sent = bench.stream()
    ranks = [RankEndpoint(first_head=0, kv_heads=2, details=[])] * (MAX_PEER_RANKS + 1)
    many = msgspec.structs.replace(hello(host="there"), endpoints=[Endpoint(transport="tcp", ranks=ranks)])
    assert bench.say(stream, many) == [] and stream.refused
    assert not answer_of(sent).endpoints


@pytest.mark.parametrize(
    "wrong",
    [
        [Stop(HANDOFF)],
        [hello(life=3)],
        [hello(name="another")],
        [hello(role="prefill")],
        [hello(), hello()],
        [hello(), Stop(msgspec.structs.replace(HANDOFF, decode=Incarnation(3)))],
    ],
    ids=["before its hello", "another life", "another name", "another role", "hello twice", "another's handoff"],
)
def test_a_reader_speaks_for_itself_alone_and_once(wrong: list[Any]) -> None:
    """Guards a leak of a mapping for each hello, and blocks that a reader holds in the names of others."""
    bench = Bench()
    stream, sent = bench.stream()
    bench.list_processes(hello(life=3).info)
    bench.say(stream, *wrong)
    assert sent[-1] is None and stream.refused
    assert bench.say(stream, hello(), Stop(HANDOFF)) == [] and len([one for one in sent if one is None]) == 1


def test_who_is_not_listed_waits_and_holds_nothing() -> None:
    """Guards blocks that wait for ever for the death of a process that nobody has started. A worker that has just been
    started may come before the word of it."""
    bench = Bench()
    bench.lists = False
    (early, to_early), (never, to_never) = bench.stream(), bench.stream(3)
    assert bench.say(early, hello()) == bench.say(never, hello(life=3)) == []
    assert not to_early and not to_never
    connect, up = bench.list_processes(hello().info)
    assert isinstance(connect, Connect) and isinstance(up, ReaderUp) and answer_of(to_early)
    bench.readers.tick(bench.hear, LISTED_S - 0.1)
    assert not to_never
    bench.readers.tick(bench.hear, LISTED_S)
    assert to_never == [None] and bench.take() == []
    assert bench.list_processes(hello(life=3).info) == [], "it was refused"


def test_what_a_router_that_was_frozen_says_takes_nobody_off_the_list() -> None:
    """Guards a new life whose router is told right, against another router that comes back with an old list; and
    everybody, against a router that has just begun and has met nobody."""
    bench = Bench()
    bench.lists = False
    info = hello().info
    new = LifeOfProcess(info.name, info.incarnation, info.pid, info.host)
    old = msgspec.structs.replace(new, incarnation=Incarnation(77))
    bench.readers.listed(1, [new], bench.hear)
    bench.readers.listed(2, [old], bench.hear)
    (stream, sent), (again, to_again) = bench.stream(), bench.stream()
    bench.say(stream, hello())
    renewal = answer_of(sent).renewal
    bench.readers.router_lost(1)
    bench.readers.listed(3, [], bench.hear)
    bench.say(again, hello(renewal=renewal))
    assert answer_of(to_again)


@pytest.mark.parametrize("claim", [{"pid": 1}, {"host": "there"}])
def test_a_pid_is_what_the_launcher_says(claim: dict[str, Any]) -> None:
    """Guards a pool: one that called itself pid 1, which never dies, kept 513 of 546 blocks for ever."""
    bench = Bench()
    bench.lists = False
    stream, sent = bench.stream()
    bench.list_processes(hello().info)
    assert bench.say(stream, hello(**claim)) == [] and sent == [None]


def test_a_frame_of_another_protocol_ends_its_stream() -> None:
    """Guards a handoff whose word was in it and would be waited for: the stream is made anew, and both ends begin from
    what they know."""
    bench = Bench()
    stream, sent = bench.stream()
    bench.say(stream, hello())
    assert sent[-1] is not None
    assert stream.decode(b"\xc1") == [] and sent[-1] is None
    assert bench.say(stream, Stop(HANDOFF)) == [], "what comes behind it is not heard"
    assert sent.count(None) == 1


def test_a_life_has_one_stream_and_only_itself_may_replace_it() -> None:
    """Guards a reader against one that takes its place, and one that comes back before its cut was noticed: the late
    words of its old stream, and its late end, are nobody's."""
    bench = Bench()
    (old, to_old), (new, to_new), (other, to_other) = bench.stream(), bench.stream(), bench.stream()
    bench.say(old, hello())
    renewal = answer_of(to_old).renewal
    for wrong in (b"", bytes(len(renewal))):
        assert bench.say(other, hello(renewal=wrong)) == [] and to_other.pop() is None
        other, to_other = bench.stream()
    lost, connect, up = bench.say(new, hello(renewal=renewal))
    assert isinstance(connect, Connect) and isinstance(up, ReaderUp)
    assert lost == ReaderLost(READER) and to_old[-1] is None
    assert bench.say(old, Stop(HANDOFF)) == [] and bench.end(old) == []
    assert bench.say(other, hello(renewal=renewal)) == [] and to_other == [None], "a renewal is of one stream"
    bench.readers.send(READER, [Stop(HANDOFF)])
    assert to_new[-1] == encode([Stop(HANDOFF)]) and to_old[-1] is None
    assert bench.end(new) == [ReaderLost(READER)]
    bench.readers.send(READER, [Stop(HANDOFF)])
    assert len(to_new) == 2


def test_a_lost_reader_is_dead_when_its_process_is_and_that_is_told_once(process: subprocess.Popen[bytes]) -> None:
    """Guards blocks in quarantine: their fence is the reader's death, and a lost stream alone proves none."""
    bench = Bench()
    (here, _), (there, _) = bench.stream(), bench.stream(3)
    bench.say(here, hello(pid=process.pid))
    bench.say(there, hello(life=3, host="there", pid=process.pid))
    bench.end(here)
    bench.end(there)
    assert bench.readers.deaths() == [], "it lives"
    process.kill()
    process.wait()
    assert bench.readers.deaths() == [ReaderDead(READER)], "of another host nothing can be known"
    assert bench.readers.deaths() == []


def test_a_reader_that_came_back_is_not_dead(process: subprocess.Popen[bytes]) -> None:
    bench = Bench()
    first, second = bench.stream()[0], bench.stream()[0]
    bench.say(first, hello(pid=process.pid))
    bench.end(first)
    bench.say(second, hello(pid=process.pid))
    process.kill()
    process.wait()
    assert bench.readers.deaths() == [], "its stream will end, and be said to"
    bench.end(second)
    assert bench.readers.deaths() == [ReaderDead(READER)]


def test_closing_ends_every_stream_behind_what_was_said() -> None:
    bench = Bench()
    (one, to_one), (two, to_two) = bench.stream(), bench.stream(3)
    bench.say(one, hello())
    bench.say(two, hello(life=3))
    bench.readers.close()
    assert to_one[1:] == to_two[1:] == [None]
