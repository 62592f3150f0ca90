"""Frames of records: how several become one, and numbers that are in none."""

from typing import Any

import msgspec
import pytest

from engine.messages import (
    BlockOffer,
    Cancel,
    Handoff,
    Offer,
    Tokens,
    decode_from_prefill_frame,
    decode_router_frame,
    decode_worker_frame,
    encode,
    joined,
)
from engine.types import BlockId, FinishReason, Incarnation, RequestId

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


@pytest.mark.parametrize(
    ("path", "number"),
    [
        (("seq",), 1 << 32),
        (("seq",), -1),
        (("handoff", "decode"), -1),
        (("handoff", "prefill"), -1),
        (("blocks", 0, "source"), -1),
        (("blocks", 0, "source"), 1 << 63),
        (("blocks", 0, "generation"), -1),
    ],
)
def test_an_offer_with_a_number_that_cannot_be_is_no_frame(path: tuple[Any, ...], number: int) -> None:
    """Guards a worker whose transfer thread packs these numbers, for every chunk."""
    handoff = Handoff(RequestId("r"), 1, 1, Incarnation(1), Incarnation(2))
    offer = Offer(handoff, 0, [BlockOffer(BlockId(0), 1, 0, 4, 5)])
    said = msgspec.to_builtins([offer])
    assert decode_from_prefill_frame(msgspec.msgpack.encode(said)) == [offer]
    inner = said[0]
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = number
    with pytest.raises(msgspec.ValidationError):
        decode_from_prefill_frame(msgspec.msgpack.encode(said))
