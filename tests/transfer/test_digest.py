"""Digests: every valid byte counts, nothing else does, and what the block is counts too."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xxhash

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from engine.types import Incarnation, RequestId
from kernels.reference_blocks import wp64 as reference_wp64
from transfer.digest import Binding, block_digest, combine, is_sampled
from transfer.handoff.negotiation import ALGORITHMS, WP64, digest_shape

LAYOUT = KVLayout(kv_heads=2, layers=3, block_size=4, head_dim=8)
H = Handoff(RequestId("r"), 1, 1, Incarnation(2**64 - 1), Incarnation(3))
BOUND = Binding(H).of(b"i" * 16, 7)


def random_block() -> bytearray:
    return bytearray(np.random.default_rng(0).bytes(LAYOUT.block_bytes))


def valid_bytes(layout: KVLayout, tokens: int) -> Iterator[bool]:
    for byte in range(layout.block_bytes):
        at = byte % layout.head_bytes
        plane = [plane for plane in layout.planes if plane.offset <= at][-1]
        at -= plane.offset
        yield at % (layout.block_size * plane.row_bytes) < tokens * plane.row_bytes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_exactly_the_valid_bytes_count(tokens: int, dtype: str, algorithm: str) -> None:
    """Guards against a digest that skips a layer, a head, the values or the scales, or that reads unused rows."""
    layout = KVLayout(kv_heads=2, layers=3, block_size=4, head_dim=8, dtype=dtype)
    block = random_block()[: layout.block_bytes]
    digest = block_digest(memoryview(block), layout, tokens, BOUND, algorithm)
    for byte, valid in enumerate(valid_bytes(layout, tokens)):
        block[byte] ^= 1
        changed = block_digest(memoryview(block), layout, tokens, BOUND, algorithm) != digest
        block[byte] ^= 1
        assert changed == valid, f"byte {byte}"


def test_wp64_of_a_block_is_made_of_what_a_gpu_finds_in_its_heads() -> None:
    """Guards a pair of which one worker digests on a GPU: the specification's 64 bits of each head, combined alike."""
    block = random_block()
    words = torch.frombuffer(block, dtype=torch.int64).view(LAYOUT.kv_heads, -1)
    for tokens in (1, 4):
        heads = reference_wp64(words, digest_shape(LAYOUT), tokens).tolist()
        unsigned = [head % 2**64 for head in heads]
        wanted = combine(unsigned, tokens, BOUND)
        assert block_digest(memoryview(block), LAYOUT, tokens, BOUND, WP64) == wanted


@pytest.mark.parametrize("tokens", [2, 4])
def test_it_is_what_the_docstring_says(tokens: int) -> None:
    """A slow second computation: gathered rows of a head, in order, are hashed like the slice in place."""
    block = random_block()
    heads = []
    for head in range(LAYOUT.kv_heads):
        rows = b""
        for part in range(LAYOUT.layers * 2):
            start = head * LAYOUT.head_bytes + part * LAYOUT.block_size * LAYOUT.row_bytes
            rows += block[start : start + tokens * LAYOUT.row_bytes]
        heads.append(xxhash.xxh3_64_intdigest(rows))
    summary = tokens.to_bytes(4, "little") + b"".join(h.to_bytes(8, "little") for h in heads)
    expected = xxhash.xxh3_64_intdigest(summary + BOUND)
    assert block_digest(memoryview(block), LAYOUT, tokens, BOUND) == expected


def test_it_is_bound_to_what_the_block_is() -> None:
    """Guards against a right block in the wrong place, of an older life, or of another attempt."""
    view = memoryview(random_block())
    other = [
        Binding(H).of(b"j" * 16, 7),
        Binding(H).of(b"i" * 16, 8),
        Binding(Handoff(H.request, 2, 1, H.decode, H.prefill)).of(b"i" * 16, 7),
        Binding(Handoff(H.request, 1, 2, H.decode, H.prefill)).of(b"i" * 16, 7),
        Binding(Handoff(RequestId("q"), 1, 1, H.decode, H.prefill)).of(b"i" * 16, 7),
        Binding(Handoff(H.request, 1, 1, Incarnation(5), H.prefill)).of(b"i" * 16, 7),
        Binding(Handoff(H.request, 1, 1, H.decode, Incarnation(5))).of(b"i" * 16, 7),
    ]
    digests = {block_digest(view, LAYOUT, 4, bound) for bound in [BOUND, *other]}
    assert len(digests) == len(other) + 1


def test_equal_heads_cannot_change_places() -> None:
    """Guards against a combination that does not know the order of the heads (a sum, say)."""
    block = random_block()
    size = LAYOUT.head_bytes
    swapped = memoryview(block[size:] + block[:size])
    assert block_digest(swapped, LAYOUT, 4, BOUND) != block_digest(
        memoryview(block), LAYOUT, 4, BOUND
    )


@pytest.mark.parametrize("share", [0.0, 1 / 16, 0.5, 1.0])
def test_the_sample_is_the_share_that_was_agreed_on(share: float) -> None:
    draws = [is_sampled(Binding(H).of(bytes([i % 256, i // 256]) * 8, 7), share) for i in range(4000)]
    assert abs(sum(draws) / len(draws) - share) < 0.03


def test_every_attempt_draws_anew() -> None:
    """Guards a sample that leaves out the same block for ever: a spoiled one would pass as often as it is tried."""
    missed = []
    for at in range(200):
        names = [Handoff(H.request, 1, attempt, H.decode, H.prefill) for attempt in range(60)]
        draws = [is_sampled(Binding(name).of(bytes([at]) * 16, 7), 1 / 8) for name in names]
        missed.append(not any(draws))
    assert sum(missed) <= 3, "(7/8)**60 is 0.03 %"


@pytest.mark.parametrize(
    ("nbytes", "tokens"), [(8, 4), (LAYOUT.block_bytes, 0), (LAYOUT.block_bytes, 5)]
)
def test_sizes_that_do_not_fit_raise(nbytes: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        block_digest(memoryview(bytes(nbytes)), LAYOUT, tokens, BOUND)
