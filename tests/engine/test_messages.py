"""Frames of records: how several become one."""

import pytest

from engine.messages import Cancel, Tokens, decode_router_frame, decode_worker_frame, encode, joined
from engine.types import FinishReason, RequestId

R = RequestId("r")


@pytest.mark.parametrize("counts", [(1,), (1, 1), (0, 2), (7, 8), (15, 1), (16, 0, 3), (9, 70_000, 1)])
def test_a_frame_of_several_has_all_their_records_in_order(counts: tuple[int, ...]) -> None:
    """Guards every head that a list of records may have: of 15 at most, of 65,535, and of more."""
    made, records = [], []
    for count in counts:
        some = [Tokens(R, 1, len(records) + at, [at]) for at in range(count)]
        made.append(encode(some))
        records += some
    assert list(decode_worker_frame(joined(made))) == records


def test_what_is_no_list_of_records_is_joined_to_nothing() -> None:
    cancel = Cancel(R, 1, FinishReason.CANCELLED)
    with pytest.raises(ValueError, match="list of records"):
        joined([encode([cancel]), b"\x81\xa1a\x01"])
    assert decode_router_frame(joined([encode([cancel])])) == [cancel]
