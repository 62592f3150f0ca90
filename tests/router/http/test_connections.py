"""Which connections are kept where there is no room for all: decided by a table, against a plain model of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import FrontLimits
from router.descriptors import LEAST, RESERVE, front_connections, grpc_options
from router.http.connections import ConnectionTable

STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "answered", "waits", "remove"]), st.integers(0, 11), st.sampled_from("ab"))
)


@given(STEPS)
def test_no_step_passes_a_limit_and_no_answer_is_given_up(steps: list[tuple[str, int, str]]) -> None:
    """Guards a client whose answer is under way from those who hold connections open."""
    table: ConnectionTable[int] = ConnectionTable(4, 3)
    open_now: dict[int, str] = {}
    waiting: list[int] = []
    for what, one, address in steps:
        if what == "admit" and one not in open_now:
            same = [other for other in waiting if open_now[other] == address]
            full_address = list(open_now.values()).count(address) >= 3
            expected = None
            if full_address or len(open_now) >= 4:
                room = same if full_address else waiting
                expected = room[0] if room else None
                taken = expected is not None
            else:
                taken = True
            assert table.admit(one, address) == (taken, expected)
            if expected is not None:
                waiting.remove(expected)
                del open_now[expected]
            if taken:
                open_now[one] = address
                waiting.append(one)
        elif what == "answered":
            table.answered(one)
            waiting = [other for other in waiting if other != one]
        elif what == "waits":
            table.waits(one)
            if one in open_now and one not in waiting:
                waiting.append(one)
        elif what == "remove":
            table.remove(one)
            open_now.pop(one, None)
            waiting = [other for other in waiting if other != one]
        table.check()
        assert len(table) == len(open_now)


@pytest.mark.parametrize(
    ("wanted", "may_open", "are_open", "expected"),
    [
        ([1024, 1024], 1_000_000, 40, [1024, 1024]),
        ([1024, 1024], 256, 40, [(256 - 40 - RESERVE) // 2] * 2),
        ([1024, 1024], 1024, 60, [450, 450]),
        ([1024, 1024], 64, 60, [LEAST, LEAST]),
        ([16_384, 16_384], 20_000, 40, [9_948, 9_948]),
        ([1024, 16_384], 20_000, 40, [1024, 16_384]),
        ([16_384, 1024], 10_000, 36, [8_876, 1024]),
        ([5_000, 100, 5_000], 5_000, 36, [2_400, 100, 2_400]),
    ],
)
def test_the_fronts_share_the_descriptors_that_are_left(
    wanted: list[int], may_open: int, are_open: int, expected: list[int]
) -> None:
    """Guards a process that accepts until it cannot open anything any more, and one that keeps half of what it may open
    for a front that nobody asks."""
    assert front_connections(wanted, may_open=may_open, are_open=are_open) == expected


def test_grpc_is_told_the_same_limits() -> None:
    told = dict(grpc_options(FrontLimits(header_s=2.5, idle_s=30), 77))
    assert told["grpc.max_allowed_incoming_connections"] == 77
    assert told["grpc.server_handshake_timeout_ms"] == 2500
    assert told["grpc.max_connection_idle_ms"] == 30_000
    assert told["grpc.server.max_pending_requests"] == 1000
    assert dict(grpc_options(FrontLimits(), 5000))["grpc.server.max_pending_requests"] == 5000
