"""What two hellos settle, and what they refuse. The streams that carry them are in tests/decode_worker/test_peer.py,
blocks of the forms settled on in test_conversion.py and tests/transfer/host/test_repacked.py."""

from typing import Any

import msgspec
import pytest

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Hello, RankEndpoint, WorkerInfo
from engine.types import Incarnation
from transfer.handoff.negotiation import (
    AS_STORED,
    MAX_PEER_RANKS,
    WP64,
    Agreement,
    NegotiationError,
    check_whole,
    common_heads,
    held_heads,
    narrow_bytes,
    negotiate,
    unit,
)

RANK = RankEndpoint(first_head=0, kv_heads=4, details=[{}])


def _layout(heads: range = range(4), **changes: Any) -> KVLayout:
    sizes = {"layers": 2, "block_size": 4, "head_dim": 8, **changes}
    return KVLayout(kv_heads=len(heads), first_head=heads.start, total_heads=4, **sizes)


def _hello(layout: KVLayout, model: str = "m", fingerprint: str = "f", **changes: Any) -> Hello:
    info = WorkerInfo(
        name="w", role="prefill", incarnation=Incarnation(1), address="a:1", model=model, fingerprint=fingerprint,
        block_size=4, blocks=8, context_tokens=64, pid=1, host="h",
    )  # fmt: skip
    return Hello(info=info, layout=layout.describe(), endpoints=[], **changes)


def test_both_come_to_the_same_result() -> None:
    small, large = _layout(range(1, 4)), _layout(block_size=16)
    here, there = _hello(small, digest_share=0.1), _hello(large, digest_share=0.5)
    assert negotiate(here, there) == Agreement(large, 0.5)
    assert negotiate(there, here) == Agreement(small, 0.5), "the larger share of both holds"


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        ({"protocol": 1}, {"protocol": 2}, "its protocol is 2, this worker's is 1"),
        ({"model": "a"}, {"model": "b"}, "its model is b, this worker's is a"),
        ({"fingerprint": "a"}, {"fingerprint": "b"}, "its model fingerprint is b, this worker's is a"),
        ({"digest": "xxh3-64"}, {"digest": "wp64"}, "its digest is wp64, this worker's is xxh3-64"),
        ({"digest": "crc"}, {"digest": "crc"}, "there is no digest 'crc'"),
        ({"wire": "zstd"}, {"wire": "zstd"}, "there is no form 'zstd' to travel in"),
        ({}, {"digest_share": 1.5}, "1.5 is no share"),
        ({}, {"digest_share": float("nan")}, "nan is no share"),
    ],
)
def test_a_difference_is_refused_with_both_values(mine: dict[str, Any], theirs: dict[str, Any], why: str) -> None:
    with pytest.raises(NegotiationError, match=why):
        negotiate(_hello(_layout(), **mine), _hello(_layout(), **theirs))


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (_layout(dtype="bfloat16"), "its dtype is bfloat16, this worker's is float32"),
        (_layout(layers=3), "its number of layers is 3, this worker's is 2"),
        (_layout(head_dim=16), "its head size is 16, this worker's is 8"),
        (KVLayout(kv_heads=2, total_heads=8, layers=2, block_size=4, head_dim=8), "its number of KV heads is 8"),
        (_layout(range(2, 4)), "it holds KV heads 2 to 3 of 4, this worker KV heads 0 to 1 of 4"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(theirs: KVLayout, why: str) -> None:
    with pytest.raises(NegotiationError, match=why):
        negotiate(_hello(_layout(range(2))), _hello(theirs))


def test_a_hello_that_is_no_layout_is_refused() -> None:
    """Guards the stream's thread from a peer that says anything at all."""
    strange = msgspec.structs.replace(_hello(_layout()), layout={"kv_heads": "all"})
    with pytest.raises(NegotiationError, match="is not a KV layout"):
        negotiate(_hello(_layout()), strange)


def test_a_refusal_is_no_longer_than_a_few_lines() -> None:
    """Guards the log against a peer whose hello is refused, and as long as a message may be."""
    mine, long = _hello(_layout()), "x" * 1_000_000
    dtype = msgspec.structs.replace(mine, layout={**mine.layout, "dtype": long})
    unknown = msgspec.structs.replace(mine, layout={long: long})
    for theirs in (_hello(_layout(), model=long), dtype, unknown, _hello(_layout(), wire=long)):
        with pytest.raises(NegotiationError, match=r"x{300}") as refused:
            negotiate(mine, theirs)
        assert len(str(refused.value)) < 1000


def test_a_peer_has_no_more_ranks_than_a_host() -> None:
    """Guards both sides from work that grows with what a peer says."""
    fits, over = (
        msgspec.structs.replace(_hello(_layout()), endpoints=[Endpoint(transport="shm", ranks=[RANK] * ranks)])
        for ranks in (MAX_PEER_RANKS, MAX_PEER_RANKS + 1)
    )
    assert negotiate(fits, fits)
    with pytest.raises(NegotiationError, match="it has 257 ranks, and may have 256"):
        negotiate(fits, over)


def test_what_travels_is_the_senders_block_of_the_common_heads() -> None:
    sender, receiver = _layout(range(1, 4), block_size=16), _layout(range(3), block_size=4)
    form = unit(sender, receiver)
    assert form.heads == range(1, 3) and form.block_size == 16 and form.dtype == "float32"
    assert unit(sender, receiver, "int8").dtype == "int8"
    assert held_heads(form, sender) == slice(0, 2) and held_heads(form, receiver) == slice(1, 3)
    with pytest.raises(ValueError, match="does not fit into"):
        held_heads(sender, receiver)
    with pytest.raises(ValueError, match="does not fit into"):
        held_heads(receiver, sender)


def test_one_sender_must_have_all_heads() -> None:
    """Guards a handoff whose other heads nobody would ever send."""
    assert common_heads(_layout(range(3)), _layout(range(1, 4))) == range(1, 3)
    check_whole(_layout(), _layout(range(1, 3)))
    with pytest.raises(NegotiationError, match="needs KV heads 0 to 3 of 4 from one sender"):
        check_whole(_layout(range(1, 3)), _layout())


def test_only_a_wire_carries_fewer_bytes() -> None:
    layout = _layout()
    narrow = Agreement(layout, wire="int8")
    assert narrow_bytes(layout, narrow, "tcp") == 4 * 2 * 2 * 4 * (8 + 4)
    assert narrow_bytes(layout, narrow, "shm") == narrow_bytes(layout, Agreement(layout, wire=AS_STORED), "tcp") == 0


@pytest.mark.parametrize(
    ("dtype", "mine", "theirs", "agreed"),
    [
        ("float32", "int8", "int8", "int8"),
        ("float32", "int8", AS_STORED, AS_STORED),
        ("float32", AS_STORED, "int8", AS_STORED),
        ("int8", "fp8", "fp8", AS_STORED),
    ],
)
def test_blocks_are_narrowed_where_both_ask_for_it_and_store_more(
    dtype: str, mine: str, theirs: str, agreed: str
) -> None:
    """Guards rows that one side narrows and the other takes for values, and 8 bits that are rounded twice."""
    layout = _layout(dtype=dtype)
    assert negotiate(_hello(layout, wire=mine), _hello(layout, wire=theirs)).wire == agreed


def test_digests_may_be_left_out_by_both() -> None:
    hello = _hello(_layout(), digest_share=0.0)
    assert negotiate(hello, hello).digest_share == 0.0


def test_words_of_64_bits_are_asked_for_in_every_form_that_travels() -> None:
    """Guards a digest that fails at the first block, long after the hellos."""
    fits = _hello(_layout(), digest=WP64)
    assert negotiate(fits, fits).digest == WP64
    for layout, wire in ((_layout(head_dim=1, block_size=1), AS_STORED), (_layout(head_dim=4), "int8")):
        hello = _hello(layout, digest=WP64, wire=wire)
        with pytest.raises(NegotiationError, match="have no wp64 digest"):
            negotiate(hello, hello)
