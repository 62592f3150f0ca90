"""Capacity on paper: the published worked numbers, to the byte."""

from fractions import Fraction

import msgspec
import pytest

from cluster.plan.planner import (
    KV_FORMATS,
    Shape,
    active_parameters,
    kv_heads_per_rank,
    parameters,
    pool_of,
    rank_shape,
    request,
    token_sizes,
    waste,
    weights_bytes,
)
from cluster.plan.shapes import PUBLISHED
from engine.kv.groups import layer_groups
from engine.kv.layout import KVLayout

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
K = 1024


def shape(layers: int, kv_heads: int, head_dim: int = 128) -> Shape:
    return Shape(name="test", layers=layers, kv_heads=kv_heads, head_dim=head_dim)


def request_bytes(layers: int, kv_heads: int, tokens: int, kv_dtype: str = "bfloat16") -> int:
    return request(token_sizes(shape(layers, kv_heads), kv_dtype, 16), tokens).token_bytes


@pytest.mark.parametrize(
    ("layers", "kv_heads", "per_token"),
    [
        (32, 8, 128 * KIB),
        (80, 8, 320 * KIB),
        (80, 64, 2560 * KIB),
        (80, 1, 40 * KIB),
        (96, 96, 4608 * KIB),
    ],
)
def test_bytes_per_token(layers: int, kv_heads: int, per_token: int) -> None:
    """Guards the factors of the formula: two for key and value, every layer, KV heads instead of query heads."""
    for kv_dtype in ("bfloat16", "float16"):
        assert token_sizes(shape(layers, kv_heads), kv_dtype, 16).token_bytes == per_token
    for kv_dtype in ("fp8", "int8"):
        half = token_sizes(shape(layers, kv_heads), kv_dtype, 16).token_bytes
        assert half * 2 * 128 == per_token * 132


@pytest.mark.parametrize(
    ("layers", "kv_heads", "tokens", "want"),
    [
        (32, 8, 4 * K, 512 * MIB),
        (32, 8, 32 * K, 4 * GIB),
        (80, 8, 4 * K, 1.25 * GIB),
        (80, 8, 8 * K, 2.5 * GIB),
        (80, 8, 32 * K, 10 * GIB),
        (80, 8, 128 * K, 40 * GIB),
        (80, 64, 4 * K, 10 * GIB),
        (80, 1, 4 * K, 160 * MIB),
        (96, 96, 4 * K, 18 * GIB),
        (96, 96, 32 * K, 144 * GIB),
        (32, 32, 1000, 524_288_000),
    ],
)
def test_bytes_per_request(layers: int, kv_heads: int, tokens: int, want: float) -> None:
    assert request_bytes(layers, kv_heads, tokens) == want
    assert request_bytes(layers, kv_heads, tokens, "fp8") * 2 * 128 == want * 132


def test_one_head_at_4k_is_published_as_0_16_gib() -> None:
    assert round(request_bytes(80, 1, 4 * K) / GIB, 2) == 0.16


def test_128_requests_of_4k() -> None:
    assert 128 * request_bytes(80, 8, 4 * K) == 160 * GIB


def test_scales_are_counted() -> None:
    """Guards against an 8-bit cache that is said to be half as large and is not: a 32-bit scale for each head's key and
    value of each token is 4 bytes beside 128."""
    sizes = token_sizes(shape(80, 8), "int8", 16)
    assert sizes.token_bytes == 160 * KIB + 2 * 80 * 8 * 4
    assert sizes.token_bytes * 128 == 160 * KIB * 132


def test_six_full_requests_on_two_ranks() -> None:
    """80 layers of 8 KV heads on two ranks, 8 GiB of KV each, 4 % lost to tails: six requests of 8K tokens."""
    sizes = token_sizes(shape(80, 8), "bfloat16", 16, ranks=2)
    assert sizes.rank_token_bytes == 160 * KIB
    blocks = request(sizes, 8 * K).blocks
    pool = pool_of("rank", sizes, blocks, kv_bytes=8 * GIB, tail_share=Fraction(4, 100))
    assert (pool.blocks, pool.requests) == (3276, 6)
    assert 0.04 <= pool.tail_bytes / pool.kv_bytes < 0.0404
    # A seventh is far away without the tail too, and 20 % of tail cost one.
    assert pool_of("rank", sizes, blocks, kv_bytes=8 * GIB).requests == 6
    lossy = pool_of("rank", sizes, blocks, kv_bytes=8 * GIB, tail_share=Fraction(1, 5))
    assert lossy.requests == 5


@pytest.mark.parametrize(
    ("heads", "ranks", "held"), [(8, 2, 4), (8, 3, 8), (1, 4, 1), (8, 8, 1), (8, 16, 1), (8, 1, 8)]
)
def test_kv_heads_per_rank(heads: int, ranks: int, held: int) -> None:
    """Guards against a head that no rank holds: where they do not divide, every rank keeps all."""
    assert kv_heads_per_rank(heads, ranks) == held
    sizes = token_sizes(shape(80, heads), "bfloat16", 16, ranks)
    assert sizes.rank_token_bytes == held * 40 * KIB
    assert sizes.token_bytes == heads * 40 * KIB


def test_reserving_the_maximum_wastes_most_of_it() -> None:
    sizes = token_sizes(shape(80, 8), "bfloat16", 16)
    lost = waste(sizes, [600, 1250, 4000, 128], 8192)
    assert sizes.token_bytes == 320 * KIB
    assert f"{lost.reserved_waste:.1%}" == "81.8%"
    assert (lost.reserved_bytes, lost.live_bytes) == (10 * GIB, 5978 * 320 * KIB)
    assert lost.paged_tokens == 608 + 1264 + 4000 + 128
    assert f"{lost.paged_waste:.2%}" == "0.37%"


@pytest.mark.parametrize(
    ("tokens", "blocks", "tail"), [(505, 32, 7), (1000, 63, 8), (4096, 256, 0)]
)
def test_the_tail_of_a_request(tokens: int, blocks: int, tail: int) -> None:
    sizes = token_sizes(shape(32, 8), "bfloat16", 16)
    one = request(sizes, tokens)
    assert (one.blocks, one.tail_tokens) == (blocks, tail)
    assert one.rank_block_bytes == one.token_bytes + one.rank_tail_bytes


@pytest.mark.parametrize("dtype", list(KV_FORMATS))
def test_blocks_are_those_of_the_engine(dtype: str) -> None:
    """Guards against a second opinion on what a block takes."""
    layout = KVLayout(kv_heads=3, layers=30, block_size=16, head_dim=64, dtype=dtype)
    assert token_sizes(shape(30, 3, 64), dtype, 16).rank_block_bytes == layout.block_bytes


def test_memory_is_shared_out_in_whole_blocks() -> None:
    sizes = token_sizes(shape(32, 8), "bfloat16", 16)
    parts = {"memory_bytes": 24 * GIB, "reserve_bytes": 2 * GIB, "weights": 15 * GIB}
    pool = pool_of("GPU", sizes, 256, **parts, workspace=GIB + 1)
    assert pool.blocks == 6 * GIB // sizes.rank_block_bytes - 1, "one byte short of the last block"
    assert pool.kv_bytes == pool.blocks * sizes.rank_block_bytes
    assert (pool.requests, pool.missing_bytes) == (11, 0)


def test_what_does_not_fit_says_by_how_much() -> None:
    sizes = token_sizes(shape(32, 8), "bfloat16", 16)
    pool = pool_of("GPU", sizes, 256, memory_bytes=8 * GIB, weights=15 * GIB)
    assert (pool.blocks, pool.tokens, pool.requests) == (0, 0, 0)
    assert pool.missing_bytes == 7 * GIB + sizes.rank_block_bytes


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
        ("smollm2-1.7b", 1_711_376_384),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-2-27b", 27_227_128_320),
        ("gemma-3-270m", 268_098_176),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-4b", 3_880_263_168),
        ("gemma-3-12b", 11_766_034_176),
        ("gemma-3-27b", 27_009_346_304),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("granite-3.1-8b", 8_170_848_256),
        ("mistral-nemo", 12_247_782_400),
        ("mistral-small-24b", 23_572_403_200),
        ("olmo-2-7b", 7_298_617_344),
        ("olmo-2-13b", 13_716_198_400),
        ("phi-3.5-mini", 3_821_079_552),
        ("phi-4", 14_659_507_200),
        ("phi-4-mini", 3_836_021_760),
        ("smollm3-3b", 3_075_098_624),
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(
    name: str, published: int
) -> None:
    """Guards against a size that was copied wrongly: one wrong figure moves the sum."""
    assert parameters(PUBLISHED[name]) == published


def test_a_token_meets_few_of_the_experts() -> None:
    """Guards active sizes: 12.9 billion of Mixtral's 46.7, and 3.3 of Qwen3-30B-A3B's, as their publishers say."""
    mixtral, qwen = PUBLISHED["mixtral-8x7b"], PUBLISHED["qwen3-30b-a3b"]
    assert [round(active_parameters(model) / 1e9, 1) for model in (mixtral, qwen)] == [12.9, 3.4]
    # 5.13 are said to be active of gpt-oss-120b, the embedding, which is looked up, not among them.
    large = PUBLISHED["gpt-oss-120b"]
    assert round((active_parameters(large) - large.vocab * large.hidden) / 1e9, 2) == 5.13
    assert active_parameters(PUBLISHED["llama-3-8b"]) == parameters(PUBLISHED["llama-3-8b"])
    # On two ranks each has half of every expert, and all of the router.
    assert mixtral.experts is not None
    half = rank_shape(mixtral, 2)
    assert half.experts is not None and half.experts.width * 2 == mixtral.experts.width
    assert half.experts.count == 8


def test_weights_are_split_over_ranks() -> None:
    """Guards against norms that vanish and KV heads that are split though they must be repeated."""
    whole = PUBLISHED["llama-3.1-8b"]
    norms = (2 * 32 + 1) * 4096
    tables = whole.context_tokens * whole.head_dim
    each = weights_bytes(whole, "bfloat16", 4) / 2 - norms - tables
    assert each * 4 == parameters(whole) - norms
    repeated = rank_shape(whole, 3)
    assert (repeated.kv_heads, repeated.heads) == (8, 16)
    assert parameters(repeated) > parameters(whole) / 3


def test_a_longer_context_costs_its_rotary_tables() -> None:
    short = PUBLISHED["llama-3-8b"]
    long = msgspec.structs.replace(short, context_tokens=2 * short.context_tokens)
    more = weights_bytes(long, "float32") - weights_bytes(short, "float32")
    assert more == short.context_tokens * 128 * 4


def test_windows_keep_no_more_than_their_window() -> None:
    """Guards a plan that counts windows' layers for all of a long sequence: Gemma 3 270M, by hand."""
    model = PUBLISHED["gemma-3-270m"]
    kinds = [0 if layer % 6 == 5 else 512 for layer in range(model.layers)]
    plain = Shape(name="gemma", layers=18, kv_heads=1, head_dim=256)
    grouped = msgspec.structs.replace(plain, groups=layer_groups(kinds))
    whole, sizes = token_sizes(plain, "bfloat16", 16), token_sizes(grouped, "bfloat16", 16)
    assert sizes.token_bytes == whole.token_bytes
    assert sizes.rank_block_bytes == whole.rank_block_bytes // 6, "a block has three layers of eighteen"
    assert (sizes.block_layers, len(sizes.windows)) == (3, 5)
    short, long = request(sizes, 512), request(sizes, 8192)
    assert short.token_bytes == request(whole, 512).token_bytes, "it fits into its windows"
    assert long.token_bytes == (3 * 8192 + 15 * 512) * 2 * 256 * 2
    assert (long.blocks, long.window_blocks) == (512 + 5 * 33, 5 * 33)
    assert long.rank_block_bytes < 0.23 * request(whole, 8192).rank_block_bytes
    # A step of so many tokens is computed before anything slides away.
    assert request(sizes, 8192, step_tokens=128).window_blocks == 5 * 41
    pool = pool_of("rank", sizes, long.blocks, kv_bytes=long.rank_block_bytes)
    assert (pool.requests, pool.tokens, pool.blocks) == (1, 8192, long.blocks)
    layout = KVLayout(kv_heads=1, layers=3, block_size=16, head_dim=256, dtype="bfloat16", groups=grouped.groups)
    assert sizes.rank_block_bytes == layout.block_bytes


def test_groups_of_a_short_pool() -> None:
    """Guards the longest sequence of a pool that is smaller than the windows."""
    groups = layer_groups([0, 64])
    sizes = token_sizes(Shape(name="g", layers=2, kv_heads=1, head_dim=8, groups=groups), "float32", 16)
    tail = groups[1].tail_blocks(16)
    longest = [pool_of("p", sizes, 1, kv_bytes=n * sizes.rank_block_bytes).tokens // 16 for n in range(1, 30)]
    assert longest == [max(k for k in range(n + 1) if k + min(k, tail) <= n) for n in range(1, 30)]
