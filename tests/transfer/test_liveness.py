"""When a thread, or a stream of bytes, is stuck: the judge of time, without a clock."""

from transfer.liveness import Watchdog


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
