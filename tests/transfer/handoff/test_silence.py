"""Who is called silent, and when a thread is stuck: two small judges of time, without a clock."""

from engine.messages import Handoff
from engine.types import Incarnation, RequestId
from transfer.handoff.silence import Silence
from transfer.watchdog import Watchdog

ONE, TWO, ME = Incarnation(1), Incarnation(2), Incarnation(9)


def kept(*readers: Incarnation) -> list[Handoff]:
    return [Handoff(RequestId(f"r{n}"), 1, 0, reader, ME) for n, reader in enumerate(readers)]


def test_a_reader_is_silent_after_a_while_and_not_before() -> None:
    """Guards the first step of the ladder: nobody is accused for a cut that mends itself."""
    silence = Silence(5.0)
    assert silence.overdue(kept(ONE), 10.0) == []
    assert silence.overdue(kept(ONE, ONE, TWO), 14.0) == []
    assert silence.overdue(kept(ONE, TWO), 15.0) == [ONE]
    assert silence.overdue(kept(TWO, ONE), 19.0) == [ONE, TWO]


def test_a_quarantine_that_ended_counts_no_more() -> None:
    """Guards a reader that came back and is lost again much later."""
    silence = Silence(5.0)
    silence.overdue(kept(ONE), 0.0)
    assert silence.overdue(kept(), 4.0) == []
    assert silence.overdue(kept(ONE), 6.0) == []
    assert silence.overdue(kept(ONE), 11.0) == [ONE]


def test_a_thread_without_progress_is_stuck() -> None:
    dog = Watchdog(2.0)
    assert not any(dog.is_stuck(beat, 0.25 * n) for n, beat in enumerate(range(50)))
    looks = [dog.is_stuck(49, 12.5 + 0.25 * n) for n in range(9)]
    assert looks == [False] * 7 + [True] * 2
    assert not dog.is_stuck(50, 15.0)


def test_a_thread_with_nothing_to_do_is_not_stuck() -> None:
    dog = Watchdog(2.0)
    assert not any(dog.is_stuck(None, float(n)) for n in range(60))


def test_a_process_that_was_stopped_is_not_stuck() -> None:
    """Guards against a worker that ends itself because it was frozen in the middle of a copy."""
    dog = Watchdog(2.0)
    dog.is_stuck(7, 0.0)
    dog.is_stuck(7, 0.25)
    assert not dog.is_stuck(7, 600.0)
    assert not dog.is_stuck(8, 600.25)
