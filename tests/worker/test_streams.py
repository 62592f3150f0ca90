"""Who is a reader, by which way its blocks go, and when it is lost, or dead for certain.

Tried elsewhere too: over real streams in test_rpc.py and test_worker.py, what two hellos agree on in tests/transfer,
what a scheduler makes of a reader's loss in tests/transfer/handoff/test_source.py, all of it with faults in tests/sim.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Handoff, Hello, Stop, WorkerInfo, decode_from_prefill_frame, encode
from engine.types import Incarnation, RequestId
from transfer.handoff.commands import Connect, FromReader, ReaderDead, ReaderEvent, ReaderLost, ReaderUp
from worker.rpc import FrameIn, StreamEnded
from worker.streams import ATTACH, READ, Readers, ReaderStream, RouterStream, methods

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
ME, READER = Incarnation(1), Incarnation(2)
HANDOFF = Handoff(RequestId("a"), 1, 1, READER, ME)


def hello(life: int = READER, host: str = "here", pid: int = 0, model: str = "m", **more: object) -> Hello:
    info = WorkerInfo(
        name="w", role="decode", incarnation=Incarnation(life), address="somewhere:1", model=model, fingerprint="f",
        block_size=4, blocks=8, context_tokens=64, pid=pid or os.getpid(), host=host,
    )  # fmt: skip
    endpoints = [Endpoint(transport=name) for name in ("shm", "tcp")]
    return Hello(info=info, layout=LAYOUT.describe(), endpoints=endpoints, **more)  # type: ignore[arg-type]


class Way:
    """A transport that is asked for its address only."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reads_remotely = name == "shm"

    def describe(self) -> Endpoint:
        return Endpoint(transport=self.name, details={"mine": True})


class Bench:
    """`all` is what the transfer thread and the scheduler were told, in their common order."""

    def __init__(self) -> None:
        self.all: list[object] = []
        ways: Any = {name: Way(name) for name in ("shm", "tcp")}
        self.readers = Readers(hello(ME), ways, self.all.append)

    def stream(self) -> tuple[ReaderStream, list[bytes | None]]:
        sent: list[bytes | None] = []
        return ReaderStream(sent.append, self.all.append), sent

    def take(self) -> list[object]:
        taken, self.all[:] = list(self.all), []
        return taken

    def say(self, stream: ReaderStream, *records: Any) -> list[object]:
        self.readers.frame(stream, encode(list(records)), self.hear)
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
    streams = [served[ATTACH["decode"]](lambda data: None) for _ in range(2)]
    assert inbox == streams and [s.link for s in streams if isinstance(s, RouterStream)] == [1, 2]
    reader = served[READ](lambda data: None)
    assert len(inbox) == 2, "a reader is nobody before it has said who it is"
    reader.frame(b"x")
    reader.closed("bye")
    assert inbox[2:] == [FrameIn(reader, b"x"), StreamEnded(reader, "bye")]  # type: ignore[arg-type]


@pytest.mark.parametrize(("host", "way"), [("here", "shm"), ("there", "tcp")])
def test_one_way_is_chosen_and_both_sides_are_told(host: str, way: str) -> None:
    """Guards against a reader that goes another way than its sender, and handoffs it still reads for that are lost."""
    bench = Bench()
    stream, sent = bench.stream()
    connect, up = bench.say(stream, hello(host=host, unfinished=[HANDOFF]))
    assert isinstance(connect, Connect) and (connect.peer, connect.endpoint.transport) == (READER, way)
    assert up == ReaderUp(READER, way == "shm", (HANDOFF,))
    answer = answer_of(sent)
    assert answer.endpoints == [Endpoint(transport=way, details={"mine": True})]
    assert answer.info.incarnation == ME


def test_a_reader_that_does_not_fit_is_told_why_and_is_none() -> None:
    """Guards wrong KV: its own hello lets the reader see what differs, and leave."""
    bench = Bench()
    stream, sent = bench.stream()
    assert bench.say(stream, hello(model="another"), Stop(HANDOFF)) == []
    assert answer_of(sent).info.model == "m"
    bench.readers.send(READER, [Stop(HANDOFF)])
    assert len(sent) == 1 and bench.end(stream) == []


def test_only_who_has_said_who_it_is_is_heard() -> None:
    bench = Bench()
    stream, _ = bench.stream()
    assert bench.say(stream, Stop(HANDOFF)) == []
    *_, heard = bench.say(stream, hello(), Stop(HANDOFF))
    assert heard == FromReader(READER, Stop(HANDOFF))


def test_a_frame_of_another_protocol_is_dropped_and_the_stream_goes_on() -> None:
    bench = Bench()
    stream, _ = bench.stream()
    bench.say(stream, hello())
    bench.readers.frame(stream, b"\xc1", bench.hear)
    assert bench.take() == []
    assert bench.say(stream, Stop(HANDOFF)) == [FromReader(READER, Stop(HANDOFF))]


def test_of_two_streams_the_newer_counts_whichever_comes_first() -> None:
    """Guards a reader that comes back before its cut was noticed: its late words, and its late end, are nobody's."""
    bench = Bench()
    (old, to_old), (new, to_new), (late, to_late) = bench.stream(), bench.stream(), bench.stream()
    bench.say(old, hello(stream=2))
    lost, connect, up = bench.say(new, hello(stream=3))
    assert isinstance(connect, Connect) and isinstance(up, ReaderUp)
    assert lost == ReaderLost(READER) and to_old[-1] is None
    assert bench.say(old, Stop(HANDOFF)) == [] and bench.end(old) == []
    assert bench.say(late, hello(stream=1)) == [] and to_late == [None]
    bench.readers.send(READER, [Stop(HANDOFF)])
    assert to_new[-1] == encode([Stop(HANDOFF)]) and to_old[-1] is None
    assert bench.end(new) == [ReaderLost(READER)]
    bench.readers.send(READER, [Stop(HANDOFF)])
    assert len(to_new) == 2


def test_a_lost_reader_is_dead_when_its_process_is_and_that_is_told_once(process: subprocess.Popen[bytes]) -> None:
    """Guards blocks in quarantine: their fence is the reader's death, and a lost stream alone proves none."""
    bench = Bench()
    (here, _), (there, _) = bench.stream(), bench.stream()
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
    bench.say(first, hello(pid=process.pid, stream=1))
    bench.end(first)
    bench.say(second, hello(pid=process.pid, stream=2))
    process.kill()
    process.wait()
    assert bench.readers.deaths() == [], "its stream will end, and be said to"
    bench.end(second)
    assert bench.readers.deaths() == [ReaderDead(READER)]


def test_closing_ends_every_stream_behind_what_was_said() -> None:
    bench = Bench()
    (one, to_one), (two, to_two) = bench.stream(), bench.stream()
    bench.say(one, hello())
    bench.say(two, hello(life=3))
    bench.readers.close()
    assert to_one[1:] == to_two[1:] == [None]
