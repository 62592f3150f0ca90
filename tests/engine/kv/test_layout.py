"""The bytes of a KV block, counted by hand. Views of them are in tests/engine/storage/test_paged.py, blocks of another
size or of some heads in tests/transfer/handoff/test_conversion.py, 8 bits in tests/engine/test_eight_bits.py."""

from typing import Any

import msgspec
import pytest

from engine.kv.groups import LayerGroup
from engine.kv.layout import KVLayout, Plane

SIZES = {"kv_heads": 2, "layers": 3, "block_size": 4, "head_dim": 8}


def test_a_block_of_values_as_they_were_computed() -> None:
    layout = KVLayout(**SIZES, dtype="bfloat16")
    assert layout.row_bytes == 16 and layout.scale_bytes == 0
    assert layout.planes == (Plane(0, 16),)
    assert layout.head_bytes == 3 * 2 * 4 * 16 and layout.block_bytes == 2 * layout.head_bytes
    assert layout.pool_shape(5) == (5, 2, 3, 2, 4, 8)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_scales_lie_behind_a_heads_rows(dtype: str) -> None:
    """Guards scales from the rows of the next head: a head's slice, with both, is contiguous."""
    layout = KVLayout(**SIZES, dtype=dtype)
    assert layout.planes == (Plane(0, 8), Plane(3 * 2 * 4 * 8, 4))
    assert layout.head_bytes == 3 * 2 * 4 * (8 + 4)


def test_a_range_of_the_heads() -> None:
    layout = KVLayout(**SIZES | {"kv_heads": 4}, first_head=2, total_heads=8)
    assert layout.heads == range(2, 6)
    part = layout.restricted(range(3, 5))
    assert part.heads == range(3, 5) and part.total_heads == 8 and part.head_bytes == layout.head_bytes
    with pytest.raises(ValueError, match="at least 1"):
        layout.restricted(range(3, 3))


def test_a_begun_block_counts() -> None:
    layout = KVLayout(**SIZES)
    assert [layout.blocks_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_peers_read_what_is_described() -> None:
    """Guards the hello: both must come to the same layout, `total_heads` included."""
    layout = KVLayout(**SIZES)
    assert layout.total_heads == 2
    assert msgspec.convert(layout.describe(), KVLayout) == layout


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "int4"}, "'int4' is not one of"),
        ({"layers": 0}, "at least 1"),
        ({"dtype": "int8", "head_dim": 6}, "unaligned"),
        ({"first_head": 1, "total_heads": 2}, "heads that its model does not have"),
        ({"first_head": -1, "total_heads": 4}, "heads that its model does not have"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        KVLayout(**SIZES | changes)


def test_a_window_may_be_one_key() -> None:
    """Guards a model whose layers see their own position alone."""
    groups = (LayerGroup((0, 1, 2)), LayerGroup((3,), 1))
    assert KVLayout(**SIZES, groups=groups).group_count == 2
    with pytest.raises(ValueError, match="do not fit"):
        KVLayout(**SIZES, groups=(groups[0], LayerGroup((3,), 0)))


def test_layers_that_keep_alike_are_one_group() -> None:
    """Guards a pool without a group, of which nobody could allocate."""
    layout = KVLayout(**SIZES)
    assert layout.group_count == 1 and layout.windows == ()
