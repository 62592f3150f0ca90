"""How a model is divided among tensor-parallel ranks. Pure: names of sizes and ranges of numbers.

    by rows      q, k and v by heads, gate and up (an expert's too) by their width, embedding and head by vocabulary:
                 each rank computes columns of its own of the product
    by columns   output and down: each rank has the columns that fit the rows above, and computes a part of every sum
    whole        norms of the residual stream, the router, biases that are added to a sum

A size says by its name whether it is divided, so the families' tables are all there is to mark. Source: Megatron-LM
(Shoeybi et al. 2019, arXiv 1909.08053, section 3), for grouped heads with whole KV heads.
"""

from typing import NamedTuple

import msgspec

from engine.model.config import ModelConfig
from engine.model.families import FAMILIES, Weight

_FUSED = {"qkv_rows": ("q_rows", "kv_rows", "kv_rows"), "gate_up_rows": ("intermediate", "intermediate")}
"""Sizes of several matrices that lie under each other in one tensor."""


class Share(NamedTuple):
    """One rank's part of a model."""

    rank: int
    ranks: int

    def even(self, size: int) -> range:
        """Return this rank's of `size` things, which need not divide."""
        return range(self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks)

    def kv_heads(self, config: ModelConfig) -> range:
        """Return the KV heads whose queries are this rank's: with more ranks than heads, one that others have too."""
        if self.ranks > config.kv_heads:
            first = self.rank * config.kv_heads // self.ranks
            return range(first, first + 1)
        return self.even(config.kv_heads)


class Cut(NamedTuple):
    """What a rank has of a weight: `rows` of it, one range for each part that lies in it, and `columns`; None: all."""

    rows: tuple[range, ...] | None
    columns: range | None


WHOLE = Cut(None, None)


def check_split(config: ModelConfig, ranks: int) -> None:
    """Raise ValueError, naming the size, where a model cannot be divided among so many ranks."""

    def refuse(what: str) -> None:
        raise ValueError(f"engine.tensor_parallel: {what} of {config.name or config.family} do not divide by {ranks}")

    if config.heads % ranks:
        refuse(f"{config.heads} heads")
    if config.kv_heads % ranks and ranks % config.kv_heads:
        refuse(f"{config.kv_heads} KV heads")
    if any(not config.is_mixture(layer) for layer in range(config.layers)) and config.intermediate % ranks:
        refuse(f"{config.intermediate} rows of the feed-forward layers")
    if config.expert_width % ranks:
        refuse(f"{config.expert_width} rows of the experts")
    if config.vocab < ranks:
        refuse(f"{config.vocab} tokens")


def local_config(config: ModelConfig, share: Share) -> ModelConfig:
    """Return the sizes of a rank's part: its heads and widths. The vocabulary stays that of the whole model."""
    experts = config.experts
    if experts is not None:
        experts = msgspec.structs.replace(experts, width=experts.width // share.ranks)
    return msgspec.structs.replace(
        config,
        heads=config.heads // share.ranks,
        kv_heads=len(share.kv_heads(config)),
        intermediate=max(1, config.intermediate // share.ranks),
        experts=experts,
    )


def cut_of(name: str, config: ModelConfig, share: Share) -> Cut:
    """Return what a rank has of the prepared weight `name`. `config` is the whole model's. Raises KeyError for a weight
    that its family does not have."""
    spec = _weight(name, config)
    parts = [size for source in spec.sources for size in _FUSED.get(source.rows, (source.rows,))]
    rows: list[range] = []
    first, is_cut = 0, False
    for size in parts:
        count = int(getattr(config, size))
        kept = _range_of(size, config, share)
        is_cut |= kept is not None
        rows.append(range(count) if kept is None else kept)
        rows[-1] = range(first + rows[-1].start, first + rows[-1].stop)
        first += count
    columns = _range_of(spec.columns, config, share) if spec.columns else None
    return Cut(tuple(rows) if is_cut else None, columns)


def _range_of(size: str, config: ModelConfig, share: Share) -> range | None:
    """Return a rank's rows of the size of this name; None where it has all."""
    match size:
        case "q_rows":
            return _times(share.even(config.heads), config.head_dim)
        case "kv_rows":
            return _times(share.kv_heads(config), config.head_dim)
        case "heads" | "intermediate" | "expert_width" | "vocab":
            return share.even(int(getattr(config, size)))
        case _:
            return None


def _times(heads: range, rows: int) -> range:
    return range(heads.start * rows, heads.stop * rows)


def _weight(name: str, config: ModelConfig) -> Weight:
    family = FAMILIES[config.family]
    own = name.split(".", 2)
    weights = family.layer_weights if own[0] == "layers" else family.weights
    for weight in weights:
        if weight.name == own[-1]:
            return weight
    raise KeyError(name)
