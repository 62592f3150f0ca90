"""The three kinds of norm in bfloat16, where 32 bits cannot show which rounding comes first."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from engine.backends.attention import TorchAttention
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import map_weights
from kernels.configs import KernelConfig
from kernels.launch import interpreted
from kernels.rms_norm import rms_norm
from tests.engine.model.checkpoints import build, save_gguf, save_hf
from tests.engine.model.test_every_family import one_thread, prompt_of
from tests.engine.model.test_families import Ours

__all__ = ["one_thread"]

WIDTH = 640
EPS = 1e-6


def _norm(kind: Any, weight: torch.Tensor) -> Any:
    made = kind(WIDTH, EPS).bfloat16()
    made.weight.data.copy_(weight)
    return made


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(32, WIDTH, generator=generator).bfloat16(), torch.rand(WIDTH, generator=generator) - 0.5


@torch.inference_mode()
def test_gemmas_adds_one_and_multiplies_in_32_bits() -> None:
    """Guards a weight of 1 + w that was rounded to bfloat16, or a product that was rounded before it."""
    x, weight = _rows()
    theirs = _norm(Gemma3RMSNorm, weight)
    ours = TorchAttention(1).norm(x.clone(), None, theirs.weight.float() + 1.0, EPS)
    assert ours.dtype is torch.bfloat16 and torch.equal(ours, theirs(x))
    rounded = TorchAttention(1).norm(x.clone(), None, theirs.weight + 1.0, EPS)
    assert not torch.equal(rounded, ours), "the sum would make no difference"


@torch.inference_mode()
def test_olmos_multiplies_in_32_bits() -> None:
    x, weight = _rows()
    theirs = _norm(Olmo2RMSNorm, weight + 1)
    assert torch.equal(TorchAttention(1).norm(x.clone(), None, theirs.weight, EPS), theirs(x))


@torch.inference_mode()
def test_llamas_is_rounded_once_where_the_reference_rounds_twice() -> None:
    """Every kernel here multiplies in 32 bits: nearer to the truth than the reference, by its own rounding at most."""
    x, weight = _rows()
    theirs = _norm(LlamaRMSNorm, weight + 1)
    ours = TorchAttention(1).norm(x.clone(), None, theirs.weight, EPS)
    wide = x.double()
    truth = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * theirs.weight.double()
    assert (ours.double() - truth).abs().mean() < (theirs(x).double() - truth).abs().mean()
    torch.testing.assert_close(ours, theirs(x), rtol=2**-7, atol=0)


@pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter")
@pytest.mark.parametrize("kind", [Gemma3RMSNorm, Olmo2RMSNorm, GptOssRMSNorm])
@torch.inference_mode()
def test_so_does_tritons_kernel(kind: Any) -> None:
    """Guards the same on a GPU's kernel, in float16: the interpreter has no bfloat16."""
    x, weight = _rows()
    x, is_gemma = x.half(), kind is Gemma3RMSNorm
    theirs = kind(WIDTH, EPS).half()
    theirs.weight.data.copy_(weight if is_gemma else weight + 1)
    held = theirs.weight.float() + 1.0 if is_gemma else theirs.weight
    ours = rms_norm(x, held, EPS, KernelConfig(tile=32, warps=4, stages=1, rows=2))
    # Sums are added in another order, so that a value in ten thousand is rounded the other way.
    assert (ours == theirs(x)).float().mean() > 0.999
    twice = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).half() * held.half()
    assert (twice == theirs(x)).float().mean() < 0.9, "where it is rounded would make no difference"


@pytest.mark.parametrize("case", ["qwen2", "gemma3", "olmo2", "gpt-oss"])
@torch.inference_mode()
def test_a_model_in_16_bits_is_as_near_to_32_as_the_reference(case: str, tmp_path: Path) -> None:
    """Guards a rounding that no other test sees, of each kind of norm in a whole model: logits in bfloat16 are no
    further from those in 32 bits than the reference's, but for noise."""
    model = build(case).bfloat16()
    ours = Ours(load_model(prepare(save_hf(model, tmp_path / "model"), tmp_path / "cache", "bfloat16")))
    prompt = prompt_of()
    got = ours.step(prompt)
    ours.close()
    theirs = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float()
    exact = model.float()(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    error, reference = (got - exact).norm(), (theirs - exact).norm()
    assert reference > 0 and error < 1.5 * reference


def test_norms_of_a_gguf_file_lose_nothing_in_16_bits(tmp_path: Path) -> None:
    """Guards Gemma's GGUF files, whose norms hold 1 + w: rounded as they are, they would lose bits of w."""
    model = build("gemma3-linear").bfloat16()
    hugging_face = prepare(save_hf(model, tmp_path / "model"), tmp_path / "cache", "bfloat16")
    gguf = prepare(save_gguf(model.float(), tmp_path / "model.gguf"), tmp_path / "cache", "bfloat16")
    one, other = map_weights(hugging_face), map_weights(gguf)
    norms = [name for name in one if name.endswith("norm")]
    assert norms and all(torch.equal(one[name], other[name]) for name in norms)
