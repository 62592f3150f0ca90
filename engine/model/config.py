"""The shape of a decoder-only model: sizes, rotary embedding, options. No torch, no files but its own JSON."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.kv.layout import KVLayout
from engine.messages import guarded

CONFIG_FILE = "config.json"

Progress = Callable[[int, int], None]
"""Bytes done, and bytes in all."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of weights that run code when they are loaded: refused, never opened."""


class ModelError(Exception):
    """A model that cannot be used; the message names the file, and the tensor or field at fault."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)
        self.problem = problem


_Read = TypeVar("_Read")


def read_prepared(path: Path, kind: type[_Read]) -> _Read:
    """Read and decode a JSON file of a prepared model. Raises ModelError."""
    try:
        return guarded(msgspec.json.Decoder(kind).decode)(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(path, f"not a prepared model: {error}") from error


class Llama3Rope(msgspec.Struct, frozen=True, tag="llama3", kw_only=True):
    """Llama 3.1's stretching of the low frequencies only (Llama 3 technical report, 3.4.3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


class LinearRope(msgspec.Struct, frozen=True, tag="linear", kw_only=True):
    """Position interpolation (arXiv 2306.15595): every frequency is divided by `factor`."""

    factor: float


class FactorsRope(msgspec.Struct, frozen=True, tag="factors", kw_only=True):
    """One divisor per frequency: how GGUF files store any scaling that they have worked out beforehand."""

    factors: tuple[float, ...]


_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context_tokens")

RopeScaling = Llama3Rope | LinearRope | FactorsRope


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the weights. `name` and `fingerprint` (weights and dtype) are set when a model is prepared."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are RMS-normed, head by head, before they are rotated (Qwen3)."""
    dtype: str = "float32"
    name: str = ""
    fingerprint: str = ""

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    def kv_layout(self, block_size: int, dtype: str | None = None) -> KVLayout:
        """Return the layout in which a pool keeps the model's KV: in `dtype`, or in the one that the model computes
        in."""
        return KVLayout(
            kv_heads=self.kv_heads,
            layers=self.layers,
            block_size=block_size,
            head_dim=self.head_dim,
            dtype=dtype or self.dtype,
        )

    def check(self, path: Path) -> "ModelConfig":
        """Return itself, or raise ModelError where the sizes cannot be those of a model."""
        for field in _SIZES:
            if getattr(self, field) < 1:
                raise ModelError(path, f"{field} is {getattr(self, field)}, must be at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(path, f"{self.heads} heads do not divide by {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(path, f"head_dim is {self.head_dim}, must be even")
        scaling = self.rope_scaling
        if isinstance(scaling, FactorsRope) and len(scaling.factors) != self.head_dim // 2:
            raise ModelError(path, f"{len(scaling.factors)} rope factors for head_dim {self.head_dim}")
        return self

    @staticmethod
    def load(model_dir: Path) -> "ModelConfig":
        """Read a prepared model's configuration. Raises ModelError."""
        return read_prepared(model_dir / CONFIG_FILE, ModelConfig)
