"""Which models are divided among ranks, and which sizes are refused by their name."""

import msgspec
import pytest

from engine.model.config import ExpertOptions, ModelConfig
from engine.model.split import Share, check_split
from tests.engine.backends.test_layer_options import SHAPE

WHOLE = msgspec.structs.replace(SHAPE, heads=12, kv_heads=6, intermediate=96, vocab=100)


@pytest.mark.parametrize(
    ("ranks", "sizes", "said"),
    [
        (5, {}, "12 heads"),
        (4, {}, "6 KV heads"),
        (2, {"intermediate": 97}, "97 rows of the feed-forward layers"),
        (2, {"experts": ExpertOptions(count=4, chosen=2, width=33), "intermediate": 97}, "33 rows of the experts"),
        (12, {"vocab": 11}, "11 tokens"),
    ],
)
def test_a_size_that_does_not_divide_is_named(ranks: int, sizes: dict[str, object], said: str) -> None:
    """Guards a part that no rank has, and a refusal that sends its reader to another size; of a mixture, whose layers
    have no other feed-forward part, the width of that does not matter."""
    with pytest.raises(ValueError, match=f"{said} of .* do not divide by {ranks}"):
        check_split(msgspec.structs.replace(WHOLE, **sizes), ranks)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 6), (3, 6), (6, 6), (12, 6), (4, 2), (4, 1)])
def test_every_kv_head_is_with_the_ranks_of_its_queries(ranks: int, kv_heads: int) -> None:
    """Guards replicas: with more ranks than KV heads, runs of ranks have one, those whose queries read it."""
    config = msgspec.structs.replace(WHOLE, kv_heads=kv_heads)
    check_split(config, ranks)
    group = config.heads // kv_heads
    for rank in range(ranks):
        share = Share(rank, ranks)
        assert {head // group for head in share.even(config.heads)} == set(share.kv_heads(config))


def test_the_whole_model_is_divided_by_one() -> None:
    assert isinstance(WHOLE, ModelConfig)
    check_split(msgspec.structs.replace(WHOLE, heads=7, kv_heads=7, intermediate=5), 1)
