"""What waits of many streams: nobody is heard too long, nobody is forgotten, and each stream keeps its order."""

from engine.handshake import Party
from engine.messages import Handoff, Stop, encode
from engine.types import Incarnation, RequestId
from worker.backlog import RECORDS_AT_ONCE, Backlog, RecordsIn
from worker.rpc import FrameIn, StreamEnded
from worker.streams import ReaderStream


def stream(life: int = 1) -> ReaderStream:
    return ReaderStream(Party("decode", f"d{life}", Incarnation(life)), lambda data: None, lambda item: None)


def frame(of: ReaderStream, count: int, first: int = 0) -> FrameIn:
    life, source = of.reader.incarnation, Incarnation(9)
    records = [Stop(Handoff(RequestId("r"), 1, first + at, life, source)) for at in range(count)]
    data = encode(records)
    of.frame(data)
    return FrameIn(of, data)


def attempts(part: object) -> list[int]:
    assert isinstance(part, RecordsIn)
    return [record.handoff.attempt for record in part.records if isinstance(record, Stop)]


def test_little_is_heard_at_once_and_in_order() -> None:
    backlog, one, other = Backlog(), stream(1), stream(2)
    ended = StreamEnded(one, "bye")
    for item in (frame(one, 2), frame(other, 1), frame(one, 1, first=2), ended):
        backlog.add(item)
    heard = list(backlog.take(100))
    assert [attempts(part) for part in heard if isinstance(part, RecordsIn) and part.stream is one] == [[0, 1], [2]]
    assert heard[-1] is ended and not backlog
    assert one.unread_bytes == other.unread_bytes == 0


def test_a_stream_that_says_too_much_waits_for_the_others() -> None:
    """Guards everybody else's words behind a frame of a hundred thousand records."""
    backlog, loud, quiet = Backlog(), stream(1), stream(2)
    backlog.add(frame(loud, 3 * RECORDS_AT_ONCE))
    backlog.add(frame(quiet, 1))
    heard = list(backlog.take(2 * RECORDS_AT_ONCE))
    assert [part.stream for part in heard] == [loud, quiet, loud]
    assert len(attempts(heard[0])) == RECORDS_AT_ONCE and len(attempts(heard[2])) == RECORDS_AT_ONCE - 1
    assert backlog and loud.unread_bytes > 0 and quiet.unread_bytes == 0
    rest = list(backlog.take(2 * RECORDS_AT_ONCE))
    said = [attempt for part in (heard[0], heard[2], *rest) for attempt in attempts(part)]
    assert said == list(range(3 * RECORDS_AT_ONCE))
    assert not backlog and loud.unread_bytes == 0


def test_an_end_comes_behind_all_that_was_said() -> None:
    backlog, one = Backlog(), stream()
    backlog.add(frame(one, 10))
    backlog.add(StreamEnded(one, "bye"))
    heard = [part for _ in range(12) for part in backlog.take(1)]
    assert [attempts(part) for part in heard[:-1]] == [[at] for at in range(10)]
    assert isinstance(heard[-1], StreamEnded)


def test_frames_of_nothing_count_too() -> None:
    """Guards a turn that never ends for a peer that says nothing, again and again."""
    backlog, one = Backlog(), stream()
    for _ in range(5):
        backlog.add(frame(one, 0))
    assert len(list(backlog.take(3))) == 3 and backlog


def test_what_is_not_of_the_protocol_is_nothing_and_is_let_go() -> None:
    backlog, one = Backlog(), stream()
    one.frame(b"\xc1" * 10)
    backlog.add(FrameIn(one, b"\xc1" * 10))
    (part,) = backlog.take(10)
    assert attempts(part) == [] and one.unread_bytes == 0 and not backlog
