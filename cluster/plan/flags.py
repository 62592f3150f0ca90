"""The flags of `headrace plan`, read into one record. A wrong value is one line."""

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cluster.config import ConfigError
from cluster.plan.planner import KV_FORMATS
from cluster.resolve import add_flags
from cluster.sizes import parse_share, parse_size
from engine.kv.layout import DTYPE_BYTES
from engine.model.config import MOST_CONTEXT_TOKENS

MOST = (1 << 31) - 1
"""The largest number that a flag takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The values of the flags; None where a flag was not given. Sizes in bytes."""

    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: str | None
    kv_dtype: str | None
    block_size: int | None
    context: int | None
    tp: int | None
    gpu_memory: int | None
    kv_memory: int | None
    reserve: Fraction | int | None
    """Fraction: a share of the memory."""
    weights: int | None
    workspace: int | None
    tail: Fraction | None
    requests: int | None
    lengths: list[int] | None

    @property
    def shape(self) -> dict[str, int]:
        """Return the sizes of the model that were given."""
        sizes = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return {name: size for name, size in sizes.items() if size is not None}


def count(text: str, most: int = MOST) -> int:
    """Parse a whole number from 1 to `most`. Raises ValueError."""
    if not text.strip().isdecimal():
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    # Python reads no number of thousands of digits.
    number = int(text) if len(text) < 100 else most + 1
    if number < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    if number > most:
        raise ValueError(f"{text[:24]!r}{'…' * (len(text) > 24)} exceeds {most}")
    return number


def _context(text: str) -> int:
    return count(text, MOST_CONTEXT_TOKENS)


def _counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def _reserve(text: str) -> Fraction | int:
    return parse_share(text) if text.strip().endswith("%") else parse_size(text)


def _one_of(names: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read


_FLAGS: tuple[tuple[str, str, Callable[[str], object], str], ...] = (
    ("layers", "N", count, "layers, instead of the model's"),
    ("kv_heads", "N", count, "KV heads, instead of the model's"),
    ("head_dim", "N", count, "head size, instead of the model's"),
    (
        "dtype",
        "TYPE",
        _one_of(DTYPE_BYTES),
        f"of weights: {', '.join(DTYPE_BYTES)} (default: as a worker would have them)",
    ),
    (
        "kv_dtype",
        "TYPE",
        _one_of(KV_FORMATS),
        f"of KV: {', '.join(KV_FORMATS)} (default: as weights)",
    ),
    ("block_size", "N", count, "tokens of a block"),
    ("context", "N", _context, "tokens of a request (default: the model's longest)"),
    ("tp", "N", count, "tensor-parallel ranks (default: 1)"),
    ("gpu_memory", "SIZE", parse_size, "memory of each rank's GPU"),
    ("kv_memory", "SIZE", parse_size, "KV memory of each rank, all else taken care of"),
    ("reserve", "SIZE|N%", _reserve, "GPU memory left alone (default: 10%%)"),
    ("weights", "SIZE", parse_size, "of weights on each rank, instead of the model's"),
    ("workspace", "SIZE", parse_size, "of a step at its peak, instead of an estimate"),
    ("tail", "SHARE", parse_share, "of the pool lost to partly filled blocks (default: none)"),
    ("requests", "N", count, "how much KV so many requests take (default: 1)"),
    ("lengths", "N,N,..", _counts, "what reserving the context for each of these wastes"),
)

PAPER = frozenset(
    {"dtype", "kv_dtype", "block_size", "tp", "gpu_memory", "kv_memory", "reserve"}
) | {"layers", "kv_heads", "head_dim", "weights", "workspace"}
"""Flags that describe something else than what the configuration starts."""


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headrace plan`. Values stay text until `read_flags`."""
    group = parser.add_argument_group("what to plan for")
    for name, metavar, _, text in _FLAGS:
        group.add_argument(f"--{_dashed(name)}", metavar=metavar, help=text)
    group.add_argument("--check", action="store_true", help="start workers, compare, 1 beyond 5%%")
    group.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")
    add_flags(parser)


def read_flags(arguments: argparse.Namespace) -> Asked:
    """Parse every flag. Raises ConfigError naming the flag."""
    values: dict[str, Any] = {}
    for name, _, read, _ in _FLAGS:
        text: str | None = getattr(arguments, name)
        try:
            values[name] = None if text is None else read(text)
        except ValueError as error:
            raise ConfigError(f"flag --{_dashed(name)}: {error}") from error
        if text is not None and arguments.check and name in PAPER:
            raise ConfigError(f"flag --{_dashed(name)}: --check starts what is configured")
    return Asked(**values)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
