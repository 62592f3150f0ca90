"""The benchmark of a device that is kept busy, in small: what it shows at full size depends on the machine."""

from benchmarks.overlap import measure


def test_a_device_waits_for_its_next_step_unless_it_is_planned_ahead() -> None:
    """Guards the overlap itself, with steps far longer than planning takes; the figure without it is not zero."""
    alone, ahead = (measure(rows=8, context=300, step_s=0.02, steps=15, ahead=way) for way in (False, True))
    assert alone.idle_ms > 0.0 and ahead.idle_ms == 0.0
    assert abs(ahead.step_ms - 20.0) < 1e-6 < alone.step_ms - 20.0
    assert ahead.busy > alone.busy > 0.3
