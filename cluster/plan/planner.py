"""Capacity on paper: what a token, a request and a pool of KV blocks take, from sizes alone. Pure integers.

A token's KV is 2 x layers x KV heads x (head size x bytes of a value + bytes of its scales): the 2 is one key and one
value. Under tensor parallelism every rank holds its own KV heads of every block. A request takes whole blocks; what its
last one does not use is its *tail*. A pool is what memory leaves after weights, workspace and a reserve:

    KV = memory - reserve - weights - workspace
    requests = floor(floor(KV / block bytes) x (1 - tail share) / blocks of a request)

A model whose layers are kept in groups (docs/layer-groups.md) has blocks of as many layers as the first group. A
request takes that group's for all of its tokens, and of each window's group no more than its window and what is being
computed behind it.

The byte order inside a block is `engine.kv.layout`'s, and so are the sizes, which a test compares.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec

from engine.kv.groups import LayerGroup
from engine.kv.layout import DTYPE_BYTES, KV_DTYPES
from engine.model.config import ModelConfig
from engine.model.families import FAMILIES, Weight


class KVFormat(msgspec.Struct, frozen=True):
    """How a pool stores a value. `scale_bytes`: the scale beside each head's key, and each head's value, of each token.
    """

    value_bytes: int
    scale_bytes: int = 0


KV_FORMATS = {
    name: KVFormat(DTYPE_BYTES.get(name, 1), scale) for name, scale in KV_DTYPES.items()
}
"""8-bit values have a 32-bit scale for each token and head, keys and values apart."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model that its KV depends on; `model` where all of its sizes are known."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    context_tokens: int = 0
    """The longest context; 0 where unknown."""
    groups: tuple[LayerGroup, ...] = ()
    """Its layers' groups, where it has several."""
    stored: str = "bfloat16"
    """How the model's weights are kept (`engine.model.prepared.cache.stored_dtype`)."""
    model: ModelConfig | None = None
    not_run: str = ""
    """Why this engine does not run such a model; empty where it does, or nothing but the sizes is known."""


class TokenSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of KV memory, in bytes; those that begin with `rank_` are per rank."""

    kv_heads_per_rank: int
    token_bytes: int
    """Bytes of one token in the whole model: every head once, however often ranks repeat it."""
    rank_token_bytes: int
    block_size: int
    block_bytes: int
    rank_block_bytes: int
    block_layers: int
    """Layers that a block holds: all, or those of one group."""
    groups: tuple[LayerGroup, ...] = ()

    @property
    def windows(self) -> tuple[LayerGroup, ...]:
        """The groups that keep their window alone."""
        return self.groups[1:]


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of `tokens` tokens."""

    tokens: int
    token_bytes: int
    """Bytes of all its tokens, as far as its layers keep them; all ranks together, every head once."""
    rank_token_bytes: int
    blocks: int
    """Blocks of all its groups of layers."""
    window_blocks: int
    """Those of them that groups with a window have."""
    rank_block_bytes: int
    """What its blocks take on each rank."""
    tail_tokens: int
    rank_tail_bytes: int


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's memory, in bytes, and what fits into it. `weights_bytes` and `workspace_bytes` are None where unknown.
    """

    name: str
    memory_bytes: int | None
    reserve_bytes: int
    weights_bytes: int | None
    workspace_bytes: int | None
    kv_bytes: int
    """Bytes of whole blocks."""
    blocks: int
    tokens: int
    tail_share: float
    tail_bytes: int
    """Bytes lost to the assumed tails of requests whose lengths are mixed."""
    missing_bytes: int
    """How far weights, workspace and reserve alone exceed the memory, or by how much one block does."""
    requests: int
    """Requests of full length that fit at once."""
    draft_weights_bytes: int = 0
    draft_kv_bytes: int = 0
    """What a draft model takes beside all that, if there is one."""


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """A mix of lengths in contiguous reservations, and in blocks. Bytes count all ranks, every head once."""

    live_tokens: int
    reserved_tokens: int
    reserved_waste: float
    """The share of what is reserved that holds no token."""
    paged_tokens: int
    paged_waste: float
    live_bytes: int
    reserved_bytes: int
    paged_bytes: int


def kv_heads_per_rank(kv_heads: int, ranks: int) -> int:
    """Return how many KV heads each rank holds. Heads are dealt out where they divide evenly; ranks that outnumber them
    in whole multiples share one head each; otherwise every rank keeps all of them."""
    if kv_heads % ranks == 0:
        return kv_heads // ranks
    return 1 if ranks % kv_heads == 0 else kv_heads


def rank_shape(model: ModelConfig, ranks: int) -> ModelConfig:
    """Return the model as one of `ranks` holds it: heads, intermediate and vocabulary split, padded where they do not
    divide; norms and the residual stream whole (Megatron-LM, arXiv 1909.08053)."""
    kv_heads = kv_heads_per_rank(model.kv_heads, ranks)
    heads = -(-model.heads // ranks)
    return msgspec.structs.replace(
        model,
        heads=-(-heads // kv_heads) * kv_heads,
        kv_heads=kv_heads,
        intermediate=-(-model.intermediate // ranks),
        experts=model.experts and msgspec.structs.replace(model.experts, width=-(-model.experts.width // ranks)),
        vocab=-(-model.vocab // ranks),
    )


def parameters(model: ModelConfig) -> int:
    """Count the weights of a model of this shape, by its family's table."""
    return sum(math.prod(weight.shape(model)) for weight in _weights(model))


def active_parameters(model: ModelConfig) -> int:
    """Count the weights that one token is multiplied with: of a mixture's experts, those that it goes to."""
    if model.experts is None:
        return parameters(model)
    count, chosen = model.experts.count, model.experts.chosen
    return sum(
        math.prod(weight.shape(model)) // count * chosen if weight.each_expert else math.prod(weight.shape(model))
        for weight in _weights(model)
    )


def _weights(model: ModelConfig) -> Iterator[Weight]:
    family = FAMILIES[model.family]
    for weight in family.weights:
        if weight.present(model):
            yield weight
    for layer in range(model.layers):
        for weight in family.layer_weights:
            if weight.present(model, layer):
                yield weight


def weights_bytes(model: ModelConfig, dtype: str, ranks: int = 1) -> int:
    """Return the bytes on each rank: the weights, and the rotary tables, one cosine and one sine per position and pair.
    """
    return parameters(rank_shape(model, ranks)) * DTYPE_BYTES[dtype] + table_bytes(model, dtype)


def table_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the bytes of the rotary tables, which every process computes for itself."""
    return model.context_tokens * sum(map(model.rotary_dims, model.ropes)) * DTYPE_BYTES[dtype]


def token_sizes(shape: Shape, kv_dtype: str, block_size: int, ranks: int = 1) -> TokenSizes:
    """Return the sizes of a token and of a block. Raises KeyError for a format that is not in `KV_FORMATS`."""
    form = KV_FORMATS[kv_dtype]
    head_bytes = 2 * shape.layers * (shape.head_dim * form.value_bytes + form.scale_bytes)
    held = kv_heads_per_rank(shape.kv_heads, ranks)
    block_layers = len(shape.groups[0].layers) if shape.groups else shape.layers
    head_block_bytes = head_bytes // shape.layers * block_layers * block_size
    return TokenSizes(
        kv_heads_per_rank=held,
        token_bytes=shape.kv_heads * head_bytes,
        rank_token_bytes=held * head_bytes,
        block_size=block_size,
        block_bytes=shape.kv_heads * head_block_bytes,
        rank_block_bytes=held * head_block_bytes,
        block_layers=block_layers,
        groups=shape.groups,
    )


def request(sizes: TokenSizes, tokens: int, step_tokens: int = 1) -> PlannedRequest:
    """Plan a request, of which up to `step_tokens` are computed before what slides out of a window is let go."""
    blocks = -(-tokens // sizes.block_size)
    tail = blocks * sizes.block_size - tokens
    windows = sum(min(blocks, group.most_blocks(sizes.block_size, step_tokens - 1)) for group in sizes.windows)
    kept = kept_tokens(sizes, tokens)
    tail_bytes = tail * sizes.rank_block_bytes // sizes.block_size
    return PlannedRequest(
        tokens=tokens,
        token_bytes=int(kept * sizes.token_bytes),
        rank_token_bytes=int(kept * sizes.rank_token_bytes),
        blocks=blocks + windows,
        window_blocks=windows,
        rank_block_bytes=(blocks + windows) * sizes.rank_block_bytes,
        tail_tokens=tail,
        rank_tail_bytes=tail_bytes * (len(sizes.groups) or 1),
    )


def kept_tokens(sizes: TokenSizes, tokens: int) -> Fraction:
    """Return how many tokens of a request are kept, as the mean over the layers."""
    if not sizes.groups:
        return Fraction(tokens)
    kept = sum(len(group.layers) * min(tokens, group.window or tokens) for group in sizes.groups)
    return Fraction(kept, sum(len(group.layers) for group in sizes.groups))


def pool_of(
    name: str,
    sizes: TokenSizes,
    blocks_per_request: int,
    *,
    kv_bytes: int | None = None,
    memory_bytes: int | None = None,
    reserve_bytes: int = 0,
    weights: int | None = None,
    workspace: int | None = None,
    tail_share: Fraction = Fraction(0),
) -> Pool:
    """Return the pool that `kv_bytes` makes or, without them, that `memory_bytes` leave. One of the two is given."""
    if kv_bytes is None:
        assert memory_bytes is not None
        kv_bytes = memory_bytes - reserve_bytes - (weights or 0) - (workspace or 0)
    blocks = max(0, kv_bytes // sizes.rank_block_bytes)
    lost = math.ceil(blocks * tail_share)
    return Pool(
        name=name,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        weights_bytes=weights,
        workspace_bytes=workspace,
        kv_bytes=blocks * sizes.rank_block_bytes,
        blocks=blocks,
        tokens=_longest(sizes, blocks),
        tail_share=float(tail_share),
        tail_bytes=lost * sizes.rank_block_bytes,
        missing_bytes=0 if blocks else sizes.rank_block_bytes - kv_bytes,
        requests=(blocks - lost) // blocks_per_request,
    )


def _longest(sizes: TokenSizes, blocks: int) -> int:
    """Return the tokens of the longest sequence that so many blocks hold."""
    tails = [group.tail_blocks(sizes.block_size) for group in sizes.windows]
    low, high = 0, blocks
    while low < high:
        middle = (low + high + 1) // 2
        if middle + sum(min(middle, tail) for tail in tails) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low * sizes.block_size


def waste(sizes: TokenSizes, lengths: Sequence[int], reserved: int) -> Waste:
    """Compare requests of these lengths, each with `reserved` tokens set aside, with the same in blocks."""
    live, slots = sum(lengths), reserved * len(lengths)
    planned = [request(sizes, length) for length in lengths]
    paged = sum(one.blocks - one.window_blocks for one in planned) * sizes.block_size
    return Waste(
        live_tokens=live,
        reserved_tokens=slots,
        reserved_waste=1 - live / slots,
        paged_tokens=paged,
        paged_waste=1 - live / paged,
        live_bytes=sum(one.token_bytes for one in planned),
        reserved_bytes=slots * sizes.token_bytes,
        paged_bytes=sum(one.blocks for one in planned) * sizes.block_bytes,
    )
