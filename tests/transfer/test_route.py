"""The form of blocks on the way to one peer, and their digests. Routes of whole workers are in test_mover.py, of blocks
of another size in handoff/test_conversion.py, in 8 bits in host/test_repacked.py, on devices in gpu/test_warmup.py."""

from collections.abc import Iterator

import numpy as np
import pytest

from engine.kv.layout import KVLayout
from engine.storage.paged import PagedKV
from engine.types import BlockId
from tests.transfer.pair import PREFILL, H
from transfer.digest import Tally
from transfer.handoff.commands import IncomingBlock, OutgoingBlock, PostRecv, PostSend, Rows
from transfer.handoff.negotiation import AS_STORED, Agreement
from transfer.host.landing import InPlace
from transfer.host.repacked import Repacked
from transfer.route import Route
from transfer.transport import BlockSlice, Move

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=8)
HALF = LAYOUT.restricted(range(1, 2))


@pytest.fixture
def pool() -> Iterator[PagedKV]:
    pool = PagedKV(LAYOUT, 4)
    pool.block(BlockId(0))[:] = np.random.default_rng(1).bytes(LAYOUT.block_bytes)
    yield pool
    pool.close()


class Way:
    """As much of a transport as a route looks at."""

    def __init__(self, reads_remotely: bool) -> None:
        self.reads_remotely = reads_remotely


def _route(
    pool: PagedKV, peer: KVLayout = LAYOUT, share: float = 1.0, wire: str = AS_STORED, reads: bool = False
) -> Route:
    agreement = Agreement(peer, share, wire=wire)
    return Route(Way(reads), pool, LAYOUT, agreement, Tally())  # type: ignore[arg-type]


SEND = PostSend(PREFILL, Move(H, 0, (BlockId(0),)), (OutgoingBlock(BlockId(0), 7, 0, 4, b"i" * 16),))


def _recv(digest: int) -> PostRecv:
    block = IncomingBlock((Rows(0, BlockId(0), 0, 4),), 7, 4, b"i" * 16, digest)
    return PostRecv(PREFILL, Move(H, 0, remote=((BlockId(0), 7),)), (block,))


def test_only_the_common_heads_travel(pool: PagedKV) -> None:
    route = _route(pool, HALF)
    assert route.sent == BlockSlice(LAYOUT.head_bytes, LAYOUT.head_bytes, LAYOUT.block_bytes)
    assert route.received == BlockSlice(0, LAYOUT.head_bytes, LAYOUT.head_bytes)
    with pytest.raises(ValueError, match="at least 1"):
        Route(Way(False), pool, LAYOUT.restricted(range(1)), Agreement(HALF), Tally())  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_digest_fits_what_landed_and_nothing_else(pool: PagedKV, share: float) -> None:
    route = _route(pool, share=share)
    (digest,) = route.digests(SEND, None)
    assert bool(digest) == bool(share)
    landing = route.landing(_recv(digest))
    assert isinstance(landing, InPlace) and not isinstance(landing, Repacked)
    landing.landed(0)
    assert landing.wrong == 0
    pool.block(BlockId(0))[0] ^= 1
    landing.landed(0)
    assert landing.wrong == int(share), "without an agreement nothing is compared"


def test_a_digest_covers_the_heads_that_travel(pool: PagedKV) -> None:
    """Guards a receiver of some heads: it cannot check the bytes of the others."""
    route = _route(pool, HALF)
    before = route.digests(SEND, None)
    pool.block(BlockId(0))[0] ^= 1
    assert route.digests(SEND, None) == before
    pool.block(BlockId(0))[LAYOUT.head_bytes] ^= 1
    assert route.digests(SEND, None) != before


@pytest.mark.parametrize("reads", [False, True])
def test_only_what_is_pushed_is_packed(pool: PagedKV, reads: bool) -> None:
    route = _route(pool, wire="int8", reads=reads)
    packed = route.pack(SEND)
    if reads:
        assert packed is None and route.sent.nbytes == LAYOUT.block_bytes
    else:
        (view,) = packed
        assert view.nbytes == route.sent.nbytes < LAYOUT.block_bytes
        assert isinstance(route.landing(_recv(0)), Repacked)
